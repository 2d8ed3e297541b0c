"""Weighted non-negative least squares over all strategies of a depth, without ever listing the strategies.

The packing problem of the paper (section 3.1.2, F.4.3): find usages x >= 0 of the strategies that add up to exactly the
maximum sequence length such that  || w (A x - b) ||  is least, where b are the counts per length and column p of A holds the
lengths of strategy p. Solved by the active-set method of Lawson and Hanson (1974, chapter 23): the gradient of a column is
the sum of its lengths' prices w^2 (b - A x), so the best column is a max-plus knapsack (`pricing`) and A is never built; the
normal equations of the passive columns are a Cholesky factor that is updated and downdated; several columns with disjoint
lengths enter in one round. Objective and residual are unique; x is not, because columns are linearly dependent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BoolArray, FloatArray, IntArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel, inner_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.pricing import (
    MINUS_INFINITY,
    OPERATIONS_PER_PRODUCT,
    compiled_fill_power_table,
    power_chain,
    trace_best_lengths,
)
from gaudi_bert.packing.strategies import WorkBudget

MAX_NNLS_LENGTH = 4096
"""Packs of more tokens are not solved length by length: the factor has that many rows and columns."""

GRADIENT_TOLERANCE = 1e-12  # a column may enter if its gradient exceeds this share of the largest w^2 b
STALLED_ROUNDS = 20  # without any gain, after which only rounding errors can remain
ADDITIONS = 2  # columns that may enter in one round; more of them save pricing and cost exchanges
DEEPER = 1  # sequences by which packs may be deeper than the mean; deeper ones are hardly ever needed, and cost time


@dataclass(frozen=True)
class _NnlsSolution:
    """Result of `solve_nnls`."""

    strategies: list[tuple[int, ...]]  # the passive columns: ascending lengths that add up to the maximum sequence length
    usage: FloatArray  # float64 [strategies], how often each is used, > 0
    residual: FloatArray  # float64 [L], counts - A x per length (index 0 is length 1)
    objective: float  # the weighted residual norm


class _ActiveSet(NamedTuple):
    """The passive columns and their factor; K columns of at most W distinct lengths fit."""

    lengths: IntArray  # int64 [K, W]
    copies: FloatArray  # float64 [K, W], how often the column holds each of its lengths
    distinct: IntArray  # int64 [K], entries of a row that are in use
    usage: FloatArray  # float64 [K], x
    solution: FloatArray  # float64 [K], the unconstrained optimum of the passive columns
    factor: FloatArray  # float64 [K, K]
    projected: FloatArray  # float64 [K]
    operations: FloatArray  # float64 [1], what was done so far


class _Scratch(NamedTuple):
    """Arrays that a round writes to; kernels that make no arrays compile sooner."""

    table: FloatArray  # float64 [products + 1, L + 1], prices and what `fill_power_table` makes of them
    every_length: IntArray  # int64 [L], 1 .. L
    values: FloatArray  # float64 [L + 1], the gradient of the best column that holds each length
    weighted: FloatArray  # float64 [L + 1], an entering column, with squared weights
    products: FloatArray  # float64 [K], of an entering or leaving column
    taken: BoolArray  # bool [L + 1], lengths of the columns that entered in this round
    items: IntArray  # int64 [L + 2], an entering column
    pending: IntArray  # int64, for `trace_best_lengths`


def solve_nnls(
    target: AnyArray, weights: FloatArray, depth: int, *, max_rounds: int | None = None, work: WorkBudget | None = None
) -> _NnlsSolution:
    """Solve  min || weights (A x - target) ||, x >= 0,  over all strategies of at most `depth` lengths that fill L slots.

    `target` are counts per length, [L], of any numeric dtype, and `weights`, float64 [L], positive; a depth of L or more is
    no limit. It stops short of the optimum after `max_rounds`, or where `work` is done.
    """
    max_length = len(target)
    if max_length > MAX_NNLS_LENGTH:
        raise InputError(f"least squares packs at most {MAX_NNLS_LENGTH} tokens, not {max_length}; use nnls or optimal")
    work = WorkBudget() if work is None else work
    depth = max(1, min(depth, max_length))
    scale = max(float(np.max(target, initial=0)), 1.0)
    counts = np.concatenate(([0.0], np.asarray(target, dtype=np.float64) / scale))
    squared_weights = np.concatenate(([0.0], np.asarray(weights, dtype=np.float64) ** 2))
    state = _make_active_set(max_length, depth)
    chain = power_chain(depth - 1, max_length)
    residual = np.empty(max_length + 1)
    most_rounds = np.iinfo(np.int64).max if max_rounds is None else max_rounds
    scratch = _make_scratch(max_length, len(chain))
    limits = most_rounds, max(work.remaining, 0.0)
    size = _run_active_set(counts, squared_weights, chain, state, scratch, residual, *limits)
    work.spend(float(state.operations[0]))
    strategies = []
    for lengths, copies, distinct in zip(state.lengths[:size], state.copies[:size], state.distinct[:size], strict=True):
        items = np.repeat(lengths[:distinct], copies[:distinct].astype(np.int64))
        strategies.append(tuple(np.sort(items).tolist()))
    objective = scale * float(np.sqrt(np.sum(squared_weights * residual**2)))
    return _NnlsSolution(strategies, state.usage[:size] * scale, residual[1:] * scale, objective)


def limit_depth_by_bound(counts: IntArray, packs: float, depth: int) -> int:
    """The depth to solve for, at most `depth`, where `counts` are known to need at least so many packs."""
    return min(depth, int(np.ceil(counts.sum() / max(packs, 1))) + DEEPER)


def _make_active_set(max_length: int, depth: int) -> _ActiveSet:
    capacity = max_length + 8
    width = min(depth, int(np.sqrt(2 * max_length)) + 2)
    return _ActiveSet(
        lengths=np.zeros((capacity, width), dtype=np.int64),
        copies=np.zeros((capacity, width)),
        distinct=np.zeros(capacity, dtype=np.int64),
        usage=np.zeros(capacity),
        solution=np.zeros(capacity),
        factor=np.zeros((capacity, capacity)),
        projected=np.zeros(capacity),
        operations=np.zeros(1),
    )


def _make_scratch(max_length: int, products: int) -> _Scratch:
    return _Scratch(
        table=np.empty((products + 1, max_length + 1)),
        every_length=np.arange(1, max_length + 1),
        values=np.empty(max_length + 1),
        weighted=np.empty(max_length + 1),
        products=np.zeros(max_length + 8),
        taken=np.empty(max_length + 1, dtype=np.bool_),
        items=np.empty(max_length + 2, dtype=np.int64),
        pending=np.empty(2 * (max_length + products + 5), dtype=np.int64),
    )


@borrowing_kernel
def _run_active_set(
    counts: FloatArray,
    squared_weights: FloatArray,
    chain: IntArray,
    state: _ActiveSet,
    scratch: _Scratch,
    residual: FloatArray,
    max_rounds: int,
    most_operations: float,
) -> int:
    """The outer loop: price, let columns enter, restore feasibility. Returns the columns, and `residual` [L + 1]."""
    top = counts.size - 1
    prices, values = scratch.table[0], scratch.values
    largest = 0.0
    for length in range(top + 1):
        largest = max(largest, squared_weights[length] * counts[length])
    threshold = GRADIENT_TOLERANCE * largest
    size, rounds, stalled = 0, 0, 0
    objective = np.inf
    while True:
        improved = _update_residual(counts, squared_weights, state, size, residual)
        if rounds > 0:
            stalled = 0 if improved < objective * (1.0 - 1e-15) else stalled + 1
        objective = min(objective, improved)
        if stalled >= STALLED_ROUNDS or rounds >= max_rounds or state.operations[0] >= most_operations:
            break
        rounds += 1
        state.operations[0] += OPERATIONS_PER_PRODUCT * chain.shape[0] * top * top
        for length in range(top + 1):
            prices[length] = squared_weights[length] * residual[length]
        completion = compiled_fill_power_table(chain, scratch.table, scratch.every_length)
        for length in range(1, top + 1):
            values[length] = prices[length] + completion[top - length]
        entered = _enter_columns(threshold, chain, counts, squared_weights, state, scratch, size)
        if entered == size:
            break
        size = _restore_feasibility(state, scratch.products, entered)
    return size


@inner_kernel
def _enter_columns(
    threshold: float,
    chain: IntArray,
    counts: FloatArray,
    squared_weights: FloatArray,
    state: _ActiveSet,
    scratch: _Scratch,
    size: int,
) -> int:
    """Append the best columns with disjoint lengths, dearest first; returns the new number of columns."""
    limit = min(size + ADDITIONS, state.usage.size - 1)
    values, taken = scratch.values, scratch.taken
    for length in range(taken.size):
        taken[length] = False
    values[0] = MINUS_INFINITY
    while size < limit:
        anchor = 0
        for length in range(1, values.size):
            if values[length] > values[anchor]:
                anchor = length
        if values[anchor] <= threshold:
            break
        values[anchor] = MINUS_INFINITY
        if _write_best_column(anchor, chain, state, scratch, size) and _append_passive_column(
            counts, squared_weights, state, scratch, size
        ):
            size += 1
    return size


@inlined_kernel
def _write_best_column(anchor: int, chain: IntArray, state: _ActiveSet, scratch: _Scratch, column: int) -> bool:
    """Write the best strategy that holds `anchor` as `column`, unless one of its lengths is taken; then its
    lengths are.
    """
    items, taken = scratch.items, scratch.taken
    items[0] = anchor
    size = trace_best_lengths(chain, scratch.table, taken.size - 1 - anchor, items, 1, scratch.pending)
    free = True
    for index in range(size):
        free &= not taken[items[index]]
    if free:
        lengths, copies = state.lengths[column], state.copies[column]
        distinct = 0
        for index in range(size):
            item = items[index]
            entry = 0
            while entry < distinct and lengths[entry] != item:
                entry += 1
            if entry == distinct:
                lengths[entry] = item
                copies[entry] = 0.0
                distinct += 1
            copies[entry] += 1.0
            taken[item] = True
        state.distinct[column] = distinct
        state.usage[column] = 0.0
    return free


@inlined_kernel
def _append_passive_column(
    counts: FloatArray, squared_weights: FloatArray, state: _ActiveSet, scratch: _Scratch, size: int
) -> bool:
    """Extend the factor by the column written behind the `size` passive ones; False if it depends on them."""
    weighted, products = scratch.weighted, scratch.products
    for length in range(weighted.size):
        weighted[length] = 0.0
    diagonal, moment = 0.0, 0.0
    for entry in range(state.distinct[size]):
        length, copies = state.lengths[size, entry], state.copies[size, entry]
        weighted[length] = squared_weights[length] * copies
        diagonal += copies * weighted[length]
        moment += weighted[length] * counts[length]
    state.operations[0] += 0.5 * size * size
    for other in range(size):
        product = 0.0
        for entry in range(state.distinct[other]):
            product += state.copies[other, entry] * weighted[state.lengths[other, entry]]
        products[other] = product
    return _append_factor_column(state.factor, size, products, diagonal, state.projected, moment)


@inner_kernel
def _restore_feasibility(state: _ActiveSet, scratch: FloatArray, size: int) -> int:
    """Lawson and Hanson's inner loop: step towards the unconstrained optimum, dropping columns that reach zero."""
    usage, solution = state.usage, state.solution
    blocking = 0
    while size > 0 and blocking >= 0:
        state.operations[0] += 0.5 * size * size
        _substitute_backward(state.factor, size, state.projected, solution)
        step, blocking = 1.0, -1
        for column in range(size):
            if solution[column] <= 0.0:
                reach = usage[column] / (usage[column] - solution[column]) if usage[column] > 0.0 else 0.0
                if blocking < 0 or reach < step:
                    step, blocking = reach, column
        if blocking < 0:
            for column in range(size):
                usage[column] = solution[column]
        else:
            for column in range(size):
                usage[column] += step * (solution[column] - usage[column])
            usage[blocking] = 0.0
            for column in range(size - 1, -1, -1):
                if solution[column] <= 0.0 and usage[column] <= 1e-15:
                    state.operations[0] += 1.5 * (size - column) * (size - column)
                    _remove_factor_column(state.factor, size, column, state.projected, scratch)
                    size -= 1
                    _close_column_gap(state, column, size)
    return size


