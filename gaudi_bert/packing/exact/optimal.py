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
from gaudi_bert.packing.exact.bounds import certify_prices, certify_relaxation
from gaudi_bert.packing.exact.linear_program import MOST_CLOSED, LinearProgram, needs_coarse_grid
from gaudi_bert.packing.exact.pricers import can_be_bounded, deepest_pack
from gaudi_bert.packing.exact.whole_packs import WHOLE, DiveSettings, dive
from gaudi_bert.packing.heuristics import best_fit_into, pack_longest_first
from gaudi_bert.packing.long_packs import (
    FEW_LENGTHS,
    GRIDS,
    LAST_PACK_SHARE,
    MATCHED,
    MAX_ASSIGNED_SEQUENCES,
    MOST_LENGTHS,
    NEAR,
    SLACK_PACKS,
    SLACK_SHARE,
    THINNED,
    assign_to_slots,
    interpolate_prices,
    pack_subsample,
    rematch_halves,
    select_packs_with_room,
    split_counts_into_bins,
)
from gaudi_bert.packing.nnls import loop_weights, pack_by_nnls
from gaudi_bert.packing.nnls_solver import MAX_NNLS_LENGTH, limit_depth_by_bound, solve_nnls
from gaudi_bert.packing.strategies import (
    AlgorithmResult,
    Effort,
    StrategyCounts,
    WorkBudget,
    add_packs,
    count_packs,
    fill_slots,
    sort_strategies,
)

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
class _Incumbent:
    """A packing and how good it can be at best: none of this depth has fewer than `certificate.bound` packs."""

    strategy_counts: StrategyCounts
    certificate: Certificate

    @property
    def gap(self) -> int:
        """Packs above the bound; 0 is proven optimal."""
        return count_packs(self.strategy_counts) - self.certificate.bound


