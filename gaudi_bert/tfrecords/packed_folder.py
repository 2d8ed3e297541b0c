"""The shards of a packed folder, of which there may be hundreds of thousands, as they are read by their numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.packed import Metadata
from gaudi_bert.artefacts.shards import ShardTable, check_shards, index_path, read_starts
from gaudi_bert.artefacts.store.mirrored_folder import is_mirrored
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors
from gaudi_bert.reading.global_order import MOST_SETS, regions_of_groups, streams_of
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tfrecords.random_access import RecordFiles, ShardCache
from gaudi_bert.tfrecords.wire.schema import PackedSchema


def read_metadata(folder: Path | str) -> Metadata:
    """Read the metadata of a folder of packed TFRecords."""
    folder = Path(folder)
    with explained_os_errors(folder, "read"), suppress(FileNotFoundError):
        os.stat(folder)
    return Metadata.read(folder)


def open_shards(folder: Path, metadata: Metadata, cache: ShardCache | None = None) -> RecordFiles:
    """The packs of a folder by their shards and numbers, located by the index of their group where there is one."""
    table = metadata.shard_table
    starts = partial(_starts_of, folder, table)
    return RecordFiles(ShardPaths(folder, table), PackedSchema.of(metadata), table.packs, starts, cache)


def open_packs(folder: Path, metadata: Metadata, cache: ShardCache | None = None) -> StoredPacks:
    """The packs of a folder as they are read: from more shards, and from all parts of the input, where there is an index."""
    files, streams = open_shards(folder, metadata, cache), streams_of(metadata.shard_multiple)
    regions = regions_of_groups(metadata.shard_table.group_sizes, metadata.input_files, metadata.seed)
    return StoredPacks(files, streams, MOST_SETS, regions)


def _starts_of(folder: Path, table: ShardTable, shard: int) -> IntArray | None:
    """Return where the records of a shard begin, by the index of its group."""
    index = index_path(folder, table.group_and_number(shard)[0])
    return read_starts(index, table.packs_before(shard), int(table.packs[shard]), int(table.bytes[shard]))


@dataclass(frozen=True)
class ShardPaths(Sequence[Path]):
    """The paths of the shards of a folder, created when they are requested."""

    folder: Path
    table: ShardTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Path:  # type: ignore[override]  # nobody takes a slice
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self.folder / self.table.name(number % len(self))


# Sizes of more shards are not looked up before a run: that takes a minute on a cold disk, for each process.
_MOST_SIZES = 20_000


def check_before_reading(folder: Path, table: ShardTable) -> None:
    """`check_shards` before a run: of very many shards, the names alone; each is measured when it is opened."""
    if len(table) <= _MOST_SIZES or is_mirrored(folder):
        check_shards(folder, table)
        return
    is_there = np.zeros(len(table), bool)
    with os.scandir(folder) as entries:
        for entry in entries:
            number = table.number(entry.name)
            if number is not None:
                is_there[number] = True
    if not is_there.all():
        path = folder / table.name(int(np.argmin(is_there)))
        raise InputError(f"{path}: the shard is missing, the metadata names it; write the packed data again")
