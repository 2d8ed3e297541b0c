"""Packing algorithms based on non-negative least squares (NNLS): NNLSHP and ENNLSHP of the paper, and the iterative `nnls`.

All of them find usages x >= 0 of the strategies that fill a pack exactly, such that the weighted norm || w (A x - b) || is
minimal, where b are the counts. The solver (`nnls_solver`) never lists the strategies, so any depth works. Then x is rounded
to integers, in a different way by each algorithm.

In all functions, `length_counts` is int64 [L], the number of sequences of length 1 .. L, and `depth` is the maximum number
of sequences per pack. A depth of L or more limits nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.packing.certificate import prove_bound_by_totals
from gaudi_bert.packing.heuristics import add_by_best_fit, pack_longest_first
from gaudi_bert.packing.long_packs import (
    BINS,
    MAX_ASSIGNED_SEQUENCES,
    MOST_LENGTHS,
    NEAR,
    PartialPacking,
    assign_sequences_to_slots,
    pack_by_subsample,
    split_counts_into_bins,
)
from gaudi_bert.packing.nnls_solver import MAX_NNLS_LENGTH, limit_depth_near_mean, solve_nnls
from gaudi_bert.packing.strategies import (
    NNLS_WORK,
    AlgorithmResult,
    Leftovers,
    OperationBudget,
    Strategy,
    StrategyCounts,
    add_packs,
    count_packs,
    count_slots,
    drop_surplus_slots,
)

# --- NNLSHP, non-negative least squares histogram-packing (paper 3.1.2 and F.4), solved once

# Every column of the least-squares problem fills its pack exactly. A slot for which there is no sequence becomes padding,
# and such a slot wastes few tokens if it is short. Therefore the residuals of short lengths, up to this number of tokens,
# get a smaller weight. The paper uses this number, too (F.4.5).
SHORT_LENGTH = 8

# The weight of the residual of a length up to SHORT_LENGTH in NNLSHP, as in the paper. Longer lengths have weight 1.
SHORT_WEIGHT = 0.09


def compute_single_nnls_residual_weights(max_sequence_length: int) -> FloatArray:
    """Return the weight of each length in the least-squares problem of the algorithm NNLSHP, float64 [L]. It is 0.09 for
    lengths up to 8, and otherwise 1. The weight multiplies the residual, which is the number of sequences minus the number
    of places for them in the packs.

    See F.4.5 and F.5 in the paper.
    """
    return np.where(np.arange(max_sequence_length) < SHORT_LENGTH, SHORT_WEIGHT, 1.0)


def pack_by_single_nnls(length_counts: IntArray, depth: int) -> StrategyCounts:
    """Pack a histogram with NNLSHP. One non-negative least-squares problem finds how often to use each combination of
    lengths that fills a pack, and the solution is rounded to integers.

    x is rounded to the nearest integers. If there are then more slots of a length than sequences, the surplus becomes
    padding. If there are fewer, each remaining sequence gets a padded pack of its own. The paper's solver needs 22,102
    columns at depth 3 and length 512, and runs out of memory at larger depths. Least squares does not minimize the number of
    packs; here the result is 0.14 % above the optimum.
    """
    solution = solve_nnls(length_counts, compute_single_nnls_residual_weights(len(length_counts)), depth)
    packs = _select_used_strategies(solution.strategies, np.rint(solution.usage))
    return _add_packs_for_uncovered_sequences(packs, length_counts, depth)


def _select_used_strategies(strategies: Iterable[Strategy], pack_counts: FloatArray) -> StrategyCounts:
    """Return a mapping from strategies to their numbers of packs, without the strategies that no pack uses.

    `pack_counts` are whole numbers, float64 [strategies].
    """
    counts = pack_counts.astype(np.int64).tolist()
    return {strategy: count for strategy, count in zip(strategies, counts, strict=True) if count}


def _add_packs_for_uncovered_sequences(
    strategy_counts: StrategyCounts, length_counts: IntArray, depth: int
) -> StrategyCounts:
    """Add a padded pack for each sequence without a place in a planned pack. Remove the places, called slots, that no
    sequence fills.

    The padded pack of a sequence is (length, L - length). Its second slot is padding, unless a sequence of this length lacks
    a slot as well. A sequence of length L becomes a pack of its own; the published code looks up a strategy with length 0
    for it.
    """
    result = dict(strategy_counts)
    uncovered = np.maximum(length_counts - count_slots(strategy_counts, len(length_counts)), 0)
    for length in (np.flatnonzero(uncovered) + 1).tolist():
        is_alone = depth == 1 or length == len(length_counts)
        add_packs(result, (length,) if is_alone else (length, len(length_counts) - length), int(uncovered[length - 1]))
    return drop_surplus_slots(result, length_counts, drop_whole_packs=False)


# --- ENNLSHP, extended NNLS with padding token weighting (paper S): weight the padding, and nearly forbid uncovered
# sequences
#
# The paper adds a variable r >= 0 for the surplus A x - b and solves one larger NNLS problem (equations 23 and 24):
#
#     min  || w (A x - b) ||^2 + || v (A x - b - r) ||^2,   x >= 0, r >= 0,   w_i = i, v = 10^6.
#
# The published code fills the lower right block of the matrix with ones; this file uses the -I of equation 24. For a given
# x, the best r is max(A x - b, 0). Therefore the problem can be written in x alone: the squared weight of a length is w^2 if
# it has surplus slots, and w^2 + v^2 if sequences are uncovered. This objective is convex and piecewise quadratic. It is
# minimized by Newton steps: fix the weights by the current signs, solve the resulting NNLS problem, and move towards its
# solution as far as the objective decreases. Starting with v = 10^6 would stall, so v is increased from 1 to 10^6 in powers
# of ten.

# The weight of an uncovered sequence relative to a padding token, which is v in the objective above.
SHORTAGE_WEIGHT = 1e6

# The objective is first minimized with these smaller values of v, the weight of uncovered sequences. Newton's method would
# stall if it started with the final value.
EASY_WEIGHTS = (1e0, 1e1, 1e2, 1e3, 1e4, 1e5)

# The maximum number of Newton steps for each value of v, the weight of uncovered sequences.
STEPS_AT_A_WEIGHT = 10

# The number of times that the line search for the step size halves its interval.
LINE_SEARCH_HALVINGS = 60

# Newton's method goes on to the next value of v, the weight of uncovered sequences, if a step reduces the objective by less
# than this fraction.
SMALL_GAIN = 1e-6


def _compute_extended_nnls_weights(residual: FloatArray, shortage_weight: float = SHORTAGE_WEIGHT) -> FloatArray:
    """Return the weight of each length's residual in the objective of the packing algorithm ENNLSHP (equation 23 of the
    paper), float64 [L]. Lengths with uncovered sequences weigh more than lengths with surplus slots.

    Args:
        residual: b - A x, float64 [L]; positive if sequences are uncovered.
        shortage_weight: v, the cost of an uncovered sequence relative to a padding token.
    """
    padding = np.arange(1, len(residual) + 1, dtype=np.float64) ** 2
    weights: FloatArray = np.sqrt(padding + np.where(residual > 0, shortage_weight**2, 0.0))
    return weights


def _compute_extended_nnls_objective(residual: FloatArray, shortage_weight: float = SHORTAGE_WEIGHT) -> float:
    """Return the weighted sum of squares that the packing algorithm ENNLSHP minimizes (equation 23 of the paper). The
    residual of a length is its number of sequences minus its number of slots.
    """
    return float(np.sum((_compute_extended_nnls_weights(residual, shortage_weight) * residual) ** 2))


def _solve_extended_nnls(length_counts: IntArray, depth: int) -> dict[Strategy, float]:
    """Minimize the least-squares objective of the packing algorithm ENNLSHP (equation 23 of the paper). Return the number of
    packs of each strategy, which may be a fraction. A strategy consists of at most `depth` lengths that fill a pack.

    For each value of v, Newton steps continue until the assumed signs are right or a step gains almost nothing. The
    objective never increases.
    """
    usage: dict[Strategy, float] = {}
    residual = target = np.asarray(length_counts, dtype=np.float64)
    for shortage_weight in (*EASY_WEIGHTS, SHORTAGE_WEIGHT):
        for _ in range(STEPS_AT_A_WEIGHT):
            value = _compute_extended_nnls_objective(residual, shortage_weight)
            solution = solve_nnls(target, _compute_extended_nnls_weights(residual, shortage_weight), depth)
            change = solution.residual - residual
            step = _find_step_size(residual, change, shortage_weight)
            usage = {strategy: (1 - step) * count for strategy, count in usage.items() if step < 1.0}
            for strategy, count in zip(solution.strategies, solution.usage.tolist(), strict=True):
                usage[strategy] = usage.get(strategy, 0.0) + step * count
            residual = residual + step * change
            reached = _compute_extended_nnls_objective(residual, shortage_weight)
            if min(reached - solution.objective**2, value - reached) <= SMALL_GAIN * reached:
                break
    return usage


def _find_step_size(residual: FloatArray, change: FloatArray, shortage_weight: float) -> float:
    """Find, by bisection, the step size from 0 to 1 that minimizes the objective of the extended least-squares problem along
    a Newton direction. A step of size 1 adds `change` to the residual.
    """

    def is_rising(step: float) -> bool:
        """Return whether the objective would increase if the step size became larger than `step`."""
        moved = residual + step * change
        return bool(np.sum(_compute_extended_nnls_weights(moved, shortage_weight) ** 2 * moved * change) > 0)

    if not is_rising(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(LINE_SEARCH_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_rising(middle) else (middle, high)
    return low


def pack_by_extended_nnls(length_counts: IntArray, depth: int) -> StrategyCounts:
    """Pack a histogram with ENNLSHP. Solve an extended least-squares problem, round its numbers of packs to integers, and
    add a padded pack for each uncovered sequence.
    """
    usage = _solve_extended_nnls(length_counts, depth)
    strategy_counts = _select_used_strategies(usage, np.rint(list(usage.values())))
    return _add_packs_for_uncovered_sequences(strategy_counts, length_counts, depth)


# --- the iterative algorithm with padding feedback, published by Habana Labs ("Data Packing Process for MLPERF BERT")
#
# Solve the weighted NNLS problem for the remaining sequences. Round the usages down, but usages below 2 to the nearest
# integer. If there are now more slots of a length than sequences, the surplus is padding. Repeat with the uncovered
# sequences until fewer than 100 remain, or for 20 rounds.
#
# The sequences that remain are packed as `leftovers` specifies. "complement" is the published way: after the last round,
# each remaining sequence gets a pack (length, L - length). "best-fit" puts the remaining sequences into the room of dropped
# surplus slots, and then into new packs. Every round pays for exact fills with padding, so this is done after each round,
# and the rounds end as soon as one no longer saves packs.

# The most rounds.
MAX_ROUNDS = 20

# The iterative algorithm starts another round only if at least this many sequences are not in a pack yet.
FEW_SEQUENCES = 100

# Packs with more tokens than this count as long. To save time, the iterative algorithm does less work on long packs.
LONG = 1280

# The iterative algorithm solves a least-squares problem in each round. The first round packs nearly all sequences. Each
# later round packs only a few, but could take as long as the first. Therefore, if packs are long, all later rounds together
# may take at most this fraction of the operations of the first round. The published variant has no such limit.
LATER_ROUNDS = 0.5

# The maximum number of solver iterations per distinct length when the least-squares problem is solved for long packs. More
# iterations took up to three times as long and saved no packs, because small residuals do not matter after rounding to
# integers.
ROUNDS_PER_LENGTH = 0.5


def compute_iterative_nnls_residual_weights(max_sequence_length: int) -> FloatArray:
    """Return the weight of each length in iterative least squares, float64 [L]. It is sqrt(8 / (2 L)) for lengths up to 8,
    and otherwise 1. The weight multiplies the residual, which is the number of sequences minus the number of places for them
    in the packs.
    """
    short_weight = np.sqrt(min(1.0, SHORT_LENGTH / (2 * max_sequence_length)))
    return np.where(np.arange(max_sequence_length) < SHORT_LENGTH, short_weight, 1.0)


def pack_by_nnls(
    length_counts: IntArray, depth: int, leftovers: Leftovers = "best-fit", budget: OperationBudget | None = None
) -> AlgorithmResult:
    """Pack a histogram by iterative non-negative least squares with padding feedback, which turns surplus slots into
    padding. If the LPFHP heuristic needs fewer packs, return its packs instead.

    Least squares aims at exact fills. If there are too few sequences to fill with (wikipedia-128), LPFHP is closer to the
    optimum. The published variant ("complement") is never replaced by LPFHP.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        depth: the maximum number of sequences per pack.
        leftovers: how the sequences that remain after the rounds are packed.
        budget: the operation budget for all rounds, or None for `NNLS_WORK`.
    """
    if np.count_nonzero(length_counts) > MOST_LENGTHS:
        solved: list[AlgorithmResult] = []

        def pack_sample(sample_counts: IntArray) -> StrategyCounts:
            """Return the packs for a subsample of the sequences. Also append the whole result to `solved`, because the name
            of the algorithm that was used is needed later.
            """
            solved.append(pack_by_nnls(sample_counts, depth, leftovers, budget))
            return solved[0].strategy_counts

        return AlgorithmResult(pack_by_subsample(length_counts, depth, pack_sample, MOST_LENGTHS), solved[0].algorithm_used)
    if leftovers == "complement":
        return AlgorithmResult(
            _pack_iteratively(length_counts, depth, leftovers, budget=budget), "iterative-nnls-complement"
        )
    heuristic = pack_longest_first(length_counts, depth)
    if _is_near_bound(heuristic, length_counts, depth):
        return AlgorithmResult(heuristic, "lpfhp")
    loop = _pack_iteratively(length_counts, depth, leftovers, packs_to_beat=count_packs(heuristic), budget=budget)
    if count_packs(loop) <= count_packs(heuristic):
        return AlgorithmResult(loop, "iterative-nnls")
    return AlgorithmResult(heuristic, "lpfhp")


def _pack_iteratively(
    length_counts: IntArray,
    depth: int,
    leftovers: Leftovers = "best-fit",
    packs_to_beat: int | None = None,
    budget: OperationBudget | None = None,
) -> StrategyCounts:
    """Pack a histogram by repeatedly solving a non-negative least-squares problem and rounding its solution. The packs
    contain every sequence exactly once.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        depth: the maximum number of sequences per pack.
        leftovers: how the sequences that remain after the rounds are packed.
        packs_to_beat: with "best-fit", the rounds end once they cannot need fewer packs than this, which the caller
            already has.
        budget: the operation budget for all rounds, or None for `NNLS_WORK`.
    """
    budget = OperationBudget(NNLS_WORK) if budget is None else budget
    if len(length_counts) > MAX_NNLS_LENGTH:
        return _pack_by_rounding_lengths(length_counts, depth, leftovers, budget)
    best: StrategyCounts | None = None
    strategy_counts: StrategyCounts = {}
    for strategy_counts, remaining in _iterate_nnls_rounds(length_counts, depth, budget, leftovers):
        if leftovers == "best-fit":
            finished = add_by_best_fit(drop_surplus_slots(strategy_counts, length_counts - remaining), remaining, depth)
            if best is not None and count_packs(finished) >= count_packs(best):
                break
            best = finished
            cannot_win = packs_to_beat is not None and count_packs(strategy_counts) >= packs_to_beat
            if cannot_win or _is_near_bound(best, length_counts, depth):
                break
    if leftovers == "complement":
        return _add_packs_for_uncovered_sequences(strategy_counts, length_counts, depth)
    return add_by_best_fit({}, length_counts, depth) if best is None else best


def _is_near_bound(strategy_counts: StrategyCounts, length_counts: IntArray, depth: int) -> bool:
    """Return whether a packing into long packs uses at most 1 / `NEAR` more packs than the lower bound.

    The result is always False for short packs.
    """
    if len(length_counts) <= LONG:
        return False
    bound = prove_bound_by_totals(length_counts, depth).bound
    return count_packs(strategy_counts) <= bound + bound // NEAR


def _pack_by_rounding_lengths(
    length_counts: IntArray, depth: int, leftovers: Leftovers, budget: OperationBudget
) -> StrategyCounts:
    """Pack sequences into very long packs by iterative least squares. Lengths are first rounded to a coarse grid, because
    the solver cannot treat so many lengths separately.

    The sequences are assigned to the slots of the rounded plan. Those that do not fit are added by best fit.
    """
    if length_counts.sum() > MAX_ASSIGNED_SEQUENCES:
        return pack_by_subsample(
            length_counts, depth, lambda part: _pack_by_rounding_lengths(part, depth, leftovers, budget)
        )
    coarse = _pack_iteratively(
        split_counts_into_bins(length_counts, BINS), depth, leftovers, budget=budget.take_fraction(0.5)
    )
    strategy_counts, remaining = assign_sequences_to_slots(coarse, length_counts, BINS, depth, budget.take_fraction(0.5))
    return add_by_best_fit(strategy_counts, remaining, depth)


def _iterate_nnls_rounds(
    length_counts: IntArray, depth: int, budget: OperationBudget, leftovers: Leftovers
) -> Iterator[PartialPacking]:
    """Pack a histogram in rounds. Each round solves a least-squares problem for the sequences that are in no pack yet, and
    rounds its solution. After each round, yield all packs so far and the remaining sequences.
    """
    weights = compute_iterative_nnls_residual_weights(len(length_counts))
    is_long = len(length_counts) > LONG and leftovers == "best-fit"
    if is_long:
        depth = limit_depth_near_mean(length_counts, prove_bound_by_totals(length_counts, depth).bound, depth)
    strategy_counts: Counter[Strategy] = Counter()
    remaining = length_counts.copy()
    allowed = budget
    for _ in range(MAX_ROUNDS):
        before = int(remaining.sum())
        if before == 0 or budget.is_exhausted:
            break
        before_spent = budget.spent
        most_rounds = int(ROUNDS_PER_LENGTH * np.count_nonzero(remaining)) + 1 if is_long else None
        solution = solve_nnls(remaining, weights, depth, max_rounds=most_rounds, budget=allowed)
        usage = np.where(solution.usage < 2, np.rint(solution.usage), np.floor(solution.usage))
        packs = _select_used_strategies(solution.strategies, usage)
        if is_long and allowed is budget:
            allowed = budget.take_fraction(LATER_ROUNDS * (budget.spent - before_spent) / max(budget.remaining, 1.0))
        strategy_counts.update(packs)
        remaining = np.maximum(remaining - count_slots(packs, len(length_counts)), 0)
        yield PartialPacking(strategy_counts, remaining)
        if int(remaining.sum()) < FEW_SEQUENCES or int(remaining.sum()) == before:
            break
