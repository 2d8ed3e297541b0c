"""Write the shards of packed tables, and read packs by their numbers. A shard is a Parquet file with one row per pack.

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
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.packed import TableManifest, TableMetadata
from gaudi_bert.artefacts.shards import Shard, check_shard_sizes, compute_file_identity
from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, Int32Array, IntArray
from gaudi_bert.common.arrow import open_parquet, require_pyarrow, require_utf8_column_names, validate_arrow_buffers
from gaudi_bert.common.compiled import kernel_without_refcounts
from gaudi_bert.common.crc32c import append_crc, crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, explain_os_errors, open_file
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.reading.global_order import choose_shard_stream_count
from gaudi_bert.reading.streams import ShardFiles, StoredPacks
from gaudi_bert.tables.groups import GroupRows, ListValues, PackSequences
from gaudi_bert.tables.sources import LABELS_COLUMN, TableColumns, is_list_type
from gaudi_bert.tfrecords.random_access import ShardPaths

_SLOTS_PER_ROW_GROUP = 2**21
_VALUES_AT_ONCE = 2**14
_REQUIRED_COLUMNS = ("input_ids", "position_ids", "seq_lens", "sequence_ids")
_TOKEN_COLUMNS = ("position_ids", "sequence_ids")


# --- writing shards


class PackLayout(NamedTuple):
    """The columns of a packed table, and the number of token positions in each pack.

    Attributes:
        columns: The columns of the table.
        max_sequence_length: The number of slots in a pack.
        with_starts: Whether rows may be split, so that the column `starts` exists.
    """

    columns: TableColumns
    max_sequence_length: int
    with_starts: bool

    @classmethod
    def from_settings(cls, columns: TableColumns, settings: TableSettings) -> PackLayout:
        """Return the layout of packs that are written with these settings."""
        return cls(columns, settings.max_sequence_length, settings.too_long == "split")

    @property
    def estimated_pack_bytes(self) -> int:
        """The approximate size of a pack in bytes before compression.

        Positions and sequence numbers are not included, because they compress to almost nothing.
        """
        along: int = sum(max(1, kind.bit_width // 8) for kind in self.columns.aligned.values())
        return self.max_sequence_length * along + 64

    def build_schema(self) -> Any:
        """Return the pyarrow schema of a shard."""
        pyarrow = require_pyarrow()
        int32, int64 = pyarrow.int32(), pyarrow.int64()
        of_sequences = {"seq_lens": int32, "indices": int64, **({"starts": int32} if self.with_starts else {})}
        along = {**self.columns.aligned, "position_ids": int32, "sequence_ids": int32}
        return pyarrow.schema(
            [
                *(
                    pyarrow.field(name, _make_list_type(kind, self.max_sequence_length), False)
                    for name, kind in along.items()
                ),
                *(pyarrow.field(name, _make_list_type(kind)) for name, kind in of_sequences.items()),
                *(pyarrow.field(name, pyarrow.list_(kind)) for name, kind in self.columns.scalars.items()),
            ]
        )


def _make_list_type(value_type: Any, size: int = -1) -> Any:
    """Return the pyarrow type of a list without nulls. If `size` is not -1, all lists have this size."""
    pyarrow = require_pyarrow()
    return pyarrow.list_(pyarrow.field("element", value_type, nullable=False), size)


def padding_value(column: str) -> int:
    """Return the value of padding slots in an aligned column, which is -100 for `labels` and 0 for all other columns."""
    return NOT_PREDICTED if column == LABELS_COLUMN else 0


def write_table_shard(
    path: Path, layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, pack_range: tuple[int, int]
) -> Shard:
    """Write a range of consecutive packs from one group of table rows to a Parquet file.

    Args:
        path: The file.
        layout: The columns and sizes.
        rows: The rows of the group.
        packs: The packs of the group.
        scalars: A pyarrow table of the scalar columns, in the order of the sequences of `packs`, or None.
        pack_range: The first pack, and the end of the packs to write.

    Returns:
        The name, the number of packs, the size and the CRC-32C of the file.
    """
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    first, last = pack_range
    most = max(1, _SLOTS_PER_ROW_GROUP // layout.max_sequence_length)
    schema = layout.build_schema()
    with (
        atomic_file(path) as handle,
        parquet.ParquetWriter(handle, schema, compression="zstd", **_choose_encodings(layout)) as writer,
    ):
        for start in range(first, last, most):
            columns = _build_columns(layout, rows, packs, scalars, start, min(start + most, last))
            writer.write_batch(pyarrow.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))
    return Shard(name=path.name, packs=last - first, **compute_file_identity(path).size_and_crc32c)


def _choose_encodings(layout: PackLayout) -> dict[str, Any]:
    """Return the options of pyarrow's Parquet writer that set the encodings of the columns in a shard.

    Columns with L numbers per pack are split into their bytes: first all first bytes, then all second bytes, and so on. zstd
    compresses this in half the time of a dictionary encoding, and to fewer bytes. These columns have no statistics, because
    nobody searches for packs by their smallest token id.
    """
    types = require_pyarrow().types
    split, others, counted = [], [], []
    for field in layout.build_schema():
        if not is_list_type(field.type):
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


def _build_columns(
    layout: PackLayout, rows: GroupRows, packs: PackSequences, scalars: Any, first_pack: int, end_pack: int
) -> dict[str, Any]:
    """Return all columns of the packs from `first_pack` to `end_pack` - 1, as pyarrow arrays by name."""
    pyarrow = require_pyarrow()
    slots, (begin, end) = layout.max_sequence_length, packs.offsets[[first_pack, end_pack]].tolist()
    of_rows, starts, lengths = packs.rows[begin:end], packs.starts[begin:end], packs.lengths[begin:end]
    offsets = pyarrow.array((packs.offsets[first_pack : end_pack + 1] - begin).astype(np.int32))

    def lists(values: Any, kind: Any = None) -> Any:
        """Return a pyarrow array with one list per pack."""
        return pyarrow.ListArray.from_arrays(offsets, values, type=kind)

    counted: dict[str, AnyArray] = {"seq_lens": lengths, "starts": starts, "indices": rows.numbers[of_rows]}
    columns = {}
    for name, each in counted.items():
        array = pyarrow.array(each)
        columns[name] = lists(array, _make_list_type(array.type))
    positions, numbers = (np.empty((end_pack - first_pack) * slots, np.int32) for _ in range(2))
    _fill_positions_and_numbers(packs, first_pack, end_pack, slots, positions, numbers)
    along = {"position_ids": pyarrow.array(positions), "sequence_ids": pyarrow.array(numbers)}
    tokens, is_token = rows.find_token_positions(of_rows, starts, lengths), numbers > 0
    for name, kind in layout.columns.aligned.items():
        values = np.full(is_token.size, padding_value(name), rows.values[name].dtype)
        values[is_token] = rows.values[name][tokens]
        along[name] = pyarrow.array(values).cast(kind)
    for name, array in along.items():
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(array, type=_make_list_type(array.type, slots))
    for name in layout.columns.scalars:
        values = scalars.column(name).slice(begin, end - begin)
        columns[name] = lists(values.chunk(0) if values.num_chunks == 1 else values.combine_chunks())
    return columns


@kernel_without_refcounts
def _fill_positions_and_numbers(
    packs: PackSequences, first_pack: int, end_pack: int, row_slots: int, positions: Int32Array, sequence_numbers: Int32Array
) -> None:
    """Fill the columns `position_ids` and `sequence_ids` of a range of packs. A slot gets its position in its sequence, and
    the number of the sequence in the pack, from 1.

    Padding gets the sequence number 0, and its positions count from 0 like those of a sequence.
    """
    at = 0
    for pack in range(first_pack, end_pack):
        end = at + row_slots
        begin = packs.offsets[pack]
        for index in range(begin, packs.offsets[pack + 1]):
            for position in range(packs.lengths[index]):
                positions[at + position] = position
                sequence_numbers[at + position] = index - begin + 1
            at += packs.lengths[index]
        for position in range(end - at):
            positions[at + position] = position
            sequence_numbers[at + position] = 0
        at = end


# --- reading packs


class _RowGroup(NamedTuple):
    """A row group of a Parquet file that has been read into memory.

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
        pieces: int64 [row groups + 1], the first byte of each row group. The first begins at 0 and the last ends with the
            file, so that all pieces together are the complete file.
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
    if TableMetadata.json_path_in(folder).exists():
        metadata = TableMetadata.read(folder)
        table = metadata.shard_table
        if [path.name for path in paths] == [path.name for path in ShardPaths(folder, table)]:
            check_shard_sizes(folder, table)
            sizes, shard_multiple = table.packs, metadata.shard_multiple
            crc32c_of = partial(TableManifest.read_shard_crc32c, folder / NOTES_NAME, table)
    files = TableFiles(paths, sizes, crc32c_of)
    return StoredPacks(files, choose_shard_stream_count(shard_multiple), window_rows=files.get_largest_row_group_size)


