"""Max-plus products of prices, which find the strategies with the largest total price (a knapsack problem).

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

from typing import TypeVar

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import inlined_kernel, kernel_without_python_wrapper, kernel_without_refcounts

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
    """List which rows of a table to multiply so that the last row becomes the power `max_items` of the first row. For each
    total length, this power contains the largest total price of at most `max_items` items.

    The multiplication is the max-plus product, and the power is computed by repeated squaring.

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
