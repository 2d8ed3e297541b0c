"""The best strategies for given prices, with any number of copies of a length: from tables over all tokens of a pack.

This is what column generation adds to its program (`linear_program`); the tables are those of `pricing`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.packing.mixture import Strategy, Work
from gaudi_bert.packing.pricing import close_over, completion_values, power_chain, unwind

OPERATIONS_PER_PRODUCT = 0.2
"""Of a max-plus product, for each pair of totals."""

UNWINDING_WORK = 4e9
"""What unwinding strategies may do in one round."""


class TablePricer:
    """Best strategies for given prices of the lengths that occur (ascending), from tables over all tokens of a pack."""

    def __init__(self, lengths: IntArray, max_length: int, depth: int, work: Work) -> None:
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

    def price(self, prices: FloatArray) -> FloatArray:
        """Worth of the best pack that holds each length, for non-decreasing `prices`: float64 [rows] both."""
        tried = len(self.lengths) if self._closes else len(self.chain) * self.max_length
        self.work.spend(OPERATIONS_PER_PRODUCT * tried * self.max_length)
        self._table[0] = np.where(self._row_below >= 0, prices[self._row_below], 0.0)
        if self._closes:
            completion = self._table[1]
            close_over(self._table[0], self.lengths, completion)
        else:
            completion = completion_values(self.chain, self._table, self.lengths)
        self._worth = prices + completion[self.max_length - self.lengths]
        return self._worth

    def strategies(self, rows: IntArray, prices: FloatArray, least: float) -> list[Strategy]:
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
                if worth > least:
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
    pending: IntArray  # int64, for `unwind`


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
        size = unwind(chain, table, top - length, pack, 1, unwound.pending)
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
