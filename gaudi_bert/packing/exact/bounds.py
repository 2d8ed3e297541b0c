"""How few packs any packing needs: certified bounds, quick enough to come with every plan.

Prices come from the token bound (length), the count bound (1 each), the linear program without a depth limit,
and the one with it. The last starts from the strategies of LPFHP and stops after a number of simplex
iterations; its prices prove a bound at any time. Whatever the prices, they are rounded to integers and the worth of
the best pack is computed exactly, so floating point has no part in the proof.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.certificate import (
    LARGEST_WORTH,
    MAX_EXACT_LENGTH,
    Certificate,
    best_worth_by_enumeration,
    simple_certificate,
    threshold_certificate,
    total_worth,
    worth_limit_by_longest,
)
from gaudi_bert.packing.exact.linear_program import LinearProgram, Relaxation, needs_coarse_grid
from gaudi_bert.packing.long_packs import BINS, interpolate_prices, split_counts_into_bins
from gaudi_bert.packing.pricing import LONGEST_TABLE, OPERATIONS_PER_PRODUCT, best_pack_worth, max_plus_closure, power_chain
from gaudi_bert.packing.strategies import BOUND_WORK, WorkBudget

LARGEST_PRICE = 10**15
MAX_DENOMINATOR = 4096
QUICK_ITERATIONS = 3500
QUICK_ITERATIONS_PER_LENGTH = 4
"""Simplex iterations that a bound which has to be quick may take: the larger of the two."""
STEP_WORK = 2**33
"""Steps of length, times tokens of a pack: some seconds."""
ALWAYS_PROVEN = 2e8
"""Operations of a proof that is computed even where the limit of work is reached."""


def prove_bound(counts: IntArray, depth: int, work: WorkBudget | None = None) -> Certificate:
    """The best certificate that can be had quickly, of counts int64 [L]; with at most `work`, by default `BOUND_WORK`."""
    work = WorkBudget(BOUND_WORK) if work is None else work
    best = simple_certificate(counts, depth)
    if depth == 1 or not counts.any():
        return best
    proofs = _prove_by_linear_programs(counts, depth, work)
    return max(best, *proofs, threshold_certificate(counts, depth), key=lambda certificate: certificate.bound)


def _prove_by_linear_programs(counts: IntArray, depth: int, work: WorkBudget) -> list[Certificate]:
    """Return the proofs by the linear programs, without a limit of depth and with it."""
    if needs_coarse_grid(counts, depth):
        coarse = prove_bound(split_counts_into_bins(counts, BINS), depth, work)
        return [certify_prices(counts, interpolate_prices(coarse.prices, len(counts)), depth, work)]
    linear_program = LinearProgram.from_heuristic(counts, len(counts), work.share(0.5))
    iterations = max(QUICK_ITERATIONS, QUICK_ITERATIONS_PER_LENGTH * len(linear_program.lengths))
    linear_program.generate(iterations)
    proofs = [certify_relaxation(linear_program, depth, work)]
    if depth < linear_program.deepest:
        limited = LinearProgram.from_heuristic(counts, depth, work)
        limited.relaxation = linear_program.relaxation
        limited.generate(iterations)
        proofs.append(certify_relaxation(limited, depth, work))
    return proofs


def certify_relaxation(linear_program: LinearProgram, depth: int, work: WorkBudget) -> Certificate:
    """Integer prices from the program's relaxation, and what they prove for packs of at most `depth` sequences."""
    relaxation = linear_program.relaxation
    if relaxation is None:
        return simple_certificate(linear_program.counts, depth)
    scale = min(LARGEST_PRICE, 2**61 // min(depth, linear_program.max_length))
    prices = _extend_to_all_lengths(linear_program, np.floor(relaxation.prices * scale).astype(np.int64))
    certificate = certify_prices(linear_program.counts, prices, depth, work)
    if certificate.bound < np.ceil(relaxation.bound - 1e-6):
        common = _as_integer_multiples(relaxation)
        if common is not None:
            snapped = certify_prices(linear_program.counts, _extend_to_all_lengths(linear_program, common), depth, work)
            certificate = max(certificate, snapped, key=lambda candidate: candidate.bound)
    return certificate


def _extend_to_all_lengths(linear_program: LinearProgram, prices: IntArray) -> IntArray:
    """Prices of all lengths from those of the lengths that occur: each takes the price of the next shorter one."""
    row = np.searchsorted(linear_program.lengths, np.arange(1, linear_program.max_length + 1), side="right") - 1
    result: IntArray = np.where(row >= 0, np.maximum.accumulate(prices)[row], 0)
    return result


def certify_prices(counts: IntArray, prices: IntArray, depth: int, work: WorkBudget | None = None) -> Certificate:
    """Prove a bound for packs of at most `depth` sequences by integer prices [L] that never fall with length.

    Prices that are too large for integers, or for long packs too many, are rounded down: they prove nearly as much. Where
    `work` is less than the proof takes, it is that of tokens and sequences alone.
    """
    work = WorkBudget() if work is None else work
    length = len(counts)
    if length > MAX_EXACT_LENGTH:
        prices = _round_down_in_steps(prices, min(STEP_WORK, max(work.remaining, ALWAYS_PROVEN)))
    deepest = length // max(1, int(np.argmax(prices > 0)) + 1)  # shorter ones are worth nothing
    products = len(power_chain(depth, length)) if depth < deepest and length <= MAX_EXACT_LENGTH else 1
    operations = OPERATIONS_PER_PRODUCT * products * length * min(length, STEP_WORK / length)
    if operations > max(work.remaining, ALWAYS_PROVEN):
        return simple_certificate(counts, depth)
    work.spend(operations)
    items = min(depth, length) if length <= LONGEST_TABLE else max(min(depth, length), deepest)
    too_large = -(-int(prices.max()) * items // (LARGEST_WORTH - 1))
    if too_large > 1:
        prices = prices // too_large
    if length > LONGEST_TABLE:
        most = _limit_long_pack_worth(prices, depth, deepest)
    else:
        most = int(best_pack_worth(prices, depth if depth < deepest else length))
    return Certificate(prices, depth, -(-total_worth(prices, counts) // most) if most else 0)


def _round_down_in_steps(prices: IntArray, work: float) -> IntArray:
    """The prices if there are few of them; else rounded down in equal steps of length, as many as `work` allows."""
    length = len(prices)
    steps = max(1, int(work) // length)
    if np.count_nonzero(np.diff(prices, prepend=0)) <= steps:
        return prices
    width = -(-length // steps)
    first = np.arange(1, length + 1) // width * width  # 0 for lengths shorter than a step: they are worth nothing
    return np.where(first > 0, prices[np.maximum(first, 1) - 1], 0)


def _limit_long_pack_worth(prices: IntArray, depth: int, deepest: int) -> int:
    """Return the worth of the best pack, or a limit of it where that takes too long; see `certificate.limit_of_worth`."""
    length, best = len(prices), np.concatenate(([0], prices))
    rises = np.flatnonzero(np.diff(best) > 0) + 1
    listed = best_worth_by_enumeration(best[rises], rises, length, depth)
    if listed is not None:
        return listed
    if length <= MAX_EXACT_LENGTH and depth < deepest:
        return int(best_pack_worth(prices, depth))
    at_any_depth = np.empty_like(best)
    max_plus_closure(best, rises, at_any_depth)
    return min(int(at_any_depth[-1]), worth_limit_by_longest(best[rises], rises, length, min(depth, length)))


def _as_integer_multiples(relaxation: Relaxation) -> IntArray | None:
    """The prices as multiples of one fraction 1 / n, if they are.

    For billions of sequences, rounding them down would cost packs.
    """
    for denominator in range(1, MAX_DENOMINATOR + 1):
        multiples = relaxation.prices * denominator
        nearest = np.rint(multiples)
        if np.max(np.abs(multiples - nearest)) < 1e-6:
            whole: IntArray = nearest.astype(np.int64)
            return whole
    return None
