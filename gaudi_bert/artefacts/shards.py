"""The shards of a packed folder: how files list them, how packs are divided among them, and how their records are indexed.

A manifest lists the shards of its group one by one (`Shard`), and metadata.json lists them by group (`GroupShards`). Code
that reads shards uses arrays (`ShardTable`). Each group has an index file, which contains the size and the checksum of every
record, so that a reader can find a record without reading the shard from the beginning.
"""

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

from gaudi_bert.artefacts.base import Artefact, Count, Crc32c, InputFile
from gaudi_bert.artefacts.mirrored_folder import is_mirrored, list_files
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, explain_os_errors, open_file

_CHUNK_BYTES = 1 << 20


def compute_file_identity(path: Path) -> InputFile:
    """Read a file and return its name, size and CRC-32C.

    Raises:
        InputError: The file cannot be read.
    """
    checksum = size = 0
    with explain_os_errors(path, "read"), open_file(path) as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            checksum, size = crc32c(chunk, checksum), size + len(chunk)
    return InputFile(name=path.name, bytes=size, crc32c=checksum)


class Shard(Artefact):
    """The entry of a shard, a file of packs, in the manifest of its group.

    Attributes:
        name: The name of the file in the packed folder.
        packs: The number of packs.
        bytes: The size of the file.
        crc32c: The CRC-32C of the file.
    """

    name: str
    packs: Count
    bytes: Count
    crc32c: Crc32c


class GroupShards(Artefact):
    """The shards of one group of packs, in order, as metadata.json lists them.

    Attributes:
        packs: The number of packs of each shard.
        bytes: The size of each shard.
        manifest_crc32c: The CRC-32C of the group's manifest, which contains the CRC-32C of every shard.
    """

    packs: tuple[Count, ...] = Field(min_length=1)
    bytes: tuple[Count, ...]
    manifest_crc32c: Crc32c

    @model_validator(mode="after")
    def _check_lengths(self) -> GroupShards:
        """Check that the lists `packs` and `bytes` have the same length."""
        if len(self.packs) != len(self.bytes):
            raise ValueError(f"`packs` has {len(self.packs)} values, but `bytes` has {len(self.bytes)}")
        return self


class ShardLocation(NamedTuple):
    """The group of packs that contains a shard, and the number of the shard within this group."""

    group: int
    number: int


@dataclass(frozen=True)
class ShardTable:
    """A table of all shards in a packed folder, stored as arrays.

    Shards are numbered from 0, group after group. A table of 640,000 shards takes only a few megabytes.

    Attributes:
        packs: int64 [shards], the number of packs of each shard.
        bytes: int64 [shards], the size of each shard.
        first_shards: int64 [groups], the number of the first shard of each group.
        ending: The suffix of the files, with its dot.
    """

    packs: IntArray
    bytes: IntArray
    first_shards: IntArray
    ending: str

    def __len__(self) -> int:
        return len(self.packs)

    def locate_shard(self, shard: int) -> ShardLocation:
        """Return the group that contains a shard, and the number of the shard within this group."""
        group = int(np.searchsorted(self.first_shards, shard, side="right")) - 1
        return ShardLocation(group, shard - int(self.first_shards[group]))

    def file_name(self, shard: int) -> str:
        """Return the file name of a shard."""
        group, number = self.locate_shard(shard)
        return shard_name(group, number, self.ending)

    def packs_before(self, shard: int) -> int:
        """Return the number of packs in the earlier shards of the same group."""
        _, number = self.locate_shard(shard)
        return int(self.packs[shard - number : shard].sum())

    @cached_property
    def shards_per_group(self) -> IntArray:
        """The number of shards in each group, int64 [groups]."""
        return np.diff(self.first_shards, append=len(self))

    def find_shard(self, name: str) -> int | None:
        """Return the number of the shard with the given file name, or None if there is no such shard."""
        match = re.fullmatch(r"packed-(\d{5,})-(\d{5,})(\.\w+)", name, re.ASCII)
        if match is None:
            return None
        group, shard = int(match[1]), int(match[2])
        if group >= len(self.first_shards) or shard >= self.shards_per_group[group]:
            return None
        return int(self.first_shards[group]) + shard if shard_name(group, shard, self.ending) == name else None

    @classmethod
    def from_groups(cls, groups: Sequence[GroupShards], ending: str) -> ShardTable:
        """Create the table from the lists of shards in metadata.json.

        Args:
            groups: The shards of each group.
            ending: The suffix of the files, with its dot.
        """
        sizes = np.array([len(group.packs) for group in groups], np.int64)
        packs, size = (
            np.fromiter(itertools.chain.from_iterable(getattr(group, key) for group in groups), np.int64, int(sizes.sum()))
            for key in ("packs", "bytes")
        )
        return cls(packs, size, np.cumsum(sizes) - sizes, ending)


# --- dividing the packs of a group among its shards
#
# The packs of a group are in random order (`common.sampling`), so that every shard is a random sample of its group.


def shard_name(group: int, number: int, ending: str) -> str:
    """Return the file name of a shard. The name consists of `packed`, the number of the group, the number of the shard, and
    `ending`.
    """
    return f"packed-{group:05d}-{number:05d}{ending}"


