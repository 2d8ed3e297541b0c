"""As few packs as possible, with the proof: NNLS or LPFHP strategies, linear program, whole packs by search.

1. LPFHP, and the token and count bounds: often that is the end of it.
2. The linear program without a depth limit, from LPFHP's strategies. It is quick, and its prices are valid at
   any depth.
3. The one with the depth limit, from those prices. Where LPFHP's strategies lead nowhere (depth 4 at length
   1024), those of an NNLS solve do:
   least squares prices are smooth, where those of the linear program jump, so it finds strategies that fill
   exactly.
4. Its solution rounded down, and the rest searched or dived for (`dive`), with other step sizes if that fails.

For packs of more than LONGEST_WHOLE tokens all this is done on a coarse grid first, the sequences are dealt out into the
slots of that plan (`slot_swaps`), and the packs are matched anew (`halves`): mostly that ends within a pack of the bound.
Where it does not, packs made in rounds on coarse grids (`coarse_grid`) are matched, then other grids are dealt out. Where
there are too many sequences to deal them out, MANY_LENGTHS lengths and more are packed in rounds on coarse grids alone.

The certificate holds whatever the floating point did; the mixture is exact. If the gap is not 0, the best
mixture found is returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.certificate import Certificate, simple_certificate
from gaudi_bert.packing.coarse_grid import Grid, interpolated_prices, pack_on_grids, split_counts
from gaudi_bert.packing.exact.bounds import MANY_LENGTHS, certify, prove
from gaudi_bert.packing.exact.dive import DiveSettings, dive
from gaudi_bert.packing.exact.fill_slots import fill_slots
from gaudi_bert.packing.exact.linear_program import LinearProgram
from gaudi_bert.packing.halves import rematch_halves
from gaudi_bert.packing.heuristics.best_fit import best_fit_into
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.mixture import Mixture, packs_of, sorted_mixture
from gaudi_bert.packing.nnls.iterative import pack_by_nnls, residual_weights
from gaudi_bert.packing.nnls.solver import LONGEST_WHOLE, solve_nnls, useful_depth
from gaudi_bert.packing.result import Solved
from gaudi_bert.packing.slot_swaps import MOST_DEALT, deal_into_slots
from gaudi_bert.packing.work import OPTIMAL_WORK, Work

__all__ = ["Optimum", "pack_optimally", "solve_optimally"]

NNLS_ROUNDS = 1.5
"""Rounds for each length that the NNLS may take. Where exact fills exist it needs fewer, and elsewhere it is no help."""

PATIENCE = 4
"""Simplex iterations for each length before the NNLS is asked for strategies."""


FEW_LENGTHS = 600
"""So few lengths are packed as they are, however long; more of them, in long packs, on coarse grids first."""

DEALT = ((512, 0), (512, 1), (512, 4), (1024, 1))
"""Bins of the coarse grids whose slots sequences are dealt into, one after the other until the packs are near the bound, and
how often the slack that makes this easier."""

SLACK_SHARE = 3e-5
SLACK_PACKS = 0.3
"""The slack of a sequence: this share of the mean length, or this part of a pack for all sequences, whichever is more."""

LAST_PACK_SHARE = 0.1
"""What may be done to find out whether the last pack can be saved."""

NEAR = 10_000
"""A plan on a coarse grid is good enough within one pack in so many of the bound."""

FAR = 1_000
"""Above one pack in so many of the bound, the limit of work has cut the search off, and `nnls` may have come further."""


MATCHING_WORK = 2e9
"""What matching the packs anew may do in the end, beside the limit of work, where there is a gap."""


@dataclass(frozen=True)
class Effort:
    """When to give up.

    Attributes:
        attempts: dives, until the gap is 0.
        iterations: simplex iterations for each length, with the depth limit and the strategies of the NNLS.
    """

    attempts: tuple[DiveSettings, ...]
    iterations: float = np.inf


THOROUGH = Effort((DiveSettings(0.15), DiveSettings(0.25), DiveSettings(0.4), DiveSettings(0.08, 0.6)))
QUICK = Effort((DiveSettings(0.25, max_steps=30),), iterations=60)
"""For a coarse grid, where a pack or two more do not matter."""


@dataclass(frozen=True)
class Optimum:
    """A packing and how good it can be at best.

    Attributes:
        mixture: covers the histogram exactly.
        certificate: proof that no packing of this depth has fewer than `certificate.bound` packs.
    """

    mixture: Mixture
    certificate: Certificate

    @property
    def gap(self) -> int:
        """Packs above the bound; 0 is proven optimal."""
        return packs_of(self.mixture) - self.certificate.bound


def solve_optimally(counts: IntArray, depth: int, work: Work | None = None) -> Solved:
    """As `pack_optimally`, in the form of the table of algorithms; what lies far from its bound is packed by `nnls` too."""
    found = pack_optimally(counts, depth, work=work)
    if found.gap > max(1, found.certificate.bound // FAR):
        found = _better(found, pack_by_nnls(counts, depth).mixture, found.certificate)
    if found.gap and counts.sum() <= MOST_DEALT:
        bound = found.certificate.bound
        matched = rematch_halves(found.mixture, len(counts), depth, bound, Work(MATCHING_WORK))
        found = _better(found, matched, found.certificate)
    return Solved(found.mixture, "optimal", found.certificate)


def pack_optimally(counts: IntArray, depth: int, effort: Effort = THOROUGH, work: Work | None = None) -> Optimum:
    """Pack a histogram in as few packs as possible, or in nearly as few if it has thousands of lengths.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences in a pack, from 1; L or more means no limit.
        effort: when to give up.
        work: what may be done in all; None for `OPTIMAL_WORK`.
    """
    work = Work(OPTIMAL_WORK) if work is None else work
    optimum = Optimum(sorted_mixture(pack_longest_first(counts, depth)), simple_certificate(counts, depth))
    if optimum.gap == 0:
        return optimum
    if len(counts) > LONGEST_WHOLE and np.count_nonzero(counts) > FEW_LENGTHS and counts.sum() <= MOST_DEALT:
        optimum = _deal_from_grids(counts, depth, optimum, work.share(0.8))
        if optimum.gap == 0 or (_near(optimum) and np.count_nonzero(counts) > MANY_LENGTHS):
            return optimum
        work = work.share(LAST_PACK_SHARE) if _near(optimum) else work
    if np.count_nonzero(counts) > MANY_LENGTHS:
        found = _pack_coarsely(counts, depth, work)
        return _better(optimum, found.mixture, found.certificate)
    linear_program = LinearProgram.unlimited(counts, work.share(0.4))
    linear_program.generate()
    optimum = _better(optimum, None, certify(linear_program, depth))
    if depth < linear_program.deepest and optimum.gap:
        linear_program = _limited(counts, depth, linear_program, effort, work.share(0.6))
        optimum = _better(optimum, None, certify(linear_program, depth))
    linear_program.limit_work(work)
    for settings in effort.attempts:
        if optimum.gap == 0 or (work.exhausted and settings is not effort.attempts[0]):
            break
        optimum = _better(optimum, _whole_packs(linear_program, optimum.certificate.bound, settings), optimum.certificate)
    return optimum


def _near(optimum: Optimum) -> bool:
    """Whether the gap is at most a pack, or one pack in `NEAR`."""
    return optimum.gap <= _near_gap(optimum.certificate.bound)


def _near_gap(bound: int) -> int:
    """Packs above the bound with which a plan is near to it."""
    return max(1, bound // NEAR)


def _deal_from_grids(counts: IntArray, depth: int, optimum: Optimum, work: Work) -> Optimum:
    """Solve on coarse grids, deal the sequences out into the slots, and swap them until they fit."""
    sequences, length = int(counts.sum()), len(counts)
    mean = float(counts @ np.arange(1, length + 1)) / sequences
    slack = max(SLACK_SHARE * mean, SLACK_PACKS * length / sequences)
    for attempt, (bins, slacks) in enumerate(DEALT):
        if _near(optimum) or work.exhausted:
            break
        coarse = pack_optimally(split_counts(counts, bins, slack * slacks), depth, QUICK, work.share(0.3))
        proof = prove(counts, interpolated_prices(coarse.certificate.prices, len(counts)), depth)
        optimum = _better(optimum, None, proof)
        if _near(optimum):
            break
        mixture, left = deal_into_slots(coarse.mixture, counts, bins, depth, work.share(0.4))
        optimum = _better(optimum, best_fit_into(mixture, left, depth), proof)
        optimum = _better(optimum, _matched(optimum.mixture, optimum, length, depth, work.share(0.3)), proof)
        if attempt == 0 and not _near(optimum):  # from packs that were made on grids, matching goes another way
            found = _pack_coarsely(counts, depth, work.share(0.5))
            matched = _matched(found.mixture, optimum, length, depth, work.share(0.6))
            optimum = _better(optimum, matched, found.certificate)
    return optimum


def _matched(mixture: Mixture, optimum: Optimum, length: int, depth: int, work: Work) -> Mixture:
    """The packs of `mixture` matched anew, until they are near the bound."""
    bound = optimum.certificate.bound
    return rematch_halves(mixture, length, depth, bound + _near_gap(bound), work)


def _pack_coarsely(counts: IntArray, depth: int, work: Work) -> Optimum:
    """Rounds on coarse grids, each solved optimally; the first one's prices prove the bound."""
    proofs: list[Certificate] = []

    def solve(coarse: IntArray, _grid: Grid) -> Mixture:
        found = pack_optimally(coarse, depth, QUICK, work.share(0.5))
        if not proofs:
            proofs.append(prove(counts, interpolated_prices(found.certificate.prices, len(counts)), depth))
        return found.mixture

    mixture, left = pack_on_grids(counts, solve)
    return Optimum(best_fit_into(mixture, left, depth), proofs[0])


