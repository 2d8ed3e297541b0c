"""The best strategies for given prices, with no more copies of a length than there are sequences.

Of many sequences the limit makes no difference. Of some hundred, most of different lengths, it brings the program's
fractions much closer to whole packs, for the price of a table with a row for each length.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import borrowing_kernel, inner_kernel
from gaudi_bert.packing.mixture import Strategy, Work

MOST_ENTRIES = 2**24
"""Of a table: lengths, times tokens of a pack, times sequences in one where depth is limited."""


class BoundedPricer:
    """As `TablePricer`, with no more copies of a length than `counts` (int64 [rows], may be changed) has sequences.

    For each length the best pack of which it is the longest: `_table[row, slots, room]` is what at most `slots` sequences of
    the shorter lengths are worth in `room` tokens. Without a limit of depth there is one entry for any number of slots.
    """

    def __init__(self, lengths: IntArray, max_length: int, depth: int, counts: IntArray, work: Work) -> None:
        self.work = work
        self.lengths = lengths
        self.max_length = max_length
        self.counts = counts.copy()
        self._is_limited = depth < deepest_pack(lengths, counts, max_length)
        self._table = np.zeros(_bounded_shape(lengths, max_length, depth, counts))
        self._prices = np.zeros(len(lengths))

    def price(self, prices: FloatArray) -> FloatArray:
        """Worth of the best pack of which each length is the longest, for non-decreasing `prices`: float64 [rows] both."""
        self.work.spend(self._table.size)
        self._prices, worth = prices.copy(), np.zeros(len(prices))
        _fill_bounded(self.lengths, self.counts, prices, self._is_limited, self._table, worth)
        return worth

    def strategies(self, rows: IntArray, prices: FloatArray, least: float) -> list[Strategy]:
        """The strategies behind the last `price`, for these rows, that are worth more than `least` at `prices`."""
        self.work.spend(len(rows) * len(self.lengths))
        pack, result = np.empty(self.max_length, dtype=np.int64), []
        for row in rows[self.counts[rows] > 0].tolist():
            size = _unwind_bounded(self.lengths, self.counts, self._prices, self._is_limited, self._table, row, pack)
            if float(prices[pack[:size]].sum()) > least:
                result.append(tuple(self.lengths[pack[:size][::-1]].tolist()))
        return result


def deepest_pack(lengths: IntArray, counts: IntArray, max_length: int) -> int:
    """Most sequences that any pack can hold: the shortest of all. `lengths` are ascending, `counts` of each."""
    deepest, room = 0, max_length
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        copies = min(count, room // length)
        deepest, room = deepest + copies, room - copies * length
        if copies < count:
            break
    return deepest


def can_be_bounded(lengths: IntArray, max_length: int, depth: int, counts: IntArray) -> bool:
    """Whether the table of a `BoundedPricer` is small enough."""
    return bool(np.prod(_bounded_shape(lengths, max_length, depth, counts), dtype=np.float64) <= MOST_ENTRIES)


def _bounded_shape(lengths: IntArray, max_length: int, depth: int, counts: IntArray) -> tuple[int, int, int]:
    slots = depth if depth < deepest_pack(lengths, counts, max_length) else 0
    return len(lengths) + 1, slots + 1, max_length + 1


@borrowing_kernel
def _fill_bounded(
    lengths: IntArray, counts: IntArray, prices: FloatArray, is_limited: bool, table: FloatArray, worth: FloatArray
) -> None:
    """Fill rows 1 .. of `table`; row 0, of no lengths, is 0."""
    top, slots = table.shape[2] - 1, table.shape[1] - 1
    for row in range(lengths.size):
        length, most = lengths[row], min(counts[row], top // lengths[row])
        worth[row] = 0.0
        for slot in range(slots + 1):
            for room in range(top + 1):
                table[row + 1, slot, room] = table[row, slot, room]
            for copies in range(1, min(most, slot if is_limited else most) + 1):
                added, before = copies * prices[row], table[row, slot - copies if is_limited else slot]
                _raise_from(table[row + 1, slot, copies * length :], added, before)
                if slot == slots:
                    worth[row] = max(worth[row], added + before[top - copies * length])


@inner_kernel
def _raise_from(result: FloatArray, added: float, before: FloatArray) -> None:
    """result = max(result, added + before), elementwise; `before` may be longer."""
    for position in range(result.size):
        result[position] = max(result[position], added + before[position])


@borrowing_kernel
def _unwind_bounded(
    lengths: IntArray,
    counts: IntArray,
    prices: FloatArray,
    is_limited: bool,
    table: FloatArray,
    longest: int,
    pack: IntArray,
) -> int:
    """Write the rows of the best pack whose longest length is that of row `longest`, which has to be there once at least."""
    room, slot, size = table.shape[2] - 1, table.shape[1] - 1, 0
    for row in range(longest, -1, -1):
        most = min(counts[row], room // lengths[row])
        if is_limited:
            most = min(most, slot)
        best, taken = table[row, slot, room], 0
        if row == longest:
            best = -1.0
        for copies in range(1, most + 1):
            value = copies * prices[row] + table[row, slot - copies if is_limited else slot, room - copies * lengths[row]]
            if value > best:
                best, taken = value, copies
        for _ in range(taken):
            pack[size] = row
            size += 1
        room -= taken * lengths[row]
        if is_limited:
            slot -= taken
    return size
