"""The methods of non-negative least squares: NNLSHP and ENNLSHP of the paper, and the loop that is the default (`nnls`).

All find usages x >= 0 of the strategies that fill a pack exactly, such that a weighted || w (A x - b) || is least, where b
are the counts; `nnls_solver` does that without listing the strategies, so any depth works. Then they round x. Counts are
int64 [L], the sequences of length 1 .. L; a depth is the most sequences per pack, and L or more means no limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.packing.heuristics import best_fit_into, pack_longest_first
from gaudi_bert.packing.long_packs import (
    BINS,
    MAX_ASSIGNED_SEQUENCES,
    MOST_LENGTHS,
    NEAR,
    assign_to_slots,
    pack_subsample,
    split_counts_into_bins,
)
from gaudi_bert.packing.nnls_solver import MAX_NNLS_LENGTH, limit_depth_by_bound, solve_nnls
from gaudi_bert.packing.strategies import (
    NNLS_WORK,
    AlgorithmResult,
    Leftovers,
    Strategy,
    StrategyCounts,
    WorkBudget,
    add_packs,
    count_packs,
    count_slots,
    drop_surplus_slots,
)

# --- NNLSHP, non-negative least squares histogram-packing (paper 3.1.2 and F.4), one shot

SHORT_LENGTH = 8
SHORT_WEIGHT = 0.09


def paper_weights(max_sequence_length: int) -> FloatArray:
    """float64 [L]: `SHORT_WEIGHT` for lengths up to `SHORT_LENGTH`, 1 for the rest (paper F.4.5 and F.5)."""
    weights = np.ones(max_sequence_length)
    weights[:SHORT_LENGTH] = SHORT_WEIGHT
    return weights


def pack_nnlshp(counts: IntArray, depth: int) -> StrategyCounts:
    """NNLSHP with the residual weights of the paper.

    x is rounded to the nearest integers; where b - A x is negative, that is padding, and a sequence where it is positive
    becomes a pack alone, padded up. The paper solves this with 22,102 columns at depth 3 and length 512, and runs out
    of memory beyond. Least squares is not the number of packs: this is 0.14 % above the optimum there.
    """
    solution = solve_nnls(counts, paper_weights(len(counts)), depth)
    strategy_counts: StrategyCounts = {}
    for strategy, usage in zip(solution.strategies, np.rint(solution.usage).astype(np.int64).tolist(), strict=True):
        add_packs(strategy_counts, strategy, usage)
    return _pad_uncovered_sequences(strategy_counts, counts, depth)


def _pad_uncovered_sequences(strategy_counts: StrategyCounts, counts: IntArray, depth: int) -> StrategyCounts:
    """Give each sequence without a slot a pack (length, L - length), and give up the slots that no sequence fills.

    The complement of such a pack stands for padding, unless a sequence of that length lacks a slot as well. A sequence of
    full length, for which the published listing looks up a strategy with a length of 0, is a pack alone.
    """
    result = dict(strategy_counts)
    lacking = np.maximum(counts - count_slots(strategy_counts, len(counts)), 0)
    for length in (np.flatnonzero(lacking) + 1).tolist():
        alone = depth == 1 or length == len(counts)
        add_packs(result, (length,) if alone else (length, len(counts) - length), int(lacking[length - 1]))
    return drop_surplus_slots(result, counts, whole_packs=False)


# --- ENNLSHP, extended NNLS with padding token weighting (paper S): weigh the padding, all but forbid what is not packed
#
# The paper adds a variable r >= 0 for the deficit A x - b and solves one larger NNLS (equations 23 and 24):
#
#     min  || w (A x - b) ||^2 + || v (A x - b - r) ||^2,   x >= 0, r >= 0,   w_i = i, v = 10^6.
#
# Its listing fills the lower right block with ones; this is the -I of equation 24. For a given x the best r is
# max(A x - b, 0), so the problem is one in x alone in which a row has the squared weight w^2 where it is over-subscribed and
# w^2 + v^2 where it is not packed. Convex and piecewise quadratic, it is solved by Newton steps: fix the rows' weights by
# the present signs, solve that ordinary weighted NNLS, and go there as far as the objective falls. The weight v is raised
# from 1 to 10^6 in powers of ten: started at 10^6, the steps stall.

SHORTAGE_WEIGHT = 1e6
EASY_WEIGHTS = (1e0, 1e1, 1e2, 1e3, 1e4, 1e5)
STEPS_AT_A_WEIGHT = 10
LINE_SEARCH_HALVINGS = 60
SMALL_GAIN = 1e-6


def _ennls_row_weights(residual: FloatArray, shortage_weight: float = SHORTAGE_WEIGHT) -> FloatArray:
    """The weight of each row of equation 23, with the best r put in, where the residual b - A x has these signs.

    `shortage_weight` is v, the cost of a sequence that is not packed, relative to a token of padding; float64 [L] both.
    """
    padding = np.arange(1, len(residual) + 1, dtype=np.float64) ** 2
    weights: FloatArray = np.sqrt(padding + np.where(residual > 0, shortage_weight**2, 0.0))
    return weights


def _ennls_objective(residual: FloatArray, shortage_weight: float = SHORTAGE_WEIGHT) -> float:
    """The value of equation 23."""
    return float(np.sum((_ennls_row_weights(residual, shortage_weight) * residual) ** 2))


def _solve_ennls(counts: IntArray, depth: int) -> tuple[dict[Strategy, float], FloatArray]:
    """Minimise equation 23 over all strategies of at most `depth` sequences.

    At each weight it goes down until the signs are those that were assumed, or a step gains nothing; never up.

    Returns:
        Usages (x) of the strategies, and the residual b - A x, float64 [L].
    """
    usage: dict[Strategy, float] = {}
    residual = target = np.asarray(counts, dtype=np.float64)
    for shortage_weight in (*EASY_WEIGHTS, SHORTAGE_WEIGHT):
        for _ in range(STEPS_AT_A_WEIGHT):
            value = _ennls_objective(residual, shortage_weight)
            solution = solve_nnls(target, _ennls_row_weights(residual, shortage_weight), depth)
            change = solution.residual - residual
            step = _find_step_size(residual, change, shortage_weight)
            usage = {strategy: (1 - step) * count for strategy, count in usage.items() if step < 1.0}
            for strategy, count in zip(solution.strategies, solution.usage.tolist(), strict=True):
                usage[strategy] = usage.get(strategy, 0.0) + step * count
            residual = residual + step * change
            reached = _ennls_objective(residual, shortage_weight)
            if min(reached - solution.objective**2, value - reached) <= SMALL_GAIN * reached:
                break
    return usage, residual


def _find_step_size(residual: FloatArray, change: FloatArray, shortage_weight: float) -> float:
    """The share of `change`, 0 .. 1, after which the objective is least; its slope grows along the way."""

    def rises(step: float) -> bool:
        moved = residual + step * change
        return bool(np.sum(_ennls_row_weights(moved, shortage_weight) ** 2 * moved * change) > 0)

    if not rises(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(LINE_SEARCH_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) else (middle, high)
    return low


def pack_ennlshp(counts: IntArray, depth: int) -> StrategyCounts:
    """ENNLSHP: usages are rounded to the nearest integer, and what is then not packed is padded up."""
    usage, _ = _solve_ennls(counts, depth)
    strategy_counts: StrategyCounts = {}
    for strategy, count in usage.items():
        add_packs(strategy_counts, strategy, round(count))
    return _pad_uncovered_sequences(strategy_counts, counts, depth)


# --- the iterative loop with padding feedback, as Habana Labs published it ("Data Packing Process for MLPERF BERT")
#
# Solve the weighted NNLS for the remaining sequences; round the usages down (those below 2 to the nearest integer);
# where that makes more slots than there are sequences, the surplus is padding; repeat with what is not covered, until fewer
# than 100 sequences remain or 20 rounds are over.
#
# What remains is packed by `leftovers`. "complement" is the published way: a pack (length, L - length) for each sequence,
# after the last round. "best-fit" puts it into the room that the trimmed surplus slots leave, then into new packs; and
# because each round pays for its exact fills with padding, it does so after every round and keeps the last that gained.

MAX_ROUNDS = 20
FEW_SEQUENCES = 100
PADDING_LENGTHS = 8

LONG = 1280
"""Tokens of a pack, more than any coarse grid has bins: longer packs are handled with an eye on the time."""

LATER_ROUNDS = 0.5
"""For packs of more than `LONG` tokens, what the rounds after the first may do together, as a share of what that one did:
they have few sequences to pack, and cost as much. The published way has no such limit."""

ROUNDS_PER_LENGTH = 0.5
"""Rounds of pricing that one solution for such packs may take, for each length. The last rounds only make small residuals
smaller, which rounding to integers undoes: up to three times the time for the same number of packs, or for more."""


def loop_weights(max_sequence_length: int) -> FloatArray:
    """float64 [L]: sqrt(8 / (2 L)) for lengths 1 to 8, and 1 for the rest."""
    weights = np.ones(max_sequence_length)
    weights[:PADDING_LENGTHS] = np.sqrt(min(1.0, PADDING_LENGTHS / (2 * max_sequence_length)))
    return weights


def pack_by_nnls(
    counts: IntArray, depth: int, leftovers: Leftovers = "best-fit", work: WorkBudget | None = None
) -> AlgorithmResult:
    """Pack by the loop, or by LPFHP where that is better; arguments as `_pack_iteratively`.

    Least squares wants exact fills, and where there is too little to fill with (wikipedia-128) LPFHP is nearer to the
    optimum. The published way ("complement") is never replaced.
    """
    if np.count_nonzero(counts) > MOST_LENGTHS:
        solved: list[AlgorithmResult] = []

        def pack(part: IntArray) -> StrategyCounts:
            solved.append(pack_by_nnls(part, depth, leftovers, work))
            return solved[0].strategy_counts

        return AlgorithmResult(pack_subsample(counts, depth, pack, MOST_LENGTHS), solved[0].algorithm_used)
    if leftovers == "complement":
        return AlgorithmResult(_pack_iteratively(counts, depth, leftovers, work=work), "iterative-nnls-complement")
    heuristic = pack_longest_first(counts, depth)
    if _is_near_bound(heuristic, counts, depth):
        return AlgorithmResult(heuristic, "lpfhp")
    loop = _pack_iteratively(counts, depth, leftovers, enough=count_packs(heuristic), work=work)
    if count_packs(loop) <= count_packs(heuristic):
        return AlgorithmResult(loop, "iterative-nnls")
    return AlgorithmResult(heuristic, "lpfhp")


def _pack_iteratively(
    counts: IntArray,
    depth: int,
    leftovers: Leftovers = "best-fit",
    enough: int | None = None,
    work: WorkBudget | None = None,
) -> StrategyCounts:
    """Pack by the published loop; the mixture covers the counts, int64 [L], exactly.

    With "best-fit", the loop ends where it cannot get below `enough` packs, which the caller has already; `work` is for all
    rounds, by default `NNLS_WORK`.
    """
    work = WorkBudget(NNLS_WORK) if work is None else work
    if len(counts) > MAX_NNLS_LENGTH:
        return _pack_on_coarse_grid(counts, depth, leftovers, work)
    best: StrategyCounts | None = None
    strategy_counts: StrategyCounts = {}
    for strategy_counts, remaining in _iterate_rounds(counts, depth, work, leftovers):
        if leftovers == "best-fit":
            finished = best_fit_into(drop_surplus_slots(strategy_counts, counts - remaining), remaining, depth)
            if best is not None and count_packs(finished) >= count_packs(best):
                break
            best = finished
            if enough is not None and count_packs(strategy_counts) >= enough:
                break
            if _is_near_bound(best, counts, depth):
                break
    if leftovers == "complement":
        return _pad_uncovered_sequences(strategy_counts, counts, depth)
    return best_fit_into({}, counts, depth) if best is None else best


def _is_near_bound(strategy_counts: StrategyCounts, counts: IntArray, depth: int) -> bool:
    """Whether there are so few long packs that least squares, which cost seconds, could hardly save any."""
    if len(counts) <= LONG:
        return False
    least = simple_certificate(counts, depth).bound
    return count_packs(strategy_counts) <= least + least // NEAR


def _pack_on_coarse_grid(counts: IntArray, depth: int, leftovers: Leftovers, work: WorkBudget) -> StrategyCounts:
    """The loop on a coarse grid, into whose slots the sequences are dealt; what remains is packed by best fit."""
    if counts.sum() > MAX_ASSIGNED_SEQUENCES:
        return pack_subsample(counts, depth, lambda part: _pack_on_coarse_grid(part, depth, leftovers, work))
    coarse = _pack_iteratively(split_counts_into_bins(counts, BINS), depth, leftovers, work=work.share(0.5))
    strategy_counts, remaining = assign_to_slots(coarse, counts, BINS, depth, work.share(0.5))
    return best_fit_into(strategy_counts, remaining, depth)


def _iterate_rounds(
    counts: IntArray, depth: int, work: WorkBudget, leftovers: Leftovers
) -> Iterator[tuple[StrategyCounts, IntArray]]:
    """After each round of NNLS and rounding: all packs so far, with surplus slots, and the sequences they do
    not cover.
    """
    weights = loop_weights(len(counts))
    is_long = len(counts) > LONG and leftovers == "best-fit"
    if is_long:
        depth = limit_depth_by_bound(counts, simple_certificate(counts, depth).bound, depth)
    strategy_counts: StrategyCounts = {}
    remaining = counts.copy()
    allowed = work
    for _ in range(MAX_ROUNDS):
        before = int(remaining.sum())
        if before == 0 or work.exhausted:
            break
        before_spent = work.spent
        most_rounds = int(ROUNDS_PER_LENGTH * np.count_nonzero(remaining)) + 1 if is_long else None
        solution = solve_nnls(remaining, weights, depth, max_rounds=most_rounds, work=allowed)
        usage = np.where(solution.usage < 2, np.rint(solution.usage), np.floor(solution.usage)).astype(np.int64)
        packs: StrategyCounts = {}
        for strategy, count in zip(solution.strategies, usage.tolist(), strict=True):
            add_packs(packs, strategy, count)
        if is_long and allowed is work:
            allowed = work.share(LATER_ROUNDS * (work.spent - before_spent) / max(work.remaining, 1.0))
        for strategy, count in packs.items():
            add_packs(strategy_counts, strategy, count)
        remaining = np.maximum(remaining - count_slots(packs, len(counts)), 0)
        yield strategy_counts, remaining
        if int(remaining.sum()) < FEW_SEQUENCES or int(remaining.sum()) == before:
            break
