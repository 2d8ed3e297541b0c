"""Pricers: given a price for each length, they find the strategies with the largest total price.

Column generation (`linear_program`) adds these strategies to its program. `TablePricer` computes a table with the kernels of
`max_plus`, and allows any number of copies of a length. `BoundedKnapsackPricer` allows no more copies than there are
sequences. `EnumeratedPricer` searches a list of all strategies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import kernel_without_refcounts
from gaudi_bert.packing.max_plus import (
    OPERATIONS_PER_PRODUCT,
    backtrack_best_lengths,
    compute_max_plus_closure,
    fill_table_with_max_plus_powers,
    list_factor_rows_for_power,
    update_elementwise_maximum,
)
from gaudi_bert.packing.strategies import OperationBudget, Strategy

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

    def __init__(self, lengths: IntArray, max_length: int, depth: int, budget: OperationBudget) -> None:
        self.budget = budget
        self.lengths = lengths
        self.max_length = max_length
        self.depth = depth
        deepest = max_length // int(lengths[0])
        self._closes = depth >= deepest  # without a depth limit, only lengths that occur have to be tried
        # `backtrack_best_lengths` reconstructs a pack by splitting its tokens in two again and again. With a depth limit,
        # each split scans up to a full table row, and there are at most as many splits as sequences. Without a depth limit
        # (`_closes`), each split finds the shortest remaining sequence, and scans only as many entries as this sequence has
        # tokens. All these scans together take at most one entry per token of the pack. The factor 2 is a margin.
        self._operations_per_pack = (2 if self._closes else min(depth, deepest)) * max_length
        self.factor_rows = list_factor_rows_for_power(max_length if self._closes else depth - 1, max_length)
        self._table = np.zeros((len(self.factor_rows) + 1, max_length + 1))
        self._worth = np.zeros(len(lengths))
        self._index_rounded_down = np.searchsorted(lengths, np.arange(max_length + 1), side="right") - 1
        self._output = _BacktrackedPacks(
            items=np.empty(4 * max_length + 16, dtype=np.int64),
            ends=np.empty(len(lengths), dtype=np.int64),
            pack_prices=np.empty(len(lengths)),
            pack=np.empty(max_length + 2, dtype=np.int64),
            stack=np.empty(2 * (max_length + len(self.factor_rows) + 5), dtype=np.int64),
        )

    def compute_best_pack_prices(self, prices: FloatArray) -> FloatArray:
        """For each length, return the largest total price of a pack that contains it, float64 [lengths]. Prices must not
        decrease with length.
        """
        tried = len(self.lengths) if self._closes else len(self.factor_rows) * self.max_length
        self.budget.spend(OPERATIONS_PER_PRODUCT * tried * self.max_length)
        self._table[0] = np.where(self._index_rounded_down >= 0, prices[self._index_rounded_down], 0.0)
        if self._closes:
            completion = self._table[1]
            compute_max_plus_closure(self._table[0], self.lengths, completion)
        else:
            completion = fill_table_with_max_plus_powers(self.factor_rows, self._table, self.lengths)
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
        affordable = max(1, int(min(max(self.budget.remaining, 0.0) / 4, TRACING_WORK) // self._operations_per_pack))
        if len(rows) > affordable:
            rows = np.sort(rows[np.argsort(-self._worth[rows], kind="stable")[:affordable]])
        self.budget.spend(len(rows) * self._operations_per_pack)
        strategies: list[Strategy] = []
        while len(rows):
            done = _backtrack_best_packs(
                self.factor_rows, self._table, self.lengths, self._index_rounded_down, rows, prices, self._output
            )
            start = 0
            for end, worth in zip(self._output.ends[:done].tolist(), self._output.pack_prices[:done].tolist(), strict=True):
                if worth > min_price:
                    strategies.append(tuple(sorted(self._output.items[start:end].tolist())))
                start = end
            rows = rows[done:]
        return strategies


class _BacktrackedPacks(NamedTuple):
    """Output and scratch arrays of `_backtrack_best_packs`, which reconstructs the best packs from a table of prices. L is
    the number of tokens of a pack.
    """

    items: IntArray  # int64 [4 L + 16], the lengths of all packs one after the other
    ends: IntArray  # int64 [rows], where each pack ends in `items`
    pack_prices: FloatArray  # float64 [rows], the worth of each pack
    pack: IntArray  # int64 [L + 2], the pack that is being reconstructed
    stack: IntArray  # int64, for `backtrack_best_lengths`


@kernel_without_refcounts
def _backtrack_best_packs(
    factor_rows: IntArray,
    table: FloatArray,
    lengths: IntArray,
    index_rounded_down: IntArray,
    required_lengths: IntArray,
    prices: FloatArray,
    output: _BacktrackedPacks,
) -> int:
    """Backtrack through a knapsack table that contains the largest total price of a pack. For each required length, find a
    pack that contains this length and has the largest total price. Write these packs to `output`, and return how many were
    written.

    The function stops if the array `items` is full, but writes at least one pack. Lengths that do not occur in the histogram
    are replaced by the next shorter length that does.

    Args:
        factor_rows: the rows that were multiplied to fill the table.
        table: the table of max-plus powers of the prices with which packs are chosen.
        lengths: int64 [rows], the lengths that occur, ascending.
        index_rounded_down: int64 [L + 1], for each length the index of the longest occurring length that is not longer, or
            -1 if there is none.
        required_lengths: int64, the indices in `lengths` of the required lengths.
        prices: float64 [rows], the prices from which `pack_prices` are computed.
        output: the arrays to write to.
    """
    top = table.shape[1] - 1
    items, pack = output.items, output.pack
    end = 0
    for number in range(required_lengths.size):
        length = lengths[required_lengths[number]]
        pack[0] = length
        size = backtrack_best_lengths(factor_rows, table, top - length, pack, 1, output.stack)
        if end + size > items.size:
            return number
        worth = 0.0
        for index in range(size):
            below = index_rounded_down[pack[index]]
            if below >= 0:
                items[end] = lengths[below]
                worth += prices[below]
                end += 1
        output.ends[number], output.pack_prices[number] = end, worth
    return required_lengths.size


# --- at most as many copies of a length as there are sequences
#
# With many sequences this limit makes no difference. With a few hundred sequences of mostly different lengths, it brings the
# fractions of the program much closer to integers, at the cost of a table with a row for each length.

# The maximum number of entries in the dynamic-programming table of a `BoundedKnapsackPricer`.
MOST_ENTRIES = 2**24


class BoundedKnapsackPricer:
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

    def __init__(self, lengths: IntArray, max_length: int, depth: int, counts: IntArray, budget: OperationBudget) -> None:
        self.budget = budget
        self.lengths = lengths
        self.max_length = max_length
        self.counts = counts.copy()
        self._has_depth_limit = depth < compute_max_sequences_per_pack(lengths, counts, max_length)
        self._table = np.zeros(_compute_bounded_knapsack_shape(lengths, max_length, depth, counts))
        self._prices = np.zeros(len(lengths))

    def compute_best_pack_prices(self, prices: FloatArray) -> FloatArray:
        """For each length, return the largest total price of a pack with this length as its longest, float64 [lengths].

        `prices` are float64 [rows] and must not fall with length.
        """
        self.budget.spend(self._table.size)
        self._prices, worth = prices.copy(), np.zeros(len(prices))
        _fill_bounded_knapsack_table(self.lengths, self.counts, prices, self._has_depth_limit, self._table, worth)
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
            size = _backtrack_bounded_knapsack(
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


def can_price_by_bounded_knapsack(lengths: IntArray, max_length: int, depth: int, counts: IntArray) -> bool:
    """Return whether the table of a `BoundedKnapsackPricer` for these lengths would have at most `MOST_ENTRIES` entries."""
    return bool(
        np.prod(_compute_bounded_knapsack_shape(lengths, max_length, depth, counts), dtype=np.float64) <= MOST_ENTRIES
    )


def _compute_bounded_knapsack_shape(
    lengths: IntArray, max_length: int, depth: int, counts: IntArray
) -> tuple[int, int, int]:
    """Return the shape (lengths + 1, slots + 1, tokens + 1) of the dynamic-programming table in a `BoundedKnapsackPricer`.
    `slots` is the depth, or 0 if no pack can contain more sequences than the depth.
    """
    slots = depth if depth < compute_max_sequences_per_pack(lengths, counts, max_length) else 0
    return len(lengths) + 1, slots + 1, max_length + 1


@kernel_without_refcounts
def _fill_bounded_knapsack_table(
    lengths: IntArray,
    counts: IntArray,
    prices: FloatArray,
    has_depth_limit: bool,
    table: FloatArray,
    best_prices: FloatArray,
) -> None:
    """Fill the table of a `BoundedKnapsackPricer` by dynamic programming, one length after another. For each length, write
    to `best_prices` the largest total price of a pack with this length as its longest.

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
def _backtrack_bounded_knapsack(
    lengths: IntArray,
    counts: IntArray,
    prices: FloatArray,
    has_depth_limit: bool,
    table: FloatArray,
    longest_index: int,
    pack_indices: IntArray,
) -> int:
    """Backtrack through the table of a `BoundedKnapsackPricer`, to find the pack with the largest total price among those
    whose longest sequence has the length `lengths[longest_index]`. Write the indices of its lengths to `pack_indices`, and
    return how many sequences it contains.
    """
    room, slot, size = table.shape[2] - 1, table.shape[1] - 1, 0
    for row in range(longest_index, -1, -1):
        most = min(counts[row], room // lengths[row])
        if has_depth_limit:
            most = min(most, slot)
        best, taken = table[row, slot, room], 0
        if row == longest_index:
            best = -1.0
        for copies in range(1, most + 1):
            value = (
                copies * prices[row] + table[row, slot - copies if has_depth_limit else slot, room - copies * lengths[row]]
            )
            if value > best:
                best, taken = value, copies
        for _ in range(taken):
            pack_indices[size] = row
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

    def __init__(self, lengths: IntArray, max_length: int, copies: IntArray, budget: OperationBudget) -> None:
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
