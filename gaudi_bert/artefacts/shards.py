"""The shards of a packed folder: one by one as manifests list them, by group as metadata.json does, and as arrays; and how
the packs of a group are dealt to them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from pydantic import Field, model_validator

from gaudi_bert.artefacts.base import Artefact, Count, Crc32c
from gaudi_bert.common.arrays import IntArray


class Shard(Artefact):
    """A packed file: its name in the folder, its packs, size and CRC-32C (None where the predecessor did not record it)."""

    name: str
    packs: Count
    bytes: Count
    crc32c: Crc32c | None = None


class GroupShards(Artefact):
    """The shards of a group in their order, and what its manifest is known by.

    Attributes:
        packs, bytes: of each shard.
        manifest_crc32c: of the manifest's bytes, which say the CRC of every shard.
    """

    packs: tuple[Count, ...] = Field(min_length=1)
    bytes: tuple[Count, ...]
    manifest_crc32c: Crc32c

    @model_validator(mode="after")
    def _of_the_same_shards(self) -> GroupShards:
        if len(self.packs) != len(self.bytes):
            raise ValueError(f"packs of {len(self.packs)} shards, bytes of {len(self.bytes)}")
        return self


@dataclass(frozen=True)
class ShardTable:
    """The shards of a packed folder as arrays, which hold 640,000 of them in few megabytes.

    Attributes:
        packs, bytes: of each shard, int64 [shards].
        group_firsts: the number of the first shard of each group, int64 [groups].
        ending: of the files, with its dot; "" where `given_names` are all that is known.
        given_names: of folders whose files are not named by group and shard (the predecessor's).
    """

    packs: IntArray
    bytes: IntArray
    group_firsts: IntArray
    ending: str
    given_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.packs)

    def group_and_number(self, shard: int) -> tuple[int, int]:
        """The group of a shard, and its number in this group."""
        group = int(np.searchsorted(self.group_firsts, shard, side="right")) - 1
        return group, shard - int(self.group_firsts[group])

    def name(self, shard: int) -> str:
        """Its file in the folder."""
        if self.given_names:
            return self.given_names[shard]
        group, number = self.group_and_number(shard)
        return shard_name(group, number, self.ending)

    def packs_before(self, shard: int) -> int:
        """Packs of the earlier shards of its group."""
        _, number = self.group_and_number(shard)
        return int(self.packs[shard - number : shard].sum())

    @cached_property
    def group_sizes(self) -> IntArray:
        """Shards of each group, int64 [groups]."""
        return np.diff(self.group_firsts, append=len(self))

    def number(self, name: str) -> int | None:
        """The shard with this file; None where there is none."""
        if self.given_names:
            return self._given_numbers.get(name)
        match = re.fullmatch(r"packed-(\d{5,})-(\d{5,})(\.\w+)", name, re.ASCII)
        if match is None:
            return None
        group, shard = int(match[1]), int(match[2])
        if group >= len(self.group_firsts) or shard >= self.group_sizes[group]:
            return None
        return int(self.group_firsts[group]) + shard if shard_name(group, shard, self.ending) == name else None

    @cached_property
    def _given_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.given_names)}

    @classmethod
    def of_groups(cls, groups: Sequence[GroupShards], ending: str) -> ShardTable:
        """Of shards that are listed group by group."""
        sizes = np.array([len(group.packs) for group in groups], np.int64)
        packs, size = (
            np.fromiter(itertools.chain.from_iterable(getattr(group, key) for group in groups), np.int64, int(sizes.sum()))
            for key in ("packs", "bytes")
        )
        return cls(packs, size, np.cumsum(sizes) - sizes, ending)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> ShardTable:
        """Of shards with names of any kind."""
        packs, sizes = (np.array([getattr(shard, key) for shard in shards], np.int64) for key in ("packs", "bytes"))
        return cls(packs, sizes, np.zeros(1, np.int64), "", tuple(shard.name for shard in shards))


# --- which packs go into which shard: any run of packs is a fair sample of its group (`common.dealing`), so any shard is


def shard_name(group: int, shard: int, ending: str) -> str:
    """`packed-GGGGG-SSSSS.tfrecord`, or with another ending."""
    return f"packed-{group:05d}-{shard:05d}{ending}"


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
    (`packs_before` packs in all) ended, as if all packs of the data set were dealt in turn: so the shares
    of the ranks, which take every W-th shard, differ by at most one pack over the complete data set and not by
    one per group.
    """
    share, larger = divmod(packs, shards)
    extra = (np.arange(shards) - packs_before) % shards < larger
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(share + extra)])