@inner_kernel
def _close_column_gap(state: _ActiveSet, first: int, size: int) -> None:
    """Move the columns behind `first` one position down; `size` of them remain."""
    for column in range(first, size):
        state.usage[column] = state.usage[column + 1]
        state.solution[column] = state.solution[column + 1]
        distinct = state.distinct[column + 1]
        state.distinct[column] = distinct
        for entry in range(distinct):
            state.lengths[column, entry] = state.lengths[column + 1, entry]
            state.copies[column, entry] = state.copies[column + 1, entry]


@inner_kernel
def _update_residual(
    counts: FloatArray, squared_weights: FloatArray, state: _ActiveSet, size: int, residual: FloatArray
) -> float:
    """residual = counts - A x from scratch, so that no error builds up; returns its weighted square."""
    for length in range(counts.size):
        residual[length] = counts[length]
    for column in range(size):
        for entry in range(state.distinct[column]):
            residual[state.lengths[column, entry]] -= state.copies[column, entry] * state.usage[column]
    total = 0.0
    for length in range(counts.size):
        total += squared_weights[length] * residual[length] * residual[length]
    return total


# --- an upper triangular factor R with R^T R = G that follows as columns enter and leave the active set
#
# Appending a column costs one forward substitution; removing one shifts the later columns and restores the triangle with
# Givens rotations (Golub and Van Loan, Matrix Computations, section 6.5). All loops run along rows of R, which are
# contiguous. The right-hand side is stored as `projected` = R^-T g, so that the solution of G x = g is always one back
# substitution away. Innermost loops that vectors speed up are kernels on slices: LLVM then knows that no index is negative.
# Elsewhere slices are avoided: one compiles for as long as four elements.

