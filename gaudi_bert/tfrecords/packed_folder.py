"""The metadata of a packed folder, by either packer: gaudi-bert, or the vendor's script that came before it.

The predecessor (see `artefacts.packed`) writes one file or more per strategy, named `strategy_<lengths>_part_<n>`, and
next to the folder `<folder>_metadata.json`, which holds counts but no sizes. The sizes are therefore taken from the first
record, and the packs are counted in the files: its packer could lose records and still report them as written, so the two
numbers are compared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

import numpy as np

from gaudi_bert.artefacts.base import LARGEST_COUNT, METADATA_NAME
from gaudi_bert.artefacts.pack_kinds import predecessor_metadata_path
from gaudi_bert.artefacts.packed import Metadata
from gaudi_bert.artefacts.shards import Shard, ShardTable, check_shards, index_path, read_starts
from gaudi_bert.artefacts.store.mirrored_folder import is_mirrored
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.common.features import PackingFigures
from gaudi_bert.common.files import explained_os_errors, read_json
from gaudi_bert.reading.global_order import MOST_SETS, regions_of_groups, streams_of
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tfrecords.random_access import RecordFiles
from gaudi_bert.tfrecords.scanning.scan import first_record
from gaudi_bert.tfrecords.shard_cache import ShardCache
from gaudi_bert.tfrecords.wire.framing import record_location
from gaudi_bert.tfrecords.wire.schema import PackedSchema, RecordError, check_features, packed_schema_of

PREDECESSOR_DEPTH = 3
_FILE_PATTERN = "strategy_*_part_*"


def read_metadata(folder: Path | str) -> Metadata:
    """The metadata of a packed folder: ours inside it, or the predecessor's next to it (`<folder>_metadata.json`)."""
    folder = Path(folder)
    with explained_os_errors(folder, "read"), suppress(FileNotFoundError):
        os.stat(folder)
    sibling = predecessor_metadata_path(folder)
    if not (folder / METADATA_NAME).exists() and sibling.exists():
        return _read_predecessor_metadata(folder, sibling)
    return Metadata.read(folder)


# --- the shards of a folder, of which there may be hundreds of thousands


def open_shards(folder: Path, metadata: Metadata, cache: ShardCache | None = None) -> RecordFiles:
    """The packs of a folder by their shards and numbers, located by the index of their group where there is one."""
    table = metadata.shard_table
    starts = partial(_starts_of, folder, table)
    return RecordFiles(ShardPaths(folder, table), PackedSchema.of(metadata), table.packs, starts, cache)


def open_packs(folder: Path, metadata: Metadata, cache: ShardCache | None = None) -> StoredPacks:
    """The packs of a folder as they are read: from more shards, and from all parts of the input, where there is an index."""
    files, streams = open_shards(folder, metadata, cache), streams_of(metadata.shard_multiple)
    if not metadata.groups:
        return StoredPacks(files, streams)
    regions = regions_of_groups(metadata.shard_table.group_sizes, metadata.input_files, metadata.seed)
    return StoredPacks(files, streams, MOST_SETS, regions)


def _starts_of(folder: Path, table: ShardTable, shard: int) -> IntArray | None:
    """Where the records of a shard begin, by the index of its group."""
    if table.given_names:
        return None
    index = index_path(folder, table.group_and_number(shard)[0])
    return read_starts(index, table.packs_before(shard), int(table.packs[shard]), int(table.bytes[shard]))


@dataclass(frozen=True)
class ShardPaths(Sequence[Path]):
    """The paths of the shards of a folder, created when they are requested."""

    folder: Path
    table: ShardTable

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, number: int) -> Path: ...

    @overload
    def __getitem__(self, number: slice) -> list[Path]: ...

    def __getitem__(self, number: int | slice) -> Path | list[Path]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
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


def _read_predecessor_metadata(folder: Path, sibling: Path) -> Metadata:
    """The metadata of a folder that the predecessor packed.

    What it did not record is given as its neutral value: no inputs, no checksums, an empty histogram, seed 0; the lower
    bound is the number of tokens divided by the length of a row.
    """
    content = read_json(sibling)
    packs = _count(sibling, content, "new_number_of_samples")
    dropped = _count(sibling, content, "sequences_dropped", 0)
    sequences = _count(sibling, content, "original_number_of_samples") - dropped
    padding = _count(sibling, content, "padding_tokens_packed_dataset")
    paths = sorted(path for path in folder.glob(_FILE_PATTERN) if path.is_file())
    if not paths:
        raise InputError(f"{folder}: holds no {_FILE_PATTERN} file, which {sibling.name} belongs to; check the path")
    schema = _schema_of(paths[0])
    sizes = [int(packs) for packs in RecordFiles(paths, schema).sizes]
    if sum(sizes) != packs:
        raise InputError(
            f"{folder}: its files hold {sum(sizes)} packs, {sibling.name} states {packs}: files are missing, or its "
            "packer lost records; pack the data again, or correct new_number_of_samples to train on what is there"
        )
    slots = packs * schema.max_sequence_length
    tokens = slots - padding
    if not 0 <= padding < slots or sequences < packs:
        raise InputError(
            f"{sibling}: {sequences} sequences and {padding} padding tokens do not go with "
            f"{packs} packs of {schema.max_sequence_length}; it belongs to other data"
        )
    return _PredecessorMetadata(
        format_version=2,
        tool_version="predecessor",
        max_sequence_length=schema.max_sequence_length,
        max_predictions=schema.max_predictions,
        masked_slots=schema.masked_slots,
        depth=schema.depth,
        seed=0,
        algorithm="nnls",
        vocabulary=None,
        **PackingFigures(sequences, packs, tokens, slots, -(-tokens // schema.max_sequence_length)).stored(),
        shard_multiple=1,
        input_files=0,
        groups=(),
        shards=tuple(
            Shard(name=path.name, packs=packs, bytes=path.stat().st_size) for path, packs in zip(paths, sizes, strict=True)
        ),
        histogram=(),
    )


class _PredecessorMetadata(Metadata):
    """The metadata of a folder that the predecessor packed: it has no groups, but files of any name."""

    shards: tuple[Shard, ...]

    @cached_property
    def shard_table(self) -> ShardTable:
        """The shards as arrays."""
        return ShardTable.of(self.shards)

    def known_by(self) -> list[Any]:
        """What tells these packs from others: names and sizes of all files."""
        return [shard.model_dump() for shard in self.shards]


def _count(sibling: Path, content: Any, key: str, default: int | None = None) -> int:
    """A count, which the predecessor writes as a float."""
    value = content.get(key, default) if isinstance(content, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_COUNT or value % 1:
        raise InputError(
            f"{sibling}: `{key}` is {shown(value)}, it must be an integer; this is not the predecessor's metadata"
        )
    return int(value)


def _schema_of(path: Path) -> PackedSchema:
    features = first_record(path)
    try:
        schema = packed_schema_of(features)
        check_features(features, schema)
    except RecordError as error:
        raise InputError(f"{record_location(path, 0, 0)}: {error}") from error
    if schema.depth != PREDECESSOR_DEPTH:
        raise InputError(f"{path}: its packs hold {schema.depth} sequences, the predecessor's hold {PREDECESSOR_DEPTH}")
    return schema
