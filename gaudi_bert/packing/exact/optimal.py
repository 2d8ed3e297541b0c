"""As few packs as possible, with the proof: NNLS or LPFHP strategies, linear programme, whole packs by search.

1. LPFHP, and the token and count bounds: often that is the end of it.
2. The linear programme without a depth limit, from LPFHP's strategies. It is quick, and its prices are valid at
   any depth.
3. The one with the depth limit, from those prices. Where LPFHP's strategies lead nowhere (depth 4 at length
   1024), those of an NNLS solve do:
   least squares prices are smooth, where those of the linear programme jump, so it finds strategies that fill
   exactly.
4. Its solution rounded down, and the rest searched or dived for (`dive`), with other step sizes if that fails.

Above MANY_LENGTHS lengths, as at a maximum length of 8192, all this is done on a coarse grid (`coarse`), to
within some 0.05 %.

The certificate holds whatever the floating point did; the mixture is exact. If the gap is not 0, the best
mixture found is returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.certificate import Certificate
from gaudi_bert.packing.coarse_grid import Grid, interpolated_prices, pack_on_grids
from gaudi_bert.packing.exact.bounds import MANY_LENGTHS, certify, prove, simple_certificate
from gaudi_bert.packing.exact.dive import DiveSettings, dive
from gaudi_bert.packing.exact.fill_slots import fill_slots
from gaudi_bert.packing.exact.linear_program import LinearProgram
from gaudi_bert.packing.heuristics.best_fit import best_fit_into
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.mixture import Mixture, packs_of, sorted_mixture
from gaudi_bert.packing.nnls.iterative import residual_weights
from gaudi_bert.packing.nnls.solver import LONGEST_WHOLE, solve_nnls
from gaudi_bert.packing.result import Solved
from gaudi_bert.packing.work import OPTIMAL_WORK, Work

__all__ = ["Optimum", "pack_optimally", "solve_optimally"]

NNLS_ROUNDS = 1.5
"""Rounds for each length that the NNLS may take. Where exact fills exist it needs fewer, and elsewhere it is no help."""

PATIENCE = 4
"""Simplex iterations for each length before the NNLS is asked for strategies."""


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
QUICK = Effort((DiveSettings(0.25, max_steps=6),), iterations=60)
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
    """As `pack_optimally`, in the form of the table of algorithms."""
    found = pack_optimally(counts, depth, work=work)
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
    if np.count_nonzero(counts) > MANY_LENGTHS:
        return _pack_coarsely(counts, depth, optimum, work)
    programme = LinearProgram.unlimited(counts, work.share(0.4))
    programme.generate()
    optimum = _better(optimum, None, certify(programme, depth))
    if depth < programme.deepest and optimum.gap:
        programme = _limited_programme(counts, depth, programme, effort, work.share(0.6))
        optimum = _better(optimum, None, certify(programme, depth))
    programme.limit_work(work)
    for settings in effort.attempts:
        if optimum.gap == 0 or (work.exhausted and settings is not effort.attempts[0]):
            break
        optimum = _better(optimum, _whole_packs(programme, optimum.certificate.bound, settings), optimum.certificate)
    return optimum


def _pack_coarsely(counts: IntArray, depth: int, optimum: Optimum, work: Work) -> Optimum:
    """Rounds on coarse grids, each solved optimally; the first one's prices prove the bound."""
    proofs: list[Certificate] = []

    def solve(coarse: IntArray, grid: Grid) -> Mixture:
        found = pack_optimally(coarse, depth, QUICK, work.share(0.5))
        if not proofs:
            proofs.append(prove(counts, interpolated_prices(found.certificate.prices, grid), depth))
        return found.mixture

    mixture, left = pack_on_grids(counts, solve)
    return _better(optimum, best_fit_into(mixture, left, depth), proofs[0])


def _better(optimum: Optimum, mixture: Mixture | None, certificate: Certificate) -> Optimum:
    """The smaller mixture and the larger bound."""
    if mixture is None or packs_of(mixture) >= packs_of(optimum.mixture):
        mixture = optimum.mixture
    if certificate.bound < optimum.certificate.bound:
        certificate = optimum.certificate
    return Optimum(mixture, certificate)


def _limited_programme(counts: IntArray, depth: int, unlimited: LinearProgram, effort: Effort, work: Work) -> LinearProgram:
    """The programme with the depth limit, solved."""
    programme = LinearProgram.limited(counts, depth, work)
    programme.relaxation = unlimited.relaxation
    relaxation = programme.generate(PATIENCE * len(programme.lengths))
    if not relaxation.closed and programme.max_length > LONGEST_WHOLE:
        programme.generate(effort.iterations * len(programme.lengths))
    elif not relaxation.closed:
        enough = int(np.ceil(counts.sum() / relaxation.bound)) + 1  # deeper packs are hardly ever needed, and cost time
        solution = solve_nnls(
            counts,
            residual_weights(len(counts)),
            min(depth, enough),
            max_rounds=int(NNLS_ROUNDS * len(programme.lengths)),
            work=work.share(0.6),
        )
        programme = LinearProgram(counts, depth, work)
        programme.relaxation = relaxation
        programme.add(solution.strategies)
        programme.generate(effort.iterations * len(programme.lengths))
    return programme


def _whole_packs(programme: LinearProgram, target: int, settings: DiveSettings) -> Mixture:
    """One attempt at the target."""
    slots, waiting = dive(programme, target, settings)
    unpacked = np.zeros_like(programme.counts)
    unpacked[programme.lengths - 1] = waiting
    return best_fit_into(fill_slots(slots, programme.counts - unpacked), unpacked, programme.depth)
