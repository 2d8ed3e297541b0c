"""Lower bounds on the number of packs, each with a certificate, that can be computed fast enough for every plan.

Prices come from the token bound (the length), the count bound (1 each), the linear program without a depth limit, and the
linear program with it. The latter starts from the strategies of LPFHP and stops after a number of simplex iterations; its
prices prove a bound at any time. All prices are rounded to integers, and the worth of the best pack is computed in integers
or rounded up, so the proof does not depend on floating-point accuracy.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.certificate import (
    LARGEST_WORTH,
    MAX_EXACT_LENGTH,
    Certificate,
    compute_fractional_knapsack_bound,
    compute_max_price_by_enumeration,
    prove_bound_by_length_threshold,
    prove_bound_by_totals,
    sum_prices,
)
from gaudi_bert.packing.knapsack import (
    LONGEST_TABLE,
    OPERATIONS_PER_PRODUCT,
    compute_max_pack_price,
    compute_max_plus_closure,
    list_factor_rows_for_power,
)
from gaudi_bert.packing.linear_program import LinearProgram, Relaxation, is_linear_program_too_large
from gaudi_bert.packing.long_packs import BINS, interpolate_prices, split_counts_into_bins
from gaudi_bert.packing.strategies import BOUND_WORK, OperationBudget

# To prove a lower bound in exact integers, dual prices, which are at most 1, are multiplied by this number and rounded down.
# If packs hold thousands of sequences, the factor is smaller.
LARGEST_PRICE = 10**15

# If rounding the dual prices down weakens the lower bound, they are also tried as exact fractions. Their common denominator
# may be at most this number.
MAX_DENOMINATOR = 4096

# The limit on simplex iterations for a linear program that is solved only to prove a lower bound. It is QUICK_ITERATIONS, or
# QUICK_ITERATIONS_PER_LENGTH times the number of distinct lengths if that is more.
QUICK_ITERATIONS = 3500
QUICK_ITERATIONS_PER_LENGTH = 4
# Proving a lower bound takes (distinct prices) * (tokens of a pack) operations. For long packs, prices are rounded to fewer
# distinct values, so that a proof takes at most STEP_WORK operations, which is a few seconds.
STEP_WORK = 2**33
# Proving a lower bound may take this many operations even if the operation budget is exhausted.
ALWAYS_PROVEN = 2e8


def prove_lower_bound(length_counts: IntArray, depth: int, budget: OperationBudget | None = None) -> Certificate:
    """Prove lower bounds on the number of packs in several ways. Return the largest as a certificate, which proves the bound
    by a price for each sequence length.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        depth: the maximum number of sequences per pack.
        budget: the operation budget, or None for `BOUND_WORK`.
    """
    budget = OperationBudget(BOUND_WORK) if budget is None else budget
    best = prove_bound_by_totals(length_counts, depth)
    if depth == 1 or not length_counts.any():
        return best
    proofs = _prove_bounds_by_linear_programs(length_counts, depth, budget)
    return max(
        best, *proofs, prove_bound_by_length_threshold(length_counts, depth), key=lambda certificate: certificate.bound
    )


def _prove_bounds_by_linear_programs(length_counts: IntArray, depth: int, budget: OperationBudget) -> list[Certificate]:
    """Solve the linear program without a limit on the sequences per pack, and again with the limit if it matters. Return
    certificates, which contain the prices that prove lower bounds on the number of packs.
    """
    if is_linear_program_too_large(length_counts, depth):
        coarse = prove_lower_bound(split_counts_into_bins(length_counts, BINS), depth, budget)
        return [prove_bound_by_prices(length_counts, interpolate_prices(coarse.prices, len(length_counts)), depth, budget)]
    linear_program = LinearProgram.from_heuristic(length_counts, len(length_counts), budget.take_fraction(0.5))
    iterations = max(QUICK_ITERATIONS, QUICK_ITERATIONS_PER_LENGTH * len(linear_program.lengths))
    linear_program.solve(iterations)
    proofs = [prove_bound_by_linear_program(linear_program, depth, budget)]
    if depth < linear_program.deepest:
        limited = LinearProgram.from_heuristic(length_counts, depth, budget)
        limited.relaxation = linear_program.relaxation
        limited.solve(iterations)
        proofs.append(prove_bound_by_linear_program(limited, depth, budget))
    return proofs


def prove_bound_by_linear_program(linear_program: LinearProgram, depth: int, budget: OperationBudget) -> Certificate:
    """Round the dual prices of a solved linear program to integers, which prove a lower bound on the number of packs. Return
    this proof as a certificate.

    Args:
        linear_program: the program. If it has no relaxation yet, the simple certificate is returned.
        depth: the maximum number of sequences per pack, for which the certificate is valid.
        budget: the operation budget.
    """
    relaxation = linear_program.relaxation
    if relaxation is None:
        return prove_bound_by_totals(linear_program.counts, depth)
    scale = min(LARGEST_PRICE, 2**61 // min(depth, linear_program.max_length))
    prices = _extend_prices_to_all_lengths(linear_program, np.floor(relaxation.prices * scale).astype(np.int64))
    certificate = prove_bound_by_prices(linear_program.counts, prices, depth, budget)
    if certificate.bound < np.ceil(relaxation.bound - 1e-6):
        common = _find_prices_with_common_denominator(relaxation)
        if common is not None:
            snapped = prove_bound_by_prices(
                linear_program.counts, _extend_prices_to_all_lengths(linear_program, common), depth, budget
            )
            certificate = max(certificate, snapped, key=lambda candidate: candidate.bound)
    return certificate


def _extend_prices_to_all_lengths(linear_program: LinearProgram, prices: IntArray) -> IntArray:
    """Extend the prices of the lengths that occur in the histogram to all lengths that fit into a pack. A length that does
    not occur gets the price of the next shorter length that does. Return int64 [L], where L is the pack length in tokens.
    """
    row = np.searchsorted(linear_program.lengths, np.arange(1, linear_program.max_length + 1), side="right") - 1
    return np.where(row >= 0, np.maximum.accumulate(prices)[row], 0)


def prove_bound_by_prices(
    length_counts: IntArray, prices: IntArray, depth: int, budget: OperationBudget | None = None
) -> Certificate:
    """Prove a lower bound on the number of packs, given an integer price for each sequence length, and return the proof as a
    certificate. The bound is the total price of all sequences, divided by the largest total price in one pack.

    Prices that are too large, or too many for long packs, are rounded down, which proves nearly as much. If the proof would
    take more operations than the budget allows, the simple certificate is returned.

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        prices: int64 [L], which must not fall with length.
        depth: the maximum number of sequences per pack.
        budget: the operation budget, or None for no limit.
    """
    budget = OperationBudget() if budget is None else budget
    length = len(length_counts)
    if length > MAX_EXACT_LENGTH:
        prices = _round_to_fewer_distinct_prices(prices, min(STEP_WORK, max(budget.remaining, ALWAYS_PROVEN)))
    max_items = length // max(1, int(np.argmax(prices > 0)) + 1)  # shorter sequences are worth nothing
    products = len(list_factor_rows_for_power(depth, length)) if depth < max_items and length <= MAX_EXACT_LENGTH else 1
    operations = OPERATIONS_PER_PRODUCT * products * length * min(length, STEP_WORK / length)
    if operations > max(budget.remaining, ALWAYS_PROVEN):
        return prove_bound_by_totals(length_counts, depth)
    budget.spend(operations)
    items = min(depth, length) if length <= LONGEST_TABLE else max(min(depth, length), max_items)
    divisor = -(-int(prices.max()) * items // (LARGEST_WORTH - 1))
    if divisor > 1:
        prices = prices // divisor
    if length > LONGEST_TABLE:
        max_pack_price = _compute_pack_price_upper_bound(prices, depth, max_items)
    else:
        max_pack_price = int(compute_max_pack_price(prices, depth if depth < max_items else length))
    return Certificate(prices, depth, -(-sum_prices(prices, length_counts) // max_pack_price) if max_pack_price else 0)


def _round_to_fewer_distinct_prices(prices: IntArray, max_proof_operations: float) -> IntArray:
    """Round the price of each length down so that fewer distinct prices remain, which makes proving a lower bound faster. If
    there are only a few distinct prices already, return them unchanged.

    The rounded prices rise only at equal steps of length. There are so few steps that the proof takes at most
    `max_proof_operations`.
    """
    length = len(prices)
    steps = max(1, int(max_proof_operations) // length)
    if np.count_nonzero(np.diff(prices, prepend=0)) <= steps:
        return prices
    width = -(-length // steps)
    first = np.arange(1, length + 1) // width * width  # 0 for lengths shorter than a step, which are worth nothing
    return np.where(first > 0, prices[np.maximum(first, 1) - 1], 0)


def _compute_pack_price_upper_bound(prices: IntArray, depth: int, max_sequences: int) -> int:
    """Return an upper bound on the total price of the sequences in one very long pack. The bound is exact if that is fast
    enough to compute.

    `max_sequences` is the largest number of sequences with a positive price that fit into a pack.
    """
    length, best = len(prices), np.concatenate(([0], prices))
    rises = np.flatnonzero(np.diff(best) > 0) + 1
    listed = compute_max_price_by_enumeration(best[rises], rises, length, depth)
    if listed is not None:
        return listed
    if length <= MAX_EXACT_LENGTH and depth < max_sequences:
        return int(compute_max_pack_price(prices, depth))
    at_any_depth = np.empty_like(best)
    compute_max_plus_closure(best, rises, at_any_depth)
    return min(int(at_any_depth[-1]), compute_fractional_knapsack_bound(best[rises], rises, length, min(depth, length)))


def _find_prices_with_common_denominator(relaxation: Relaxation) -> IntArray | None:
    """Find the smallest integer factor that turns all dual prices of a linear program into integers, and return the
    multiplied prices. Return None if no factor up to `MAX_DENOMINATOR` does.

    With billions of sequences, rounding exact fractions down would weaken the bound by several packs.
    """
    for denominator in range(1, MAX_DENOMINATOR + 1):
        multiples = relaxation.prices * denominator
        nearest = np.rint(multiples)
        if np.max(np.abs(multiples - nearest)) < 1e-6:
            whole: IntArray = nearest.astype(np.int64)
            return whole
    return None
