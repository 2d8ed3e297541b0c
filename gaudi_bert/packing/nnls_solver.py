"""A solver for weighted non-negative least squares over all strategies up to a depth, which are never listed.

The packing problem of the paper (3.1.2, F.4.3) is: find usages x >= 0 of the strategies that fill a pack exactly, such that
|| w (A x - b) || is minimal. Here b are the counts per length, and column p of A counts the lengths in strategy p.

It is solved by the active-set method of Lawson and Hanson (1974, chapter 23). The gradient of a column is the sum of the
prices w^2 (b - A x) of its lengths. Therefore the best column is found by a max-plus knapsack (`knapsack`), and A is never
built. The normal equations of the passive columns are kept as a Cholesky factor, which is updated as columns enter and
leave. Several columns without common lengths enter in one round. Objective and residual are unique; x is not, because
columns are linearly dependent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BoolArray, FloatArray, IntArray
from gaudi_bert.common.compiled import inlined_kernel, kernel_without_python_wrapper, kernel_without_refcounts
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.knapsack import (
    MINUS_INFINITY,
    OPERATIONS_PER_PRODUCT,
    backtrack_best_lengths,
    compiled_fill_table_with_max_plus_powers,
    list_factor_rows_for_power,
)
from gaudi_bert.packing.strategies import OperationBudget

# The maximum number of tokens in a pack for the least-squares solver. With one row per length, the Cholesky factor would
# become too large for longer packs.
MAX_NNLS_LENGTH = 4096

GRADIENT_TOLERANCE = 1e-12  # a column may enter if its gradient exceeds this fraction of the largest w^2 b
STALLED_ROUNDS = 20  # after this many rounds without progress, only rounding errors remain and the solver stops
ADDITIONS = 2  # columns that may enter in one round; more would save pricing but cost exchanges
DEEPER = 1  # packs may be this many sequences deeper than the mean; deeper packs are hardly ever needed and cost time


@dataclass(frozen=True)
class _NnlsSolution:
    """A solution of the weighted non-negative least-squares problem. It contains the combinations of lengths in use, the
    number of packs of each, and the residual of each length.
    """

    strategies: list[tuple[int, ...]]  # the passive columns: ascending lengths that add up to L
    usage: FloatArray  # float64 [strategies], x of each strategy, > 0
    residual: FloatArray  # float64 [L], counts - A x
    objective: float  # || w (A x - b) ||


class _ActiveSet(NamedTuple):
    """The passive columns of the active-set method, which are the variables that may be positive, and their Cholesky factor.
    There is room for K columns with at most W distinct lengths each.
    """

    lengths: IntArray  # int64 [K, W]
    copies: FloatArray  # float64 [K, W], how often each column contains each of its lengths
    distinct: IntArray  # int64 [K], how many entries of each row are in use
    usage: FloatArray  # float64 [K], x
    solution: FloatArray  # float64 [K], the unconstrained optimum of the passive columns
    factor: FloatArray  # float64 [K, K], the upper triangular factor R
    projected: FloatArray  # float64 [K], R^-T g
    operations: FloatArray  # float64 [1], operations done so far


class _Scratch(NamedTuple):
    """Scratch arrays of the least-squares solver, which are reused in every round. They are allocated in advance because
    compiled functions without allocations compile faster.
    """

    table: FloatArray  # float64 [products + 1, L + 1], prices and their max-plus powers
    every_length: IntArray  # int64 [L], 1 .. L
    values: FloatArray  # float64 [L + 1], the gradient of the best column that contains each length
    weighted: FloatArray  # float64 [L + 1], an entering column times the squared weights
    products: FloatArray  # float64 [K], products of an entering or leaving column with the passive ones
    taken: BoolArray  # bool [L + 1], lengths of the columns that entered in this round
    items: IntArray  # int64 [L + 2], an entering column
    stack: IntArray  # int64, for `backtrack_best_lengths`


def solve_nnls(
    target: AnyArray,
    weights: FloatArray,
    depth: int,
    *,
    max_rounds: int | None = None,
    budget: OperationBudget | None = None,
) -> _NnlsSolution:
    """Minimize || weights (A x - target) || over x >= 0. Each column of A is a combination of at most `depth` lengths that
    fills a pack exactly. The variable of the column in x is the number of such packs.

    Args:
        target: counts per length, [L], of any numeric dtype.
        weights: float64 [L], positive.
        depth: the maximum number of lengths per strategy; L or more limits nothing.
        max_rounds: the maximum number of pricing rounds, or None for no limit.
        budget: the operation budget, or None for no limit.

    Returns:
        The optimum, or the best solution so far if a limit was reached.

    Raises:
        InputError: L is more than `MAX_NNLS_LENGTH`.
    """
    max_length = len(target)
    if max_length > MAX_NNLS_LENGTH:
        raise InputError(
            f"this algorithm supports packs of at most {MAX_NNLS_LENGTH} tokens, but these packs have {max_length}; use "
            "nnls or optimal"
        )
    budget = OperationBudget() if budget is None else budget
    depth = max(1, min(depth, max_length))
    scale = max(float(np.max(target, initial=0)), 1.0)
    counts = np.concatenate(([0.0], np.asarray(target, dtype=np.float64) / scale))
    squared_weights = np.concatenate(([0.0], np.asarray(weights, dtype=np.float64) ** 2))
    factor_rows = list_factor_rows_for_power(depth - 1, max_length)
    capacity, width = max_length + 8, min(depth, int(np.sqrt(2 * max_length)) + 2)
    active_set = _ActiveSet(
        lengths=np.zeros((capacity, width), dtype=np.int64),
        copies=np.zeros((capacity, width)),
        distinct=np.zeros(capacity, dtype=np.int64),
        usage=np.zeros(capacity),
        solution=np.zeros(capacity),
        factor=np.zeros((capacity, capacity)),
        projected=np.zeros(capacity),
        operations=np.zeros(1),
    )
    scratch = _Scratch(
        table=np.empty((len(factor_rows) + 1, max_length + 1)),
        every_length=np.arange(1, max_length + 1),
        values=np.empty(max_length + 1),
        weighted=np.empty(max_length + 1),
        products=np.zeros(capacity),
        taken=np.empty(max_length + 1, dtype=np.bool_),
        items=np.empty(max_length + 2, dtype=np.int64),
        stack=np.empty(2 * (max_length + len(factor_rows) + 5), dtype=np.int64),
    )
    residual = np.empty(max_length + 1)
    limits = np.iinfo(np.int64).max if max_rounds is None else max_rounds, max(budget.remaining, 0.0)
    size = _run_active_set_method(counts, squared_weights, factor_rows, active_set, scratch, residual, *limits)
    budget.spend(float(active_set.operations[0]))
    strategies = [
        tuple(np.sort(np.repeat(lengths[:distinct], copies[:distinct].astype(np.int64))).tolist())
        for lengths, copies, distinct in zip(active_set.lengths, active_set.copies, active_set.distinct[:size], strict=False)
    ]
    objective = scale * float(np.sqrt(np.sum(squared_weights * residual**2)))
    return _NnlsSolution(strategies, active_set.usage[:size] * scale, residual[1:] * scale, objective)


def limit_depth_near_mean(length_counts: IntArray, min_packs: float, max_depth: int) -> int:
    """Return a limit on the number of sequences per pack that makes the least-squares solver faster. It is slightly above
    the mean number of sequences per pack, but at most `max_depth`.

    Args:
        length_counts: the number of sequences of each length.
        min_packs: a proven lower bound on the number of packs.
        max_depth: the maximum number of sequences per pack.
    """
    return min(max_depth, int(np.ceil(length_counts.sum() / max(min_packs, 1))) + DEEPER)


@kernel_without_refcounts
def _run_active_set_method(
    counts: FloatArray,
    squared_weights: FloatArray,
    factor_rows: IntArray,
    active_set: _ActiveSet,
    scratch: _Scratch,
    residual: FloatArray,
    max_rounds: int,
    max_operations: float,
) -> int:
    """Solve the least-squares problem by the active-set method of Lawson and Hanson, until it converges or reaches a limit.
    Return the number of passive columns, which are the variables that may be positive.

    `residual` [L + 1] is overwritten with b - A x.
    """
    top = counts.size - 1
    prices, values = scratch.table[0], scratch.values
    largest = 0.0
    for length in range(top + 1):
        largest = max(largest, squared_weights[length] * counts[length])
    threshold = GRADIENT_TOLERANCE * largest
    size, rounds, stalled = 0, 0, 0
    objective = np.inf
    while True:
        improved = _recompute_residual(counts, squared_weights, active_set, size, residual)
        if rounds > 0:
            stalled = 0 if improved < objective * (1.0 - 1e-15) else stalled + 1
        objective = min(objective, improved)
        if stalled >= STALLED_ROUNDS or rounds >= max_rounds or active_set.operations[0] >= max_operations:
            break
        rounds += 1
        active_set.operations[0] += OPERATIONS_PER_PRODUCT * factor_rows.shape[0] * top * top
        for length in range(top + 1):
            prices[length] = squared_weights[length] * residual[length]
        completion = compiled_fill_table_with_max_plus_powers(factor_rows, scratch.table, scratch.every_length)
        for length in range(1, top + 1):
            values[length] = prices[length] + completion[top - length]
        entered = _append_largest_gradient_columns(
            threshold, factor_rows, counts, squared_weights, active_set, scratch, size
        )
        if entered == size:
            break
        size = _remove_infeasible_columns(active_set, scratch.products, entered)
    return size


@kernel_without_python_wrapper
def _append_largest_gradient_columns(
    min_gradient: float,
    factor_rows: IntArray,
    counts: FloatArray,
    squared_weights: FloatArray,
    active_set: _ActiveSet,
    scratch: _Scratch,
    column_count: int,
) -> int:
    """Add the columns with the largest gradients to the passive set of the active-set method, and return the new number of
    columns. No two of the added columns contain the same length.
    """
    limit = min(column_count + ADDITIONS, active_set.usage.size - 1)
    values, taken = scratch.values, scratch.taken
    for length in range(taken.size):
        taken[length] = False
    values[0] = MINUS_INFINITY
    while column_count < limit:
        required_length = 0
        for length in range(1, values.size):
            if values[length] > values[required_length]:
                required_length = length
        if values[required_length] <= min_gradient:
            break
        values[required_length] = MINUS_INFINITY
        if _try_write_largest_gradient_column(
            required_length, factor_rows, active_set, scratch, column_count
        ) and _append_passive_column(counts, squared_weights, active_set, scratch, column_count):
            column_count += 1
    return column_count


@inlined_kernel
def _try_write_largest_gradient_column(
    required_length: int, factor_rows: IntArray, active_set: _ActiveSet, scratch: _Scratch, column_index: int
) -> bool:
    """Among the columns that contain `required_length`, find the one with the largest gradient. If none of its lengths is
    taken yet, write the column to the active set, and mark its lengths as taken. Return whether it was written.

    A column is a combination of lengths that fills a pack.
    """
    items, taken = scratch.items, scratch.taken
    items[0] = required_length
    size = backtrack_best_lengths(factor_rows, scratch.table, taken.size - 1 - required_length, items, 1, scratch.stack)
    is_free = True
    for index in range(size):
        is_free &= not taken[items[index]]
    if is_free:
        lengths, copies = active_set.lengths[column_index], active_set.copies[column_index]
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
        active_set.distinct[column_index] = distinct
        active_set.usage[column_index] = 0.0
    return is_free


@inlined_kernel
def _append_passive_column(
    counts: FloatArray, squared_weights: FloatArray, active_set: _ActiveSet, scratch: _Scratch, size: int
) -> bool:
    """Add a newly written column to the passive set by extending the Cholesky factor of the normal equations. Return False
    if the column is linearly dependent on the others.
    """
    weighted, products = scratch.weighted, scratch.products
    for length in range(weighted.size):
        weighted[length] = 0.0
    diagonal, moment = 0.0, 0.0
    for entry in range(active_set.distinct[size]):
        length, copies = active_set.lengths[size, entry], active_set.copies[size, entry]
        weighted[length] = squared_weights[length] * copies
        diagonal += copies * weighted[length]
        moment += weighted[length] * counts[length]
    active_set.operations[0] += 0.5 * size * size
    for other in range(size):
        product = 0.0
        for entry in range(active_set.distinct[other]):
            product += active_set.copies[other, entry] * weighted[active_set.lengths[other, entry]]
        products[other] = product
    return _append_cholesky_column(active_set.factor, size, products, diagonal, active_set.projected, moment)


@kernel_without_python_wrapper
def _remove_infeasible_columns(active_set: _ActiveSet, scratch: FloatArray, size: int) -> int:
    """Move the solution towards the unconstrained optimum of the passive columns, and remove columns that reach zero on the
    way. Return how many columns remain.

    The method is the inner loop of Lawson and Hanson.
    """
    usage, solution = active_set.usage, active_set.solution
    blocking = 0
    while size > 0 and blocking >= 0:
        active_set.operations[0] += 0.5 * size * size
        _substitute_backward(active_set.factor, size, active_set.projected, solution)
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
                    active_set.operations[0] += 1.5 * (size - column) * (size - column)
                    _remove_cholesky_column(active_set.factor, size, column, active_set.projected, scratch)
                    size -= 1
                    _shift_columns_down(active_set, column, size)
    return size


@kernel_without_python_wrapper
def _shift_columns_down(active_set: _ActiveSet, first: int, size: int) -> None:
    """Remove column `first` from the active set by moving all later columns down by one, which leaves `size` columns."""
    for column in range(first, size):
        active_set.usage[column] = active_set.usage[column + 1]
        active_set.solution[column] = active_set.solution[column + 1]
        distinct = active_set.distinct[column + 1]
        active_set.distinct[column] = distinct
        for entry in range(distinct):
            active_set.lengths[column, entry] = active_set.lengths[column + 1, entry]
            active_set.copies[column, entry] = active_set.copies[column + 1, entry]


@kernel_without_python_wrapper
def _recompute_residual(
    counts: FloatArray, squared_weights: FloatArray, active_set: _ActiveSet, size: int, residual: FloatArray
) -> float:
    """Compute the least-squares residual, counts - A x, from scratch, because updates would accumulate rounding errors.
    Return its weighted sum of squares.
    """
    for length in range(counts.size):
        residual[length] = counts[length]
    for column in range(size):
        for entry in range(active_set.distinct[column]):
            residual[active_set.lengths[column, entry]] -= active_set.copies[column, entry] * active_set.usage[column]
    total = 0.0
    for length in range(counts.size):
        total += squared_weights[length] * residual[length] * residual[length]
    return total


# --- an upper triangular factor R with R^T R = G, updated as columns enter and leave the active set
#
# Appending a column takes one forward substitution. Removing a column shifts the later columns, and Givens rotations make
# the factor triangular again (Golub and Van Loan, Matrix Computations, section 6.5). All loops run along rows of R, which
# are contiguous. The right-hand side is stored as `projected` = R^-T g, so that solving G x = g takes a single back
# substitution.
#
# LLVM vectorizes a loop only if it knows that no index is negative, so the innermost loops are separate kernels on slices.
# Elsewhere slices are avoided, because each takes as long to compile as four element accesses.

# A column of the least-squares problem counts as linearly dependent if less than this fraction of its squared norm is
# independent of the other columns.
SMALLEST_PIVOT = 1e-11


@inlined_kernel
def _append_cholesky_column(
    factor: FloatArray, size: int, products: FloatArray, diagonal: float, projected: FloatArray, moment: float
) -> bool:
    """Extend the Cholesky factor, which is the leading [size, size] block of `factor`, by one column. Return False if the
    new column is linearly dependent on the others.

    Args:
        factor: R, float64 [K, K].
        size: columns in use.
        products: products of the new column with the columns in use; overwritten.
        diagonal: the product of the new column with itself.
        projected: R^-T g, float64 [K], extended by one element.
        moment: the new element of g.
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