SMALLEST_PIVOT = 1e-11
"""A column is called dependent when less than this share of its squared norm is new."""


@inlined_kernel
def _append_factor_column(
    factor: FloatArray, size: int, products: FloatArray, diagonal: float, projected: FloatArray, moment: float
) -> bool:
    """Extend the factor, in use up to [size, size], by one column; False (and no change) if it depends on those there.

    `products` are those with the columns there, and overwritten; `diagonal` is the one with itself, `moment` its entry of g,
    `projected` R^-T g.
    """
    _substitute_forward(factor, size, products)
    new_share = diagonal
    remainder = moment
    for row in range(size):
        new_share -= products[row] * products[row]
        remainder -= products[row] * projected[row]
    independent = new_share >= SMALLEST_PIVOT * diagonal
    if independent:
        pivot = np.sqrt(new_share)
        for row in range(size):
            factor[row, size] = products[row]
        factor[size, size] = pivot
        projected[size] = remainder / pivot
    return independent


@inner_kernel
def _substitute_forward(factor: FloatArray, size: int, values: FloatArray) -> None:
    """values[:size] = R^-T values[:size], four rows of R at a time, to read and write `values` less often."""
    for first in range(0, size, 4):
        end = min(first + 4, size)
        for row in range(first, end):
            value = values[row] / factor[row, row]
            values[row] = value
            for column in range(row + 1, end):
                values[column] -= value * factor[row, column]
        if end < size:
            _subtract_rows(
                values[end:size],
                factor[first, end:size],
                factor[first + 1, end:size],
                factor[first + 2, end:size],
                factor[first + 3, end:size],
                values[first:end],
            )


