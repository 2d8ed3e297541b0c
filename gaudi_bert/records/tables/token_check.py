"""Whether rows of a table are sequences of the contract (a numba kernel): the first that is none, and the sizes of the rest.

The kernel only finds the row; `token_tables` says what is wrong with it.
"""

from __future__ import annotations

from typing import NamedTuple

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.records.schema import MAX_SEGMENT_ID, MAX_SEQUENCE_LENGTH, MAX_TOKEN_ID

__all__ = ["NOT_PREDICTED", "RowLists", "TokenLists", "collect_predicted", "first_bad_row"]

NOT_PREDICTED = -100


class RowLists(NamedTuple):
    """Lists of numbers, one a row: row i holds `values[offsets[i] : offsets[i + 1]]`; int64.

    A column that the table lacks has no offsets.
    """

    values: IntArray
    offsets: IntArray


class TokenLists(NamedTuple):
    """The columns of a table that make sequences.

    Attributes:
        ids: token ids.
        mask, segments: as long as `ids`.
        predicted: the id that was masked, -100 elsewhere; where it is there, the following three are not looked at.
        positions, masked_ids, weights: the same in the contract's form.
        labels: next-sentence labels.
    """

    ids: RowLists
    mask: RowLists
    segments: RowLists
    predicted: RowLists
    positions: RowLists
    masked_ids: RowLists
    weights: RowLists
    labels: RowLists


@inlined_kernel
def _is_there(column: RowLists) -> bool:
    return column.offsets.size > 0


@inlined_kernel
def _size(column: RowLists, row: int) -> int:
    size: int = column.offsets[row + 1] - column.offsets[row]
    return size


@borrowing_kernel
def _prefix_length(column: RowLists, row: int) -> int:
    """n of a list of n ones and then zeros; -1 for any other."""
    start, end = column.offsets[row], column.offsets[row + 1]
    length = start
    while length < end and column.values[length] == 1:
        length += 1
    for place in range(length, end):
        if column.values[place] != 0:
            return -1
    prefix: int = length - start
    return prefix


@borrowing_kernel
def _all_within(values: IntArray, start: int, count: int, most: int) -> bool:
    outside = False
    for value in values[start : start + count]:
        outside |= (value < 0) | (value > most)
    return not outside


@borrowing_kernel
def first_bad_row(columns: TokenLists, lengths: IntArray, masked: IntArray) -> int:
    """The first row that is no sequence; -1 where all are.

    Args:
        columns: those that the table lacks are empty.
        lengths, masked: int64 [rows], set to the tokens and the masked positions of each row before the one returned.
    """
    ids, mask, segments, predicted, positions, masked_ids, weights, labels = columns
    for row in range(lengths.size):
        size = _size(ids, row)
        length = size
        if _is_there(mask):
            length = _prefix_length(mask, row)
            if _size(mask, row) != size:
                return row
        if length < 1 or length > MAX_SEQUENCE_LENGTH:
            return row
        if not _all_within(ids.values, ids.offsets[row], length, MAX_TOKEN_ID):
            return row
        if _is_there(segments) and (
            _size(segments, row) != size or not _all_within(segments.values, segments.offsets[row], length, MAX_SEGMENT_ID)
        ):
            return row
        lengths[row] = length
        if _is_there(predicted):
            masked[row] = _count_predicted(predicted, row, size, length)
        elif _is_there(positions):
            masked[row] = _count_masked(positions, masked_ids, weights, row, length)
        else:
            masked[row] = 0
        if masked[row] < 0:
            return row
        if _is_there(labels) and (
            _size(labels, row) != 1 or labels.values[labels.offsets[row]] < 0 or labels.values[labels.offsets[row]] > 1
        ):
            return row
    return -1


@borrowing_kernel
def collect_predicted(predicted: RowLists, positions: IntArray, ids: IntArray) -> None:
    """Set `positions` and `ids`, int64 [masked positions of all rows], to where labels predict a token, and which."""
    count = 0
    for row in range(predicted.offsets.size - 1):
        start = predicted.offsets[row]
        for place in range(start, predicted.offsets[row + 1]):
            if predicted.values[place] != NOT_PREDICTED:
                positions[count] = place - start
                ids[count] = predicted.values[place]
                count += 1


@borrowing_kernel
def _count_predicted(predicted: RowLists, row: int, size: int, length: int) -> int:
    """Masked positions of a row; -1 where it is at fault."""
    if _size(predicted, row) != size:
        return -1
    start = predicted.offsets[row]
    count = 0
    wrong = False
    for place in range(size):
        value = predicted.values[start + place]
        if value != NOT_PREDICTED:
            count += 1
            wrong |= (place >= length) | (value < 0) | (value > MAX_TOKEN_ID)
    return -1 if wrong else count


@borrowing_kernel
def _count_masked(positions: RowLists, masked_ids: RowLists, weights: RowLists, row: int, length: int) -> int:
    """Masked positions of a row; -1 where it is at fault."""
    if not _is_there(masked_ids) or _size(masked_ids, row) != _size(positions, row):
        return -1
    count = _size(positions, row)
    if _is_there(weights):
        if _size(weights, row) != count:
            return -1
        count = _prefix_length(weights, row)
    if not _all_within(positions.values, positions.offsets[row], count, length - 1):
        return -1
    if not _all_within(masked_ids.values, masked_ids.offsets[row], count, MAX_TOKEN_ID):
        return -1
    return count
