"""The best strategies for given prices, from tables over all tokens of a pack: with any number of copies of a length, or
with no more than there are sequences.

This is what column generation adds to its program (`linear_program`); the tables are those of `pricing`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.packing.pricing import (
    OPERATIONS_PER_PRODUCT,
    fill_power_table,
    max_plus_closure,
    power_chain,
    trace_best_lengths,
    update_maximum,
)
from gaudi_bert.packing.strategies import Strategy, WorkBudget

UNWINDING_WORK = 4e9
"""What unwinding strategies may do in one round."""


class TablePricer:
    """Best strategies for given prices of the lengths that occur (ascending), from tables over all tokens of a pack."""

    def __init__(self, lengths: IntArray, max_length: int, depth: int, work: WorkBudget) -> None:
        self.work = work
        self.lengths = lengths
        self.max_length = max_length
        self.depth = depth
        deepest = max_length // int(lengths[0])
        self._closes = depth >= deepest  # without a limit of depth only the lengths that occur have to be tried
        # Without a limit of depth the smallest part of a split comes first, so that a pack is looked at once or twice.
        self._unwinding = (2 if self._closes else min(depth, deepest)) * max_length
        self.chain = power_chain(max_length if self._closes else depth - 1, max_length)
        self._table = np.zeros((len(self.chain) + 1, max_length + 1))
        self._worth = np.zeros(len(lengths))
        self._row_below = np.searchsorted(lengths, np.arange(max_length + 1), side="right") - 1
        self._unwound = _Unwound(
            items=np.empty(4 * max_length + 16, dtype=np.int64),
            ends=np.empty(len(lengths), dtype=np.int64),
            worths=np.empty(len(lengths)),
            pack=np.empty(max_length + 2, dtype=np.int64),
            pending=np.empty(2 * (max_length + len(self.chain) + 5), dtype=np.int64),
        )

    def best_pack_worths(self, prices: FloatArray) -> FloatArray:
        """Worth of the best pack that holds each length, for non-decreasing `prices`: float64 [rows] both."""
        tried = len(self.lengths) if self._closes else len(self.chain) * self.max_length
        self.work.spend(OPERATIONS_PER_PRODUCT * tried * self.max_length)
        self._table[0] = np.where(self._row_below >= 0, prices[self._row_below], 0.0)
        if self._closes:
            completion = self._table[1]
            max_plus_closure(self._table[0], self.lengths, completion)
        else:
            completion = fill_power_table(self.chain, self._table, self.lengths)
        self._worth = prices + completion[self.max_length - self.lengths]
        return self._worth

    def improving_strategies(self, rows: IntArray, prices: FloatArray, min_worth: float) -> list[Strategy]:
        """The strategies behind the last `price`, for these rows, that are worth more than `least` at `prices`."""
        affordable = max(1, int(min(max(self.work.remaining, 0.0) / 4, UNWINDING_WORK) // self._unwinding))
        if len(rows) > affordable:
            rows = np.sort(rows[np.argsort(-self._worth[rows], kind="stable")[:affordable]])
        self.work.spend(len(rows) * self._unwinding)
        strategies: list[Strategy] = []
        while len(rows):
            done = _unwind_rows(self.chain, self._table, self.lengths, self._row_below, rows, prices, self._unwound)
            start = 0
            for end, worth in zip(self._unwound.ends[:done].tolist(), self._unwound.worths[:done].tolist(), strict=True):
                if worth > min_worth:
                    strategies.append(tuple(sorted(self._unwound.items[start:end].tolist())))
                start = end
            rows = rows[done:]
        return strategies


class _Unwound(NamedTuple):
    """Room for packs, and what unwinding them needs; L tokens in a pack."""

    items: IntArray  # int64 [4 L + 16], the lengths one after the other
    ends: IntArray  # int64 [rows], where each pack ends
    worths: FloatArray  # float64 [rows]
    pack: IntArray  # int64 [L + 2]
    pending: IntArray  # int64, for `trace_best_lengths`


@borrowing_kernel
def _unwind_rows(
    chain: IntArray,
    table: FloatArray,
    lengths: IntArray,
    row_below: IntArray,
    rows: IntArray,
    prices: FloatArray,
    unwound: _Unwound,
) -> int:
    """Write the best pack of each row, as many as there is room for, at least one; returns how many.

    Slots of lengths that do not occur shrink to the next one that does.
    """
    top = table.shape[1] - 1
    items, pack = unwound.items, unwound.pack
    end = 0
    for number in range(rows.size):
        length = lengths[rows[number]]
        pack[0] = length
        size = trace_best_lengths(chain, table, top - length, pack, 1, unwound.pending)
        if end + size > items.size:
            return number
        worth = 0.0
        for index in range(size):
            below = row_below[pack[index]]
            if below >= 0:
                items[end] = lengths[below]
                worth += prices[below]
                end += 1
        unwound.ends[number], unwound.worths[number] = end, worth
    return rows.size


# --- with no more copies of a length than there are sequences
#
# Of many sequences the limit makes no difference. Of some hundred, most of different lengths, it brings the program's
# fractions much closer to integers, for the price of a table with a row for each length.

MOST_ENTRIES = 2**24
"""Of a table: lengths, times tokens of a pack, times sequences in one where depth is limited."""


class BoundedPricer:
    """A `TablePricer` with no more copies of a length than `counts` (int64 [rows], may be changed) has sequences.

    For each length the best pack of which it is the longest: `_table[row, slots, room]` is what at most `slots` sequences of
    the shorter lengths are worth in `room` tokens. Without a limit of depth there is one entry for any number of slots.
    """

    def __init__(self, lengths: IntArray, max_length: int, depth: int, counts: IntArray, work: WorkBudget) -> None:
        self.work = work
        self.lengths = lengths
        self.max_length = max_length
        self.counts = counts.copy()
        self._is_limited = depth < deepest_pack(lengths, counts, max_length)
        self._table = np.zeros(_bounded_shape(lengths, max_length, depth, counts))
        self._prices = np.zeros(len(lengths))

    def best_pack_worths(self, prices: FloatArray) -> FloatArray:
        """Worth of the best pack of which each length is the longest, for non-decreasing `prices`: float64 [rows] both."""
        self.work.spend(self._table.size)
        self._prices, worth = prices.copy(), np.zeros(len(prices))
        _fill_bounded(self.lengths, self.counts, prices, self._is_limited, self._table, worth)
        return worth

    def improving_strategies(self, rows: IntArray, prices: FloatArray, min_worth: float) -> list[Strategy]:
        """The strategies behind the last `price`, for these rows, that are worth more than `least` at `prices`."""
        self.work.spend(len(rows) * len(self.lengths))
        pack, result = np.empty(self.max_length, dtype=np.int64), []
        for row in rows[self.counts[rows] > 0].tolist():
            size = _unwind_bounded(self.lengths, self.counts, self._prices, self._is_limited, self._table, row, pack)
            if float(prices[pack[:size]].sum()) > min_worth:
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
                update_maximum(table[row + 1, slot, copies * length :], added, before)
                if slot == slots:
                    worth[row] = max(worth[row], added + before[top - copies * length])


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
