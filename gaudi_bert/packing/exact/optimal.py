"""As few packs as possible, with the proof: NNLS or LPFHP strategies, linear program, whole packs by search.

1. LPFHP, and the token and count bounds: often that is the end of it.
2. The linear program without a depth limit, from LPFHP's strategies. It is quick, and its prices are valid at any depth.
3. The one with the depth limit, from those prices. Where LPFHP's strategies lead nowhere (depth 4 at length 1024), those of
   an NNLS solve do: least squares prices are smooth, where those of the linear program jump, so it finds strategies that
   fill exactly.
4. Its solution rounded down, and the rest searched or dived for (`dive`), with other step sizes if that fails.

Long packs with thousands of lengths go through a coarse grid (`long_packs`) on which all this is done; then the packs are
matched again (`halves`). That mostly ends within a pack of the bound.

The certificate holds whatever the floating point did; the mixture is exact. If the gap is not 0, the best mixture that is
known is returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.certificate import Certificate, simple_certificate, threshold_certificate
from gaudi_bert.packing.exact.bounds import certify, prove
from gaudi_bert.packing.exact.linear_program import MOST_CLOSED, LinearProgram, needs_grid
from gaudi_bert.packing.exact.pricers import can_be_bounded, deepest_pack
from gaudi_bert.packing.exact.whole_packs import WHOLE, DiveSettings, dive
from gaudi_bert.packing.heuristics import best_fit_into, pack_longest_first
from gaudi_bert.packing.long_packs import (
    FEW_LENGTHS,
    GRIDS,
    LAST_PACK_SHARE,
    MATCHING_WORK,
    MOST_DEALT,
    MOST_LENGTHS,
    NEAR,
    SLACK_PACKS,
    SLACK_SHARE,
    THINNED,
    deal_into_slots,
    interpolated_prices,
    pack_thinned,
    rematch_halves,
    split_counts,
)
from gaudi_bert.packing.mixture import OPTIMAL_WORK, Mixture, Solved, Work, fill_slots, packs_of, sorted_mixture
from gaudi_bert.packing.nnls import loop_weights, pack_by_nnls
from gaudi_bert.packing.nnls_solver import LONGEST_WHOLE, solve_nnls, useful_depth

NNLS_ROUNDS = 1.5
"""Rounds for each length that the NNLS may take. Where exact fills exist it needs fewer, and elsewhere it does not help."""

PATIENCE = 4
"""Simplex iterations for each length before the NNLS supplies strategies."""

SMALLER_DEPTHS_WORK = 15e9
"""What the plans of smaller depths may do together. None is begun unless as much as the last one took remains."""

FAR = 1_000
"""Above one pack in so many of the bound, the limit of work has cut the search off, and `nnls` may have come further."""


@dataclass(frozen=True)
class _Effort:
    """When to give up.

    Attributes:
        attempts: dives, until the gap is 0.
        bounded: further dives, of few sequences, with no more of a length in a pack than there are.
        iterations: simplex iterations for each length, with the depth limit and the strategies of the NNLS.
    """

    attempts: tuple[DiveSettings, ...]
    bounded: tuple[DiveSettings, ...] = ()
    iterations: float = np.inf


FEW_SEQUENCES = 1500
"""So many sequences or fewer may cost seconds for each pack that is saved."""

_SHARES = (0.08, 0.15, 0.25, 0.02)
_FIRST = (DiveSettings(0.15), DiveSettings(0.25), DiveSettings(0.4), DiveSettings(0.08, 0.6))

THOROUGH = _Effort(
    attempts=(*_FIRST, *(DiveSettings(_SHARES[seed % 4], seed=seed) for seed in range(1, 9))),
    bounded=tuple(DiveSettings(_SHARES[seed % 4], max_failures=12 if seed % 2 else 60, seed=seed) for seed in range(1, 41)),
)
QUICK = _Effort((DiveSettings(0.25, max_steps=30),), iterations=60)
"""For a coarse grid, where a pack or two more do not matter."""


@dataclass(frozen=True)
class _Optimum:
    """A packing and how good it can be at best: none of this depth has fewer than `certificate.bound` packs."""

    mixture: Mixture
    certificate: Certificate

    @property
    def gap(self) -> int:
        """Packs above the bound; 0 is proven optimal."""
        return packs_of(self.mixture) - self.certificate.bound


def solve_optimally(counts: IntArray, depth: int, work: Work | None = None) -> Solved:
    """As `pack_optimally`, in the form of the table of algorithms, with what else may save a pack.

    A plan of a smaller depth is one of a larger depth too. So where there is a gap, the smaller depths are planned as well,
    each as if it were requested, until they need too many packs, or too little work remains for another.
    """
    lengths = np.flatnonzero(counts) + 1
    deepest = deepest_pack(lengths, counts[lengths - 1], len(counts))
    work = Work(OPTIMAL_WORK) if work is None else work
    others, before = Work(SMALLER_DEPTHS_WORK, work), work.remaining
    optimum = _pack_at_depth(counts, depth if depth < deepest else len(counts), _limit_within(work))
    smaller = min(depth, deepest)
    while optimum.gap and smaller > 1 and before - work.remaining < others.remaining:
        smaller, before = smaller - 1, work.remaining
        if -(-int(counts.sum()) // smaller) >= packs_of(optimum.mixture):
            break
        less_deep = _pack_at_depth(counts, smaller, _limit_within(others))
        if less_deep.certificate.bound >= packs_of(optimum.mixture):
            break
        optimum = _better(optimum, less_deep.mixture, optimum.certificate)
    return Solved(optimum.mixture, "optimal", optimum.certificate)


def _limit_within(whole: Work) -> Work:
    """What one plan may do, or the rest."""
    return Work(min(OPTIMAL_WORK, whole.remaining), whole)


def _pack_at_depth(counts: IntArray, depth: int, work: Work) -> _Optimum:
    """What is far from its bound is packed by `nnls` too; the packs of sequences that can be dealt are matched again."""
    optimum = pack_optimally(counts, depth, work=work)
    bound = optimum.certificate.bound
    if optimum.gap > max(1, bound // FAR):
        optimum = _better(optimum, pack_by_nnls(counts, depth).mixture, optimum.certificate)
    if optimum.gap and counts.sum() <= MOST_DEALT:
        matched = rematch_halves(optimum.mixture, len(counts), depth, bound, Work(MATCHING_WORK))
        optimum = _better(optimum, matched, optimum.certificate)
    return optimum


def pack_optimally(counts: IntArray, depth: int, effort: _Effort = THOROUGH, work: Work | None = None) -> _Optimum:
    """Pack a histogram, int64 [L], in as few packs as possible, or in nearly as few if it has thousands of lengths.

    `effort` decides when to give up, `work` what may be done in all; None for `OPTIMAL_WORK`.
    """
    work = Work(OPTIMAL_WORK) if work is None else work
    if np.count_nonzero(counts) > MOST_LENGTHS:
        return _with_thresholds(_pack_many(counts, depth, MOST_LENGTHS, work), counts, depth)
    optimum = _Optimum(sorted_mixture(pack_longest_first(counts, depth)), simple_certificate(counts, depth))
    if optimum.gap == 0:
        return optimum
    lengths, can_be_dealt = np.count_nonzero(counts), counts.sum() <= MOST_DEALT
    is_limited = depth < len(counts) // (int(np.argmax(counts > 0)) + 1)
    must_be_coarse = needs_grid(counts, depth)
    if must_be_coarse or len(counts) > LONGEST_WHOLE:
        optimum = _with_thresholds(optimum, counts, depth)
    if must_be_coarse and not can_be_dealt:
        planned = _pack_many(counts, depth, THINNED, work)
        return _better(optimum, planned.mixture, planned.certificate)
    if must_be_coarse or (len(counts) > LONGEST_WHOLE and lengths > FEW_LENGTHS and can_be_dealt):
        optimum = _deal_from_grids(counts, depth, optimum, work.share(0.8))
        if optimum.gap == 0 or (must_be_coarse and (is_limited or lengths * len(counts) > MOST_CLOSED)):
            return optimum
        work = work.share(LAST_PACK_SHARE) if _near(optimum) else work
    linear_program = LinearProgram.unlimited(counts, work.share(0.4 if is_limited else 0.7))
    linear_program.generate()
    optimum = _better(optimum, None, certify(linear_program, depth))
    if is_limited and optimum.gap:
        linear_program = _limited(counts, depth, linear_program, effort, work.share(0.6))
        optimum = _better(optimum, None, certify(linear_program, depth))
    linear_program.limit_work(work)
    optimum = _with_thresholds(optimum, counts, depth)
    optimum, is_hopeless = _try_dives(linear_program, optimum, effort.attempts)
    if optimum.gap and not is_hopeless and effort.bounded and _can_be_bounded(linear_program):
        bounded = LinearProgram.bounded(linear_program, work)
        if np.ceil(bounded.generate().bound - WHOLE) < packs_of(optimum.mixture):
            optimum, _ = _try_dives(bounded, optimum, effort.bounded)
    return optimum


def _try_dives(
    linear_program: LinearProgram, optimum: _Optimum, attempts: tuple[DiveSettings, ...]
) -> tuple[_Optimum, bool]:
    """Dive until the gap is closed, or cannot be. Half of the dives aim at a pack less than there are, not at the bound."""
    least = linear_program.least_packs
    for number, settings in enumerate(attempts):
        least, packs = max(least, optimum.certificate.bound), packs_of(optimum.mixture)
        if least >= packs or (linear_program.work.exhausted and number > 0):
            break
        target = least if number % 2 == 0 else packs - 1
        mixture, is_hopeless = _whole_packs(linear_program, target, settings)
        optimum = _better(optimum, mixture, optimum.certificate)
        if is_hopeless:
            least = target + 1
    return optimum, least >= packs_of(optimum.mixture)


def _can_be_bounded(linear_program: LinearProgram) -> bool:
    """Whether there are so few sequences that their number at each length tells."""
    sequences = int(linear_program.demand.sum())
    return sequences <= FEW_SEQUENCES and can_be_bounded(
        linear_program.lengths, linear_program.max_length, linear_program.depth, linear_program.demand
    )


def _with_thresholds(optimum: _Optimum, counts: IntArray, depth: int) -> _Optimum:
    """With the proof by thresholds, where that is a better one."""
    if optimum.gap == 0:
        return optimum
    proofs = (optimum.certificate, threshold_certificate(counts, depth))
    return _Optimum(optimum.mixture, max(proofs, key=lambda certificate: certificate.bound))


def _near(optimum: _Optimum) -> bool:
    """Whether the gap is at most a pack, or one pack in `NEAR`."""
    return optimum.gap <= _near_gap(optimum.certificate.bound)


def _near_gap(bound: int) -> int:
    """Packs above the bound with which a plan is near to it."""
    return max(1, bound // NEAR)


def _deal_from_grids(counts: IntArray, depth: int, optimum: _Optimum, work: Work) -> _Optimum:
    """Solve on coarse grids, deal the sequences out into the slots, and swap them until they fit."""
    sequences, length = int(counts.sum()), len(counts)
    mean = float(counts @ np.arange(1, length + 1)) / sequences
    slack = max(SLACK_SHARE * mean, SLACK_PACKS * length / sequences)
    for bins, slacks in GRIDS:
        if _near(optimum) or work.exhausted:
            break
        coarse = pack_optimally(split_counts(counts, bins, slack * slacks), depth, QUICK, work.share(0.3))
        proof = prove(counts, interpolated_prices(coarse.certificate.prices, len(counts)), depth)
        optimum = _better(optimum, None, proof)
        if _near(optimum):
            break
        mixture, remaining = deal_into_slots(coarse.mixture, counts, bins, depth, work.share(0.4))
        optimum = _better(optimum, best_fit_into(mixture, remaining, depth), proof)
        bound = optimum.certificate.bound
        matched = rematch_halves(optimum.mixture, length, depth, bound + _near_gap(bound), work.share(0.3))
        optimum = _better(optimum, matched, proof)
    return optimum


def _pack_many(counts: IntArray, depth: int, most: int, work: Work) -> _Optimum:
    """Plan a part of the sequences, at most so many; its prices prove the bound of all."""
    proofs: list[Certificate] = []

    def pack(part: IntArray) -> Mixture:
        planned = pack_optimally(part, depth, work=work)
        proofs.append(prove(counts, planned.certificate.prices, depth))
        return planned.mixture

    return _Optimum(pack_thinned(counts, depth, pack, most), proofs[0])


def _better(optimum: _Optimum, mixture: Mixture | None, certificate: Certificate) -> _Optimum:
    """The smaller mixture and the larger bound."""
    if mixture is None or packs_of(mixture) >= packs_of(optimum.mixture):
        mixture = optimum.mixture
    if certificate.bound < optimum.certificate.bound:
        certificate = optimum.certificate
    return _Optimum(mixture, certificate)


def _limited(counts: IntArray, depth: int, unlimited: LinearProgram, effort: _Effort, work: Work) -> LinearProgram:
    """The program with the depth limit, solved."""
    linear_program = LinearProgram.limited(counts, depth, work)
    linear_program.relaxation = unlimited.relaxation
    relaxation = linear_program.generate(PATIENCE * len(linear_program.lengths))
    if not relaxation.closed and linear_program.max_length > LONGEST_WHOLE:
        linear_program.generate(effort.iterations * len(linear_program.lengths))
    elif not relaxation.closed:
        solution = solve_nnls(
            counts,
            loop_weights(len(counts)),
            useful_depth(counts, relaxation.bound, depth),
            max_rounds=int(NNLS_ROUNDS * len(linear_program.lengths)),
            work=work.share(0.6),
        )
        linear_program = LinearProgram(counts, depth, work)
        linear_program.relaxation = relaxation
        linear_program.add(solution.strategies)
        linear_program.generate(effort.iterations * len(linear_program.lengths))
    return linear_program


def _whole_packs(linear_program: LinearProgram, target: int, settings: DiveSettings) -> tuple[Mixture, bool]:
    """One attempt at the target; and whether no other is worth while."""
    dived = dive(linear_program, target, settings)
    unpacked = np.zeros_like(linear_program.counts)
    unpacked[linear_program.lengths - 1] = dived.waiting
    mixture = fill_slots(dived.packs, linear_program.counts - unpacked)
    return best_fit_into(mixture, unpacked, linear_program.depth), dived.is_hopeless