@kernel_without_python_wrapper
def _substitute_forward(factor: FloatArray, size: int, values: FloatArray) -> None:
    """Solve R^T y = values[:size] by forward substitution, where R is the upper triangular Cholesky factor. Overwrite the
    values with y.

    Four rows of R are handled at a time, which saves memory accesses.
    """
    for first in range(0, size, 4):
        end = min(first + 4, size)
        for row in range(first, end):
            value = values[row] / factor[row, row]
            values[row] = value
            for column in range(row + 1, end):
                values[column] -= value * factor[row, column]
        if end < size:
            _subtract_four_scaled_rows(
                values[end:size],
                factor[first, end:size],
                factor[first + 1, end:size],
                factor[first + 2, end:size],
                factor[first + 3, end:size],
                values[first:end],
            )


@kernel_without_python_wrapper
def _subtract_four_scaled_rows(
    values: FloatArray, first: FloatArray, second: FloatArray, third: FloatArray, fourth: FloatArray, factors: FloatArray
) -> None:
    """Subtract four rows from `values`, each multiplied by its factor."""
    one, two, three, four = factors[0], factors[1], factors[2], factors[3]
    for column in range(values.size):
        values[column] -= one * first[column] + two * second[column] + three * third[column] + four * fourth[column]


@inlined_kernel
def _remove_cholesky_column(factor: FloatArray, size: int, removed: int, projected: FloatArray, carried: FloatArray) -> None:
    """Remove a column from the Cholesky factor, which is the leading [size, size] block of `factor`. The array `carried` is
    scratch space for at least `size` elements.
    """
    for row in range(removed):
        _shift_left(factor[row, removed:size])
    last = size - 1
    for column in range(removed, last):
        carried[column] = factor[removed, column + 1]
    carried_projection = projected[removed]
    for row in range(removed, last):
        pivot = factor[row + 1, row + 1]
        scale = 1.0 / np.sqrt(carried[row] * carried[row] + pivot * pivot)
        cosine, sine = carried[row] * scale, pivot * scale
        _apply_givens_rotation(factor[row, row:last], carried[row:last], factor[row + 1, row + 1 : size], cosine, sine)
        lower_projection = projected[row + 1]
        projected[row] = cosine * carried_projection + sine * lower_projection
        carried_projection = cosine * lower_projection - sine * carried_projection


@kernel_without_python_wrapper
def _shift_left(values: FloatArray) -> None:
    """Move every element to the previous position, which overwrites the first element. The last element stays as it is."""
    for column in range(values.size - 1):
        values[column] = values[column + 1]


@kernel_without_python_wrapper
def _apply_givens_rotation(result: FloatArray, carried: FloatArray, lower: FloatArray, cosine: float, sine: float) -> None:
    """Apply a Givens rotation: result = cosine * carried + sine * lower, carried = cosine * lower - sine * carried."""
    for column in range(result.size):
        upper, below = carried[column], lower[column]
        result[column] = cosine * upper + sine * below
        carried[column] = cosine * below - sine * upper


@inlined_kernel
def _substitute_backward(factor: FloatArray, size: int, projected: FloatArray, solution: FloatArray) -> None:
    """Solve R x = projected[:size] by back substitution, where R is the upper triangular Cholesky factor. Write x to
    `solution`.

    The last size % 4 rows are handled first, and the others four at a time.
    """
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
