"""The algorithm `optimal`, which searches for as few packs as possible and proves how few are possible.

1. Pack by LPFHP and compute the token, count and threshold bounds. Often these are equal already.
2. Solve the linear program without a depth limit, starting from the strategies of LPFHP. It is fast, and its prices are
   valid at any depth.
3. Solve the linear program with the depth limit, starting from those prices. If the strategies of LPFHP lead nowhere (for
   example at depth 4 and length 1024), use those of an NNLS solution, whose prices are smoother.
4. Round the solution down, and find packs for the rest by search and diving (`run_diving_heuristic`). Repeat with other step
   sizes if that fails.

With thousands of distinct lengths, all this is done on a coarse grid, and the resulting packs are improved by combining
parts of packs again (`long_packs`). The strategy counts are exact, and the certificate does not depend on floating-point
accuracy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.bounds import prove_bound_by_linear_program, prove_bound_by_prices
from gaudi_bert.packing.certificate import Certificate, prove_bound_by_length_threshold, prove_bound_by_totals
from gaudi_bert.packing.heuristics import add_by_best_fit, pack_longest_first
from gaudi_bert.packing.knapsack import can_price_by_bounded_knapsack, compute_max_sequences_per_pack
from gaudi_bert.packing.linear_program import MOST_CLOSED, LinearProgram, is_linear_program_too_large
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
    assign_sequences_to_slots,
    cut_and_recombine_packs,
    interpolate_prices,
    pack_by_subsample,
    select_packs_with_room,
    split_counts_into_bins,
)
from gaudi_bert.packing.nnls import compute_iterative_nnls_residual_weights, pack_by_nnls
from gaudi_bert.packing.nnls_solver import MAX_NNLS_LENGTH, limit_depth_near_mean, solve_nnls
from gaudi_bert.packing.strategies import (
    AlgorithmResult,
    Effort,
    OperationBudget,
    StrategyCounts,
    count_packs,
    fill_planned_packs_with_sequences,
    sort_strategies,
)
from gaudi_bert.packing.whole_packs import WHOLE, DiveSettings, run_diving_heuristic

# The maximum number of iterations per distinct length when least squares supplies columns for the linear program. If the
# lengths can fill packs exactly, fewer iterations are needed. If they cannot, more iterations do not help.
NNLS_ROUNDS = 1.5

# If column generation makes slow progress, columns are taken from a least-squares solution. Progress is slow if the lower
# bound is not reached after this many simplex iterations per distinct length.
PATIENCE = 4

# The linear programs normally come much closer to the lower bound than a thousandth of it. If the packing still exceeds the
# bound by more than 1 / FAR of the bound, the operation budget has ended the search early. In this case, the algorithm
# `nnls` may find fewer packs, so it is tried next.
FAR = 1_000

# --- how many operations the search for fewer packs may take, depending on what it may save

FULL_WORK = 90e9  # about a minute: for few sequences, or if at least 2 % of the packs may be saved
NEAR_WORK = 1.2e9  # about a second: if almost nothing can be saved
NEGLIGIBLE = 1e-5  # a gap below this fraction of the packs is ignored with thousands of lengths
FULL_GAIN, FEW_PACKS = 0.02, 10  # FULL_WORK is allowed if the gap exceeds FEW_PACKS by this fraction of the packs
FEWEST_SEQUENCES = 500  # up to this many sequences FULL_WORK is allowed, because each pack matters
HEURISTIC_MULTIPLE = 3  # the search may always take this many times as long as LPFHP
# Before the linear program is solved, `cut_and_recombine_packs` may already close the gap. It may use MATCHING_SHARE of
# NEAR_WORK operations, which is less than half a second. If there are at most FEW_LENGTHS distinct lengths, it may use only
# QUICK_MATCHING_SHARE, because the linear program is then fast itself.
MATCHING_SHARE, QUICK_MATCHING_SHARE = 0.4, 0.04
# Linear programs and the rounding of their solutions may use this fraction of the operations. The rest is for the algorithm
# `nnls`, and for cutting packs in two and combining the halves again.
SEARCH_SHARE = 2 / 3
FEW_SEQUENCES = 1500  # up to this many sequences, seconds are spent on each pack that may be saved

_SHARES = (0.08, 0.15, 0.25, 0.02)
_FIRST = (DiveSettings(0.15), DiveSettings(0.25), DiveSettings(0.4), DiveSettings(0.08, 0.6))
# A dive (the diving heuristic) rounds the fractional solution of the linear program to whole packs. Dives with these
# settings are tried one after another, until the number of packs reaches its lower bound.
_DIVES = (*_FIRST, *(DiveSettings(_SHARES[seed % 4], seed=seed) for seed in range(1, 9)))
# The linear program may use packs that contain a length more often than it occurs in the histogram. With few sequences, such
# packs keep its solution far from whole packs. If the dives above leave a gap, a second linear program therefore excludes
# such packs, and dives with these settings round its solution. There are 40 of them, because with few sequences one pack
# less is worth seconds of search.
_BOUNDED_DIVES = tuple(
    DiveSettings(_SHARES[seed % 4], max_failures=12 if seed % 2 else 60, seed=seed) for seed in range(1, 41)
)

# If lengths are rounded to a coarse grid, one or two additional packs do not matter. Therefore a single short dive, which
# rounds the linear program's solution, and this many simplex iterations per distinct length are enough.
_QUICK_DIVES, _QUICK_ITERATIONS = (DiveSettings(0.25, max_steps=30),), 60


@dataclass(frozen=True)
class _Incumbent:
    """The best packing and the best lower bound that a search has found so far."""

    strategy_counts: StrategyCounts
    certificate: Certificate

    @property
    def gap(self) -> int:
        """The number of packs above the proven lower bound. If it is 0, the packing is optimal."""
        return count_packs(self.strategy_counts) - self.certificate.bound


def pack_optimally(
    length_counts: IntArray, depth: int, budget: OperationBudget | None = None, effort: Effort = "bounded"
) -> AlgorithmResult:
    """Pack a histogram in as few packs as possible, and prove a lower bound on the number of packs.

    A packing with a smaller depth is also valid at a larger depth. If there is a gap, smaller depths are therefore planned
    too, until they provably need too many packs or the remaining budget is less than the last depth took.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        depth: the maximum number of sequences per pack.
        budget: the operation budget, or None for a budget that depends on what can be saved.
        effort: "unlimited" continues until nothing helps.
    """
    lengths = np.flatnonzero(length_counts) + 1
    deepest = compute_max_sequences_per_pack(lengths, length_counts[lengths - 1], len(length_counts))
    budget = OperationBudget() if budget is None else budget
    first = _pack_heuristically(length_counts, depth if depth < deepest else len(length_counts), budget)
    allowed = budget.take_at_most(_count_allowed_operations(first, length_counts, depth, effort))
    before = allowed.spent
    incumbent = _search_for_fewer_packs(
        first, length_counts, depth if depth < deepest else len(length_counts), allowed, effort
    )
    smaller = min(depth, deepest)
    while incumbent.gap and smaller > 1 and allowed.spent - before < allowed.remaining:
        if _is_gap_negligible(incumbent, length_counts, depth):
            break
        smaller, before = smaller - 1, allowed.spent
        if -(-int(length_counts.sum()) // smaller) >= count_packs(incumbent.strategy_counts):
            break
        shallower = _pack_heuristically(length_counts, smaller, allowed)
        part = allowed.take_at_most(_count_allowed_operations(shallower, length_counts, smaller, effort))
        shallower = _search_for_fewer_packs(shallower, length_counts, smaller, part, effort)
        if shallower.certificate.bound >= count_packs(incumbent.strategy_counts):
            break
        incumbent = _update_incumbent(incumbent, shallower.strategy_counts, incumbent.certificate)
    return AlgorithmResult(incumbent.strategy_counts, "optimal", incumbent.certificate)


def _pack_heuristically(length_counts: IntArray, depth: int, budget: OperationBudget) -> _Incumbent:
    """Pack a histogram with the LPFHP heuristic. Return the packing with the best lower bound that can be computed without a
    linear program.

    If the packing is not far above this bound, packs are also cut in two and combined again.
    """
    if np.count_nonzero(length_counts) > MOST_LENGTHS:
        strategy_counts = pack_by_subsample(length_counts, depth, lambda part: pack_longest_first(part, depth), MOST_LENGTHS)
    else:
        strategy_counts = sort_strategies(pack_longest_first(length_counts, depth))
    budget.spend_on_heuristic(strategy_counts)
    incumbent = _raise_bound_by_length_threshold(
        _Incumbent(strategy_counts, prove_bound_by_totals(length_counts, depth)), length_counts, depth
    )
    if incumbent.gap > max(FEW_PACKS, FULL_GAIN * incumbent.certificate.bound) or _is_gap_negligible(
        incumbent, length_counts, depth
    ):
        return incumbent
    share = MATCHING_SHARE if np.count_nonzero(length_counts) > FEW_LENGTHS else QUICK_MATCHING_SHARE
    return _improve_by_recombining_packs(incumbent, len(length_counts), depth, budget.take_at_most(share * NEAR_WORK))


def _is_gap_negligible(incumbent: _Incumbent, length_counts: IntArray, depth: int) -> bool:
    """Return whether the packing is so close to its lower bound that a search is unlikely to find fewer packs. Only searches
    that round lengths to a coarse grid are skipped for this reason.
    """
    return incumbent.gap <= NEGLIGIBLE * count_packs(incumbent.strategy_counts) and is_linear_program_too_large(
        length_counts, depth
    )


def _count_allowed_operations(incumbent: _Incumbent, length_counts: IntArray, depth: int, effort: Effort) -> float:
    """Return how many operations a search for fewer packs may take. The more packs there are above the lower bound, the more
    operations are allowed.
    """
    if effort == "unlimited":
        return np.inf
    if _is_gap_negligible(incumbent, length_counts, depth):
        return 0.0
    if length_counts.sum() <= FEWEST_SEQUENCES:
        return FULL_WORK
    gain = max(0, incumbent.gap - FEW_PACKS) / count_packs(incumbent.strategy_counts)
    heuristic = OperationBudget()
    heuristic.spend_on_heuristic(incumbent.strategy_counts)
    return max(NEAR_WORK, HEURISTIC_MULTIPLE * heuristic.spent, FULL_WORK * min(gain / FULL_GAIN, 1.0))


def _search_for_fewer_packs(
    initial: _Incumbent, length_counts: IntArray, depth: int, budget: OperationBudget, effort: Effort
) -> _Incumbent:
    """Search for a packing with fewer packs by linear programs, and by cutting packs in two and combining the parts again.
    If the number of packs stays far above its lower bound, also try the algorithm `nnls`.
    """
    if initial.gap == 0 or budget.is_exhausted:
        return initial
    near_work = np.inf if effort == "unlimited" else NEAR_WORK
    incumbent = _pack_by_linear_programs(
        length_counts, depth, budget.take_fraction(SEARCH_SHARE), initial, max_operations_if_gap_small=near_work
    )
    if incumbent.gap > max(1, incumbent.certificate.bound // FAR):
        incumbent = _update_incumbent(
            incumbent, pack_by_nnls(length_counts, depth, budget=budget).strategy_counts, incumbent.certificate
        )
    return _improve_by_recombining_packs(incumbent, len(length_counts), depth, budget)


def _improve_by_recombining_packs(incumbent: _Incumbent, max_length: int, depth: int, budget: OperationBudget) -> _Incumbent:
    """Try to find a packing with fewer packs by cutting packs in two and combining the parts again. Return the better
    packing, or `incumbent`, the best one so far, if there is none.

    With more than `MATCHED` sequences, only some of the packs are cut.
    """
    if incumbent.gap == 0 or budget.is_exhausted:
        return incumbent
    part = select_packs_with_room(incumbent.strategy_counts, max_length, MATCHED)
    matched = cut_and_recombine_packs(part, max_length, depth, count_packs(part) - incumbent.gap, budget)
    if count_packs(matched) == count_packs(part):
        return incumbent
    return _Incumbent(
        sort_strategies(Counter(incumbent.strategy_counts) - Counter(part) + Counter(matched)), incumbent.certificate
    )


def _pack_by_linear_programs(
    length_counts: IntArray,
    depth: int,
    budget: OperationBudget | None = None,
    initial: _Incumbent | None = None,
    *,
    max_operations_if_gap_small: float = np.inf,
    stop_early: bool = False,
) -> _Incumbent:
    """Pack a histogram by solving linear programs and rounding their fractional numbers of packs. Return the best packing
    and lower bound. Thousands of distinct lengths are first rounded to a coarse grid.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        depth: the maximum number of sequences per pack.
        budget: the operation budget, or None for `FULL_WORK`.
        initial: a packing to start from, or None for LPFHP.
        max_operations_if_gap_small: the budget of operations once the packing is near its bound.
        stop_early: stop early, as is sufficient on a coarse grid.
    """
    budget = OperationBudget(FULL_WORK) if budget is None else budget
    if np.count_nonzero(length_counts) > MOST_LENGTHS:
        planned = _raise_bound_by_length_threshold(
            _pack_subsample_and_prove_bound(length_counts, depth, MOST_LENGTHS, budget), length_counts, depth
        )
        return planned if initial is None else _update_incumbent(initial, planned.strategy_counts, planned.certificate)
    incumbent = initial
    if incumbent is None:
        incumbent = _Incumbent(
            sort_strategies(pack_longest_first(length_counts, depth)), prove_bound_by_totals(length_counts, depth)
        )
        budget.spend_on_heuristic(incumbent.strategy_counts)
    if incumbent.gap == 0:
        return incumbent
    lengths, can_be_assigned = np.count_nonzero(length_counts), length_counts.sum() <= MAX_ASSIGNED_SEQUENCES
    is_limited = depth < len(length_counts) // (int(np.argmax(length_counts > 0)) + 1)
    must_be_coarse = is_linear_program_too_large(length_counts, depth)
    if must_be_coarse or len(length_counts) > MAX_NNLS_LENGTH:
        incumbent = _raise_bound_by_length_threshold(incumbent, length_counts, depth)
    if must_be_coarse and not can_be_assigned:
        planned = _pack_subsample_and_prove_bound(length_counts, depth, THINNED, budget)
        return _update_incumbent(incumbent, planned.strategy_counts, planned.certificate)
    if must_be_coarse or (len(length_counts) > MAX_NNLS_LENGTH and lengths > FEW_LENGTHS and can_be_assigned):
        incumbent = _improve_by_rounding_lengths(length_counts, depth, incumbent, budget.take_fraction(0.8))
        if incumbent.gap == 0 or (must_be_coarse and (is_limited or lengths * len(length_counts) > MOST_CLOSED)):
            return incumbent
        budget = budget.take_fraction(LAST_PACK_SHARE) if _is_near_bound(incumbent) else budget
    linear_program = LinearProgram.from_heuristic(
        length_counts, len(length_counts), budget.take_fraction(0.4 if is_limited else 0.7)
    )
    linear_program.solve()
    incumbent = _update_incumbent(incumbent, None, prove_bound_by_linear_program(linear_program, depth, budget))
    if is_limited and incumbent.gap:
        linear_program = _solve_depth_limited_program(
            length_counts, depth, linear_program, stop_early, budget.take_fraction(0.6)
        )
        incumbent = _update_incumbent(incumbent, None, prove_bound_by_linear_program(linear_program, depth, budget))
    linear_program.replace_budget(budget)
    incumbent = _raise_bound_by_length_threshold(incumbent, length_counts, depth)
    incumbent, is_hopeless = _improve_by_diving_heuristic(
        linear_program, incumbent, _QUICK_DIVES if stop_early else _DIVES, max_operations_if_gap_small
    )
    if (
        incumbent.gap
        and not is_hopeless
        and not stop_early
        and length_counts.sum() <= FEW_SEQUENCES  # with so few, the number of sequences of each length matters
        and can_price_by_bounded_knapsack(linear_program.lengths, len(length_counts), depth, linear_program.demand)
    ):
        bounded = LinearProgram.with_bounded_knapsack_pricing(linear_program, linear_program.budget)
        if np.ceil(bounded.solve().bound - WHOLE) < count_packs(incumbent.strategy_counts):
            incumbent, _ = _improve_by_diving_heuristic(bounded, incumbent, _BOUNDED_DIVES, max_operations_if_gap_small)
    return incumbent


class _DiveOutcome(NamedTuple):
    """The best packing after several dives, which round the linear program's solution to whole packs. `is_hopeless` is True
    if it is proven that no dive can find fewer packs.
    """

    incumbent: _Incumbent
    is_hopeless: bool


def _improve_by_diving_heuristic(
    linear_program: LinearProgram,
    incumbent: _Incumbent,
    dive_settings: tuple[DiveSettings, ...],
    max_operations_if_gap_small: float,
) -> _DiveOutcome:
    """Try to find a packing with fewer packs by diving. A dive rounds the fractional solution of the linear program to whole
    packs step by step, and solves the program again after each step.

    Stop if the gap is closed or provably cannot be closed. Dives aim alternately at the lower bound and at one pack less
    than the incumbent. Once the incumbent is near its bound, further dives have a budget of `max_operations_if_gap_small`.
    """
    least = linear_program.min_packs
    is_limited = False
    for number, settings in enumerate(dive_settings):
        if _is_near_bound(incumbent) and not is_limited:
            linear_program.replace_budget(linear_program.budget.take_at_most(max_operations_if_gap_small))
            is_limited = True
        least, packs = max(least, incumbent.certificate.bound), count_packs(incumbent.strategy_counts)
        if least >= packs or (linear_program.budget.is_exhausted and number > 0):
            break
        target = least if number % 2 == 0 else packs - 1
        packs_of_dive, waiting, is_hopeless = run_diving_heuristic(linear_program, target, settings)
        unpacked = np.zeros_like(linear_program.counts)
        unpacked[linear_program.lengths - 1] = waiting
        strategy_counts = add_by_best_fit(
            fill_planned_packs_with_sequences(packs_of_dive, linear_program.counts - unpacked),
            unpacked,
            linear_program.depth,
        )
        linear_program.budget.spend_on_heuristic(strategy_counts)
        incumbent = _update_incumbent(incumbent, strategy_counts, incumbent.certificate)
        if is_hopeless:
            least = target + 1
    return _DiveOutcome(incumbent, least >= count_packs(incumbent.strategy_counts))


def _raise_bound_by_length_threshold(incumbent: _Incumbent, length_counts: IntArray, depth: int) -> _Incumbent:
    """Compute the threshold bound, which is a lower bound on the number of packs that ignores short sequences. Return the
    best packing so far with the larger of this bound and its own.
    """
    if incumbent.gap == 0:
        return incumbent
    proofs = (incumbent.certificate, prove_bound_by_length_threshold(length_counts, depth))
    return _Incumbent(incumbent.strategy_counts, max(proofs, key=lambda certificate: certificate.bound))


def _is_near_bound(incumbent: _Incumbent) -> bool:
    """Return whether the best packing exceeds its lower bound by at most one pack, or by at most 1 / `NEAR` of the bound."""
    return incumbent.gap <= _compute_gap_tolerance(incumbent.certificate.bound)


def _compute_gap_tolerance(lower_bound: int) -> int:
    """Return the largest gap for which a packing counts as near its lower bound. The gap is the number of packs above the
    bound.
    """
    return max(1, lower_bound // NEAR)


def _improve_by_rounding_lengths(
    length_counts: IntArray, depth: int, incumbent: _Incumbent, budget: OperationBudget
) -> _Incumbent:
    """Search for a packing with fewer packs by rounding lengths to a coarse grid, and return the best packing and lower
    bound. Several grids are tried.

    For each grid, pack the rounded lengths, assign the sequences to the slots of this plan, and swap sequences until no pack
    is too full.
    """
    sequences, length = int(length_counts.sum()), len(length_counts)
    mean = float(length_counts @ np.arange(1, length + 1)) / sequences
    slack = max(SLACK_SHARE * mean, SLACK_PACKS * length / sequences)
    for bins, slacks in GRIDS:
        if _is_near_bound(incumbent) or budget.is_exhausted:
            break
        coarse = _pack_by_linear_programs(
            split_counts_into_bins(length_counts, bins, slack * slacks), depth, budget.take_fraction(0.3), stop_early=True
        )
        proof = prove_bound_by_prices(
            length_counts, interpolate_prices(coarse.certificate.prices, len(length_counts)), depth, budget
        )
        incumbent = _update_incumbent(incumbent, None, proof)
        if _is_near_bound(incumbent):
            break
        strategy_counts, remaining = assign_sequences_to_slots(
            coarse.strategy_counts, length_counts, bins, depth, budget.take_fraction(0.4)
        )
        strategy_counts = add_by_best_fit(strategy_counts, remaining, depth)
        budget.spend_on_heuristic(strategy_counts)
        incumbent = _update_incumbent(incumbent, strategy_counts, proof)
        bound = incumbent.certificate.bound
        matched = cut_and_recombine_packs(
            incumbent.strategy_counts, length, depth, bound + _compute_gap_tolerance(bound), budget.take_fraction(0.3)
        )
        incumbent = _update_incumbent(incumbent, matched, proof)
    return incumbent


def _pack_subsample_and_prove_bound(
    length_counts: IntArray, depth: int, max_sequences: int, budget: OperationBudget
) -> _Incumbent:
    """Pack a subsample of the sequences, and repeat its packs to hold all sequences. Return the packing with a lower bound
    on the number of packs.

    The prices of the subsample prove a bound for all sequences.
    """
    proofs: list[Certificate] = []

    def pack_sample(sample_counts: IntArray) -> StrategyCounts:
        """Return the packs for a subsample of the sequences. Also compute a lower bound for all sequences, and append it to
        `proofs`. The dual prices of the subsample prove it, because prices prove a bound for any histogram.
        """
        planned = _pack_by_linear_programs(sample_counts, depth, budget=budget)
        proofs.append(prove_bound_by_prices(length_counts, planned.certificate.prices, depth, budget))
        return planned.strategy_counts

    strategy_counts = pack_by_subsample(length_counts, depth, pack_sample, max_sequences)
    budget.spend_on_heuristic(strategy_counts)
    return _Incumbent(strategy_counts, proofs[0])


def _update_incumbent(incumbent: _Incumbent, strategy_counts: StrategyCounts | None, certificate: Certificate) -> _Incumbent:
    """Combine the best packing so far with a new one. Keep the packing with fewer packs, and the certificate that proves the
    larger lower bound on the number of packs.
    """
    if strategy_counts is None or count_packs(strategy_counts) >= count_packs(incumbent.strategy_counts):
        strategy_counts = incumbent.strategy_counts
    if certificate.bound < incumbent.certificate.bound:
        certificate = incumbent.certificate
    return _Incumbent(strategy_counts, certificate)


def _solve_depth_limited_program(
    length_counts: IntArray, depth: int, unlimited_program: LinearProgram, stop_early: bool, budget: OperationBudget
) -> LinearProgram:
    """Solve the linear program with at most `depth` sequences per pack, and return it. Start from the dual prices of the
    program without this limit.
    """
    linear_program = LinearProgram.from_heuristic(length_counts, depth, budget)
    linear_program.relaxation = unlimited_program.relaxation
    iterations = _QUICK_ITERATIONS * len(linear_program.lengths) if stop_early else np.inf
    relaxation = linear_program.solve(PATIENCE * len(linear_program.lengths))
    if not relaxation.is_gap_closed and linear_program.max_length > MAX_NNLS_LENGTH:
        linear_program.solve(iterations)
    elif not relaxation.is_gap_closed:
        solution = solve_nnls(
            length_counts,
            compute_iterative_nnls_residual_weights(len(length_counts)),
            limit_depth_near_mean(length_counts, relaxation.bound, depth),
            max_rounds=int(NNLS_ROUNDS * len(linear_program.lengths)),
            budget=budget.take_fraction(0.6),
        )
        linear_program = LinearProgram(length_counts, depth, budget)
        linear_program.relaxation = relaxation
        linear_program.add_strategies(solution.strategies)
        linear_program.solve(iterations)
    return linear_program
