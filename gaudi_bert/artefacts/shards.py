"""The shards of a packed folder: one by one as manifests list them, by group as metadata.json does, and as arrays; how the
packs of a group are dealt to them; and the index of their records."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from gaudi_bert.artefacts.base import Artefact, Count, Crc32c
from gaudi_bert.artefacts.mirrored_folder import files_in, is_mirrored
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, open_file


class Shard(Artefact):
    """A packed file: its name in the folder, its packs, size and CRC-32C."""

    name: str
    packs: Count
    bytes: Count
    crc32c: Crc32c


class GroupShards(Artefact):
    """The shards of a group in their order, and the CRC-32C of its manifest, whose bytes state the CRC of every shard."""

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
        ending: of the files, with its dot.
    """

    packs: IntArray
    bytes: IntArray
    group_firsts: IntArray
    ending: str

    def __len__(self) -> int:
        return len(self.packs)

    def group_and_number(self, shard: int) -> tuple[int, int]:
        """The group of a shard, and its number in this group."""
        group = int(np.searchsorted(self.group_firsts, shard, side="right")) - 1
        return group, shard - int(self.group_firsts[group])

    def name(self, shard: int) -> str:
        """Its file in the folder."""
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
        match = re.fullmatch(r"packed-(\d{5,})-(\d{5,})(\.\w+)", name, re.ASCII)
        if match is None:
            return None
        group, shard = int(match[1]), int(match[2])
        if group >= len(self.group_firsts) or shard >= self.group_sizes[group]:
            return None
        return int(self.group_firsts[group]) + shard if shard_name(group, shard, self.ending) == name else None

    @classmethod
    def of_groups(cls, groups: Sequence[GroupShards], ending: str) -> ShardTable:
        """Return the table of shards that are listed group by group."""
        sizes = np.array([len(group.packs) for group in groups], np.int64)
        packs, size = (
            np.fromiter(itertools.chain.from_iterable(getattr(group, key) for group in groups), np.int64, int(sizes.sum()))
            for key in ("packs", "bytes")
        )
        return cls(packs, size, np.cumsum(sizes) - sizes, ending)


# --- which packs go into which shard: any run of packs is a fair sample of its group (`common.sampling`), so any shard is


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

    Shares differ by at most one pack, and the larger ones continue where the groups before (`packs_before` packs in all)
    ended: so those of ranks, which take every W-th shard, differ by one pack over the complete data set, not one per group.
    """
    share, larger = divmod(packs, shards)
    extra = (np.arange(shards) - packs_before) % shards < larger
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(share + extra)])


# --- group-GGGGG.index: the size and the checksum of every record of a group's shards
#
# The file contains two uint32 values, little-endian, for each record in the order of the shards: the bytes of its frame, and
# the masked CRC-32C of its payload, as the frame states it. With the sizes, nobody has to walk a shard to find its records;
# with the checksums, every process notices a record that is not the one that was packed there, whichever records it reads.
# A reader takes the part of one shard. A shard whose sizes do not add up to its bytes is walked.

IndexArray = NDArray[np.uint32]
_ENTRY = np.dtype(("<u4", (2,)))


def index_path(folder: Path, group: int) -> Path:
    """The path of the index of `group` in a packed folder."""
    return folder / f"group-{group:05d}.index"


def index_bytes(packs: int) -> int:
    """The size of the index of so many records."""
    return packs * _ENTRY.itemsize


def write_index(path: Path, entries: Sequence[IndexArray]) -> int:
    """Write the sizes and checksums of the records of each shard of a group, and return the CRC-32C of the file.

    Args:
        path: the index.
        entries: for each shard uint32 [packs, 2], the bytes of each frame and the masked CRC-32C of its payload.
    """
    crc = 0
    with atomic_file(path) as handle:
        for of_shard in entries:
            data = np.ascontiguousarray(of_shard, "<u4").view(np.uint8)
            handle.write(data.data)
            crc = crc32c(data, crc)
    return crc


class IndexedRecords(NamedTuple):
    """The part of an index that describes one shard.

    Attributes:
        starts: int64 [packs + 1], the position of each frame in the shard; the last is the end of the shard.
        checksums: int64 [packs], the masked CRC-32C of each payload.
    """

    starts: IntArray
    checksums: IntArray


def read_index(path: Path, first: int, packs: int, shard_bytes: int) -> IndexedRecords | None:
    """Return what an index states about one shard; None if there is no index, or if its sizes do not fit the shard.

    `first` counts the packs of the group's earlier shards.
    """
    try:
        with open_file(path) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # only this part is read from the disk
            data = os.pread(handle.fileno(), index_bytes(packs), index_bytes(first))
    except FileNotFoundError:
        return None
    if len(data) != index_bytes(packs):
        return None
    entries = np.frombuffer(data, "<u4").reshape(packs, 2).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(entries[:, 0])])
    return IndexedRecords(starts, entries[:, 1].copy()) if starts[-1] == shard_bytes else None


def check_shards(folder: Path, table: ShardTable, remedy: str = "write the packed data again") -> None:
    """Refuse a folder in which a shard is missing, or has another size than the metadata state."""
    sizes = np.full(len(table), -1, np.int64)
    for name, size in sizes_in(folder):
        number = table.number(name)
        if number is not None:
            sizes[number] = size
    if (sizes != table.bytes).any():
        number = int(np.argmax(sizes != table.bytes))
        differs = f"has {sizes[number]:,} bytes, but {table.bytes[number]:,} in the metadata"
        problem = "the shard is missing, the metadata names it" if sizes[number] < 0 else differs
        raise InputError(f"{folder / table.name(number)}: {problem}; {remedy}")


def sizes_in(folder: Path) -> Iterator[tuple[str, int]]:
    """The files of a folder and their sizes; of a folder on this machine, no list is stored."""
    if is_mirrored(folder):
        yield from ((name, info.bytes) for name, info in files_in(folder).items())
        return
    with os.scandir(folder) as entries:
        yield from ((entry.name, entry.stat().st_size) for entry in entries if entry.is_file())
