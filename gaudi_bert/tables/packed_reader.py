"""Read the packs of packed tables by their numbers.

`packed_writer` describes the columns. A reader keeps one row group of each open file in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.packed import TableManifest, TableMetadata
from gaudi_bert.artefacts.shards import check_shard_sizes
from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.arrow import check_column_names, open_parquet, require_pyarrow, validate_content
from gaudi_bert.common.crc32c import append_crc, crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explain_os_errors, open_file
from gaudi_bert.reading.global_order import choose_stream_count
from gaudi_bert.reading.streams import ShardFiles, StoredPacks
from gaudi_bert.tables.groups import ListValues
from gaudi_bert.tables.sources import is_list_type
from gaudi_bert.tfrecords.random_access import ShardPaths

_BYTES_AT_ONCE = 2**20
_REQUIRED_COLUMNS = ("input_ids", "position_ids", "seq_lens", "sequence_ids")
_TOKEN_COLUMNS = ("position_ids", "sequence_ids")


class _RowGroup(NamedTuple):
    """A row group of a Parquet file in memory.

    Attributes:
        first: The number of its first row in the file.
        last: The number after that of its last row.
        columns: The columns by name.
    """

    first: int
    last: int
    columns: dict[str, ListValues]


class _Footer(NamedTuple):
    """The footer of a Parquet file, which contains the positions of its row groups.

    Attributes:
        metadata: The metadata as pyarrow returns it.
        ends: int64 [row groups], the end of each row group in rows.
        pieces: int64 [row groups + 1], the byte at which each row group begins. The first begins at 0 and the last ends with
            the file, so that all pieces together are the complete file.
    """

    metadata: Any
    ends: IntArray
    pieces: IntArray

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return int(self.ends[-1]) if len(self.ends) else 0


def open_packed_tables(folder: Path, paths: Sequence[Path]) -> StoredPacks:
    """Open the Parquet files of a packed folder, so that packs can be read by their numbers.

    If metadata.json describes exactly these files, their sizes come from there, and otherwise from the footers of the files.

    Args:
        folder: The folder.
        paths: Its packed tables, in order.
    """
    sizes, shard_multiple, crc32c_of = None, 1, None
    if TableMetadata.path_in(folder).exists():
        metadata = TableMetadata.read(folder)
        table = metadata.shard_table
        if [path.name for path in paths] == [path.name for path in ShardPaths(folder, table)]:
            check_shard_sizes(folder, table)
            sizes, shard_multiple = table.packs, metadata.shard_multiple
            crc32c_of = partial(TableManifest.read_shard_crc32c, folder / NOTES_NAME, table)
    files = TableFiles(paths, sizes, crc32c_of)
    return StoredPacks(files, choose_stream_count(shard_multiple), window_rows=files.window_rows)


class TableFiles(ShardFiles["_Footer"]):
    """The Parquet files of a packed table, which serve as the shards of a `StreamReader`.

    The files are numbered in the order of their paths. One row group of each open file is in memory, and no file handle
    stays open. After all row groups of a file were read, the CRC-32C of the file is compared with the expected value.

    Args:
        paths: The files.
        sizes: int64, the number of rows in each file. None to read them from the footers.
        crc32c_of: Returns the expected CRC-32C of the file with this number, or None if it is unknown. None to check
            nothing.
    """

    def __init__(
        self, paths: Sequence[Path], sizes: IntArray | None = None, crc32c_of: Callable[[int], int | None] | None = None
    ) -> None:
        self.paths, self._crc32c_of = tuple(paths), crc32c_of
        self._read_pieces: dict[int, dict[int, int]] = {}  # for each file, the CRC-32C of the row groups read so far
        self._footers: dict[int, _Footer] = {}
        self._groups: dict[int, _RowGroup] = {}
        self._windows: dict[int, int] = {}
        _read_footer(self.paths[0])  # raises an error at once if the table is not packed
        self.sizes = np.array([_read_footer(path).rows for path in self.paths], np.int64) if sizes is None else sizes
        """The number of rows in each file, int64."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the arguments with which another process can open the files itself."""
        return TableFiles, (self.paths, self.sizes, self._crc32c_of)

    def window_rows(self, file: int) -> int:
        """Return the number of rows in the largest row group of a file.

        If packs are shuffled within windows of this size, no second row group has to be read.
        """
        if file not in self._windows:
            self.prepare_shard(file)
        return self._windows[file]

    def prepare_shard(self, file: int) -> _Footer:
        """Read and check the footer of a file.

        Raises:
            InputError: The file is not a packed table, or has another number of rows than expected.
        """
        path = self.paths[file]
        footer = _read_footer(path)
        if footer.rows != self.sizes[file]:
            raise InputError(f"{path}: expected {self.sizes[file]:,} rows, found {footer.rows:,}; pack the table again")
        self._windows[file] = int(np.diff(footer.ends, prepend=0).max(initial=1))
        return footer

    def open_shard(self, file: int, prepared: _Footer) -> None:
        """Open a file by storing its footer, which `prepare_shard` returned."""
        self._footers[file] = prepared

    def close_shard(self, file: int) -> None:
        """Close a file, and release the memory of its footer and its row group."""
        del self._footers[file]
        self._groups.pop(file, None)

    def close_shards_except(self, numbers: Iterable[int]) -> None:
        """Close all open files except those with these numbers."""
        for number in self._footers.keys() - set(numbers):
            self.close_shard(number)

    def read_records(self, files: IntArray, records: IntArray) -> list[dict[str, AnyArray]]:
        """Read packs, and return each as a dict with one numpy array per column. Files that are not open are opened.

        Args:
            files: int64 [n], the file of each row.
            records: int64 [n], the number of each row in its file.
        """
        rows = []
        for file, record in zip(files.tolist(), records.tolist(), strict=True):
            group = self._load_row_group(file, record)
            row = record - group.first
            columns = group.columns.items()
            rows.append({name: column.values[column.offsets[row] : column.offsets[row + 1]] for name, column in columns})
        return rows

    def _load_row_group(self, file: int, record: int) -> _RowGroup:
        """Return the row group of a file that contains a row. Read it unless it is already in memory."""
        group = self._groups.get(file)
        if group is None or not group.first <= record < group.last:
            if file not in self._footers:
                self.open_shard(file, self.prepare_shard(file))
            ends = self._footers[file].ends
            number = int(np.searchsorted(ends, record, side="right"))
            self._groups.pop(file, None)
            first = int(ends[number - 1]) if number else 0
            group = self._groups[file] = _RowGroup(first, int(ends[number]), self._read_row_group(file, number))
        return group

    def _read_row_group(self, file: int, number: int) -> dict[str, ListValues]:
        """Read and check one row group of a file, and return its columns as numpy arrays by name."""
        pyarrow = require_pyarrow()
        with open_parquet(self.paths[file], metadata=self._footers[file].metadata, memory_map=True) as opened:
            table = validate_content(self.paths[file], opened.read_row_group(number))
        self._check_file_crc32c(file, number)
        columns = {}
        for name in table.column_names:
            array = table.column(name).combine_chunks()
            array = array.chunk(0) if isinstance(array, pyarrow.ChunkedArray) else array
            kind = array.type
            if array.null_count or (name in _REQUIRED_COLUMNS and array.flatten().null_count):
                raise InputError(
                    f"{self.paths[file]}: column {name} contains nulls, which a packed table must not; pack the table again"
                )
            if pyarrow.types.is_fixed_size_list(kind):
                offsets = np.arange(len(array) + 1, dtype=np.int64) * kind.list_size
                columns[name] = ListValues(array.flatten().to_numpy(zero_copy_only=False), offsets)
            elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
                offsets = array.offsets.to_numpy().astype(np.int64)
                columns[name] = ListValues(array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])
        for name in _TOKEN_COLUMNS:
            if not np.array_equal(columns[name].offsets, columns["input_ids"].offsets):
                raise InputError(f"{self.paths[file]}: {name} and input_ids have different lengths; pack the table again")
        return columns

    def _check_file_crc32c(self, file: int, number: int) -> None:
        """Compute the CRC-32C of the bytes of one row group. When all row groups of a file were read, check the CRC-32C of
        the file.

        Raises:
            InputError: The CRC-32C differs from the manifest.
        """
        if self._crc32c_of is None:
            return
        read, bounds, path = self._read_pieces.setdefault(file, {}), self._footers[file].pieces.tolist(), self.paths[file]
        pieces = len(bounds) - 1
        if number in read:
            return
        begin, end = bounds[number : number + 2]
        with explain_os_errors(path, "read"), open_file(path) as handle:
            handle.seek(begin)
            read[number] = 0
            for at in range(begin, end, _BYTES_AT_ONCE):
                read[number] = crc32c(handle.read(min(_BYTES_AT_ONCE, end - at)), read[number])
        if len(read) == pieces:
            combined = 0
            for each in range(pieces):
                combined = int(append_crc(combined, bounds[each + 1] - bounds[each], read[each]))
            if self._crc32c_of(file) not in (None, combined):
                raise InputError(
                    f"{path}: the CRC-32C of the file differs from the manifest of its group; pack the table again"
                )


def _read_footer(path: Path) -> _Footer:
    """Read the footer of a file, and check that it is a packed table."""
    types = require_pyarrow().types
    with open_parquet(path, memory_map=True) as file:
        schema, metadata = check_column_names(path, file.schema_arrow), file.metadata
    names = schema.names
    for name in _REQUIRED_COLUMNS:
        if name not in names:
            raise InputError(
                f"{path}: column {name} is missing, so this is not a packed table; pack the table with `gaudi-bert pack`"
            )
        kind = schema.field(name).type
        if not (is_list_type(kind) and types.is_integer(kind.value_type)):
            raise InputError(
                f"{path}: column {name} has type {kind}, but must contain lists of integers; pack the table again"
            )
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    begins = [0, *map(_find_row_group_start, groups[1:]), path.stat().st_size]
    return _Footer(metadata, np.cumsum([group.num_rows for group in groups], dtype=np.int64), np.array(begins, np.int64))


def _find_row_group_start(row_group: Any) -> int:
    """Return the byte position at which a row group begins in its file."""
    column = row_group.column(0)
    return int(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)
