"""Read the rows of a table in groups. The rows of a group are read, checked, packed and held in memory together.

As with TFRecords, a group has at most `group_sequences` rows and `group_bytes` bytes, and depends only on the files and the
settings. A group consists of the parts that the formats have (row groups, record batches, blocks of lines). A seeded
permutation assigns the parts to groups, so that each group mixes all regions of the table. A part that is larger than these
limits becomes a group of its own.

Values stay in arrays and never become Python objects. Every row is checked, and the error names the first invalid row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import InputTable, TooLong, TooLongRows, counts_to_json_fields
from gaudi_bert.artefacts.packed import PackedTotals, TableMetadata
from gaudi_bert.common.arrays import MOST_TOKEN_ID, AnyArray, BoolArray, Int32Array, IntArray, find_index_of_invalid_integer
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.histogram import divide_files_into_groups, find_oversized_files
from gaudi_bert.tables.parts import TablePart, list_parts, read_parts, read_table_schema
from gaudi_bert.tables.sources import MASK_COLUMN, TOKENS_COLUMN, TableColumns, list_table_files, select_columns

_LARGEST_LENGTH = 2**31 - 1
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 2**17, 2**26


@dataclass(frozen=True)
class GroupedTable:
    """A table, and the division of its rows into groups. The rows of a group are read and packed together.

    Attributes:
        files: The files, in the order of their names.
        file_rows: The number of rows in each file.
        columns: The columns.
        groups: The parts of each group.
    """

    files: Sequence[Path]
    file_rows: Sequence[int]
    columns: TableColumns
    groups: Sequence[Sequence[TablePart]]

    @property
    def rows(self) -> int:
        """The number of rows in all files."""
        return sum(self.file_rows)


def open_table(source: str | Path, settings: TableSettings, reporter: Reporter) -> GroupedTable:
    """List the files and columns of a table, divide its rows into groups, and return the table.

    Args:
        source: A file, a folder or a glob.
        settings: The limits of a group, the seed, and the columns to pack.
        reporter: Reports parts that are larger than a group may be.

    Raises:
        InputError: The table has no rows, or its columns cannot be packed.
    """
    files = list_table_files(source, reporter)
    columns = select_columns(files, settings.columns, settings.input_column)
    columns.check_types(files[0])
    limits = settings.group_sequences, settings.group_bytes
    parts: list[TablePart] = []
    file_rows: list[int] = []
    for file in files:
        before, of_file = sum(file_rows), list_parts(file, columns.stored_names, *limits)
        parts += [part._replace(table_row=before + part.first_row) for part in of_file]
        file_rows.append(sum(part.rows for part in of_file))
    if not parts:
        raise InputError(f"{source}: the table contains no rows, so there is nothing to pack; check the path")
    large = find_oversized_files(parts, *limits)
    if large:
        largest = max(large, key=lambda part: part.bytes)
        reporter.say(
            f"{source}: {len(large):,} parts of the table exceed the limits of a group ({limits[0]:,} rows, {limits[1]:,} "
            f"bytes), so each becomes a group of its own; the largest has {largest.rows:,} rows and about "
            f"{largest.bytes:,} bytes, in {largest.path.name}"
        )
    return GroupedTable(files, file_rows, columns, divide_files_into_groups(parts, *limits, settings.seed))


# --- the rows of some parts


class ListValues(NamedTuple):
    """A column of lists, stored in two numpy arrays. Row i contains `values[offsets[i] : offsets[i + 1]]`.

    Attributes:
        values: The values. Booleans are stored as uint8.
        offsets: [rows + 1], where each row begins in `values`.
    """

    values: AnyArray
    offsets: AnyArray

    @property
    def flat_values(self) -> AnyArray:
        """The values of all rows. Values before the first row and after the last row, which `values` may contain, are left
        out.
        """
        return self.values[self.offsets[0] : self.offsets[-1]]


class GroupRows(NamedTuple):
    """One group of table rows, as numpy arrays.

    Attributes:
        lengths: int32 [rows], the number of tokens in each row.
        numbers: int64 [rows], the number of each row in the table, from 0.
        values: For each aligned column, the values of all rows, one row after the other. Empty if values are not read.
        scalars: A pyarrow table of the scalar columns, or None.
    """

    lengths: Int32Array
    numbers: IntArray
    values: dict[str, AnyArray]
    scalars: Any

    def find_token_positions(self, rows: IntArray, starts: Int32Array, lengths: Int32Array) -> IntArray:
        """Return where the tokens of the given sequences are in the arrays of `values`, as int64 positions, sequence by
        sequence.

        Args:
            rows: The row of each sequence.
            starts: The first token of each sequence in its row.
            lengths: The number of tokens in each sequence.
        """
        begins = (np.cumsum(self.lengths, dtype=np.int64) - self.lengths)[rows] + starts
        ends = np.cumsum(lengths, dtype=np.int64)
        tokens: IntArray = np.repeat(begins - ends + lengths, lengths)
        tokens += np.arange(tokens.size)
        return tokens


class GroupContent(NamedTuple):
    """One group of table rows, and the sequences that these rows contribute to the packs.

    Attributes:
        rows: The rows.
        sequences: The sequences of these rows whose length is in `settings.accepted_sequence_lengths`.
        too_long: How many rows and tokens were changed by the policy for rows that are too long.
    """

    rows: GroupRows
    sequences: RowSequences
    too_long: TooLongRows


def read_sequences(
    table: GroupedTable, group: int, settings: TableSettings, *, lengths_only: bool = False, threads: bool = True
) -> GroupContent:
    """Read and check the rows of one group of a table. Truncate, split or drop rows that are too long, and return the
    sequences to pack.

    Args:
        table: The table.
        group: The number of the group.
        settings: The settings, which contain the largest row length, the policy for longer rows, and the lengths of the
            sequences to return.
        lengths_only: Whether values are skipped, because only lengths are needed.
        threads: Whether several threads decode.

    Raises:
        InputError: A row is invalid, or is too long under the policy "error".
    """
    columns = table.columns.select_length_columns() if lengths_only else table.columns
    most = settings.longest_row_length if settings.too_long == "error" else _LARGEST_LENGTH
    rows = _read_rows(table.groups[group], columns, most, keep_values=not lengths_only, threads=threads)
    sequences, too_long = _apply_too_long_policy(rows.lengths, settings.longest_row_length, settings.too_long)
    return GroupContent(rows, sequences.select_lengths(settings.accepted_sequence_lengths), too_long)


def _read_rows(
    parts: Sequence[TablePart], columns: TableColumns, max_tokens: int, *, keep_values: bool, threads: bool = True
) -> GroupRows:
    """Read and check the rows of the given parts of a table, and return them as arrays. Parts of the same file must be
    adjacent and in order.

    Args:
        parts: The parts.
        columns: The columns to read.
        max_tokens: The largest allowed number of tokens in a row.
        keep_values: Whether the result contains the values. Otherwise they are only checked.
        threads: Whether several threads decode.
    """
    lengths, numbers, scalars = [], [], []
    values: dict[str, list[AnyArray]] = {name: [] for name in columns.aligned if keep_values}
    for _, of_file in itertools.groupby(parts, key=lambda part: part.path):
        listed = list(of_file)
        for part, stored in zip(listed, read_parts(listed, columns.stored_names, columns.schema, threads), strict=True):
            table = stored.rename_columns(columns.names)
            lists = _validate_and_convert_lists(part, table, columns, max_tokens)
            lengths.append(np.diff(lists[TOKENS_COLUMN].offsets).astype(np.int32))
            numbers.append(np.arange(table.num_rows) + part.table_row)
            scalars.append(table.select(list(columns.scalars)))
            for name, of_parts in values.items():
                of_parts.append(lists[name].flat_values)
    return GroupRows(
        np.concatenate(lengths),
        np.concatenate(numbers),
        {name: np.concatenate(of_parts) for name, of_parts in values.items()},
        require_pyarrow().concat_tables(scalars) if columns.scalars else None,
    )


def count_row_tokens(files: Sequence[Path], tokens_column: str = TOKENS_COLUMN) -> Int32Array:
    """Return the number of tokens in each row of a table, int32 [rows], in the order of the table.

    Args:
        files: The files of the table.
        tokens_column: The column that contains the token ids.
    """
    mask = {MASK_COLUMN} & set(read_table_schema(files[0]).names)
    columns = select_columns(files, [*mask], tokens_column).select_length_columns()
    lengths = [np.zeros(0, np.int32)]
    for file in files:
        for part in list_parts(file, columns.stored_names, _ROWS_AT_ONCE, _BYTES_AT_ONCE):
            lengths.append(_read_rows([part], columns, _LARGEST_LENGTH, keep_values=False).lengths)
    return np.concatenate(lengths)


def _validate_and_convert_lists(
    part: TablePart, arrow_table: Any, columns: TableColumns, max_tokens: int
) -> dict[str, ListValues]:
    """Check every row of a part of a table. Return the aligned columns (those with one value per token) as numpy arrays.

    Raises:
        InputError: A row is empty, too long or padded, a token id is invalid, or a column has more or fewer values than
            `input_ids`.
    """
    lists = {
        name: convert_lists_to_numpy(part.path, part.first_row, name, arrow_table.column(name)) for name in columns.aligned
    }
    tokens = lists[TOKENS_COLUMN]
    lengths = np.diff(tokens.offsets)
    _raise_for_first_wrong_row(part, lengths == 0, "the row contains no token; omit empty rows")
    too_long = lengths > max_tokens
    remedy = "increase --max-sequence-length, or pass --too-long truncate, split or drop"
    _raise_for_first_wrong_row(
        part, too_long, f"expected 1 to {max_tokens} tokens, found {lengths[np.argmax(too_long)]}; {remedy}"
    )
    wrong = find_index_of_invalid_integer(tokens.flat_values, 0, MOST_TOKEN_ID)
    if wrong >= 0:
        row = int(np.searchsorted(tokens.offsets[1:] - tokens.offsets[0], wrong, side="right"))
        reason = f"input_ids contains {tokens.flat_values[wrong]}, but token ids must be between 0 and {MOST_TOKEN_ID}"
        _raise_for_first_wrong_row(part, np.arange(lengths.size) == row, reason)
    for name, others in lists.items():
        row = int(np.argmax(np.diff(others.offsets) != lengths))
        reason = f"{name} has {others.offsets[row + 1] - others.offsets[row]} values, but input_ids has {lengths[row]}"
        remedy = "write one value for each token, or omit the column with --columns"
        _raise_for_first_wrong_row(part, np.diff(others.offsets) != lengths, f"{reason}; {remedy}")
    if MASK_COLUMN in lists:
        mask = lists[MASK_COLUMN]
        if mask.flat_values.size and mask.flat_values.min() == 0:  # without this check, padding would be packed like tokens
            reason = "attention_mask contains a 0, so the row is padded; tokenize without padding, or remove the padding"
            _raise_for_first_wrong_row(
                part, np.logical_or.reduceat(mask.flat_values == 0, mask.offsets[:-1] - mask.offsets[0]), reason
            )
    return lists


def _raise_for_first_wrong_row(part: TablePart, is_wrong: BoolArray, problem: str) -> None:
    """Raise an InputError that names the first row for which `is_wrong` is true. Do nothing if no row is wrong."""
    if is_wrong.any():
        raise InputError(f"{part.path}: row {part.first_row + int(np.argmax(is_wrong))}: {problem}")


def convert_lists_to_numpy(path: Path, first_row: int, column_name: str, column: Any) -> ListValues:
    """Convert a pyarrow column of lists of numbers or booleans to numpy arrays.

    The column must have been validated (`common.arrow.validate_arrow_buffers`), because pyarrow does not check the offsets.

    Args:
        path: The file, for messages.
        first_row: The number of the first row, for messages.
        column_name: The name of the column, for messages.
        column: The column.

    Raises:
        InputError: The column contains a null.
    """
    pyarrow = require_pyarrow()
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pyarrow.ChunkedArray):
            raise InputError(
                f"{path}: from row {first_row}: the row group contains more than 2**31 values; write smaller row groups"
            )
    if column.null_count:
        row = first_row + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(f"{path}: row {row}: {column_name} is null; replace the null with a list, or omit the row")
    if pyarrow.types.is_fixed_size_list(column.type):
        offsets = np.arange(column.offset, column.offset + len(column) + 1) * column.type.list_size
    else:
        offsets = column.offsets.to_numpy()
    values = column.values
    if values.null_count:
        used = values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])).is_null().to_numpy(zero_copy_only=False)
        if used.any():
            row = first_row + int(np.searchsorted(offsets - offsets[0], int(np.argmax(used)), side="right")) - 1
            raise InputError(f"{path}: row {row}: {column_name} contains a null; replace it with a value, or omit the row")
        values = values.fill_null(0)
    if pyarrow.types.is_boolean(values.type):
        values = values.cast(pyarrow.uint8())
    return ListValues(values.to_numpy(), offsets)


# --- sequences: what happens to rows that are too long
#
# A sequence is a run of tokens of one row. A row of at most L tokens is a single sequence. A longer row is rejected,
# truncated to its first L tokens, split into pieces of L tokens (the last piece may be shorter), or dropped.


class RowSequences(NamedTuple):
    """The sequences to pack, in the order of their rows. A sequence consists of consecutive tokens of one row.

    Attributes:
        rows: int64, the row of each sequence in its group.
        starts: int32, the first token of each sequence in its row.
        lengths: int32, the number of tokens in each sequence.
    """

    rows: IntArray
    starts: Int32Array
    lengths: Int32Array

    def select_lengths(self, lengths: range) -> RowSequences:
        """Return only the sequences with a number of tokens in the range `lengths`."""
        chosen = (self.lengths >= lengths.start) & (self.lengths < lengths.stop)
        return self if chosen.all() else RowSequences(self.rows[chosen], self.starts[chosen], self.lengths[chosen])


class PackSequences(NamedTuple):
    """The sequences in the packs from one group of table rows, in the order of the packs.

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
    def pack_count(self) -> int:
        """The number of packs from this group of table rows."""
        return self.offsets.size - 1


