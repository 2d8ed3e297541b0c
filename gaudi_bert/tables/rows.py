"""The rows of a group of a table: read and checked, cut into sequences.

No value becomes a Python object. What is checked of every row: it is there and not empty, its aligned columns are as long as
its `input_ids`, no value is missing, no token id is negative, no token is masked out as padding. The first wrong
row is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import TooLong, TooLongRows
from gaudi_bert.common.arrays import MOST_TOKEN_ID, AnyArray, BoolArray, Int32Array, IntArray, first_not_whole
from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError
from gaudi_bert.tables.parts import TablePart, list_parts, read_parts, table_schema
from gaudi_bert.tables.sources import MASK_COLUMN, TOKENS_COLUMN, TableColumns, check_same_columns, columns_of

_LARGEST_LENGTH = 2**31 - 1
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 2**17, 2**26


class ListValues(NamedTuple):
    """A column of lists as numpy arrays: row i holds `values[offsets[i] : offsets[i + 1]]`; booleans are uint8."""

    values: AnyArray
    offsets: AnyArray

    @property
    def used(self) -> AnyArray:
        """The values of all rows, and no others."""
        return self.values[self.offsets[0] : self.offsets[-1]]


class GroupRows(NamedTuple):
    """Rows that are packed together.

    Attributes:
        lengths: int32 [rows].
        numbers: int64 [rows], their numbers in the table, from 0.
        values: of each aligned column, if they are read: the values of all rows, one after the other.
        scalars: a pyarrow table of the scalar columns.
    """

    lengths: Int32Array
    numbers: IntArray
    values: dict[str, AnyArray]
    scalars: Any

    def tokens_of(self, rows: IntArray, starts: Int32Array, lengths: Int32Array) -> IntArray:
        """Return which of `values` are in these runs of tokens, int64: of which row, from where on, how many."""
        begins = (np.cumsum(self.lengths, dtype=np.int64) - self.lengths)[rows] + starts
        ends = np.cumsum(lengths, dtype=np.int64)
        tokens: IntArray = np.repeat(begins - ends + lengths, lengths)
        tokens += np.arange(tokens.size)
        return tokens


def read_rows(
    parts: Sequence[TablePart], columns: TableColumns, *, keep_values: bool = True, threads: bool = True
) -> GroupRows:
    """Read and check the rows of these parts.

    The parts of a file are adjacent and in order. Without `keep_values` only lengths are read: values are dropped at once.
    """
    lengths, numbers, scalars = [], [], []
    values: dict[str, list[AnyArray]] = {name: [] for name in columns.aligned if keep_values}
    for _, of_file in itertools.groupby(parts, key=lambda part: part.path):
        listed = list(of_file)
        for part, stored in zip(listed, read_parts(listed, columns.stored_names, columns.schema, threads), strict=True):
            table = stored.rename_columns(columns.names)
            lists = _checked_lists(part, table, columns)
            lengths.append(np.diff(lists[TOKENS_COLUMN].offsets).astype(np.int32))
            numbers.append(np.arange(table.num_rows) + part.table_row)
            scalars.append(table.select(list(columns.scalars)))
            for name, of_parts in values.items():
                of_parts.append(lists[name].used)
    return GroupRows(
        np.concatenate(lengths),
        np.concatenate(numbers),
        {name: np.concatenate(of_parts) for name, of_parts in values.items()},
        require_pyarrow().concat_tables(scalars) if columns.scalars else None,
    )


def table_lengths(files: Sequence[Path], tokens: str = TOKENS_COLUMN) -> Int32Array:
    """Tokens of each row of a table, int32 [rows], in its order; `tokens` is what `input_ids` is called there."""
    mask = {MASK_COLUMN} & set(table_schema(files[0]).names)
    columns = columns_of(files[0], [*mask], tokens).tokens_only()
    check_same_columns(files, columns)
    lengths = [np.zeros(0, np.int32)]
    for file in files:
        for part in list_parts(file, columns.stored_names, _ROWS_AT_ONCE, _BYTES_AT_ONCE):
            lengths.append(read_rows([part], columns, keep_values=False).lengths)
    return np.concatenate(lengths)


def _checked_lists(part: TablePart, table: Any, columns: TableColumns) -> dict[str, ListValues]:
    lists = {name: list_values(part.path, part.first_row, name, table.column(name)) for name in columns.aligned}
    tokens = lists[TOKENS_COLUMN]
    lengths = np.diff(tokens.offsets)
    _refuse_rows(part, lengths == 0, "has no token; leave empty rows out")
    _refuse_rows(part, lengths > _LARGEST_LENGTH, "is too long; split it, or leave it out")
    wrong = first_not_whole(tokens.used, 0, MOST_TOKEN_ID)
    if wrong >= 0:
        row = int(np.searchsorted(tokens.offsets[1:] - tokens.offsets[0], wrong, side="right"))
        reason = f"input_ids holds {tokens.used[wrong]}; token ids are 0 to {MOST_TOKEN_ID}"
        _refuse_rows(part, np.arange(lengths.size) == row, reason)
    for name, others in lists.items():
        row = int(np.argmax(np.diff(others.offsets) != lengths))
        reason = f"{name} has {others.offsets[row + 1] - others.offsets[row]} values for {lengths[row]} input_ids"
        remedy = "give as many, or leave the column out with --columns"
        _refuse_rows(part, np.diff(others.offsets) != lengths, f"{reason}; {remedy}")
    if MASK_COLUMN in lists:
        mask = lists[MASK_COLUMN]
        if mask.used.size and mask.used.min() == 0:  # the row would be packed with its padding, as if that were tokens
            reason = "attention_mask holds a 0, so the row is padded; tokenise without padding, or cut the padding off"
            _refuse_rows(part, np.logical_or.reduceat(mask.used == 0, mask.offsets[:-1] - mask.offsets[0]), reason)
    return lists


def _refuse_rows(part: TablePart, wrong: BoolArray, reason: str) -> None:
    """Refuse the first of the rows that are wrong."""
    if wrong.any():
        raise InputError(f"{part.path}: row {part.first_row + int(np.argmax(wrong))}: {reason}")


def list_values(path: Path, first_row: int, name: str, column: Any) -> ListValues:
    """A validated pyarrow column of lists of numbers or booleans; `path`, `first_row`, `name` are how errors call it."""
    pyarrow = require_pyarrow()
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pyarrow.ChunkedArray):
            raise InputError(f"{path}: from row {first_row}: more than 2**31 values at once; write smaller row groups")
    if column.null_count:
        row = first_row + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(f"{path}: row {row}: {name} is null; fill it, or leave the row out")
    if pyarrow.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        offsets = np.arange(column.offset, column.offset + len(column) + 1) * size
    else:
        offsets = column.offsets.to_numpy()
    values = column.values
    if values.null_count:
        used = values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])).is_null().to_numpy(zero_copy_only=False)
        if used.any():
            row = first_row + int(np.searchsorted(offsets - offsets[0], int(np.argmax(used)), side="right")) - 1
            raise InputError(f"{path}: row {row}: {name} holds a null; fill it, or leave the row out")
        values = values.fill_null(0)
    if pyarrow.types.is_boolean(values.type):
        values = values.cast(pyarrow.uint8())
    return ListValues(values.to_numpy(), offsets)


# --- sequences: what becomes of rows that are too long
#
# A sequence is a run of tokens of one row. Rows of at most L tokens are one sequence each; a longer one is refused, cut to
# its first L tokens, split into pieces of L (the last is shorter), or dropped.


class RowSequences(NamedTuple):
    """Runs of tokens, in the order of their rows.

    Attributes:
        rows: int64 [sequences], the row of the group that each is of.
        starts: int32 [sequences], its first token in the row.
        lengths: int32 [sequences], 1 .. L.
    """

    rows: IntArray
    starts: Int32Array
    lengths: Int32Array

    def of_lengths(self, lengths: range) -> RowSequences:
        """Return those that have one of these lengths."""
        chosen = (self.lengths >= lengths.start) & (self.lengths < lengths.stop)
        return self if chosen.all() else RowSequences(self.rows[chosen], self.starts[chosen], self.lengths[chosen])


def cut_rows(lengths: Int32Array, max_sequence_length: int, policy: TooLong) -> tuple[RowSequences, TooLongRows]:
    """The sequences of rows of these lengths, and what the policy did; under "error" none may be too long."""
    rows = np.arange(lengths.size)
    too_long = lengths > max_sequence_length
    affected = int(np.count_nonzero(too_long))
    lost = int(lengths[too_long].sum(dtype=np.int64))
    sequences = RowSequences(rows, np.zeros(lengths.size, np.int32), lengths)
    effect = {"rows": affected, "dropped_rows": 0, "dropped_tokens": 0, "added_sequences": 0}
    if not affected or policy == "error":
        effect["rows"] = 0
    elif policy == "truncate":
        sequences = sequences._replace(lengths=np.minimum(lengths, np.int32(max_sequence_length)))
        effect["dropped_tokens"] = lost - affected * max_sequence_length
    elif policy == "drop":
        sequences = RowSequences(rows[~too_long], sequences.starts[~too_long], lengths[~too_long])
        effect |= {"dropped_rows": affected, "dropped_tokens": lost}
    else:
        pieces = -(-lengths // max_sequence_length)
        of_rows = np.repeat(rows, pieces)
        number = np.arange(of_rows.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = (number * max_sequence_length).astype(np.int32)
        sequences = RowSequences(of_rows, starts, np.minimum(lengths[of_rows] - starts, np.int32(max_sequence_length)))
        effect["added_sequences"] = of_rows.size - lengths.size
    return sequences, TooLongRows(policy=policy, **effect)
