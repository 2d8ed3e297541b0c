"""The iterative NNLS loop with padding feedback, as Habana Labs published it.

("Data Packing Process for MLPERF BERT".) Solve the weighted NNLS for the sequences that are left; round the
usages down (those below 2 to the nearest integer); where that makes more slots than there are sequences, the
surplus is padding; go on with what is not covered, until fewer than 100 sequences are left or 20 rounds are
over. Lengths 1 to 8 get the residual weight sqrt(8 / (2 L)), because their surplus is cheap padding.

What is left is packed by `leftovers`. "complement" is the published way: a pack (length, L - length) for each
sequence, after the last round. "best-fit" puts it into the room that the trimmed surplus slots leave, then into
new packs; and because each round pays for its exact fills with padding, it does so after every round and keeps
the last round that gained. The published listing fails on a leftover of full length (it asks for a sequence of
length 0) and may go on for ever without progress; neither happens here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.packing.coarse_grid import Grid, pack_on_grids, split_counts
from gaudi_bert.packing.heuristics.best_fit import best_fit_into
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.mixture import Mixture, add_packs, coverage, packs_of, trim_to_exact
from gaudi_bert.packing.nnls.complements import complete_by_complements
from gaudi_bert.packing.nnls.solver import LONGEST_WHOLE, solve_nnls, useful_depth
from gaudi_bert.packing.result import Solved
from gaudi_bert.packing.slot_swaps import MOST_DEALT, deal_into_slots
from gaudi_bert.packing.work import NNLS_WORK, Work

__all__ = ["Leftovers", "iterative_nnls", "pack_by_nnls", "residual_weights"]

Leftovers = Literal["best-fit", "complement"]

MAX_ROUNDS = 20
FEW_SEQUENCES = 100
PADDING_LENGTHS = 8

BINS = 512
"""Of the grid on which longer packs than the solver takes are planned."""

LONG = 1280
"""Tokens of a pack, more than any coarse grid has bins: longer packs are handled with an eye on the time."""

LATER_ROUNDS = 0.5
"""For packs of more than `LONG` tokens, what the rounds after the first may do together, as a share of what that one did:
they have few sequences left to place, and cost as much. The published way goes on to its end."""

ROUNDS_PER_LENGTH = 0.5
"""Rounds of pricing that one solution for such packs may take, for each length. The last rounds only make small residuals
smaller, which rounding to whole packs undoes: up to three times the time for the same number of packs, or for more."""

NEAR = 10_000
"""For such packs, no round is made to save less than one pack in so many."""


def residual_weights(max_sequence_length: int) -> FloatArray:
    """float64 [L]: sqrt(8 / (2 L)) for lengths 1 to 8, and 1 for the rest."""
    weights = np.ones(max_sequence_length)
    weights[:PADDING_LENGTHS] = np.sqrt(min(1.0, PADDING_LENGTHS / (2 * max_sequence_length)))
    return weights


def pack_by_nnls(counts: IntArray, depth: int, leftovers: Leftovers = "best-fit", work: Work | None = None) -> Solved:
    """Pack by the loop, or by LPFHP where that is better; arguments as `iterative_nnls`.

    Least squares wants exact fills, and where there is too little to fill with (wikipedia-128) LPFHP is nearer to the
    optimum. The published way ("complement") is never replaced.
    """
    if leftovers == "complement":
        return Solved(iterative_nnls(counts, depth, leftovers, work=work), "iterative-nnls-complement")
    heuristic = pack_longest_first(counts, depth)
    if _is_near(heuristic, counts, depth):
        return Solved(heuristic, "lpfhp")
    loop = iterative_nnls(counts, depth, leftovers, enough=packs_of(heuristic), work=work)
    if packs_of(loop) <= packs_of(heuristic):
        return Solved(loop, "iterative-nnls")
    return Solved(heuristic, "lpfhp")


def iterative_nnls(
    counts: IntArray,
    depth: int,
    leftovers: Leftovers = "best-fit",
    enough: int | None = None,
    work: Work | None = None,
) -> Mixture:
    """Pack by the published loop; the mixture covers `counts` exactly.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences in a pack, from 1; L or more means no limit.
        leftovers: how the last sequences are packed.
        enough: "best-fit" only: packs that the caller can do with; the loop ends where it cannot get below them.
        work: what all rounds may do; None for `NNLS_WORK`.

    Raises:
        InputError: an unknown value of `leftovers`.
    """
    if leftovers not in ("best-fit", "complement"):
        raise InputError(f"leftovers is {leftovers!r}; it must be 'best-fit' or 'complement'")
    work = Work(NNLS_WORK) if work is None else work
    if len(counts) > LONGEST_WHOLE:
        return _pack_coarsely(np.asarray(counts, dtype=np.int64), depth, leftovers, work)
    best: Mixture | None = None
    mixture: Mixture = {}
    for mixture, left in _rounds(np.asarray(counts, dtype=np.int64), depth, work, leftovers):
        if leftovers == "best-fit":
            finished = best_fit_into(trim_to_exact(mixture, counts - left), left, depth)
            if best is not None and packs_of(finished) >= packs_of(best):
                break
            best = finished
            if enough is not None and packs_of(mixture) >= enough:
                break
            if _is_near(best, counts, depth):
                break
    if leftovers == "complement":
        return complete_by_complements(mixture, counts, depth)
    return best_fit_into({}, counts, depth) if best is None else best


def _is_near(mixture: Mixture, counts: IntArray, depth: int) -> bool:
    """Whether long packs are so few that the least squares, which cost seconds, could hardly save any."""
    if len(counts) <= LONG:
        return False
    least = simple_certificate(counts, depth).bound
    return packs_of(mixture) <= least + least // NEAR


def _pack_coarsely(counts: IntArray, depth: int, leftovers: Leftovers, work: Work) -> Mixture:
    """The loop on a coarse grid, into whose slots the sequences are dealt; with too many of them for that, on several grids.
    What is left over is packed by best fit.
    """
    if counts.sum() <= MOST_DEALT:
        coarse = iterative_nnls(split_counts(counts, BINS), depth, leftovers, work=work.share(0.5))
        mixture, left = deal_into_slots(coarse, counts, BINS, depth, work.share(0.5))
        return best_fit_into(mixture, left, depth)

    def solve(coarse: IntArray, _grid: Grid) -> Mixture:
        return iterative_nnls(coarse, depth, leftovers, work=work.share(0.5))

    mixture, left = pack_on_grids(counts, solve)
    return best_fit_into(mixture, left, depth)


def _rounds(counts: IntArray, depth: int, work: Work, leftovers: Leftovers) -> Iterator[tuple[Mixture, IntArray]]:
    """After each round of NNLS and rounding: all packs so far, with surplus slots, and the sequences they do
    not cover.
    """
    weights = residual_weights(len(counts))
    is_long = len(counts) > LONG and leftovers == "best-fit"
    if is_long:
        depth = useful_depth(counts, simple_certificate(counts, depth).bound, depth)
    mixture: Mixture = {}
    left = counts.copy()
    allowed = work
    for _ in range(MAX_ROUNDS):
        before = int(left.sum())
        if before == 0 or work.exhausted:
            break
        start = work.left
        most_rounds = int(ROUNDS_PER_LENGTH * np.count_nonzero(left)) + 1 if is_long else None
        packs = _rounded_packs(left, weights, depth, allowed, most_rounds)
        if is_long and allowed is work:
            allowed = work.share(LATER_ROUNDS * (start - work.left) / max(work.left, 1.0))
        for strategy, count in packs.items():
            add_packs(mixture, strategy, count)
        left = np.maximum(left - coverage(packs, len(counts)), 0)
        yield mixture, left
        if int(left.sum()) < FEW_SEQUENCES or int(left.sum()) == before:
            break


def _rounded_packs(left: IntArray, weights: FloatArray, depth: int, work: Work, most_rounds: int | None) -> Mixture:
    solution = solve_nnls(left, weights, depth, max_rounds=most_rounds, work=work)
    usage = np.where(solution.usage < 2, np.rint(solution.usage), np.floor(solution.usage)).astype(np.int64)
    packs: Mixture = {}
    for strategy, count in zip(solution.strategies, usage.tolist(), strict=True):
        add_packs(packs, strategy, count)
    return packs
