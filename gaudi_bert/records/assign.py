"""Which sequences go into which pack, and which packs into which shard: seeded, and a function of the group
alone.

A group's plan says how many packs of each strategy there are. Its packs are put into a random order; the
sequences of each length are put into a random order; then each place of a pack takes the next sequence of its
length. Any run of packs is therefore a fair sample of the group, and so is any shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.permutation import permutation

__all__ = ["Assignment", "assign_sequences", "count_shards", "shard_bounds"]


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
    """Deal the sequences of a group to the packs of its plan.

    Args:
        lengths: int32 [sequences].
        strategies: pairs (lengths of a pack, how many such packs).
        seed: of the plan.
        group: number of the group, so that groups differ.

    Raises:
        InputError: the packs do not hold exactly these lengths.
    """
    sizes = np.array([len(strategy) for strategy, _ in strategies], dtype=np.int64)
    counts = np.array([count for _, count in strategies], dtype=np.int64)
    kinds = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    kinds = kinds[permutation(kinds.size, seed, "packs", group)]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[kinds])])
    wanted = _lengths_in_order(strategies, sizes, kinds, starts)
    _check_counts(lengths, wanted)

    shuffled = permutation(lengths.size, seed, "sequences", group).astype(np.int32)
    by_length = shuffled[np.argsort(lengths[shuffled].astype(np.int16), kind="stable")]
    members = np.empty(lengths.size, dtype=np.int32)
    members[np.argsort(wanted, kind="stable")] = by_length
    return Assignment(starts, members)


def count_shards(packs: int, total_bytes: int, shard_multiple: int, shard_bytes: int) -> int:
    """The smallest multiple of `shard_multiple` that keeps shards of equal packs within `shard_bytes`.

    Args:
        packs: packs of the group.
        total_bytes: a bound on the bytes of all of them.
        shard_multiple: how many shards every reader may count on.
        shard_bytes: most bytes of a shard (one pack is never split).
    """
    shards = shard_multiple
    while shards < packs and -(-packs // shards) * (total_bytes / max(packs, 1)) > shard_bytes:
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


def _lengths_in_order(
    strategies: Sequence[tuple[Sequence[int], int]], sizes: IntArray, kinds: Int32Array, starts: IntArray
) -> NDArray[np.int16]:
    """int16 [sequences]: the length that each place of each pack, in order, is for."""
    flat = np.array([length for strategy, _ in strategies for length in strategy], dtype=np.int16)
    flat_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[:-1]
    places = np.arange(starts[-1]) + np.repeat(flat_starts[kinds] - starts[:-1], sizes[kinds])
    wanted: NDArray[np.int16] = flat[places]
    return wanted


def _check_counts(lengths: Int32Array, wanted: NDArray[np.int16]) -> None:
    most = int(max(lengths.max(initial=0), wanted.max(initial=0)))
    found = np.bincount(lengths, minlength=most + 1)
    planned = np.bincount(wanted, minlength=most + 1)
    if not np.array_equal(found, planned):
        length = int(np.flatnonzero(found != planned)[0])
        raise InputError(
            f"the plan has places for {planned[length]} sequences of length {length}, the records hold {found[length]};"
            " make the histogram and the plan again"
        )
