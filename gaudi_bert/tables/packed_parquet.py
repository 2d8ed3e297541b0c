"""Packed tables, read by the numbers of their packs: one row group in memory of each file that is read; and vectors.

Columns of L values per row are matrices, those of one value per sequence are cut by their offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gaudi_bert.artefacts.packed import TableMetadata
from gaudi_bert.artefacts.shards import check_shards
from gaudi_bert.common.arrays import AnyArray, Float32Array, IntArray
from gaudi_bert.common.arrow import named, opened_parquet, require_pyarrow, validated
from gaudi_bert.common.errors import InputError
from gaudi_bert.reading.global_order import streams_of
from gaudi_bert.reading.streams import ShardFiles, StoredPacks
from gaudi_bert.tables.rows import ListValues
from gaudi_bert.tables.sources import is_list
from gaudi_bert.tfrecords.packed_folder import ShardPaths

_NEEDED = ("input_ids", "position_ids", "seq_lens", "sequence_ids")
_ALONG = ("position_ids", "sequence_ids")


class _Group(NamedTuple):
    first: int
    last: int
    columns: dict[str, ListValues]


class _Footer(NamedTuple):
    """The metadata of a file, as pyarrow has it, and the end of each row group, int64."""

    metadata: Any
    ends: IntArray


def open_tables(folder: Path, paths: Sequence[Path]) -> StoredPacks:
    """The packed tables of a folder; packs that move within a row group need no other one.

    Where metadata.json describes these files, their sizes are from there, otherwise from their footers.
    """
    sizes, shard_multiple = None, 1
    if TableMetadata.path_in(folder).exists():
        metadata = TableMetadata.read(folder)
        table = metadata.shard_table
        if [path.name for path in paths] == [path.name for path in ShardPaths(folder, table)]:
            check_shards(folder, table)
            sizes, shard_multiple = table.packs, metadata.shard_multiple
    files = TableFiles(paths, sizes)
    return StoredPacks(files, streams_of(shard_multiple), window_rows=files.window_rows)


class TableFiles(ShardFiles["_Footer"]):
    """Packed Parquet files, numbered in the order of their paths: the shards of a `StreamReader`.

    Of each open file one row group is in memory; no handle stays open. Sizes of None, int64, are read from the footers.
    """

    def __init__(self, paths: Sequence[Path], sizes: IntArray | None = None) -> None:
        self.paths = tuple(paths)
        self._footers: dict[int, _Footer] = {}
        self._groups: dict[int, _Group] = {}
        self._windows: dict[int, int] = {}
        _footer(self.paths[0])  # other tables are refused before anything is read
        self.sizes = np.array([_rows(_footer(path)) for path in self.paths], np.int64) if sizes is None else sizes
        """Rows of each file, int64."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which reads the files itself."""
        return TableFiles, (self.paths, self.sizes)

    def window_rows(self, file: int) -> int:
        """Rows of the largest row group of a file: packs that are permuted within so many need no other group."""
        if file not in self._windows:
            self.prepare(file)
        return self._windows[file]

    def prepare(self, file: int) -> _Footer:
        """Read and check the footer of a file."""
        footer = _footer(self.paths[file])
        if _rows(footer) != self.sizes[file]:
            raise InputError(
                f"{self.paths[file]}: has {_rows(footer):,} rows, expected {self.sizes[file]:,}; pack the table again"
            )
        self._windows[file] = int(np.diff(footer.ends, prepend=0).max(initial=1))
        return footer

    def open(self, file: int, prepared: _Footer) -> None:
        """Begin to read a file."""
        self._footers[file] = prepared

    def close(self, file: int) -> None:
        """Release what is in memory of a file."""
        del self._footers[file]
        self._groups.pop(file, None)

    def close_except(self, numbers: Iterable[int]) -> None:
        """Release all files but these."""
        for number in self._footers.keys() - set(numbers):
            self.close(number)

    def read(self, files: IntArray, records: IntArray) -> list[dict[str, AnyArray]]:
        """Rows by file and number, int64 [n] each; a file that is not open is opened."""
        rows = []
        for file, record in zip(files.tolist(), records.tolist(), strict=True):
            group = self._group(file, record)
            row = record - group.first
            columns = group.columns.items()
            rows.append({name: column.values[column.offsets[row] : column.offsets[row + 1]] for name, column in columns})
        return rows

    def _group(self, file: int, record: int) -> _Group:
        group = self._groups.get(file)
        if group is None or not group.first <= record < group.last:
            if file not in self._footers:
                self.open(file, self.prepare(file))
            ends = self._footers[file].ends
            number = int(np.searchsorted(ends, record, side="right"))
            self._groups.pop(file, None)
            first = int(ends[number - 1]) if number else 0
            group = self._groups[file] = _Group(first, int(ends[number]), self._read_group(file, number))
        return group

    def _read_group(self, file: int, number: int) -> dict[str, ListValues]:
        pyarrow = require_pyarrow()
        with opened_parquet(self.paths[file], metadata=self._footers[file].metadata, memory_map=True) as opened:
            table = validated(self.paths[file], opened.read_row_group(number))
        columns = {}
        for name in table.column_names:
            array = table.column(name).combine_chunks()
            array = array.chunk(0) if isinstance(array, pyarrow.ChunkedArray) else array
            kind = array.type
            if array.null_count or (name in _NEEDED and array.flatten().null_count):
                raise InputError(
                    f"{self.paths[file]}: column {name} holds nulls, packed tables do not; pack the table again"
                )
            if pyarrow.types.is_fixed_size_list(kind):
                offsets = np.arange(len(array) + 1, dtype=np.int64) * kind.list_size
                columns[name] = ListValues(array.flatten().to_numpy(zero_copy_only=False), offsets)
            elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
                offsets = array.offsets.to_numpy().astype(np.int64)
                columns[name] = ListValues(array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])
        for name in _ALONG:
            if not np.array_equal(columns[name].offsets, columns["input_ids"].offsets):
                raise InputError(f"{self.paths[file]}: {name} and input_ids differ in length; pack the table again")
        return columns


def _footer(path: Path) -> _Footer:
    """The footer of a file, which must be a packed table."""
    types = require_pyarrow().types
    with opened_parquet(path, memory_map=True) as file:
        schema, metadata = named(path, file.schema_arrow), file.metadata
    names = schema.names
    for name in _NEEDED:
        if name not in names:
            raise InputError(
                f"{path}: column {name} is missing, so this is not a packed table; pack it with `gaudi-bert pack`"
            )
        kind = schema.field(name).type
        if not (is_list(kind) and types.is_integer(kind.value_type)):
            raise InputError(f"{path}: column {name} holds {kind}, in packed tables lists of integers; pack again")
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return _Footer(metadata, np.cumsum(sizes, dtype=np.int64))


def _rows(footer: _Footer) -> int:
    return int(footer.ends[-1]) if len(footer.ends) else 0


# --- vectors as a Parquet table: one column `embedding` of lists of float32

_ROWS_OF_A_GROUP = 8192


def write_vectors(handle: BinaryIO, vectors: Float32Array) -> None:
    """Write `vectors`, [rows, width], a group of rows at a time."""
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    width = vectors.shape[1]
    schema = pyarrow.schema([("embedding", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(handle, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, len(vectors), _ROWS_OF_A_GROUP):
            flat = pyarrow.array(vectors[first : first + _ROWS_OF_A_GROUP].reshape(-1), pyarrow.float32())
            column = pyarrow.FixedSizeListArray.from_arrays(flat, width)
            writer.write_table(pyarrow.table([column], schema=schema))
