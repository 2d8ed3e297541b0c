"""The rows of a group of parts, in memory as their files hold them: lengths, addresses of their values, checks.

No value of a list is copied or becomes a Python object: of each row and aligned column there is the address of the first
value. What is checked of every row: it is there and not empty, its aligned columns are as long as its `input_ids`, no value
is missing, no token id is negative, no token is masked out as padding. The first row at fault is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BoolArray, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.tables.arrow import explained_arrow_errors, require_pyarrow
from gaudi_bert.records.tables.columns import MASK_COLUMN, TOKENS_COLUMN, TableColumns
from gaudi_bert.records.tables.parts import TablePart, read_parts

__all__ = ["GroupRows", "ListValues", "PartShare", "list_values", "read_rows"]

_LARGEST_LENGTH = 2**31 - 1


class ListValues(NamedTuple):
    """A column of lists as numpy arrays: row i holds `values[offsets[i] : offsets[i + 1]]`.

    Attributes:
        values: of any numeric type; truths as uint8.
        offsets: int32 or int64 [rows + 1].
    """

    values: AnyArray
    offsets: AnyArray


class PartShare(NamedTuple):
    """Which rows of a part belong to a group: all, or by their value in a column.

    Attributes:
        part: the part.
        first_row: number of the first row of its file in the whole table.
        column: that decides; None for all rows.
        values: pyarrow array of values.
        without: the rows with other values belong to the group, and not those with these.
    """

    part: TablePart
    first_row: int
    column: str | None = None
    values: Any = None
    without: bool = False


class GroupRows(NamedTuple):
    """Rows that are packed together.

    Attributes:
        lengths: int32 [rows].
        numbers: int64 [rows], their numbers in the whole table, from 0.
        addresses: int64 [rows] for each aligned column that is kept.
        scalars: a pyarrow table of the scalar columns.
        owners: what keeps the memory at `addresses`.
    """

    lengths: Int32Array
    numbers: IntArray
    addresses: dict[str, IntArray]
    scalars: Any
    owners: list[AnyArray]


def read_rows(
    shares: Sequence[PartShare], columns: TableColumns, *, keep_values: bool = True, threads: bool = True
) -> GroupRows:
    """Read and check the rows of these parts.

    Args:
        shares: parts of one or several files, those of a file together and in order.
        columns: what is read.
        keep_values: False where only lengths are wanted: values are then let go at once.
        threads: several threads may decode.

    Raises:
        InputError: a file is damaged, or a row is at fault.
    """
    pyarrow = require_pyarrow()
    lengths, numbers, tables = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], []
    addresses: dict[str, list[IntArray]] = {name: [np.zeros(0, np.int64)] for name in columns.aligned if keep_values}
    owners: list[AnyArray] = []
    for share, whole in _part_tables(shares, columns, threads):
        lists = _checked_lists(share.part, whole, columns)
        rows, table = _chosen(share, whole)
        if table.num_rows < whole.num_rows:
            lists = {name: list_values(share.part.path, 0, name, table.column(name)) for name in columns.aligned}
        lengths.append(np.diff(lists[TOKENS_COLUMN].offsets).astype(np.int32))
        numbers.append(rows + (share.first_row + share.part.first_row))
        tables.append(table.select(list(columns.scalars)))
        for name, of_rows in addresses.items():
            values, offsets = lists[name]
            owners.append(values)
            of_rows.append(offsets[:-1].astype(np.int64) * values.itemsize + values.ctypes.data)
    return GroupRows(
        np.concatenate(lengths),
        np.concatenate(numbers),
        {name: np.concatenate(of_rows) for name, of_rows in addresses.items()},
        pyarrow.concat_tables(tables) if columns.scalars else None,
        owners,
    )


def _part_tables(shares: Sequence[PartShare], columns: TableColumns, threads: bool) -> Iterable[tuple[PartShare, Any]]:
    of_files: dict[Path, list[PartShare]] = {}
    for share in shares:
        of_files.setdefault(share.part.path, []).append(share)
    for of_file in of_files.values():
        parts = [share.part for share in of_file]
        yield from zip(of_file, read_parts(parts, columns.names, columns.schema, threads), strict=True)


def _chosen(share: PartShare, table: Any) -> tuple[IntArray, Any]:
    """The rows of a part that belong to the group: their numbers in the part, and a table of them."""
    if share.column is None:
        return np.arange(table.num_rows), table
    from pyarrow import compute

    chosen = compute.is_in(table.column(share.column), value_set=share.values)
    chosen = compute.invert(chosen) if share.without else chosen
    return np.flatnonzero(chosen.to_numpy()), table.filter(chosen)


def _checked_lists(part: TablePart, table: Any, columns: TableColumns) -> dict[str, ListValues]:
    lists = {name: list_values(part.path, part.first_row, name, table.column(name)) for name in columns.aligned}
    tokens = lists[TOKENS_COLUMN]
    lengths = np.diff(tokens.offsets)
    _refuse(part, lengths == 0, "has no token; leave empty rows out")
    _refuse(part, lengths > _LARGEST_LENGTH, "is too long; split it, or leave it out")
    if tokens.values.dtype.kind == "i" and tokens.values.size:
        used = tokens.values[tokens.offsets[0] : tokens.offsets[-1]]
        if used.min() < 0:
            row = _row_of(tokens, np.flatnonzero(used < 0)[0])
            raise InputError(
                f"{part.path}: row {part.first_row + row}: input_ids holds {used[used < 0][0]}; token ids are 0 or more"
            )
    for name, others in lists.items():
        differing = np.diff(others.offsets) != lengths
        if differing.any():
            row = int(np.flatnonzero(differing)[0])
            raise InputError(
                f"{part.path}: row {part.first_row + row}: {name} has {np.diff(others.offsets)[row]} values for "
                f"{lengths[row]} input_ids; give as many, or leave the column out with --columns"
            )
    if MASK_COLUMN in lists:
        _refuse_padding(part, lists[MASK_COLUMN])
    return lists


def _refuse(part: TablePart, wrong: BoolArray, reason: str) -> None:
    if wrong.any():
        raise InputError(f"{part.path}: row {part.first_row + int(np.argmax(wrong))}: {reason}")


def _refuse_padding(part: TablePart, mask: ListValues) -> None:
    """A padded row would be packed with its padding, as if that were tokens."""
    used = mask.values[mask.offsets[0] : mask.offsets[-1]]
    if used.size and used.min() == 0:
        row = _row_of(mask, np.flatnonzero(used == 0)[0])
        raise InputError(
            f"{part.path}: row {part.first_row + row}: attention_mask holds a 0, so the row is padded; tokenise without "
            "padding, or cut the padding off"
        )


def _row_of(lists: ListValues, place: int) -> int:
    """The row that holds value `place`, counted from the first row's first value."""
    return int(np.searchsorted(lists.offsets - lists.offsets[0], place, side="right")) - 1


def list_values(path: Path, first_row: int, name: str, column: Any) -> ListValues:
    """A column of lists of numbers or truths as numpy arrays.

    Args:
        path, first_row, name: how errors call it.
        column: a pyarrow array, or a chunked one.

    Raises:
        InputError: a list or a value is missing.
    """
    pyarrow = require_pyarrow()
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(column, pyarrow.ChunkedArray):
            raise InputError(f"{path}: from row {first_row}: more than 2**31 values at once; write smaller row groups")
    with explained_arrow_errors(path):  # offsets that lead out of the file would be followed
        column.validate(full=True)
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