def _apply_too_long_policy(
    lengths: Int32Array, max_sequence_length: int, policy: TooLong
) -> tuple[RowSequences, TooLongRows]:
    """Truncate, split or drop rows that are too long, depending on `policy`.

    Return the sequences that remain, and the numbers of rows, tokens and sequences that changed.

    Under the policy "error", no row may be too long, because such rows were rejected before.
    """
    too_long = lengths > max_sequence_length
    pieces = np.ones(lengths.size, np.int64)
    if policy == "split":
        pieces = -(-lengths.astype(np.int64) // max_sequence_length)
    elif policy == "drop":
        pieces[too_long] = 0
    rows = np.repeat(np.arange(lengths.size), pieces)
    number = np.arange(rows.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = (number * max_sequence_length).astype(np.int32)
    stored = np.minimum(lengths[rows] - starts, np.int32(max_sequence_length))
    dropped = int(np.count_nonzero(pieces == 0))
    return RowSequences(rows, starts, stored), TooLongRows(
        policy=policy,
        rows=int(np.count_nonzero(too_long)),
        dropped_rows=dropped,
        dropped_tokens=int(lengths.sum(dtype=np.int64) - stored.sum(dtype=np.int64)),
        added_sequences=rows.size - lengths.size + dropped,
    )


# --- contents of the group manifests and metadata.json


def build_manifest_fields(
    rows: GroupRows, sequences: RowSequences, too_long: TooLongRows, max_sequence_length: int
) -> dict[str, Any]:
    """Return the fields of a group manifest that describe the rows and sequences of the group.

    Args:
        rows: The rows.
        sequences: The sequences of the rows that are packed.
        too_long: How many rows and tokens were changed by the policy for rows that are too long.
        max_sequence_length: The row length.
    """
    counts = np.bincount(sequences.lengths, minlength=max_sequence_length + 1)[1:].tolist()
    return {"format_version": 2, "rows": rows.lengths.size, "too_long": too_long, **counts_to_json_fields(counts)}


def build_table_metadata(
    table: GroupedTable,
    settings: TableSettings,
    totals: PackedTotals,
    inputs: Mapping[str, Mapping[str, int]],
    tool_version: str,
) -> TableMetadata:
    """Return the content of the metadata.json of a packed table.

    Args:
        table: The table.
        settings: The settings that were used to pack the table.
        totals: The sums over all group manifests.
        inputs: The size in bytes and the CRC-32C of each file, by name.
        tool_version: The version of gaudi-bert that packed it.
    """
    copied = ("max_sequence_length", "seed", "algorithm", "shard_multiple")
    return TableMetadata(
        **settings.model_dump(include={*copied, "group_sequences", "group_bytes"}),
        **totals.to_metadata_fields(settings.max_sequence_length, totals.lower_bound),
        format="table",
        tool_version=tool_version,
        depth=None if settings.depth == "max" else settings.depth,
        deepest_pack=totals.deepest_pack,
        algorithms_used=tuple(sorted(totals.algorithms)),
        aligned_columns={name: str(kind) for name, kind in table.columns.aligned.items()},
        scalar_columns={name: str(kind) for name, kind in table.columns.scalars.items()},
        rows=table.rows,
        row_lengths=settings.explicit_row_lengths,
        too_long=TooLongRows(policy=settings.too_long, **totals.too_long),
        inputs=tuple(
            InputTable(name=file.name, rows=rows, **inputs[file.name])
            for file, rows in zip(table.files, table.file_rows, strict=True)
        ),
    )
