"""As few packs as possible, with the proof: NNLS or LPFHP strategies, linear program, integer packs by search.

1. LPFHP, and the token and count bounds: often that is the end of it.
2. The linear program without a depth limit, from LPFHP's strategies. It is quick, and its prices are valid at any depth.
3. The one with the depth limit, from those prices. Where LPFHP's strategies lead nowhere (depth 4 at length 1024), those of
   an NNLS solve do, whose prices are smooth.
4. Its solution rounded down, and the rest searched or dived for (`dive`), with other step sizes if that fails.

Long packs with thousands of lengths go through a coarse grid on which all this is done; then the packs are matched again
(`long_packs`). The certificate holds whatever the floating point did; the mixture is exact.
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
    MATCHED,
    MOST_DEALT,
    MOST_LENGTHS,
    NEAR,
    SLACK_PACKS,
    SLACK_SHARE,
    THINNED,
    deal_into_slots,
    interpolated_prices,
    pack_thinned,
    packs_with_room,
    rematch_halves,
    split_counts,
)
from gaudi_bert.packing.mixture import Effort, Mixture, Solved, Work, add_packs, fill_slots, packs_of, sorted_mixture
from gaudi_bert.packing.nnls import loop_weights, pack_by_nnls
from gaudi_bert.packing.nnls_solver import LONGEST_WHOLE, solve_nnls, useful_depth

NNLS_ROUNDS = 1.5
"""Rounds for each length that the NNLS may take. Where exact fills exist it needs fewer, and elsewhere it does not help."""

PATIENCE = 4
"""Simplex iterations for each length before the NNLS supplies strategies."""

FAR = 1_000
"""Above one pack in so many of the bound, the limit of work has cut the search off, and `nnls` may have come further."""

# --- what the search for fewer packs may cost, by what it can gain

FULL_WORK = 90e9  # for few sequences, or where at least one pack in fifty may be saved: a minute or so
NEAR_WORK = 1.2e9  # where next to nothing can be saved: a second
NEGLIGIBLE = 1e-5  # a share of the packs that is not looked for with thousands of lengths
FULL_GAIN, FEW_PACKS = 0.02, 10  # the share that may be saved, beyond so many packs, from which on it may take `FULL_WORK`
FEWEST_SEQUENCES = 500  # so many or fewer may take `FULL_WORK`: each pack is a large share of them
HEURISTIC_MULTIPLE = 3  # the search may in any case take so many times as long as LPFHP took
# What matching in halves may do before anything else is tried, as a share of `NEAR_WORK`: of more and of at most
# `FEW_LENGTHS` lengths, whose linear program is quick.
MATCHING_SHARE, QUICK_MATCHING_SHARE = 0.4, 0.04
SEARCH_SHARE = 2 / 3  # of the work at one depth, for linear programs and dives; the rest is for `nnls` and for matching
FEW_SEQUENCES = 1500  # so many or fewer may cost seconds for each pack that is saved

_SHARES = (0.08, 0.15, 0.25, 0.02)
_FIRST = (DiveSettings(0.15), DiveSettings(0.25), DiveSettings(0.4), DiveSettings(0.08, 0.6))
_DIVES = (*_FIRST, *(DiveSettings(_SHARES[seed % 4], seed=seed) for seed in range(1, 9)))
"""Until the gap is 0."""
_BOUNDED_DIVES = tuple(
    DiveSettings(_SHARES[seed % 4], max_failures=12 if seed % 2 else 60, seed=seed) for seed in range(1, 41)
)
"""Further ones, of few sequences, with no more of a length in a pack than there are."""

_QUICK_DIVES, _QUICK_ITERATIONS = (DiveSettings(0.25, max_steps=30),), 60
"""For a coarse grid, where a pack or two more do not matter; and simplex iterations for each length."""


@dataclass(frozen=True)
class _Optimum:
    """A packing and how good it can be at best: none of this depth has fewer than `certificate.bound` packs."""

    mixture: Mixture
    certificate: Certificate

    @property
    def gap(self) -> int:
        """Packs above the bound; 0 is proven optimal."""
        return packs_of(self.mixture) - self.certificate.bound


def solve_optimally(counts: IntArray, depth: int, work: Work | None = None, effort: Effort = "bounded") -> Solved:
    """Pack as `_pack_optimally`, in the form of the table of algorithms, with what else may save a pack.

    A plan of a smaller depth is one of a larger depth too. So where there is a gap, the smaller depths are planned as well,
    each as if it were requested, until they need too many packs, or less work remains than the last one took.

    All may do `work`, by default what can be gained; the effort "unlimited" continues until nothing helps.
    """
    lengths = np.flatnonzero(counts) + 1
    deepest = deepest_pack(lengths, counts[lengths - 1], len(counts))
    work = Work() if work is None else work
    first = _first_look(counts, depth if depth < deepest else len(counts), work)
    allowed = work.at_most(_worth_of_a_search(first, counts, depth, effort))
    before = allowed.spent
    optimum = _search(first, counts, depth if depth < deepest else len(counts), allowed, effort)
    smaller = min(depth, deepest)
    while optimum.gap and smaller > 1 and allowed.spent - before < allowed.remaining:
        if _is_enough(optimum, counts, depth):
            break
        smaller, before = smaller - 1, allowed.spent
        if -(-int(counts.sum()) // smaller) >= packs_of(optimum.mixture):
            break
        less_deep = _first_look(counts, smaller, allowed)
        part = allowed.at_most(_worth_of_a_search(less_deep, counts, smaller, effort))
        less_deep = _search(less_deep, counts, smaller, part, effort)
        if less_deep.certificate.bound >= packs_of(optimum.mixture):
            break
        optimum = _better(optimum, less_deep.mixture, optimum.certificate)
    return Solved(optimum.mixture, "optimal", optimum.certificate)


def _first_look(counts: IntArray, depth: int, work: Work) -> _Optimum:
    """Pack by LPFHP, and prove what tokens and thresholds prove. Where little can be gained, match again."""
    if np.count_nonzero(counts) > MOST_LENGTHS:
        mixture = pack_thinned(counts, depth, lambda part: pack_longest_first(part, depth), MOST_LENGTHS)
    else:
        mixture = sorted_mixture(pack_longest_first(counts, depth))
    work.spend_on(mixture)
    optimum = _with_thresholds(_Optimum(mixture, simple_certificate(counts, depth)), counts, depth)
    if optimum.gap > max(FEW_PACKS, FULL_GAIN * optimum.certificate.bound) or _is_enough(optimum, counts, depth):
        return optimum
    share = MATCHING_SHARE if np.count_nonzero(counts) > FEW_LENGTHS else QUICK_MATCHING_SHARE
    return _matched_again(optimum, len(counts), depth, work.at_most(share * NEAR_WORK))


def _is_enough(optimum: _Optimum, counts: IntArray, depth: int) -> bool:
    """Whether so little can be gained that it is not worth a plan on a coarse grid, whose own error is at least as large."""
    return optimum.gap <= NEGLIGIBLE * packs_of(optimum.mixture) and needs_grid(counts, depth)


def _worth_of_a_search(optimum: _Optimum, counts: IntArray, depth: int, effort: Effort) -> float:
    """Operations that a search for fewer packs may take: in proportion to the share of the packs that it may save."""
    if effort == "unlimited":
        return np.inf
    if _is_enough(optimum, counts, depth):
        return 0.0
    if counts.sum() <= FEWEST_SEQUENCES:
        return FULL_WORK
    gain = max(0, optimum.gap - FEW_PACKS) / packs_of(optimum.mixture)
    heuristic = Work()
    heuristic.spend_on(optimum.mixture)
    return max(NEAR_WORK, HEURISTIC_MULTIPLE * heuristic.spent, FULL_WORK * min(gain / FULL_GAIN, 1.0))


def _search(first: _Optimum, counts: IntArray, depth: int, work: Work, effort: Effort) -> _Optimum:
    """Plan by linear programs; what is then far from its bound is packed by `nnls` too, and all packs are matched again."""
    if first.gap == 0 or work.exhausted:
        return first
    near_work = np.inf if effort == "unlimited" else NEAR_WORK
    optimum = _pack_optimally(counts, depth, work.share(SEARCH_SHARE), first, near_work=near_work)
    bound = optimum.certificate.bound
    if optimum.gap > max(1, bound // FAR):
        optimum = _better(optimum, pack_by_nnls(counts, depth, work=work).mixture, optimum.certificate)
    return _matched_again(optimum, len(counts), depth, work)


def _matched_again(optimum: _Optimum, max_length: int, depth: int, work: Work) -> _Optimum:
    """Match the halves of packs again, if there is a gap: of more than `MATCHED` sequences those of a part of the packs."""
    if optimum.gap == 0 or work.exhausted:
        return optimum
    part = packs_with_room(optimum.mixture, max_length, MATCHED)
    matched = rematch_halves(part, max_length, depth, packs_of(part) - optimum.gap, work)
    if packs_of(matched) == packs_of(part):
        return optimum
    mixture = dict(optimum.mixture)
    for strategy, count in part.items():
        mixture[strategy] -= count
    for strategy, count in matched.items():
        add_packs(mixture, strategy, count)
    return _Optimum(sorted_mixture({strategy: count for strategy, count in mixture.items() if count}), optimum.certificate)


def _pack_optimally(
    counts: IntArray,
    depth: int,
    work: Work | None = None,
    known: _Optimum | None = None,
    *,
    near_work: float = np.inf,
    is_quick: bool = False,
) -> _Optimum:
    """Pack a histogram, int64 [L], in as few packs as possible, or in nearly as few if it has thousands of lengths.

    All may do `work`, by default `FULL_WORK`, and `near_work` once the plan is near to its bound; `known` is a plan to start
    from. `is_quick` gives up soon, as for a coarse grid.
    """
    work = Work(FULL_WORK) if work is None else work
    if np.count_nonzero(counts) > MOST_LENGTHS:
        planned = _with_thresholds(_pack_many(counts, depth, MOST_LENGTHS, work), counts, depth)
        return planned if known is None else _better(known, planned.mixture, planned.certificate)
    optimum = known
    if optimum is None:
        optimum = _Optimum(sorted_mixture(pack_longest_first(counts, depth)), simple_certificate(counts, depth))
        work.spend_on(optimum.mixture)
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
    linear_program = LinearProgram.limited(counts, len(counts), work.share(0.4 if is_limited else 0.7))
    linear_program.generate()
    optimum = _better(optimum, None, certify(linear_program, depth, work))
    if is_limited and optimum.gap:
        linear_program = _limited(counts, depth, linear_program, is_quick, work.share(0.6))
        optimum = _better(optimum, None, certify(linear_program, depth, work))
    linear_program.limit_work(work)
    optimum = _with_thresholds(optimum, counts, depth)
    optimum, is_hopeless = _try_dives(linear_program, optimum, _QUICK_DIVES if is_quick else _DIVES, near_work)
    if (
        optimum.gap
        and not is_hopeless
        and not is_quick
        and counts.sum() <= FEW_SEQUENCES  # so few that their number at each length tells
        and can_be_bounded(linear_program.lengths, len(counts), depth, linear_program.demand)
    ):
        bounded = LinearProgram.bounded(linear_program, linear_program.work)
        if np.ceil(bounded.generate().bound - WHOLE) < packs_of(optimum.mixture):
            optimum, _ = _try_dives(bounded, optimum, _BOUNDED_DIVES, near_work)
    return optimum


def _try_dives(
    linear_program: LinearProgram, optimum: _Optimum, attempts: tuple[DiveSettings, ...], near_work: float
) -> tuple[_Optimum, bool]:
    """Dive until the gap is closed, or cannot be. Half of the dives aim at a pack less than there are, not at the bound.

    Once the plan is near to the bound, further dives may do `near_work`.
    """
    least = linear_program.least_packs
    is_limited = False
    for number, settings in enumerate(attempts):
        if _near(optimum) and not is_limited:
            linear_program.limit_work(linear_program.work.at_most(near_work))
            is_limited = True
        least, packs = max(least, optimum.certificate.bound), packs_of(optimum.mixture)
        if least >= packs or (linear_program.work.exhausted and number > 0):
            break
        target = least if number % 2 == 0 else packs - 1
        packs_of_dive, waiting, is_hopeless = dive(linear_program, target, settings)
        unpacked = np.zeros_like(linear_program.counts)
        unpacked[linear_program.lengths - 1] = waiting
        mixture = best_fit_into(fill_slots(packs_of_dive, linear_program.counts - unpacked), unpacked, linear_program.depth)
        linear_program.work.spend_on(mixture)
        optimum = _better(optimum, mixture, optimum.certificate)
        if is_hopeless:
            least = target + 1
    return optimum, least >= packs_of(optimum.mixture)


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
        coarse = _pack_optimally(split_counts(counts, bins, slack * slacks), depth, work.share(0.3), is_quick=True)
        proof = prove(counts, interpolated_prices(coarse.certificate.prices, len(counts)), depth, work)
        optimum = _better(optimum, None, proof)
        if _near(optimum):
            break
        mixture, remaining = deal_into_slots(coarse.mixture, counts, bins, depth, work.share(0.4))
        mixture = best_fit_into(mixture, remaining, depth)
        work.spend_on(mixture)
        optimum = _better(optimum, mixture, proof)
        bound = optimum.certificate.bound
        matched = rematch_halves(optimum.mixture, length, depth, bound + _near_gap(bound), work.share(0.3))
        optimum = _better(optimum, matched, proof)
    return optimum


def _pack_many(counts: IntArray, depth: int, most: int, work: Work) -> _Optimum:
    """Plan a part of the sequences, at most so many; its prices prove the bound of all."""
    proofs: list[Certificate] = []

    def pack(part: IntArray) -> Mixture:
        planned = _pack_optimally(part, depth, work=work)
        proofs.append(prove(counts, planned.certificate.prices, depth, work))
        return planned.mixture

    mixture = pack_thinned(counts, depth, pack, most)
    work.spend_on(mixture)
    return _Optimum(mixture, proofs[0])


def _better(optimum: _Optimum, mixture: Mixture | None, certificate: Certificate) -> _Optimum:
    """The smaller mixture and the larger bound."""
    if mixture is None or packs_of(mixture) >= packs_of(optimum.mixture):
        mixture = optimum.mixture
    if certificate.bound < optimum.certificate.bound:
        certificate = optimum.certificate
    return _Optimum(mixture, certificate)


def _limited(counts: IntArray, depth: int, unlimited: LinearProgram, is_quick: bool, work: Work) -> LinearProgram:
    """The program with the depth limit, solved."""
    linear_program = LinearProgram.limited(counts, depth, work)
    linear_program.relaxation = unlimited.relaxation
    iterations = _QUICK_ITERATIONS * len(linear_program.lengths) if is_quick else np.inf
    relaxation = linear_program.generate(PATIENCE * len(linear_program.lengths))
    if not relaxation.closed and linear_program.max_length > LONGEST_WHOLE:
        linear_program.generate(iterations)
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
        linear_program.generate(iterations)
    return linear_program