def count_shards(packs: int, total_bytes: int, shard_multiple: int, shard_bytes: int, small_shard_packs: int = 0) -> int:
    """Return how many shards the packs of a group should be divided into.

    This is the smallest multiple of `shard_multiple` for which no shard exceeds `shard_bytes`. A pack is never divided, so a
    shard with a single pack may be larger.

    Args:
        packs: The number of packs of the group.
        total_bytes: An upper bound on the size of all packs.
        shard_multiple: The number of shards is a multiple of this.
        shard_bytes: The maximum size of a shard.
        small_shard_packs: The maximum number of packs in a small shard. If fewer than `shard_multiple` small shards can
            contain all packs, return the smallest such number of shards that divides `shard_multiple`.
    """

    def bytes_of(shards: int) -> float:
        """Return the size in bytes of the largest shard if there are `shards` shards."""
        return -(-packs // shards) * (total_bytes / max(packs, 1))

    for fewer in range(1, shard_multiple):
        are_small = -(-packs // fewer) <= small_shard_packs and bytes_of(fewer) <= shard_bytes
        if are_small and shard_multiple % fewer == 0:
            return fewer
    shards = shard_multiple
    while shards < packs and bytes_of(shards) > shard_bytes:
        shards += shard_multiple
    return shards


def divide_packs(packs: int, shards: int, packs_before: int) -> IntArray:
    """Divide the packs of a group evenly among its shards, and return the boundaries of the shards.

    The sizes of the shards differ by at most one pack. Process r of W reads every W-th shard. If the larger shards were
    always the first of their group, the number of packs that two processes read would differ by one for each group.
    Therefore the larger shards come directly after those of the previous group, and the difference is one pack over the
    complete data set.

    Args:
        packs: The number of packs of the group.
        shards: The number of shards of the group.
        packs_before: The number of packs in all previous groups.

    Returns:
        int64 [shards + 1]. Shard s contains the packs bounds[s] to bounds[s + 1] - 1 of the group.
    """
    share, larger = divmod(packs, shards)
    extra = (np.arange(shards) - packs_before) % shards < larger
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(share + extra)])


# --- group-GGGGG.index: the size and the checksum of every record in the shards of a group
#
# The file contains two little-endian uint32 values for each record, in the order of the shards: the size of the frame in
# bytes, and the masked CRC-32C of the payload, as the frame states it. Without the sizes, a reader would have to read a
# shard from the beginning to find its records. With the checksums, a reader notices a record that was replaced, even if it
# reads only a few records. A reader reads only the part of the index that belongs to one shard. If the sizes do not add up
# to the size of the shard, the index is ignored, and the shard is read from the beginning.

IndexArray = NDArray[np.uint32]
_ENTRY = np.dtype(("<u4", (2,)))


def index_path(folder: Path, group: int) -> Path:
    """Return the path of the index file of a group of packs, which contains the size and the checksum of every record."""
    return folder / f"group-{group:05d}.index"


def index_file_bytes(packs: int) -> int:
    """Return the size in bytes of an index file that describes the given number of packs."""
    return packs * _ENTRY.itemsize


def write_index(path: Path, entries: Sequence[IndexArray]) -> int:
    """Write the index file of a group, and return its CRC-32C.

    Args:
        path: The index file.
        entries: For each shard, uint32 [packs, 2], the size of each frame and the masked CRC-32C of its payload.
    """
    crc = 0
    with atomic_file(path) as handle:
        for shard_entries in entries:
            data = np.ascontiguousarray(shard_entries, "<u4").view(np.uint8)
            handle.write(data.data)
            crc = crc32c(data, crc)
    return crc


class IndexedRecords(NamedTuple):
    """The positions and the checksums of the records in one shard, read from the index file of its group.

    Attributes:
        starts: int64 [packs + 1], the position in bytes of each record's frame in the shard, and the end of the shard.
        checksums: int64 [packs], the masked CRC-32C of each payload.
    """

    starts: IntArray
    checksums: IntArray


def read_index(path: Path, first: int, packs: int, shard_bytes: int) -> IndexedRecords | None:
    """Read the positions and the checksums of the records in one shard from the index file of its group.

    Args:
        path: The index file.
        first: The number of packs in the group's shards before this shard.
        packs: The number of packs of the shard.
        shard_bytes: The size of the shard.

    Returns:
        The positions and checksums of the records, or None if there is no index or its sizes do not add up to `shard_bytes`.
    """
    try:
        with open_file(path) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # do not read ahead
            data = os.pread(handle.fileno(), index_file_bytes(packs), index_file_bytes(first))
    except FileNotFoundError:
        return None
    if len(data) != index_file_bytes(packs):
        return None
    entries = np.frombuffer(data, "<u4").reshape(packs, 2).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(entries[:, 0])])
    return IndexedRecords(starts, entries[:, 1].copy()) if starts[-1] == shard_bytes else None


def check_shard_sizes(folder: Path, table: ShardTable, remedy: str = "write the packs again") -> None:
    """Check that every shard of a packed folder exists and has the size that the metadata lists.

    Args:
        folder: The packed folder.
        table: The shards of the folder.
        remedy: What the user can do, for the error message.

    Raises:
        InputError: A shard is missing or has another size. The message names the first such shard.
    """
    sizes = np.full(len(table), -1, np.int64)
    for name, size in list_file_sizes(folder):
        number = table.find_shard(name)
        if number is not None:
            sizes[number] = size
    if (sizes != table.bytes).any():
        number = int(np.argmax(sizes != table.bytes))
        problem = f"the metadata states {table.bytes[number]:,} bytes, but the shard has {sizes[number]:,}"
        if sizes[number] < 0:
            problem = "the shard is missing, although the metadata lists it"
        raise InputError(f"{folder / table.file_name(number)}: {problem}; {remedy}")


def list_file_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, size in bytes) for each file in a folder.

    The entries of a local folder are read one at a time, so the memory does not grow with their number.
    """
    if is_mirrored(folder):
        yield from ((name, info.bytes) for name, info in list_files(folder).items())
        return
    with os.scandir(folder) as entries:
        yield from ((entry.name, entry.stat().st_size) for entry in entries if entry.is_file())
