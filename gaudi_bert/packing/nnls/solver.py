"""Weighted non-negative least squares over all strategies of a depth, without ever listing the strategies.

The packing problem of the paper (section 3.1.2, F.4.3): find usages x >= 0 of the strategies that add up to
exactly the maximum sequence length such that  || w (A x - b) ||  is least, where b are the counts per length
and column p of A holds the lengths of strategy p. Solved by the active-set method of Lawson and Hanson (1974,
chapter 23), using the structure of A:

- the gradient of a column is the sum of its lengths' prices w^2 (b - A x), so the best column is a max-plus
  knapsack (`pricing`) and the matrix, whose columns number s^2 / 12 at depth 3 and explode beyond, is never
  built;
- a product of two columns needs their few lengths only;
- the normal equations of the passive columns are kept as a Cholesky factor that is updated and downdated
  (`cholesky`);
- several columns with disjoint lengths enter in one round, which saves rounds.

Objective and residual are unique; x is not, because columns are linearly dependent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BoolArray, FloatArray, IntArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.nnls.cholesky import append_column, remove_column, solve_factor
from gaudi_bert.packing.pricing import MINUS_INFINITY, completion_values, power_chain, unwind
from gaudi_bert.packing.work import Work

__all__ = ["LONGEST_WHOLE", "NnlsSolution", "solve_nnls", "useful_depth"]

LONGEST_WHOLE = 4096
"""Packs of more tokens are not solved length by length: the factor has that many rows and columns."""

GRADIENT_TOLERANCE = 1e-12
"""A column may enter if its gradient exceeds this share of the largest w^2 b."""

OPERATIONS_PER_PRODUCT = 0.2
"""Of a max-plus product, for each pair of totals."""

STALLED_ROUNDS = 20
"""Rounds without any gain after which rounding errors are taken to be all that is left."""


DEEPER = 1
"""Sequences by which packs may be deeper than the mean; deeper ones are hardly ever needed, and cost time."""


@dataclass(frozen=True)
class NnlsSolution:
    """What `solve_nnls` found.

    Attributes:
        strategies: the passive columns, each a tuple of ascending lengths that add up to the maximum sequence length.
        usage: float64 [strategies], how often each is used, > 0.
        residual: float64 [L], counts - A x per length (index 0 is length 1).
        objective: the weighted residual norm.
        rounds: pricing rounds that were needed.
    """

    strategies: list[tuple[int, ...]]
    usage: FloatArray
    residual: FloatArray
    objective: float
    rounds: int


class ActiveSet(NamedTuple):
    """The passive columns and their factor; K columns of at most W distinct lengths fit."""

    lengths: IntArray  # int64 [K, W]
    copies: FloatArray  # float64 [K, W], how often the column holds each of its lengths
    distinct: IntArray  # int64 [K], entries of a row that are in use
    usage: FloatArray  # float64 [K], x
    solution: FloatArray  # float64 [K], the unconstrained optimum of the passive columns
    factor: FloatArray  # float64 [K, K]
    projected: FloatArray  # float64 [K]
    scratch: FloatArray  # float64 [K]
    operations: FloatArray  # float64 [1], what was done so far


def solve_nnls(
    target: AnyArray,
    weights: FloatArray,
    depth: int,
    *,
    additions: int = 2,
    max_rounds: int | None = None,
    work: Work | None = None,
) -> NnlsSolution:
    """Solve  min || weights (A x - target) ||, x >= 0,  over all strategies of at most `depth` lengths that
    fill L slots exactly.

    Args:
        target: counts per length, [L] (index 0 is length 1), any numeric dtype.
        weights: float64 [L], positive residual weights.
        depth: most sequences in a pack, >= 1; L or more means no limit.
        additions: columns that may enter in one round; more of them save pricing and cost exchanges.
        max_rounds: stop after so many rounds, short of the optimum; None for no limit.
        work: what may be done before it stops short of the optimum; None for no limit.

    Raises:
        InputError: more than `LONGEST_WHOLE` tokens per pack.
    """
    max_length = len(target)
    if max_length > LONGEST_WHOLE:
        raise InputError(
            f"least squares takes packs of at most {LONGEST_WHOLE} tokens, not {max_length}; use nnls or optimal"
        )
    work = Work() if work is None else work
    depth = max(1, min(depth, max_length))
    scale = max(float(np.max(target, initial=0)), 1.0)
    counts = np.concatenate(([0.0], np.asarray(target, dtype=np.float64) / scale))
    squared_weights = np.concatenate(([0.0], np.asarray(weights, dtype=np.float64) ** 2))
    state = _empty_set(max_length, depth)
    chain = power_chain(depth - 1, max_length)
    most_rounds = np.iinfo(np.int64).max if max_rounds is None else max_rounds
    size, rounds, residual = _run(counts, squared_weights, chain, state, additions, most_rounds, max(work.left, 0.0))
    work.spend(float(state.operations[0]))
    strategies = [_strategy(state, column) for column in range(size)]
    objective = scale * float(np.sqrt(np.sum(squared_weights * residual**2)))
    return NnlsSolution(strategies, state.usage[:size] * scale, residual[1:] * scale, objective, int(rounds))


def useful_depth(counts: IntArray, packs: float, depth: int) -> int:
    """The depth to solve for, at most `depth`, where `counts` are known to need at least so many packs."""
    return min(depth, int(np.ceil(counts.sum() / max(packs, 1))) + DEEPER)


def _empty_set(max_length: int, depth: int) -> ActiveSet:
    capacity = max_length + 8
    width = min(depth, int(np.sqrt(2 * max_length)) + 2)
    return ActiveSet(
        lengths=np.zeros((capacity, width), dtype=np.int64),
        copies=np.zeros((capacity, width)),
        distinct=np.zeros(capacity, dtype=np.int64),
        usage=np.zeros(capacity),
        solution=np.zeros(capacity),
        factor=np.zeros((capacity, capacity)),
        projected=np.zeros(capacity),
        scratch=np.zeros(capacity),
        operations=np.zeros(1),
    )


def _strategy(state: ActiveSet, column: int) -> tuple[int, ...]:
    distinct = state.distinct[column]
    items = np.repeat(state.lengths[column, :distinct], state.copies[column, :distinct].astype(np.int64))
    return tuple(np.sort(items).tolist())


@kernel
def _run(
    counts: FloatArray,
    squared_weights: FloatArray,
    chain: IntArray,
    state: ActiveSet,
    additions: int,
    max_rounds: int,
    most_operations: float,
) -> tuple[int, int, FloatArray]:
    """The outer loop: price, let columns enter, restore feasibility. Returns (columns, rounds, residual [L + 1])."""
    top = counts.size - 1
    table = np.zeros((chain.shape[0] + 1, top + 1))
    values = np.zeros(top + 1)
    threshold = GRADIENT_TOLERANCE * np.max(squared_weights * counts)
    residual = counts.copy()
    size, rounds, stalled = 0, 0, 0
    objective = np.sum(squared_weights * residual * residual)
    while stalled < STALLED_ROUNDS and rounds < max_rounds and state.operations[0] < most_operations:
        rounds += 1
        state.operations[0] += OPERATIONS_PER_PRODUCT * chain.shape[0] * top * top
        prices = squared_weights * residual
        completion = completion_values(chain, prices, table)
        for length in range(1, top + 1):
            values[length] = prices[length] + completion[top - length]
        entered = _enter_columns(values, threshold, chain, table, counts, squared_weights, state, size, additions)
        if entered == size:
            break
        size = _restore_feasibility(state, entered)
        _update_residual(counts, state, size, residual)
        improved = np.sum(squared_weights * residual * residual)
        stalled = 0 if improved < objective * (1.0 - 1e-15) else stalled + 1
        objective = min(objective, improved)
    return size, rounds, residual


@kernel
def _enter_columns(
    values: FloatArray,
    threshold: float,
    chain: IntArray,
    table: FloatArray,
    counts: FloatArray,
    squared_weights: FloatArray,
    state: ActiveSet,
    size: int,
    additions: int,
) -> int:
    """Append the best columns with disjoint lengths, dearest first; returns the new number of columns."""
    limit = min(size + additions, state.usage.size - 1)
    taken = np.zeros(values.size, dtype=np.bool_)
    values[0] = MINUS_INFINITY
    while size < limit:
        anchor = int(np.argmax(values))
        if values[anchor] <= threshold:
            break
        values[anchor] = MINUS_INFINITY
        if _choose(anchor, chain, table, taken, state, size) and _append(counts, squared_weights, state, size):
            size += 1
    return size


@kernel
def _choose(anchor: int, chain: IntArray, table: FloatArray, taken: BoolArray, state: ActiveSet, column: int) -> bool:
    """Write the best strategy that holds `anchor` as `column`, unless one of its lengths is taken; then its
    lengths are.
    """
    top = table.shape[1] - 1
    items = np.empty(top + 2, dtype=np.int64)
    items[0] = anchor
    found = unwind(chain, table, top - anchor, items, 1)
    for item in items[:found]:
        if taken[item]:
            return False
    distinct = 0
    for item in items[:found]:
        entry = 0
        while entry < distinct and state.lengths[column, entry] != item:
            entry += 1
        if entry == distinct:
            state.lengths[column, entry] = item
            state.copies[column, entry] = 0.0
            distinct += 1
        state.copies[column, entry] += 1.0
        taken[item] = True
    state.distinct[column] = distinct
    state.usage[column] = 0.0
    return True


@kernel
def _append(counts: FloatArray, squared_weights: FloatArray, state: ActiveSet, size: int) -> bool:
    """Extend the factor by the column written behind the `size` passive ones; False if it depends on them."""
    weighted = np.zeros(squared_weights.size)
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
        state.scratch[other] = product
    return append_column(state.factor, size, state.scratch, diagonal, state.projected, moment)


@kernel
def _move(state: ActiveSet, source: int, target: int) -> None:
    """Copy a column's lengths and usage to another place."""
    distinct = state.distinct[source]
    state.distinct[target] = distinct
    state.usage[target] = state.usage[source]
    state.solution[target] = state.solution[source]
    for entry in range(distinct):
        state.lengths[target, entry] = state.lengths[source, entry]
        state.copies[target, entry] = state.copies[source, entry]


