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
from gaudi_bert.packing.long_packs import BINS, MOST_DEALT, MOST_LENGTHS, NEAR, deal_into_slots, pack_thinned, split_counts
from gaudi_bert.packing.mixture import (
    NNLS_WORK,
    Leftovers,
    Mixture,
    Solved,
    Strategy,
    Work,
    add_packs,
    coverage,
    packs_of,
    trim_to_exact,
)
from gaudi_bert.packing.nnls_solver import LONGEST_WHOLE, solve_nnls, useful_depth

# --- NNLSHP, non-negative least squares histogram-packing (paper 3.1.2 and F.4), one shot

SHORT_LENGTH = 8
SHORT_WEIGHT = 0.09


def paper_weights(max_sequence_length: int) -> FloatArray:
    """float64 [L]: `SHORT_WEIGHT` for lengths up to `SHORT_LENGTH`, 1 for the rest (paper F.4.5 and F.5)."""
    weights = np.ones(max_sequence_length)
    weights[:SHORT_LENGTH] = SHORT_WEIGHT
    return weights


def pack_nnlshp(counts: IntArray, depth: int) -> Mixture:
    """NNLSHP with the residual weights of the paper.

    x is rounded to the nearest integers; where b - A x is negative, that is padding, and a sequence where it is positive
    becomes a pack alone, padded up. The paper solves this with 22,102 columns at depth 3 and length 512, and runs out
    of memory beyond. Least squares is not the number of packs: this is 0.14 % above the optimum there.
    """
    solution = solve_nnls(counts, paper_weights(len(counts)), depth)
    mixture: Mixture = {}
    for strategy, usage in zip(solution.strategies, np.rint(solution.usage).astype(np.int64).tolist(), strict=True):
        add_packs(mixture, strategy, usage)
    return _complete_by_complements(mixture, counts, depth)


def _complete_by_complements(mixture: Mixture, counts: IntArray, depth: int) -> Mixture:
    """Give each sequence without a slot a pack (length, L - length), and give up the slots that no sequence fills.

    The complement of such a pack stands for padding, unless a sequence of that length lacks a slot as well. A sequence of
    full length, for which the published listing looks up a strategy with a length of 0, is a pack alone.
    """
    result = dict(mixture)
    lacking = np.maximum(counts - coverage(mixture, len(counts)), 0)
    for length in (np.flatnonzero(lacking) + 1).tolist():
        alone = depth == 1 or length == len(counts)
        add_packs(result, (length,) if alone else (length, len(counts) - length), int(lacking[length - 1]))
    return trim_to_exact(result, counts, whole_packs=False)


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


def _extended_weights(residual: FloatArray, shortage_weight: float = SHORTAGE_WEIGHT) -> FloatArray:
    """The weight of each row of equation 23, with the best r put in, where the residual b - A x has these signs.

    `shortage_weight` is v, the cost of a sequence that is not packed, relative to a token of padding; float64 [L] both.
    """
    padding = np.arange(1, len(residual) + 1, dtype=np.float64) ** 2
    weights: FloatArray = np.sqrt(padding + np.where(residual > 0, shortage_weight**2, 0.0))
    return weights


def _extended_objective(residual: FloatArray, shortage_weight: float = SHORTAGE_WEIGHT) -> float:
    """The value of equation 23."""
    return float(np.sum((_extended_weights(residual, shortage_weight) * residual) ** 2))


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
            value = _extended_objective(residual, shortage_weight)
            solution = solve_nnls(target, _extended_weights(residual, shortage_weight), depth)
            change = solution.residual - residual
            step = _best_step(residual, change, shortage_weight)
            usage = {strategy: (1 - step) * count for strategy, count in usage.items() if step < 1.0}
            for strategy, count in zip(solution.strategies, solution.usage.tolist(), strict=True):
                usage[strategy] = usage.get(strategy, 0.0) + step * count
            residual = residual + step * change
            reached = _extended_objective(residual, shortage_weight)
            if min(reached - solution.objective**2, value - reached) <= SMALL_GAIN * reached:
                break
    return usage, residual


