"""Index-only packs with the table that they index: rows as of a packed table, assembled when they are read.

The index is held in memory (about 16 bytes a sequence). Of the table, Arrow files are mapped, Parquet and JSON lines are
decoded into memory once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.completion import read_signature, settings_path
from gaudi_bert.artefacts.packed import TableMetadata
from gaudi_bert.common.arrays import AnyArray, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import section_from_mapping
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.reading.streams import ShardFiles
from gaudi_bert.tables.parts import list_parts, read_parts
from gaudi_bert.tables.rows import ListValues, list_values, read_lists
from gaudi_bert.tables.sources import check_same_columns, columns_of, table_files
from gaudi_bert.tables.write_packs import pad_value
from gaudi_bert.tfrecords.files import input_file

Pack = dict[str, AnyArray]


class _Index(NamedTuple):
    """The sequences of all packs of a shard, one after the other: those of pack p from `offsets[p]` on."""

    offsets: IntArray
    rows: IntArray
    starts: Int32Array
    lengths: Int32Array


class _Rows(NamedTuple):
    """Some rows of the table, from `first` on: their aligned columns, and the others as a pyarrow table."""

    first: int
    aligned: dict[str, ListValues]
    scalars: Any


class IndexedTable(ShardFiles[None]):
    """The packs of an index, as the shards of a `StreamReader`; nothing is opened or closed.

    `folder` is `pack --index-only` of `table`; `is_known`: another process has checked that.
    """

    def __init__(self, folder: Path, table: Path, is_known: bool = False) -> None:
        self.folder, self.table = folder, table
        metadata = TableMetadata.read(folder)
        if not metadata.index_only:
            raise InputError(f"{folder}: is not an index folder; omit table=, or pack with --index-only")
        self.shard_multiple, self.identity = metadata.shard_multiple, metadata.identity()
        self._length = metadata.max_sequence_length
        table_of_shards = metadata.shard_table
        names = [table_of_shards.name(number) for number in range(len(table_of_shards))]
        self._shards = [_read_index(folder / name) for name in names]
        self.sizes = np.array([len(shard.offsets) - 1 for shard in self._shards], np.int64)
        self._rows = _open_table(folder, table, metadata, is_known)
        self._firsts = np.array([rows.first for rows in self._rows], np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which reads the table itself."""
        return IndexedTable, (self.folder, self.table, True)

    def prepare(self, shard: int) -> None:
        """Nothing to do: everything is in memory, or mapped."""

    def read(self, files: IntArray, records: IntArray) -> list[Pack]:
        """Packs by shard and number, int64 [n] each."""
        return [
            self._pack(self._shards[file], record) for file, record in zip(files.tolist(), records.tolist(), strict=True)
        ]

    def _pack(self, shard: _Index, pack: int) -> Pack:
        chosen = slice(int(shard.offsets[pack]), int(shard.offsets[pack + 1]))
        numbers, starts, lengths = shard.rows[chosen], shard.starts[chosen], shard.lengths[chosen]
        parts = np.searchsorted(self._firsts, numbers, side="right") - 1
        tokens, first = int(lengths.sum()), self._rows[0]
        content: Pack = {}
        for name, values in first.aligned.items():
            row = np.full(self._length, pad_value(name), values.values.dtype)
            at = 0
            for part, number, start, length in zip(parts, numbers, starts, lengths, strict=True):
                held = self._rows[part].aligned[name]
                begin = int(held.offsets[number - self._rows[part].first]) + start
                row[at : at + length] = held.values[begin : begin + length]
                at += length
            content[name] = row
        within = [np.arange(length, dtype=np.int32) for length in (*lengths.tolist(), self._length - tokens)]
        content["position_ids"] = np.concatenate(within)
        content["sequence_ids"] = np.zeros(self._length, np.int32)
        content["sequence_ids"][:tokens] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        content["seq_lens"], content["indices"] = lengths, numbers
        for name in first.scalars.column_names:
            held_rows = zip(parts.tolist(), numbers.tolist(), strict=True)
            cells = [self._rows[part].scalars.column(name)[number - self._rows[part].first] for part, number in held_rows]
            content[name] = np.array([cell.as_py() for cell in cells])
        return content


def _read_index(path: Path) -> _Index:
    lists = read_lists(path)
    indices = lists["indices"]
    starts = lists["starts"].values if "starts" in lists else np.zeros(len(indices.values), np.int32)
    return _Index(indices.offsets.astype(np.int64), indices.values, starts, lists["seq_lens"].values)


def _open_table(folder: Path, table: Path, metadata: TableMetadata, is_known: bool) -> list[_Rows]:
    """The rows of the table of an index, part by part."""
    files = table_files(table)
    known = {file.name: file.identity for file in metadata.inputs}
    for file in files:
        # Other tokens of the same lengths would be packs without an error, so size and name are not enough.
        if file.name not in known or not (is_known or input_file(file).identity == known[file.name]):
            raise InputError(
                f"{file}: is not of the table that {folder} indexes (it holds {', '.join(known)}); give that one"
            )
    if len(files) < len(known):
        raise InputError(f"{table}: {len(files)} files, {folder} indexes {len(known)}: {', '.join(known)}; give all of them")
    path = settings_path(folder, TableMetadata.path_in(folder))
    settings = section_from_mapping(TableSettings, read_signature(path).settings, str(path))
    columns = columns_of(files[0], settings.columns, settings.input_column)
    check_same_columns(files, columns)
    limits = TableSettings(max_sequence_length=1)
    rows, first = [], 0
    for file in files:
        parts = list_parts(file, columns.stored_names, limits.group_sequences, limits.group_bytes)
        for part, content in zip(parts, read_parts(parts, columns.stored_names, columns.schema), strict=True):
            named = content.rename_columns(columns.names)
            aligned = {name: list_values(file, part.first_row, name, named.column(name)) for name in columns.aligned}
            rows.append(_Rows(first + part.first_row, aligned, named.select(list(columns.scalars))))
        first += sum(part.rows for part in parts)
    if first != metadata.rows:
        raise InputError(f"{table}: holds {first:,} rows, {folder} indexes {metadata.rows:,}; give that table")
    return rows
