"""Which sequences go into which pack, and which packs into which shard: seeded, and a function of the group
alone. How sequences are dealt to packs is in `common.dealing`; any run of packs is a fair sample of the group, and so
is any shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import Int32Array, IntArray
from gaudi_bert.common.dealing import deal_sequences


class Assignment(NamedTuple):
    """Packs in the order in which they are written: pack p holds `members[starts[p] : starts[p + 1]]`.

    Attributes:
        starts: int64 [packs + 1].
        members: int32 [sequences], rows of the group's index, each exactly once.
    """

    starts: IntArray
    members: Int32Array

    @property
    def packs(self) -> int:
        """Number of packs."""
        return self.starts.size - 1


def assign_sequences(
    lengths: Int32Array, strategies: Sequence[tuple[Sequence[int], int]], seed: int, group: int
) -> Assignment:
    """Deal the sequences of a group, by their lengths, to the packs of its plan: pairs (lengths, how many such packs).

    The packs must hold exactly these lengths. `seed` is that of the plan; the number of the group makes groups differ.
    """
    members = np.empty(lengths.size, dtype=np.int32)
    return Assignment(*deal_sequences(lengths, strategies, seed, group, members))


def count_shards(packs: int, total_bytes: int, shard_multiple: int, shard_bytes: int, packs_of_a_shard: int = 0) -> int:
    """The smallest multiple of `shard_multiple` that keeps shards of equal packs within `shard_bytes`.

    `total_bytes` is a bound on the bytes of all packs; one pack is never split. With `packs_of_a_shard` it may be fewer:
    the smallest divisor of `shard_multiple` that keeps shards within so many packs, too.
    """

    def bytes_of(shards: int) -> float:
        return -(-packs // shards) * (total_bytes / max(packs, 1))

    for fewer in range(1, shard_multiple):
        few_packs = shard_multiple % fewer == 0 and -(-packs // fewer) <= packs_of_a_shard
        if few_packs and bytes_of(fewer) <= shard_bytes:
            return fewer
    shards = shard_multiple
    while shards < packs and bytes_of(shards) > shard_bytes:
        shards += shard_multiple
    return shards


def shard_bounds(packs: int, shards: int, packs_before: int) -> IntArray:
    """int64 [shards + 1]: shard s holds packs bounds[s] .. bounds[s + 1] - 1 of the group.

    Shares differ by at most one pack. Where they do, the larger ones continue where the groups before
    (`packs_before` packs in all) left off, as if all packs of the data set were dealt in turn: so the shares
    of the ranks, which take every W-th shard, differ by at most one pack over the whole data set and not by
    one per group.
    """
    share, larger = divmod(packs, shards)
    extra = (np.arange(shards) - packs_before) % shards < larger
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(share + extra)])