def _best_step(residual: FloatArray, change: FloatArray, shortage_weight: float) -> float:
    """The share of `change`, 0 .. 1, after which the objective is least; its slope grows along the way."""

    def rises(step: float) -> bool:
        moved = residual + step * change
        return bool(np.sum(_extended_weights(moved, shortage_weight) ** 2 * moved * change) > 0)

    if not rises(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(LINE_SEARCH_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) else (middle, high)
    return low


def pack_ennlshp(counts: IntArray, depth: int) -> Mixture:
    """ENNLSHP: usages are rounded to the nearest integer, and what is then not packed is padded up."""
    usage, _ = _solve_ennls(counts, depth)
    mixture: Mixture = {}
    for strategy, count in usage.items():
        add_packs(mixture, strategy, round(count))
    return _complete_by_complements(mixture, counts, depth)


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


def pack_by_nnls(counts: IntArray, depth: int, leftovers: Leftovers = "best-fit", work: Work | None = None) -> Solved:
    """Pack by the loop, or by LPFHP where that is better; arguments as `_iterative_nnls`.

    Least squares wants exact fills, and where there is too little to fill with (wikipedia-128) LPFHP is nearer to the
    optimum. The published way ("complement") is never replaced.
    """
    if np.count_nonzero(counts) > MOST_LENGTHS:
        solved: list[Solved] = []

        def pack(part: IntArray) -> Mixture:
            solved.append(pack_by_nnls(part, depth, leftovers, work))
            return solved[0].mixture

        return Solved(pack_thinned(counts, depth, pack, MOST_LENGTHS), solved[0].algorithm_used)
    if leftovers == "complement":
        return Solved(_iterative_nnls(counts, depth, leftovers, work=work), "iterative-nnls-complement")
    heuristic = pack_longest_first(counts, depth)
    if _is_near(heuristic, counts, depth):
        return Solved(heuristic, "lpfhp")
    loop = _iterative_nnls(counts, depth, leftovers, enough=packs_of(heuristic), work=work)
    if packs_of(loop) <= packs_of(heuristic):
        return Solved(loop, "iterative-nnls")
    return Solved(heuristic, "lpfhp")


def _iterative_nnls(
    counts: IntArray, depth: int, leftovers: Leftovers = "best-fit", enough: int | None = None, work: Work | None = None
) -> Mixture:
    """Pack by the published loop; the mixture covers the counts, int64 [L], exactly.

    With "best-fit", the loop ends where it cannot get below `enough` packs, which the caller has already; `work` is for all
    rounds, by default `NNLS_WORK`.
    """
    work = Work(NNLS_WORK) if work is None else work
    if len(counts) > LONGEST_WHOLE:
        return _pack_coarsely(counts, depth, leftovers, work)
    best: Mixture | None = None
    mixture: Mixture = {}
    for mixture, remaining in _rounds(counts, depth, work, leftovers):
        if leftovers == "best-fit":
            finished = best_fit_into(trim_to_exact(mixture, counts - remaining), remaining, depth)
            if best is not None and packs_of(finished) >= packs_of(best):
                break
            best = finished
            if enough is not None and packs_of(mixture) >= enough:
                break
            if _is_near(best, counts, depth):
                break
    if leftovers == "complement":
        return _complete_by_complements(mixture, counts, depth)
    return best_fit_into({}, counts, depth) if best is None else best


def _is_near(mixture: Mixture, counts: IntArray, depth: int) -> bool:
    """Whether there are so few long packs that least squares, which cost seconds, could hardly save any."""
    if len(counts) <= LONG:
        return False
    least = simple_certificate(counts, depth).bound
    return packs_of(mixture) <= least + least // NEAR


def _pack_coarsely(counts: IntArray, depth: int, leftovers: Leftovers, work: Work) -> Mixture:
    """The loop on a coarse grid, into whose slots the sequences are dealt; what remains is packed by best fit."""
    if counts.sum() > MOST_DEALT:
        return pack_thinned(counts, depth, lambda part: _pack_coarsely(part, depth, leftovers, work))
    coarse = _iterative_nnls(split_counts(counts, BINS), depth, leftovers, work=work.share(0.5))
    mixture, remaining = deal_into_slots(coarse, counts, BINS, depth, work.share(0.5))
    return best_fit_into(mixture, remaining, depth)


def _rounds(counts: IntArray, depth: int, work: Work, leftovers: Leftovers) -> Iterator[tuple[Mixture, IntArray]]:
    """After each round of NNLS and rounding: all packs so far, with surplus slots, and the sequences they do
    not cover.
    """
    weights = loop_weights(len(counts))
    is_long = len(counts) > LONG and leftovers == "best-fit"
    if is_long:
        depth = useful_depth(counts, simple_certificate(counts, depth).bound, depth)
    mixture: Mixture = {}
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
        packs: Mixture = {}
        for strategy, count in zip(solution.strategies, usage.tolist(), strict=True):
            add_packs(packs, strategy, count)
        if is_long and allowed is work:
            allowed = work.share(LATER_ROUNDS * (work.spent - before_spent) / max(work.remaining, 1.0))
        for strategy, count in packs.items():
            add_packs(mixture, strategy, count)
        remaining = np.maximum(remaining - coverage(packs, len(counts)), 0)
        yield mixture, remaining
        if int(remaining.sum()) < FEW_SEQUENCES or int(remaining.sum()) == before:
            break
