"""Pricers: given a price for each length, they find the strategies with the largest total price.

Column generation (`linear_program`) adds these strategies to its program. `TablePricer` computes a table with the kernels of
`max_plus`, and allows any number of copies of a length. `BoundedPricer` allows no more copies than there are sequences.
`EnumeratedPricer` searches a list of all strategies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import kernel_without_refcounts
from gaudi_bert.packing.max_plus import (
    OPERATIONS_PER_PRODUCT,
    compute_max_plus_closure,
    fill_max_plus_power_table,
    plan_max_plus_products,
    trace_best_lengths,
    update_elementwise_maximum,
)
from gaudi_bert.packing.strategies import Strategy, WorkBudget

# The maximum number of operations for reconstructing packs from the table, in one search for new columns.
TRACING_WORK = 4e9


class TablePricer:
    """Finds the combinations of lengths with the largest total price, which become new columns in column generation. It uses
    a dynamic-programming table, and a combination may contain a length any number of times.

    Args:
        lengths: int64 [rows], the lengths that occur, ascending.
        max_length: tokens of a pack.
        depth: the maximum number of sequences per pack.
        budget: the operation budget.
    """

    def __init__(self, lengths: IntArray, max_length: int, depth: int, budget: WorkBudget) -> None:
        self.budget = budget
        self.lengths = lengths
        self.max_length = max_length
        self.depth = depth
        deepest = max_length // int(lengths[0])
        self._closes = depth >= deepest  # without a depth limit, only lengths that occur have to be tried
        # Reconstructing a pack scans a table row for each sequence in the pack. Without a depth limit, the smallest part of
        # a split is found first, so the work is at most that of two scans.
        self._operations_per_trace = (2 if self._closes else min(depth, deepest)) * max_length
        self.product_plan = plan_max_plus_products(max_length if self._closes else depth - 1, max_length)
        self._table = np.zeros((len(self.product_plan) + 1, max_length + 1))
        self._worth = np.zeros(len(lengths))
        self._row_below = np.searchsorted(lengths, np.arange(max_length + 1), side="right") - 1
        self._traced = _TracedPacks(
            items=np.empty(4 * max_length + 16, dtype=np.int64),
            ends=np.empty(len(lengths), dtype=np.int64),
            pack_prices=np.empty(len(lengths)),
            pack=np.empty(max_length + 2, dtype=np.int64),
            pending=np.empty(2 * (max_length + len(self.product_plan) + 5), dtype=np.int64),
        )

    def compute_best_pack_prices(self, prices: FloatArray) -> FloatArray:
        """For each length, return the largest total price of a pack that contains it, float64 [lengths]. Prices must not
        decrease with length.
        """
        tried = len(self.lengths) if self._closes else len(self.product_plan) * self.max_length
        self.budget.spend(OPERATIONS_PER_PRODUCT * tried * self.max_length)
        self._table[0] = np.where(self._row_below >= 0, prices[self._row_below], 0.0)
        if self._closes:
            completion = self._table[1]
            compute_max_plus_closure(self._table[0], self.lengths, completion)
        else:
            completion = fill_max_plus_power_table(self.product_plan, self._table, self.lengths)
        self._worth = prices + completion[self.max_length - self.lengths]
        return self._worth

    def find_improving_strategies(self, rows: IntArray, prices: FloatArray, min_price: float) -> list[Strategy]:
        """Find the best pack for the length of each given row, using the prices from the last call of
        `compute_best_pack_prices`. Return, as tuples of lengths, the packs that are worth more than `min_price` at the given
        prices.

        If the budget is short, only the lengths with the best packs are considered.

        Args:
            rows: int64, the indices of these lengths.
            prices: float64 [rows], prices that decide which of the strategies are returned.
            min_price: only strategies that are worth more than this at `prices` are returned.
        """
        affordable = max(1, int(min(max(self.budget.remaining, 0.0) / 4, TRACING_WORK) // self._operations_per_trace))
        if len(rows) > affordable:
            rows = np.sort(rows[np.argsort(-self._worth[rows], kind="stable")[:affordable]])
        self.budget.spend(len(rows) * self._operations_per_trace)
        strategies: list[Strategy] = []
        while len(rows):
            done = _trace_best_packs(
                self.product_plan, self._table, self.lengths, self._row_below, rows, prices, self._traced
            )
            start = 0
            for end, worth in zip(self._traced.ends[:done].tolist(), self._traced.pack_prices[:done].tolist(), strict=True):
                if worth > min_price:
                    strategies.append(tuple(sorted(self._traced.items[start:end].tolist())))
                start = end
            rows = rows[done:]
        return strategies


class _TracedPacks(NamedTuple):
    """Output and scratch arrays of `_trace_best_packs`, which reconstructs the best packs from a table of prices. L is the
    number of tokens of a pack.
    """

    items: IntArray  # int64 [4 L + 16], the lengths of all packs one after the other
    ends: IntArray  # int64 [rows], where each pack ends in `items`
    pack_prices: FloatArray  # float64 [rows], the worth of each pack
    pack: IntArray  # int64 [L + 2], the pack that is being traced
    pending: IntArray  # int64, for `trace_best_lengths`


@kernel_without_refcounts
def _trace_best_packs(
    product_plan: IntArray,
    table: FloatArray,
    lengths: IntArray,
    row_below: IntArray,
    rows: IntArray,
    prices: FloatArray,
    traced: _TracedPacks,
) -> int:
    """For each given row, which stands for a sequence length, find the pack with the largest total price that contains this
    length. Reconstruct these packs from a table of largest total prices, write them to `traced`, and return how many were
    written.

    The function stops if the array `items` is full, but writes at least one pack.

    Lengths that do not occur are replaced by the next shorter one that does.
    """
    top = table.shape[1] - 1
    items, pack = traced.items, traced.pack
    end = 0
    for number in range(rows.size):
        length = lengths[rows[number]]
        pack[0] = length
        size = trace_best_lengths(product_plan, table, top - length, pack, 1, traced.pending)
        if end + size > items.size:
            return number
        worth = 0.0
        for index in range(size):
            below = row_below[pack[index]]
            if below >= 0:
                items[end] = lengths[below]
                worth += prices[below]
                end += 1
        traced.ends[number], traced.pack_prices[number] = end, worth
    return rows.size


# --- at most as many copies of a length as there are sequences
#
# With many sequences this limit makes no difference. With a few hundred sequences of mostly different lengths, it brings the
# fractions of the program much closer to integers, at the cost of a table with a row for each length.

# The maximum number of entries in the dynamic-programming table of a `BoundedPricer`.
MOST_ENTRIES = 2**24


class BoundedPricer:
    """Finds the combinations of lengths with the largest total price, which become new columns in column generation. A
    combination contains each length at most as often as it occurs in the histogram.

    For each length, it finds the best pack with this length as its longest. `_table[row, slots, room]` is the worth of
    at most `slots` sequences of the shorter lengths in `room` tokens. Without a depth limit, there is a single entry for any
    number of slots.

    Args:
        lengths: int64 [rows], the lengths that occur, ascending.
        max_length: tokens of a pack.
        depth: the maximum number of sequences per pack.
        counts: int64 [rows], the number of sequences of each length; the attribute `counts` may be changed later.
        budget: the operation budget.
    """

    def __init__(self, lengths: IntArray, max_length: int, depth: int, counts: IntArray, budget: WorkBudget) -> None:
        self.budget = budget
        self.lengths = lengths
        self.max_length = max_length
        self.counts = counts.copy()
        self._has_depth_limit = depth < compute_max_sequences_per_pack(lengths, counts, max_length)
        self._table = np.zeros(_compute_bounded_table_shape(lengths, max_length, depth, counts))
        self._prices = np.zeros(len(lengths))

    def compute_best_pack_prices(self, prices: FloatArray) -> FloatArray:
        """For each length, return the largest total price of a pack with this length as its longest, float64 [lengths].

        `prices` are float64 [rows] and must not fall with length.
        """
        self.budget.spend(self._table.size)
        self._prices, worth = prices.copy(), np.zeros(len(prices))
        _fill_bounded_price_table(self.lengths, self.counts, prices, self._has_depth_limit, self._table, worth)
        return worth

    def find_improving_strategies(self, rows: IntArray, prices: FloatArray, min_price: float) -> list[Strategy]:
        """Find the best pack for the length of each given row, using the prices from the last call of
        `compute_best_pack_prices`. Return, as tuples of lengths, the packs that are worth more than `min_price` at the given
        prices.

        Args:
            rows: int64, the indices of these lengths, each the longest of its pack.
            prices: float64 [rows], prices that decide which of the strategies are returned.
            min_price: only strategies that are worth more than this at `prices` are returned.
        """
        self.budget.spend(len(rows) * len(self.lengths))
        pack, result = np.empty(self.max_length, dtype=np.int64), []
        for row in rows[self.counts[rows] > 0].tolist():
            size = _trace_bounded_pack(
                self.lengths, self.counts, self._prices, self._has_depth_limit, self._table, row, pack
            )
            if float(prices[pack[:size]].sum()) > min_price:
                result.append(tuple(self.lengths[pack[:size][::-1]].tolist()))
        return result


def compute_max_sequences_per_pack(lengths: IntArray, counts: IntArray, max_length: int) -> int:
    """Return the largest number of sequences that fit into one pack, which is reached with the shortest sequences.

    Args:
        lengths: int64 [rows], ascending.
        counts: int64 [rows], the number of sequences of each length.
        max_length: tokens of a pack.
    """
    deepest, room = 0, max_length
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        copies = min(count, room // length)
        deepest, room = deepest + copies, room - copies * length
        if copies < count:
            break
    return deepest


def can_use_bounded_pricer(lengths: IntArray, max_length: int, depth: int, counts: IntArray) -> bool:
    """Return whether the dynamic-programming table of a `BoundedPricer` would have at most `MOST_ENTRIES` entries."""
    return bool(np.prod(_compute_bounded_table_shape(lengths, max_length, depth, counts), dtype=np.float64) <= MOST_ENTRIES)


def _compute_bounded_table_shape(lengths: IntArray, max_length: int, depth: int, counts: IntArray) -> tuple[int, int, int]:
    """Return the shape (lengths + 1, slots + 1, tokens + 1) of the dynamic-programming table in a `BoundedPricer`. `slots`
    is the depth, or 0 if no pack can contain more sequences than the depth.
    """
    slots = depth if depth < compute_max_sequences_per_pack(lengths, counts, max_length) else 0
    return len(lengths) + 1, slots + 1, max_length + 1


@kernel_without_refcounts
def _fill_bounded_price_table(
    lengths: IntArray,
    counts: IntArray,
    prices: FloatArray,
    has_depth_limit: bool,
    table: FloatArray,
    best_prices: FloatArray,
) -> None:
    """Fill the table of a `BoundedPricer` by dynamic programming, one length after another. For each length, write to
    `best_prices` the largest total price of a pack with this length as its longest.

    Entry [row, slots, room] becomes the largest total price of at most `slots` sequences of the first `row` lengths in
    `room` tokens. Row 0, which stands for no lengths, is not changed.
    """
    top, slots = table.shape[2] - 1, table.shape[1] - 1
    for row in range(lengths.size):
        length, most = lengths[row], min(counts[row], top // lengths[row])
        best_prices[row] = 0.0
        for slot in range(slots + 1):
            for room in range(top + 1):
                table[row + 1, slot, room] = table[row, slot, room]
            for copies in range(1, min(most, slot if has_depth_limit else most) + 1):
                added, before = copies * prices[row], table[row, slot - copies if has_depth_limit else slot]
                update_elementwise_maximum(table[row + 1, slot, copies * length :], added, before)
                if slot == slots:
                    best_prices[row] = max(best_prices[row], added + before[top - copies * length])


@kernel_without_refcounts
def _trace_bounded_pack(
    lengths: IntArray,
    counts: IntArray,
    prices: FloatArray,
    has_depth_limit: bool,
    table: FloatArray,
    longest_row: int,
    pack: IntArray,
) -> int:
    """Reconstruct, from the table of a `BoundedPricer`, the best pack with length number `longest_row` as its longest. Write
    the indices of its lengths to `pack`, and return how many sequences it contains.
    """
    room, slot, size = table.shape[2] - 1, table.shape[1] - 1, 0
    for row in range(longest_row, -1, -1):
        most = min(counts[row], room // lengths[row])
        if has_depth_limit:
            most = min(most, slot)
        best, taken = table[row, slot, room], 0
        if row == longest_row:
            best = -1.0
        for copies in range(1, most + 1):
            value = (
                copies * prices[row] + table[row, slot - copies if has_depth_limit else slot, room - copies * lengths[row]]
            )
            if value > best:
                best, taken = value, copies
        for _ in range(taken):
            pack[size] = row
            size += 1
        room -= taken * lengths[row]
        if has_depth_limit:
            slot -= taken
    return size


# --- very long packs of few distinct lengths: price from a list of all strategies
#
# A table over all tokens of a pack grows with the pack, whereas a list grows only with the number of strategies. The list
# contains the strategies into which no further sequence of the shortest length fits. Any other strategy is a part of one of
# them and worth no more.

# For packs with more tokens than this, a list of all strategies replaces the dynamic-programming table, if the list is short
# enough. A strategy is the tuple of lengths in a pack.
LONGEST_TABLE = 1 << 16

# The maximum size of the array that lists all strategies, which are the combinations of lengths in one pack. Each row of the
# array contains how often one strategy uses each length.
MOST_LISTED_ENTRIES = 1 << 22


def list_strategies(lengths: IntArray, max_length: int, depth: int) -> IntArray | None:
    """List all strategies that leave no room for another sequence of the shortest length. A strategy is a combination of
    lengths in one pack.

    Args:
        lengths: int64 [n], ascending.
        max_length: tokens of a pack.
        depth: the maximum number of sequences per pack.

    Returns:
        int64 [strategies, n], the number of copies of each length; None if there are too many strategies.
    """
    copies = np.zeros((1, len(lengths)), dtype=np.int64)
    room, slots = np.array([max_length]), np.array([depth])
    for column in range(len(lengths) - 1, -1, -1):
        most = np.minimum(room // lengths[column], slots)
        choices = most + 1 if column else np.ones_like(most)
        if int(choices.sum()) * len(lengths) > MOST_LISTED_ENTRIES:
            return None
        parent = np.repeat(np.arange(len(choices)), choices)
        number = most if column == 0 else np.arange(len(parent)) - np.repeat(np.cumsum(choices) - choices, choices)
        copies = copies[parent]
        copies[:, column] = number
        room, slots = room[parent] - number * lengths[column], slots[parent] - number
    return copies


class EnumeratedPricer:
    """Finds the combinations of lengths with the largest total price, which become new columns in column generation. It
    searches a list of all combinations.

    It has the same methods as `TablePricer`.
    """

    def __init__(self, lengths: IntArray, max_length: int, copies: IntArray, budget: WorkBudget) -> None:
        self.budget = budget
        self.lengths = lengths
        self.max_length = max_length
        self._copies = copies
        self._worth = np.zeros(len(copies))

    def compute_best_pack_prices(self, prices: FloatArray) -> FloatArray:
        """For each length, return the largest total price of a pack that contains it. The prices and the result are float64
        [lengths].
        """
        self.budget.spend(2 * self._copies.size)
        self._worth = self._copies @ prices
        worth: FloatArray = np.max(np.where(self._copies > 0, self._worth[:, None], 0.0), axis=0)
        return worth

    def find_improving_strategies(self, rows: IntArray, prices: FloatArray, min_price: float) -> list[Strategy]:
        """Find the best pack for the length of each given row, using the prices from the last call of
        `compute_best_pack_prices`. Return, as tuples of lengths, the packs that are worth more than `min_price` at the given
        prices.

        Args:
            rows: int64, the indices of these lengths.
            prices: float64 [rows], prices that decide which of the strategies are returned.
            min_price: only strategies that are worth more than this at `prices` are returned.
        """
        self.budget.spend(2 * self._copies.size)
        best = np.argmax(np.where(self._copies[:, rows] > 0, self._worth[:, None], -1.0), axis=0)
        chosen = self._copies[np.unique(best)]
        return [tuple(np.repeat(self.lengths, row).tolist()) for row in chosen[chosen @ prices > min_price]]
