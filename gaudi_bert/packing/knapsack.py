"""Knapsack problems: given a price for each sequence length, which strategies have the largest total price?

Column generation (`linear_program`) adds these strategies to its program. A pricer finds them: `TablePricer` fills a table
with the kernels below, and allows any number of copies of a length. `BoundedKnapsackPricer` allows no more copies than there
are sequences. `EnumeratedPricer` searches a list of all strategies. The least-squares solver and the proofs of lower bounds
use the same kernels.

Let `price[i]` be what one sequence of length i is worth. The best worth of at most k sequences whose lengths add up to
exactly t is the max-plus power of the prices:

    M_1 = price (with price[0] = 0: "no sequence"),     M_(j+k)[t] = max over a of  M_j[a] + M_k[t - a]

Therefore the best strategy of at most `depth` sequences that contains a sequence of length i and fills s slots is worth
`price[i] + M_(depth-1)[s - i]`. A power takes O(log depth) products of s^2 / 2 additions each. Without a depth limit one
pass is enough, because the limit U of the powers satisfies U[t] = max(price[t], max over a of U[a] + U[t - a]).

The kernels work on integers and on floating-point numbers. They store only values. To reconstruct a strategy, the terms of
each maximum are searched for again, because only few strategies are needed. If prices never fall with length, as in the
linear program, "exactly t" is equivalent to "at most t". This is Gilmore-Gomory pricing for the cutting-stock problem (1961)
with a limit on the number of pieces. It replaces the enumeration in listing 2 of the paper.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import inlined_kernel, kernel_without_python_wrapper, kernel_without_refcounts
from gaudi_bert.packing.strategies import OperationBudget, Strategy

# The kernels use this number as the price of an impossible choice. It is finite, because the compiler may assume that
# infinities do not occur.
MINUS_INFINITY = -1e300

# Prices of lengths and total prices of packs are either integers or floating-point numbers, but never mixed in one call.
PackValues = TypeVar("PackValues", IntArray, FloatArray)

# The operation budget counts this many operations for each pair of elements in the max-plus product of two arrays.
OPERATIONS_PER_PRODUCT = 0.2

# `list_factor_rows_for_power` lists pairs of table rows to multiply. Rows have numbers from 0, so these negative numbers
# mark two cases that need no product. NOTHING marks packs without any sequence, which is power 0 of the prices. CLOSURE
# marks packs with any number of sequences, which `compute_max_plus_closure` computes.
NOTHING, CLOSURE = -2, -1


def list_factor_rows_for_power(max_items: int, max_total: int) -> IntArray:
    """Plan the max-plus products that raise the vector of prices to the power `max_items` by repeated squaring.

    This power contains the largest total price of at most `max_items` items for each total length. The vectors are the rows
    of a table. The first row contains the prices, and each product multiplies two rows and appends the result.

    Args:
        max_items: the exponent, which is the maximum number of items in a strategy.
        max_total: the largest total that matters.

    Returns:
        int64 [products, 2], for each product the numbers of the two rows to multiply. Row 0 of the table is M_1, row p + 1
            is the result of product p, and the last row is M_(max_items). Two entries are not products: (NOTHING, NOTHING)
            is M_0, and (CLOSURE, CLOSURE) is the power without a limit.
    """
    if max_items <= 0:
        return np.array([[NOTHING, NOTHING]], dtype=np.int64)
    if max_items >= max_total:
        return np.array([[CLOSURE, CLOSURE]], dtype=np.int64)
    row_of_power = {1: 0}
    products: list[tuple[int, int]] = []

    def plan_power(power: int) -> int:
        """Return the number of the table row that will contain this power of the prices. If no product in the list computes
        it yet, append one whose factors are the two halves of the power, which are planned in the same way.
        """
        if power not in row_of_power:
            products.append((plan_power((power + 1) // 2), plan_power(power // 2)))
            row_of_power[power] = len(products)
        return row_of_power[power]

    plan_power(max_items)
    return np.array(products, dtype=np.int64).reshape(-1, 2)


@kernel_without_python_wrapper
def update_elementwise_maximum(result: PackValues, offset: float, values: PackValues) -> None:
    """Compute result = max(result, offset + values) elementwise. `values` may be longer than `result`."""
    for position in range(result.size):
        result[position] = max(result[position], offset + values[position])


@kernel_without_python_wrapper
def _update_elementwise_maximum_of_four(
    result: PackValues, values: PackValues, offset_3: float, offset_2: float, offset_1: float, offset_0: float
) -> None:
    """Update each result[t] to the maximum of itself and offset_k + values[t + k], for k from 0 to 3."""
    for position in range(result.size):
        best = max(result[position], offset_3 + values[position + 3])
        best = max(best, offset_2 + values[position + 2])
        best = max(best, offset_1 + values[position + 1])
        result[position] = max(best, offset_0 + values[position])


@kernel_without_refcounts
def _multiply_max_plus(left: PackValues, right: PackValues, is_square: int, result: PackValues) -> None:
    """Compute the max-plus product of two arrays: result[t] = max over a of left[a] + right[t - a].

    `is_square` is 1 if both factors are the same, and otherwise 0. In a square, only the smaller part of each total is tried
    as a. Four values of a are handled at a time, which saves memory accesses.
    """
    size, step = left.size, 1 + is_square
    for total in range(size):
        result[total] = left[0] + right[total]
    for part in range(1, (size - 1) // step + 1, 4):
        start = min(step * (part + 3), size)  # from this total on, all four values of a are allowed
        for one in range(part, part + 4):
            for total in range(step * one, start):
                result[total] = max(result[total], left[one] + right[total - one])
        if start < size:
            rest = right[start - part - 3 : size - part]
            _update_elementwise_maximum_of_four(
                result[start:], rest, left[part], left[part + 1], left[part + 2], left[part + 3]
            )


@kernel_without_refcounts
def compute_max_plus_closure(values: PackValues, items: IntArray, result: PackValues) -> None:
    """Solve an unbounded knapsack problem. For each total length, compute the largest total value of any number of items,
    and write it to `result`.

    Items are handled one by one, in runs of the item's length, because within a run an entry depends only on entries before
    the run. An item that is worth less than shorter items of the same total is skipped.

    Args:
        values: the worth of one item of each length, [s + 1].
        items: the lengths of the items, ascending. If values never fall with length, the lengths at which they rise are
            sufficient.
        result: the output, [s + 1].
    """
    size = values.size
    for total in range(size):
        result[total] = values[total]
    result[0] = 0
    for index in range(items.size):
        item = items[index]
        if values[item] < result[item]:
            continue
        for start in range(item, size, item):
            stop = min(start + item, size)
            update_elementwise_maximum(result[start:stop], values[item], result[start - item : stop - item])


def fill_table_with_max_plus_powers(factor_rows: IntArray, table: PackValues, lengths: IntArray) -> PackValues:
    """Fill a table with max-plus powers of the prices in its first row, and return the last row. Power k contains the
    largest total price of at most k items for each total length.

    Args:
        factor_rows: the rows to multiply, from `list_factor_rows_for_power`.
        table: float64 or int64 [products + 1, s + 1]; table[0, 0] must be 0.
        lengths: int64 [s], the lengths 1 .. s.
    """
    for product in range(factor_rows.shape[0]):
        left, right = factor_rows[product, 0], factor_rows[product, 1]
        result = table[product + 1]
        if left == NOTHING:
            for total in range(result.size):
                result[total] = MINUS_INFINITY
            result[0] = 0
        elif left == CLOSURE:
            compute_max_plus_closure(table[0], lengths, result)
        else:
            _multiply_max_plus(table[left], table[right], 1 if left == right else 0, result)
    last: PackValues = table[factor_rows.shape[0]]
    return last


# The compiled version of the function above, for use in other kernels.
compiled_fill_table_with_max_plus_powers = inlined_kernel(fill_table_with_max_plus_powers)


# Floating-point numbers represent all integers below this number exactly.
LARGEST_EXACT = 2.0**53


def compute_max_pack_price(prices: PackValues, depth: int) -> int | float:
    """Return the largest total price of the sequences that fit into one pack. A pack holds at most `depth` sequences and as
    many tokens as there are prices.

    Integer prices are added as floating-point numbers, because those kernels are compiled anyway. No intermediate sum
    exceeds the result, so the result is exact if it is below 2^53. Otherwise it is computed again in integers.

    Args:
        prices: [L], the prices of lengths 1 .. L, which must not fall with length.
        depth: the maximum number of sequences per pack.
    """
    worth = _solve_knapsack_by_convolutions(prices.astype(np.float64), depth)
    if np.issubdtype(prices.dtype, np.floating):
        return worth
    return int(worth if worth < LARGEST_EXACT else _solve_knapsack_by_convolutions(prices, depth))


def _solve_knapsack_by_convolutions(prices: PackValues, depth: int) -> int | float:
    """Return the largest total price of at most `depth` sequences in one pack, computed by max-plus products (convolutions)
    in the integer or float type of the prices.
    """
    factor_rows = list_factor_rows_for_power(depth, len(prices))
    table = np.zeros((len(factor_rows) + 1, len(prices) + 1), dtype=prices.dtype)
    table[0, 1:] = prices
    result: int | float = fill_table_with_max_plus_powers(factor_rows, table, np.arange(1, len(prices) + 1))[-1].item()
    return result


@kernel_without_python_wrapper
def _find_split_reaching_price(left_prices: PackValues, right_prices: PackValues, total: int, min_price: float) -> int:
    """Find where to split the length `total` between two parts so that their total price reaches `min_price`. Return the
    smallest index `part` for which left_prices[part] + right_prices[total - part] is at least `min_price`.
    """
    for part in range(total + 1):
        if left_prices[part] + right_prices[total - part] >= min_price:
            return part
    return total


@inlined_kernel
def backtrack_best_lengths(
    factor_rows: IntArray, table: PackValues, total_length: int, best_lengths: IntArray, count: int, stack: IntArray
) -> int:
    """Backtrack through a table of max-plus powers, to find the items with the largest total price at the given total
    length. Append their lengths to `best_lengths`, and return how many lengths it now contains.

    The table contains only the prices, so the terms of each maximum are searched for again.

    Args:
        factor_rows: the rows that were multiplied to fill the table.
        table: the table of max-plus powers.
        total_length: the total length of the items, which is the entry of the last row to backtrack from.
        best_lengths: the output; lengths are written from index `count` on.
        count: the number of lengths already in `best_lengths`.
        stack: scratch space, int64 [2 * (s + rows + 2)].
    """
    stack[0], stack[1] = table.shape[0] - 1, total_length
    waiting = 2
    while waiting > 0:
        waiting -= 2
        row, rest = stack[waiting], stack[waiting + 1]
        if rest == 0:
            continue
        left = right = row
        if row > 0 and factor_rows[row - 1, 0] >= 0:
            left, right = factor_rows[row - 1, 0], factor_rows[row - 1, 1]
        worth = table[row, rest]
        if row == 0 or (left == row and table[0, rest] >= worth):
            best_lengths[count] = rest
            count += 1
            continue
        first = 1 if left == row else 0
        part = first + _find_split_reaching_price(table[left, first:], table[right], rest - first, worth)
        stack[waiting], stack[waiting + 1] = left, part
        stack[waiting + 2], stack[waiting + 3] = right, rest - part
        waiting += 4
    return count


# --- pricing from a table of max-plus powers

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