def _better(optimum: Optimum, mixture: Mixture | None, certificate: Certificate) -> Optimum:
    """The smaller mixture and the larger bound."""
    if mixture is None or packs_of(mixture) >= packs_of(optimum.mixture):
        mixture = optimum.mixture
    if certificate.bound < optimum.certificate.bound:
        certificate = optimum.certificate
    return Optimum(mixture, certificate)


def _limited(counts: IntArray, depth: int, unlimited: LinearProgram, effort: Effort, work: Work) -> LinearProgram:
    """The program with the depth limit, solved."""
    linear_program = LinearProgram.limited(counts, depth, work)
    linear_program.relaxation = unlimited.relaxation
    relaxation = linear_program.generate(PATIENCE * len(linear_program.lengths))
    if not relaxation.closed and linear_program.max_length > LONGEST_WHOLE:
        linear_program.generate(effort.iterations * len(linear_program.lengths))
    elif not relaxation.closed:
        solution = solve_nnls(
            counts,
            residual_weights(len(counts)),
            useful_depth(counts, relaxation.bound, depth),
            max_rounds=int(NNLS_ROUNDS * len(linear_program.lengths)),
            work=work.share(0.6),
        )
        linear_program = LinearProgram(counts, depth, work)
        linear_program.relaxation = relaxation
        linear_program.add(solution.strategies)
        linear_program.generate(effort.iterations * len(linear_program.lengths))
    return linear_program


def _whole_packs(linear_program: LinearProgram, target: int, settings: DiveSettings) -> Mixture:
    """One attempt at the target."""
    slots, waiting = dive(linear_program, target, settings)
    unpacked = np.zeros_like(linear_program.counts)
    unpacked[linear_program.lengths - 1] = waiting
    return best_fit_into(fill_slots(slots, linear_program.counts - unpacked), unpacked, linear_program.depth)