@kernel
def _restore_feasibility(state: ActiveSet, size: int) -> int:
    """Lawson and Hanson's inner loop: step towards the unconstrained optimum, dropping columns that reach zero."""
    usage, solution = state.usage, state.solution
    while size > 0:
        state.operations[0] += 0.5 * size * size
        solve_factor(state.factor, size, state.projected, solution)
        step, blocking = 1.0, -1
        for column in range(size):
            if solution[column] <= 0.0:
                reach = usage[column] / (usage[column] - solution[column]) if usage[column] > 0.0 else 0.0
                if blocking < 0 or reach < step:
                    step, blocking = reach, column
        if blocking < 0:
            usage[:size] = solution[:size]
            return size
        for column in range(size):
            usage[column] += step * (solution[column] - usage[column])
        usage[blocking] = 0.0
        for column in range(size - 1, -1, -1):
            if solution[column] <= 0.0 and usage[column] <= 1e-15:
                _drop(state, size, column)
                size -= 1
    return size


@kernel
def _drop(state: ActiveSet, size: int, gone: int) -> None:
    state.operations[0] += 1.5 * (size - gone) * (size - gone)
    remove_column(state.factor, size, gone, state.projected, state.scratch)
    for column in range(gone, size - 1):
        _move(state, column + 1, column)


@kernel
def _update_residual(counts: FloatArray, state: ActiveSet, size: int, residual: FloatArray) -> None:
    """residual = counts - A x from scratch, so that no error builds up."""
    residual[:] = counts
    for column in range(size):
        for entry in range(state.distinct[column]):
            residual[state.lengths[column, entry]] -= state.copies[column, entry] * state.usage[column]
