"""Packed tables: write shards of Parquet with one row per pack, and read packs by their numbers.

The columns are:

- `input_ids` and each aligned column [L]: values of the column's own type. Padding is 0, and -100 in `labels`.
- `position_ids` [L]: positions, which restart at 0 in each sequence and in the padding.
- `sequence_ids` [L]: 1..1 2..2 .. 0..0. Two tokens may attend to each other if their values are equal.
- `seq_lens`: the number of tokens in each sequence.
- `indices`: the table row that each sequence comes from.
- `starts`: the first token of each sequence in that row. This column exists only if rows are split.
- each scalar column: one value for each sequence.

L is the row length. Shards are written one row group at a time. A reader keeps one row group of each open file in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.packed import TableMetadata, read_shard_crc32c
from gaudi_bert.artefacts.shards import Shard, check_shards
from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.arrow import check_column_names, open_parquet, require_pyarrow, validate_content
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.crc32c import append_crc, crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, explain_os_errors, open_file
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.reading.global_order import choose_stream_count
from gaudi_bert.reading.streams import ShardFiles, StoredPacks
from gaudi_bert.tables.groups import GroupRows, ListValues
from gaudi_bert.tables.sources import LABELS_COLUMN, TableColumns, is_list
from gaudi_bert.tfrecords.files import input_file
from gaudi_bert.tfrecords.random_access import ShardPaths

_SLOTS_PER_ROW_GROUP = 2**21
_VALUES_AT_ONCE = 2**14
_BYTES_AT_ONCE = 2**20


class PackLayout(NamedTuple):
    """The columns and sizes of the shards in a folder.

    Attributes:
        columns: The columns of the table.
        max_sequence_length: The number of slots in a pack.
        with_starts: Whether rows may be split, so that the column `starts` exists.
    """

    columns: TableColumns
    max_sequence_length: int
    with_starts: bool

    @classmethod
    def of(cls, columns: TableColumns, settings: TableSettings) -> PackLayout:
        """Return the layout of packs that are written with these settings."""
        return cls(columns, settings.max_sequence_length, settings.too_long == "split")

    @property
    def pack_bytes(self) -> int:
        """The approximate size of a pack before compression.

        Positions and sequence numbers are not included, because they compress to almost nothing.
        """
        along: int = sum(max(1, kind.bit_width // 8) for kind in self.columns.aligned.values())
        return self.max_sequence_length * along + 64

    def schema(self) -> Any:
        """Return the pyarrow schema of a shard."""
        pyarrow = require_pyarrow()
        int32, int64 = pyarrow.int32(), pyarrow.int64()
        of_sequences = {"seq_lens": int32, "indices": int64, **({"starts": int32} if self.with_starts else {})}
        fields = [pyarrow.field(name, _list(kind)) for name, kind in of_sequences.items()]
        along = {**self.columns.aligned, "position_ids": int32, "sequence_ids": int32}
        return pyarrow.schema(
            [
                *(pyarrow.field(name, _list(kind, self.max_sequence_length), False) for name, kind in along.items()),
                *fields,
                *(pyarrow.field(name, pyarrow.list_(kind)) for name, kind in self.columns.scalars.items()),
            ]
        )


def _list(kind: Any, size: int = -1) -> Any:
    """Return the pyarrow type of lists without nulls, of fixed size if `size` is given."""
    pyarrow = require_pyarrow()
    return pyarrow.list_(pyarrow.field("element", kind, nullable=False), size)


def pad_value(name: str) -> int:
    """Return the value of padding slots in an aligned column."""
    return NOT_PREDICTED if name == LABELS_COLUMN else 0


def write_table_shard(
    path: Path, layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, bounds: tuple[int, int]
) -> Shard:
    """Write some packs of a group to a Parquet file.

    Args:
        path: The file.
        layout: The columns and sizes.
        rows: The rows of the group.
        packs: The packs of the group.
        scalars: A pyarrow table of the scalar columns, in the order of the sequences of `packs`, or None.
        bounds: The first pack, and the end of the packs to write.

    Returns:
        The name, the number of packs, the size and the CRC-32C of the file.
    """
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    first, last = bounds
    most = max(1, _SLOTS_PER_ROW_GROUP // layout.max_sequence_length)
    schema = layout.schema()
    with (
        atomic_file(path) as handle,
        parquet.ParquetWriter(handle, schema, compression="zstd", **_encodings(layout)) as writer,
    ):
        for start in range(first, last, most):
            end = min(start + most, last)
            columns = _columns(layout, rows, packs, scalars, start, end)
            writer.write_batch(pyarrow.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))
    return Shard(name=path.name, packs=last - first, **input_file(path).identity)


def _encodings(layout: PackLayout) -> dict[str, Any]:
    """Return the options that determine how the columns of a shard are encoded.

    Columns with L numbers per pack are split into their bytes: first all first bytes, then all second bytes, and so on. zstd
    compresses this in half the time of a dictionary encoding, and to fewer bytes. These columns have no statistics, because
    nobody searches for packs by their smallest token id.
    """
    types = require_pyarrow().types
    split, others, counted = [], [], []
    for field in layout.schema():
        if not is_list(field.type):
            counted.append(field.name)
            continue
        kind, element = field.type.value_type, f"{field.name}.list.element"
        along = types.is_fixed_size_list(field.type)
        if along and (types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)):
            split.append(element)
        elif field.name in ("seq_lens", "indices"):
            counted.append(element)
        else:
            others.append(element)
    return {
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "use_dictionary": others,
        "write_statistics": [*counted, *others],
        "write_batch_size": _VALUES_AT_ONCE,
    }


def _columns(
    layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, first: int, last: int
) -> dict[str, Any]:
    """Return all columns of the packs `first` .. `last` - 1, as pyarrow arrays by name."""
    pyarrow = require_pyarrow()
    slots, (begin, end) = layout.max_sequence_length, packs.offsets[[first, last]].tolist()
    of_rows, starts, lengths = packs.rows[begin:end], packs.starts[begin:end], packs.lengths[begin:end]
    offsets = pyarrow.array((packs.offsets[first : last + 1] - begin).astype(np.int32))

    def lists(values: Any, kind: Any = None) -> Any:
        """Return a pyarrow array with one list per pack."""
        return pyarrow.ListArray.from_arrays(offsets, values, type=kind)

    counted: dict[str, AnyArray] = {"seq_lens": lengths, "starts": starts, "indices": rows.numbers[of_rows]}
    columns = {}
    for name, each in counted.items():
        array = pyarrow.array(each)
        columns[name] = lists(array, _list(array.type))
    positions, numbers = (np.empty((last - first) * slots, np.int32) for _ in range(2))
    _number(packs, first, last, slots, positions, numbers)
    along = {"position_ids": pyarrow.array(positions), "sequence_ids": pyarrow.array(numbers)}
    tokens, is_token = rows.tokens_of(of_rows, starts, lengths), numbers > 0
    for name, kind in layout.columns.aligned.items():
        values = np.full(is_token.size, pad_value(name), rows.values[name].dtype)
        values[is_token] = rows.values[name][tokens]
        along[name] = pyarrow.array(values).cast(kind)
    for name, array in along.items():
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(array, type=_list(array.type, slots))
    for name in layout.columns.scalars:
        values = scalars.column(name).slice(begin, end - begin)
        columns[name] = lists(values.chunk(0) if values.num_chunks == 1 else values.combine_chunks())
    return columns


class PackSequences(NamedTuple):
    """The sequences of packs, in the order in which they are written.

    Pack p contains sequences offsets[p] to offsets[p + 1] - 1.

    Attributes:
        offsets: int64 [packs + 1].
        rows: int64 [sequences], the row of the group that each sequence comes from.
        starts: int32 [sequences], the first token of each sequence in its row.
        lengths: int32 [sequences], the number of tokens in each sequence.
    """

    offsets: IntArray
    rows: IntArray
    starts: Int32Array
    lengths: Int32Array

    @property
    def packs(self) -> int:
        """The number of packs."""
        return self.offsets.size - 1


@borrowing_kernel
def _number(packs: PackSequences, first: int, last: int, row_slots: int, positions: Int32Array, numbers: Int32Array) -> None:
    """Set the position of every slot in its sequence, and the number of that sequence from 1.

    Padding has the number 0, and its positions count from 0 as in one more sequence.
    """
    at = 0
    for pack in range(first, last):
        end = at + row_slots
        begin = packs.offsets[pack]
        for index in range(begin, packs.offsets[pack + 1]):
            for position in range(packs.lengths[index]):
                positions[at + position] = position
                numbers[at + position] = index - begin + 1
            at += packs.lengths[index]
        for position in range(end - at):
            positions[at + position] = position
            numbers[at + position] = 0
        at = end


# --- reading packs by their numbers, with one row group of each open file in memory

_NEEDED = ("input_ids", "position_ids", "seq_lens", "sequence_ids")
_ALONG = ("position_ids", "sequence_ids")


class _Group(NamedTuple):
    """A row group that was read from a file.

    Attributes:
        first: The number of its first row in the file.
        last: The number after that of its last row.
        columns: The columns by name.
    """

    first: int
    last: int
    columns: dict[str, ListValues]


class _Footer(NamedTuple):
    """The metadata of a file.

    Attributes:
        metadata: The metadata as pyarrow returns it.
        ends: int64 [row groups], the end of each row group in rows.
        pieces: int64 [row groups + 1], the byte at which each row group begins. The first begins at 0 and the last ends with
            the file, so that all pieces together are the complete file.
    """

    metadata: Any
    ends: IntArray
    pieces: IntArray


def open_tables(folder: Path, paths: Sequence[Path]) -> StoredPacks:
    """Open the packed tables of a folder.

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
            check_shards(folder, table)
            sizes, shard_multiple = table.packs, metadata.shard_multiple
            crc32c_of = partial(read_shard_crc32c, folder / NOTES_NAME, table)
    files = TableFiles(paths, sizes, crc32c_of)
    return StoredPacks(files, choose_stream_count(shard_multiple), window_rows=files.window_rows)