class TableFiles(ShardFiles["_Footer"]):
    """The Parquet files of a packed table, which serve as the shards of a `StreamReader`.

    The files are numbered in the order of their paths. One row group of each open file is in memory, and no file handle
    stays open. After all row groups of a file were read, the CRC-32C of the file is compared with the expected value.

    Args:
        paths: The files.
        sizes: int64, the number of rows in each file. None to read them from the footers.
        crc32c_of: Returns the expected CRC-32C of the file with this number, or None if it is unknown. None to check
            nothing.

    Attributes:
        record_counts: int64, the number of rows in each file.
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
        self.record_counts = np.array([_read_footer(path).rows for path in self.paths], np.int64) if sizes is None else sizes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the arguments of the constructor, so that another process opens the files itself."""
        return TableFiles, (self.paths, self.record_counts, self._crc32c_of)

    def get_largest_row_group_size(self, shard: int) -> int:
        """Return the number of rows in the largest row group of a file.

        If packs are shuffled within windows of this size, no second row group has to be read.
        """
        if shard not in self._windows:
            self.prepare_shard_for_opening(shard)
        return self._windows[shard]

    def prepare_shard_for_opening(self, shard: int) -> _Footer:
        """Read and check the footer of a file.

        Raises:
            InputError: The file is not a packed table, or has more or fewer rows than expected.
        """
        path = self.paths[shard]
        footer = _read_footer(path)
        if footer.rows != self.record_counts[shard]:
            raise InputError(
                f"{path}: expected {self.record_counts[shard]:,} rows, found {footer.rows:,}; pack the table again"
            )
        self._windows[shard] = int(np.diff(footer.ends, prepend=0).max(initial=1))
        return footer

    def open_shard(self, shard: int, footer: _Footer) -> None:
        """Mark a file as open, and keep the footer that `prepare_shard_for_opening` returned."""
        self._footers[shard] = footer

    def close_shard(self, shard: int) -> None:
        """Close a file, and release the memory of its footer and its row group."""
        del self._footers[shard]
        self._groups.pop(shard, None)

    def close_shards_except(self, numbers: Iterable[int]) -> None:
        """Close all open files except the files with the given numbers."""
        for number in self._footers.keys() - set(numbers):
            self.close_shard(number)

    def read_records(self, files: IntArray, records: IntArray) -> list[dict[str, AnyArray]]:
        """Read packs, and return each pack as a dict from column names to numpy arrays. Files are opened if necessary.

        Args:
            files: int64 [n], the file of each row.
            records: int64 [n], the number of each row in its file.
        """
        rows = []
        for file, record in zip(files.tolist(), records.tolist(), strict=True):
            group = self._load_row_group(file, record)
            row = record - group.first
            rows.append(
                {
                    name: column.values[column.offsets[row] : column.offsets[row + 1]]
                    for name, column in group.columns.items()
                }
            )
        return rows

    def _load_row_group(self, file: int, record: int) -> _RowGroup:
        """Return the row group that contains a row of a file. Read the row group unless it is already in memory."""
        group = self._groups.get(file)
        if group is None or not group.first <= record < group.last:
            if file not in self._footers:
                self.open_shard(file, self.prepare_shard_for_opening(file))
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
            table = validate_arrow_buffers(self.paths[file], opened.read_row_group(number))
        self._check_file_crc32c(file, number)
        columns = {}
        for name in table.column_names:
            array = table.column(name).combine_chunks()
            array = array.chunk(0) if isinstance(array, pyarrow.ChunkedArray) else array
            kind = array.type
            if array.null_count or (name in _REQUIRED_COLUMNS and array.flatten().null_count):
                raise InputError(f"{self.paths[file]}: column {name} must not contain nulls; pack the table again")
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
        """Compute the CRC-32C of one row group. After the last row group of a file, compare the CRC-32C of the file with its
        manifest.

        Raises:
            InputError: The CRC-32C differs from the manifest.
        """
        read, bounds, path = self._read_pieces.setdefault(file, {}), self._footers[file].pieces.tolist(), self.paths[file]
        if self._crc32c_of is None or number in read:
            return
        with explain_os_errors(path, "read"), open_file(path) as handle:
            handle.seek(bounds[number])
            read[number] = crc32c(handle.read(bounds[number + 1] - bounds[number]))
        if len(read) == len(bounds) - 1:
            combined = 0
            for each in range(len(read)):
                combined = int(append_crc(combined, bounds[each + 1] - bounds[each], read[each]))
            if self._crc32c_of(file) not in (None, combined):
                raise InputError(
                    f"{path}: the CRC-32C of the file differs from the manifest of its group; pack the table again"
                )


def _read_footer(path: Path) -> _Footer:
    """Read the footer of a file, and check that it is a packed table."""
    types = require_pyarrow().types
    with open_parquet(path, memory_map=True) as file:
        schema, metadata = require_utf8_column_names(path, file.schema_arrow), file.metadata
    for name in _REQUIRED_COLUMNS:
        if name not in schema.names:
            raise InputError(
                f"{path}: column {name} is missing, so this is not a packed table; pack the table with `gaudi-bert pack`"
            )
        kind = schema.field(name).type
        if not (is_list_type(kind) and types.is_integer(kind.value_type)):
            raise InputError(
                f"{path}: column {name} has type {kind}, but must contain lists of integers; pack the table again"
            )
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    columns = [group.column(0) for group in groups[1:]]
    starts = [each.dictionary_page_offset if each.has_dictionary_page else each.data_page_offset for each in columns]
    return _Footer(
        metadata,
        np.cumsum([group.num_rows for group in groups], dtype=np.int64),
        np.array([0, *starts, path.stat().st_size], np.int64),
    )