@inner_kernel
def _subtract_rows(
    values: FloatArray, first: FloatArray, second: FloatArray, third: FloatArray, fourth: FloatArray, factors: FloatArray
) -> None:
    one, two, three, four = factors[0], factors[1], factors[2], factors[3]
    for column in range(values.size):
        values[column] -= one * first[column] + two * second[column] + three * third[column] + four * fourth[column]


@inlined_kernel
def _remove_factor_column(factor: FloatArray, size: int, gone: int, projected: FloatArray, carried: FloatArray) -> None:
    """Take column `gone` out of the leading [size, size] block; `carried` is scratch, float64 [>= size]."""
    for row in range(gone):
        _shift_left(factor[row, gone:size])
    last = size - 1
    for column in range(gone, last):
        carried[column] = factor[gone, column + 1]
    carried_projection = projected[gone]
    for row in range(gone, last):
        pivot = factor[row + 1, row + 1]
        scale = 1.0 / np.sqrt(carried[row] * carried[row] + pivot * pivot)
        cosine, sine = carried[row] * scale, pivot * scale
        _rotate(factor[row, row:last], carried[row:last], factor[row + 1, row + 1 : size], cosine, sine)
        lower_projection = projected[row + 1]
        projected[row] = cosine * carried_projection + sine * lower_projection
        carried_projection = cosine * lower_projection - sine * carried_projection


@inner_kernel
def _shift_left(values: FloatArray) -> None:
    for column in range(values.size - 1):
        values[column] = values[column + 1]


@inner_kernel
def _rotate(result: FloatArray, carried: FloatArray, lower: FloatArray, cosine: float, sine: float) -> None:
    """result, carried = (cosine carried + sine lower), (cosine lower - sine carried)."""
    for column in range(result.size):
        upper, below = carried[column], lower[column]
        result[column] = cosine * upper + sine * below
        carried[column] = cosine * below - sine * upper


@inlined_kernel
def _substitute_backward(factor: FloatArray, size: int, projected: FloatArray, solution: FloatArray) -> None:
    """Back substitution: solution[:size] = R^-1 projected[:size], four rows of R at a time, the last ones alone."""
    whole = size - size % 4
    for row in range(size - 1, whole - 1, -1):
        total = 0.0
        for column in range(row + 1, size):
            total += factor[row, column] * solution[column]
        solution[row] = (projected[row] - total) / factor[row, row]
    for first in range(whole - 4, -1, -4):
        one = two = three = four = 0.0
        for column in range(first + 4, size):
            value = solution[column]
            one += factor[first, column] * value
            two += factor[first + 1, column] * value
            three += factor[first + 2, column] * value
            four += factor[first + 3, column] * value
        solution[first], solution[first + 1], solution[first + 2], solution[first + 3] = one, two, three, four
        for row in range(first + 3, first - 1, -1):
            value = projected[row] - solution[row]
            for column in range(first + 3, row, -1):
                value -= factor[row, column] * solution[column]
            solution[row] = value / factor[row, row]