class TableFiles(ShardFiles["_Footer"]):
    """Packed Parquet files, numbered in the order of their paths, which serve as the shards of a `StreamReader`.

    One row group of each open file is in memory, and no file handle stays open. After all row groups of a file were read,
    the CRC-32C of the file is compared with the expected value.

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
        self._groups: dict[int, _Group] = {}
        self._windows: dict[int, int] = {}
        _footer(self.paths[0])  # rejects a table that is not packed before anything is read
        self.sizes = np.array([_rows(_footer(path)) for path in self.paths], np.int64) if sizes is None else sizes
        """The number of rows in each file, int64."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only what another process needs to open the files itself."""
        return TableFiles, (self.paths, self.sizes, self._crc32c_of)

    def window_rows(self, file: int) -> int:
        """Return the number of rows in the largest row group of a file.

        If packs are shuffled within windows of this size, no second row group has to be read.
        """
        if file not in self._windows:
            self.prepare(file)
        return self._windows[file]

    def prepare(self, file: int) -> _Footer:
        """Read and check the footer of a file.

        Raises:
            InputError: The file is not a packed table, or has another number of rows than expected.
        """
        footer = _footer(self.paths[file])
        if _rows(footer) != self.sizes[file]:
            raise InputError(
                f"{self.paths[file]}: has {_rows(footer):,} rows, expected {self.sizes[file]:,}; pack the table again"
            )
        self._windows[file] = int(np.diff(footer.ends, prepend=0).max(initial=1))
        return footer

    def open(self, file: int, prepared: _Footer) -> None:
        """Start reading a file, given its footer."""
        self._footers[file] = prepared

    def close(self, file: int) -> None:
        """Release the memory of a file."""
        del self._footers[file]
        self._groups.pop(file, None)

    def close_except(self, numbers: Iterable[int]) -> None:
        """Release the memory of all files except these."""
        for number in self._footers.keys() - set(numbers):
            self.close(number)

    def read(self, files: IntArray, records: IntArray) -> list[dict[str, AnyArray]]:
        """Return rows as dicts of columns. Files that are not open are opened.

        Args:
            files: int64 [n], the file of each row.
            records: int64 [n], the number of each row in its file.
        """
        rows = []
        for file, record in zip(files.tolist(), records.tolist(), strict=True):
            group = self._group(file, record)
            row = record - group.first
            columns = group.columns.items()
            rows.append({name: column.values[column.offsets[row] : column.offsets[row + 1]] for name, column in columns})
        return rows

    def _group(self, file: int, record: int) -> _Group:
        """Return the row group that contains a row, which is read if it is not in memory."""
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
        """Read a row group, check it, and return its columns."""
        pyarrow = require_pyarrow()
        with open_parquet(self.paths[file], metadata=self._footers[file].metadata, memory_map=True) as opened:
            table = validate_content(self.paths[file], opened.read_row_group(number))
        self._check_piece(file, number)
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

    def _check_piece(self, file: int, number: int) -> None:
        """Add the bytes of a row group to the CRC-32C of its file. When all row groups were added, check the CRC-32C.

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
                raise InputError(f"{path}: its CRC-32C differs from the manifest of its group; pack the table again")


def _footer(path: Path) -> _Footer:
    """Read the footer of a file, and check that it is a packed table."""
    types = require_pyarrow().types
    with open_parquet(path, memory_map=True) as file:
        schema, metadata = check_column_names(path, file.schema_arrow), file.metadata
    names = schema.names
    for name in _NEEDED:
        if name not in names:
            raise InputError(
                f"{path}: column {name} is missing, so this is not a packed table; pack it with `gaudi-bert pack`"
            )
        kind = schema.field(name).type
        if not (is_list(kind) and types.is_integer(kind.value_type)):
            raise InputError(f"{path}: column {name} holds {kind}, in packed tables lists of integers; pack again")
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    begins = [0, *map(_first_byte, groups[1:]), path.stat().st_size]
    return _Footer(metadata, np.cumsum([group.num_rows for group in groups], dtype=np.int64), np.array(begins, np.int64))


def _first_byte(group: Any) -> int:
    """Return the position in the file at which a row group begins."""
    column = group.column(0)
    return int(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)


def _rows(footer: _Footer) -> int:
    """Return the number of rows in a file, given its footer."""
    return int(footer.ends[-1]) if len(footer.ends) else 0


# --- embeddings as a Parquet table with one column `embedding`, which contains lists of float32

_ROWS_OF_A_GROUP = 8192


def write_vectors(handle: BinaryIO, vectors: Float32Array) -> None:
    """Write embeddings, [rows, width], as a Parquet table, one row group at a time."""
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    width = vectors.shape[1]
    schema = pyarrow.schema([("embedding", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(handle, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, len(vectors), _ROWS_OF_A_GROUP):
            flat = pyarrow.array(vectors[first : first + _ROWS_OF_A_GROUP].reshape(-1), pyarrow.float32())
            column = pyarrow.FixedSizeListArray.from_arrays(flat, width)
            writer.write_table(pyarrow.table([column], schema=schema))