def solve_optimally(
    counts: IntArray, depth: int, work: WorkBudget | None = None, effort: Effort = "bounded"
) -> AlgorithmResult:
    """Pack as `_pack_optimally`, in the form of the table of algorithms, with what else may save a pack.

    A plan of a smaller depth is one of a larger depth too. So where there is a gap, the smaller depths are planned as well,
    each as if it were requested, until they need too many packs, or less work remains than the last one took.

    All may do `work`, by default what can be gained; the effort "unlimited" continues until nothing helps.
    """
    lengths = np.flatnonzero(counts) + 1
    deepest = deepest_pack(lengths, counts[lengths - 1], len(counts))
    work = WorkBudget() if work is None else work
    first = _pack_heuristically(counts, depth if depth < deepest else len(counts), work)
    allowed = work.at_most(_count_allowed_operations(first, counts, depth, effort))
    before = allowed.spent
    incumbent = _search_at_depth(first, counts, depth if depth < deepest else len(counts), allowed, effort)
    smaller = min(depth, deepest)
    while incumbent.gap and smaller > 1 and allowed.spent - before < allowed.remaining:
        if _is_gap_negligible(incumbent, counts, depth):
            break
        smaller, before = smaller - 1, allowed.spent
        if -(-int(counts.sum()) // smaller) >= count_packs(incumbent.strategy_counts):
            break
        less_deep = _pack_heuristically(counts, smaller, allowed)
        part = allowed.at_most(_count_allowed_operations(less_deep, counts, smaller, effort))
        less_deep = _search_at_depth(less_deep, counts, smaller, part, effort)
        if less_deep.certificate.bound >= count_packs(incumbent.strategy_counts):
            break
        incumbent = _update_incumbent(incumbent, less_deep.strategy_counts, incumbent.certificate)
    return AlgorithmResult(incumbent.strategy_counts, "optimal", incumbent.certificate)


def _pack_heuristically(counts: IntArray, depth: int, work: WorkBudget) -> _Incumbent:
    """Pack by LPFHP, and prove what tokens and thresholds prove. Where little can be gained, match again."""
    if np.count_nonzero(counts) > MOST_LENGTHS:
        strategy_counts = pack_subsample(counts, depth, lambda part: pack_longest_first(part, depth), MOST_LENGTHS)
    else:
        strategy_counts = sort_strategies(pack_longest_first(counts, depth))
    work.spend_on_heuristic(strategy_counts)
    incumbent = _add_threshold_bound(_Incumbent(strategy_counts, simple_certificate(counts, depth)), counts, depth)
    if incumbent.gap > max(FEW_PACKS, FULL_GAIN * incumbent.certificate.bound) or _is_gap_negligible(
        incumbent, counts, depth
    ):
        return incumbent
    share = MATCHING_SHARE if np.count_nonzero(counts) > FEW_LENGTHS else QUICK_MATCHING_SHARE
    return _rematch_packs(incumbent, len(counts), depth, work.at_most(share * NEAR_WORK))


def _is_gap_negligible(incumbent: _Incumbent, counts: IntArray, depth: int) -> bool:
    """Whether so little can be gained that it is not worth a plan on a coarse grid, whose own error is at least as large."""
    return incumbent.gap <= NEGLIGIBLE * count_packs(incumbent.strategy_counts) and needs_coarse_grid(counts, depth)


def _count_allowed_operations(incumbent: _Incumbent, counts: IntArray, depth: int, effort: Effort) -> float:
    """Operations that a search for fewer packs may take: in proportion to the share of the packs that it may save."""
    if effort == "unlimited":
        return np.inf
    if _is_gap_negligible(incumbent, counts, depth):
        return 0.0
    if counts.sum() <= FEWEST_SEQUENCES:
        return FULL_WORK
    gain = max(0, incumbent.gap - FEW_PACKS) / count_packs(incumbent.strategy_counts)
    heuristic = WorkBudget()
    heuristic.spend_on_heuristic(incumbent.strategy_counts)
    return max(NEAR_WORK, HEURISTIC_MULTIPLE * heuristic.spent, FULL_WORK * min(gain / FULL_GAIN, 1.0))


def _search_at_depth(first: _Incumbent, counts: IntArray, depth: int, work: WorkBudget, effort: Effort) -> _Incumbent:
    """Plan by linear programs; what is then far from its bound is packed by `nnls` too, and all packs are matched again."""
    if first.gap == 0 or work.exhausted:
        return first
    near_work = np.inf if effort == "unlimited" else NEAR_WORK
    incumbent = _pack_optimally(counts, depth, work.share(SEARCH_SHARE), first, near_work=near_work)
    bound = incumbent.certificate.bound
    if incumbent.gap > max(1, bound // FAR):
        incumbent = _update_incumbent(
            incumbent, pack_by_nnls(counts, depth, work=work).strategy_counts, incumbent.certificate
        )
    return _rematch_packs(incumbent, len(counts), depth, work)


def _rematch_packs(incumbent: _Incumbent, max_length: int, depth: int, work: WorkBudget) -> _Incumbent:
    """Match the halves of packs again, if there is a gap: of more than `MATCHED` sequences those of a part of the packs."""
    if incumbent.gap == 0 or work.exhausted:
        return incumbent
    part = select_packs_with_room(incumbent.strategy_counts, max_length, MATCHED)
    matched = rematch_halves(part, max_length, depth, count_packs(part) - incumbent.gap, work)
    if count_packs(matched) == count_packs(part):
        return incumbent
    strategy_counts = dict(incumbent.strategy_counts)
    for strategy, count in part.items():
        strategy_counts[strategy] -= count
    for strategy, count in matched.items():
        add_packs(strategy_counts, strategy, count)
    return _Incumbent(
        sort_strategies({strategy: count for strategy, count in strategy_counts.items() if count}), incumbent.certificate
    )


def _pack_optimally(
    counts: IntArray,
    depth: int,
    work: WorkBudget | None = None,
    known: _Incumbent | None = None,
    *,
    near_work: float = np.inf,
    is_quick: bool = False,
) -> _Incumbent:
    """Pack a histogram, int64 [L], in as few packs as possible, or in nearly as few if it has thousands of lengths.

    All may do `work`, by default `FULL_WORK`, and `near_work` once the plan is near to its bound; `known` is a plan to start
    from. `is_quick` gives up soon, as for a coarse grid.
    """
    work = WorkBudget(FULL_WORK) if work is None else work
    if np.count_nonzero(counts) > MOST_LENGTHS:
        planned = _add_threshold_bound(_pack_many_sequences(counts, depth, MOST_LENGTHS, work), counts, depth)
        return planned if known is None else _update_incumbent(known, planned.strategy_counts, planned.certificate)
    incumbent = known
    if incumbent is None:
        incumbent = _Incumbent(sort_strategies(pack_longest_first(counts, depth)), simple_certificate(counts, depth))
        work.spend_on_heuristic(incumbent.strategy_counts)
    if incumbent.gap == 0:
        return incumbent
    lengths, can_be_dealt = np.count_nonzero(counts), counts.sum() <= MAX_ASSIGNED_SEQUENCES
    is_limited = depth < len(counts) // (int(np.argmax(counts > 0)) + 1)
    must_be_coarse = needs_coarse_grid(counts, depth)
    if must_be_coarse or len(counts) > MAX_NNLS_LENGTH:
        incumbent = _add_threshold_bound(incumbent, counts, depth)
    if must_be_coarse and not can_be_dealt:
        planned = _pack_many_sequences(counts, depth, THINNED, work)
        return _update_incumbent(incumbent, planned.strategy_counts, planned.certificate)
    if must_be_coarse or (len(counts) > MAX_NNLS_LENGTH and lengths > FEW_LENGTHS and can_be_dealt):
        incumbent = _pack_on_grids(counts, depth, incumbent, work.share(0.8))
        if incumbent.gap == 0 or (must_be_coarse and (is_limited or lengths * len(counts) > MOST_CLOSED)):
            return incumbent
        work = work.share(LAST_PACK_SHARE) if _is_near_bound(incumbent) else work
    linear_program = LinearProgram.from_heuristic(counts, len(counts), work.share(0.4 if is_limited else 0.7))
    linear_program.generate()
    incumbent = _update_incumbent(incumbent, None, certify_relaxation(linear_program, depth, work))
    if is_limited and incumbent.gap:
        linear_program = _solve_depth_limited_program(counts, depth, linear_program, is_quick, work.share(0.6))
        incumbent = _update_incumbent(incumbent, None, certify_relaxation(linear_program, depth, work))
    linear_program.limit_work(work)
    incumbent = _add_threshold_bound(incumbent, counts, depth)
    incumbent, is_hopeless = _try_dives(linear_program, incumbent, _QUICK_DIVES if is_quick else _DIVES, near_work)
    if (
        incumbent.gap
        and not is_hopeless
        and not is_quick
        and counts.sum() <= FEW_SEQUENCES  # so few that their number at each length tells
        and can_be_bounded(linear_program.lengths, len(counts), depth, linear_program.demand)
    ):
        bounded = LinearProgram.with_bounded_copies(linear_program, linear_program.work)
        if np.ceil(bounded.generate().bound - WHOLE) < count_packs(incumbent.strategy_counts):
            incumbent, _ = _try_dives(bounded, incumbent, _BOUNDED_DIVES, near_work)
    return incumbent


def _try_dives(
    linear_program: LinearProgram, incumbent: _Incumbent, attempts: tuple[DiveSettings, ...], near_work: float
) -> tuple[_Incumbent, bool]:
    """Dive until the gap is closed, or cannot be. Half of the dives aim at a pack less than there are, not at the bound.

    Once the plan is near to the bound, further dives may do `near_work`.
    """
    least = linear_program.min_packs
    is_limited = False
    for number, settings in enumerate(attempts):
        if _is_near_bound(incumbent) and not is_limited:
            linear_program.limit_work(linear_program.work.at_most(near_work))
            is_limited = True
        least, packs = max(least, incumbent.certificate.bound), count_packs(incumbent.strategy_counts)
        if least >= packs or (linear_program.work.exhausted and number > 0):
            break
        target = least if number % 2 == 0 else packs - 1
        packs_of_dive, waiting, is_hopeless = dive(linear_program, target, settings)
        unpacked = np.zeros_like(linear_program.counts)
        unpacked[linear_program.lengths - 1] = waiting
        strategy_counts = best_fit_into(
            fill_slots(packs_of_dive, linear_program.counts - unpacked), unpacked, linear_program.depth
        )
        linear_program.work.spend_on_heuristic(strategy_counts)
        incumbent = _update_incumbent(incumbent, strategy_counts, incumbent.certificate)
        if is_hopeless:
            least = target + 1
    return incumbent, least >= count_packs(incumbent.strategy_counts)


def _add_threshold_bound(incumbent: _Incumbent, counts: IntArray, depth: int) -> _Incumbent:
    """With the proof by thresholds, where that is a better one."""
    if incumbent.gap == 0:
        return incumbent
    proofs = (incumbent.certificate, threshold_certificate(counts, depth))
    return _Incumbent(incumbent.strategy_counts, max(proofs, key=lambda certificate: certificate.bound))


def _is_near_bound(incumbent: _Incumbent) -> bool:
    """Whether the gap is at most a pack, or one pack in `NEAR`."""
    return incumbent.gap <= _max_near_gap(incumbent.certificate.bound)


def _max_near_gap(bound: int) -> int:
    """Packs above the bound with which a plan is near to it."""
    return max(1, bound // NEAR)


def _pack_on_grids(counts: IntArray, depth: int, incumbent: _Incumbent, work: WorkBudget) -> _Incumbent:
    """Solve on coarse grids, deal the sequences out into the slots, and swap them until they fit."""
    sequences, length = int(counts.sum()), len(counts)
    mean = float(counts @ np.arange(1, length + 1)) / sequences
    slack = max(SLACK_SHARE * mean, SLACK_PACKS * length / sequences)
    for bins, slacks in GRIDS:
        if _is_near_bound(incumbent) or work.exhausted:
            break
        coarse = _pack_optimally(split_counts_into_bins(counts, bins, slack * slacks), depth, work.share(0.3), is_quick=True)
        proof = certify_prices(counts, interpolate_prices(coarse.certificate.prices, len(counts)), depth, work)
        incumbent = _update_incumbent(incumbent, None, proof)
        if _is_near_bound(incumbent):
            break
        strategy_counts, remaining = assign_to_slots(coarse.strategy_counts, counts, bins, depth, work.share(0.4))
        strategy_counts = best_fit_into(strategy_counts, remaining, depth)
        work.spend_on_heuristic(strategy_counts)
        incumbent = _update_incumbent(incumbent, strategy_counts, proof)
        bound = incumbent.certificate.bound
        matched = rematch_halves(incumbent.strategy_counts, length, depth, bound + _max_near_gap(bound), work.share(0.3))
        incumbent = _update_incumbent(incumbent, matched, proof)
    return incumbent


def _pack_many_sequences(counts: IntArray, depth: int, most: int, work: WorkBudget) -> _Incumbent:
    """Plan a part of the sequences, at most so many; its prices prove the bound of all."""
    proofs: list[Certificate] = []

    def pack(part: IntArray) -> StrategyCounts:
        planned = _pack_optimally(part, depth, work=work)
        proofs.append(certify_prices(counts, planned.certificate.prices, depth, work))
        return planned.strategy_counts

    strategy_counts = pack_subsample(counts, depth, pack, most)
    work.spend_on_heuristic(strategy_counts)
    return _Incumbent(strategy_counts, proofs[0])


def _update_incumbent(incumbent: _Incumbent, strategy_counts: StrategyCounts | None, certificate: Certificate) -> _Incumbent:
    """The smaller mixture and the larger bound."""
    if strategy_counts is None or count_packs(strategy_counts) >= count_packs(incumbent.strategy_counts):
        strategy_counts = incumbent.strategy_counts
    if certificate.bound < incumbent.certificate.bound:
        certificate = incumbent.certificate
    return _Incumbent(strategy_counts, certificate)


def _solve_depth_limited_program(
    counts: IntArray, depth: int, unlimited: LinearProgram, is_quick: bool, work: WorkBudget
) -> LinearProgram:
    """The program with the depth limit, solved."""
    linear_program = LinearProgram.from_heuristic(counts, depth, work)
    linear_program.relaxation = unlimited.relaxation
    iterations = _QUICK_ITERATIONS * len(linear_program.lengths) if is_quick else np.inf
    relaxation = linear_program.generate(PATIENCE * len(linear_program.lengths))
    if not relaxation.is_closed and linear_program.max_length > MAX_NNLS_LENGTH:
        linear_program.generate(iterations)
    elif not relaxation.is_closed:
        solution = solve_nnls(
            counts,
            loop_weights(len(counts)),
            limit_depth_by_bound(counts, relaxation.bound, depth),
            max_rounds=int(NNLS_ROUNDS * len(linear_program.lengths)),
            work=work.share(0.6),
        )
        linear_program = LinearProgram(counts, depth, work)
        linear_program.relaxation = relaxation
        linear_program.add(solution.strategies)
        linear_program.generate(iterations)
    return linear_program
