"""Certificates: integer prices that prove a lower bound on the number of packs, and an independent check of this proof.

Give every length a non-negative integer price. If no pack of at most `depth` sequences can be worth more than M, then any
packing needs at least (total worth of all sequences) / M packs. The best prices are the dual solution of the cutting-stock
linear program. However, any prices prove a bound, so the solver that computed them need not be trusted. The simplest prices
are the lengths themselves, or 1 for every sequence.

`verify_certified_lower_bound` is the complete check. It takes the prices, the histogram and the depth, calculates in
integers only, and shares no code with the solvers. Better certificates than the simple ones are computed in `bounds.py`.

Computing the worth M of the best pack takes L^2 steps. For packs of more than `MAX_EXACT_LENGTH` tokens, M is computed
exactly only if the prices have few distinct values. Otherwise an upper limit of M is used, which proves a slightly weaker
bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError

# The time to compute the largest total price of a pack grows with the square of its number of tokens. For packs with more
# tokens than this, an upper bound may be used instead.
MAX_EXACT_LENGTH = 1 << 17

# A certificate proves a lower bound by prices. Checking it for very long packs takes (distinct prices) * (tokens of a pack)
# steps. At most this many steps are allowed, which is about ten seconds. `bounds.py` rounds prices so that checking its
# certificates takes at most half as many steps.
MAX_STEPS = 2**34

# The ways to fill a pack are enumerated only if (ways) * (distinct prices) is at most this number. Otherwise the enumeration
# would be too large.
MAX_LISTED = 2**22

# The largest total price that a pack may have, so that sums of prices fit in int64.
LARGEST_WORTH = 2**62


@dataclass(frozen=True, eq=False)
class Certificate:
    """A proof of a lower bound on the number of packs, based on a price for each sequence length. For any prices, a packing
    needs at least (total price of all sequences) / (largest total price in one pack) packs.
    """

    prices: IntArray  # int64 [L], the price of a sequence of length 1 .. L, >= 0
    depth: int
    bound: int  # no packing of the histogram has fewer packs than this


def prove_bound_by_totals(length_counts: IntArray, depth: int) -> Certificate:
    """Compute two lower bounds on the number of packs, which are (total tokens / pack length) and (sequences / depth).
    Return the larger one as a certificate, with the prices that prove it.
    """
    lengths = np.arange(1, len(length_counts) + 1)
    by_tokens = -(-sum_prices(lengths, length_counts) // max(len(length_counts), 1))
    by_count = -(-int(length_counts.sum()) // depth)
    if by_count > by_tokens:
        return Certificate(np.ones_like(lengths), depth, by_count)
    return Certificate(lengths, depth, by_tokens)


def prove_bound_by_length_threshold(length_counts: IntArray, depth: int) -> Certificate:
    """Find the length threshold that proves the largest lower bound on the number of packs. Return a certificate, which
    contains the prices that prove the bound. Sequences shorter than the threshold are ignored, and few of the longer ones
    fit into one pack.

    Let t be the threshold. A sequence that is longer than both L - t and L / 2 cannot share its pack with any other sequence
    of t or more tokens, so it is worth a full pack. A shorter sequence of at least t tokens shares its pack with at most
    min(depth, L // t) - 1 others of at least t tokens. Sequences below t are worth nothing. All occurring lengths up to L //
    2, and L // 2 + 1, are tried as t (Martello and Toth 1990, here with a depth limit).

    Args:
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        depth: the maximum number of sequences per pack.
    """
    length = len(length_counts)
    thresholds = np.append(np.flatnonzero(length_counts[: length // 2]) + 1, length // 2 + 1)
    longest_shared = np.maximum(length - thresholds, length // 2)
    max_sequences = np.minimum(depth, length // thresholds)
    lengths = np.arange(1, length + 1)
    sequences, tokens = (np.concatenate(([0], np.cumsum(worth))) for worth in (length_counts, length_counts * lengths))
    alone = sequences[-1] - sequences[longest_shared]
    by_count = -((sequences[thresholds - 1] - sequences[longest_shared]) // max_sequences)
    by_tokens = -((tokens[thresholds - 1] - tokens[longest_shared]) // length)
    bounds = np.concatenate((alone + by_count, alone + by_tokens))
    is_by_tokens, best = divmod(int(np.argmax(bounds)), len(thresholds))
    pack_price = length if is_by_tokens else int(max_sequences[best])
    prices = np.where(lengths > longest_shared[best], pack_price, lengths if is_by_tokens else 1) * (
        lengths >= thresholds[best]
    )
    return Certificate(prices, depth, int(np.max(bounds)))


def sum_prices(prices: IntArray, length_counts: IntArray) -> int:
    """Add up the prices of all sequences in a histogram, where the price of a sequence depends only on its length. Return an
    exact Python integer.
    """
    occurring = np.flatnonzero(length_counts)
    return sum(
        price * count for price, count in zip(prices[occurring].tolist(), length_counts[occurring].tolist(), strict=True)
    )


def verify_certified_lower_bound(certificate: Certificate, length_counts: IntArray) -> int:
    """Verify, in exact integers, that the prices of a certificate prove the lower bound on the number of packs that it
    claims. Return the bound that they prove.

    Args:
        certificate: the prices, the depth and the claimed bound.
        length_counts: int64 [L], the number of sequences of length 1 .. L.

    Returns:
        The bound that the prices prove, which may exceed the claimed one.

    Raises:
        FailedError: the prices prove less than the certificate claims.
        InputError: a price is negative, or so large that sums would overflow.
    """
    max_pack_price = _compute_max_pack_price(certificate.prices, certificate.depth)
    bound = -(-sum_prices(certificate.prices, length_counts) // max_pack_price) if max_pack_price else 0
    if bound < certificate.bound:
        raise FailedError(
            f"the prices prove a lower bound of only {bound} packs, but the certificate claims {certificate.bound}"
        )
    return bound


def _compute_max_pack_price(prices: IntArray, depth: int) -> int:
    """Return the largest total price of the sequences that fit into one pack. For very long packs, the result may be an
    upper bound, because the exact value would take too long to compute.
    """
    pack_tokens = len(prices)
    depth = min(depth, pack_tokens)
    if pack_tokens and (int(prices.min()) < 0 or int(prices.max()) * max(depth, 1) >= LARGEST_WORTH):
        raise InputError(f"certificate prices must be integers from 0 to {LARGEST_WORTH // max(depth, 1)}")
    # best[t] is the highest price of a single sequence of at most t tokens.
    best = np.maximum.accumulate(np.concatenate(([0], prices)))
    rises = np.flatnonzero(np.diff(best) > 0) + 1
    listed = compute_max_price_by_enumeration(best[rises], rises, pack_tokens, depth) if len(rises) else 0
    if listed is not None:
        return listed
    if pack_tokens > MAX_EXACT_LENGTH:
        limit = compute_fractional_knapsack_bound(best[rises], rises, pack_tokens, depth)
        if len(rises) * pack_tokens <= MAX_STEPS and int(best[-1]) * (pack_tokens // int(rises[0])) < LARGEST_WORTH:
            # `limit` is a rough upper bound, because it assumes that room can be filled completely. A pack without a limit
            # on the number of sequences is worth at least as much as one with this limit, so its largest total price is an
            # upper bound, too, and possibly a smaller one. Compute it if that is fast enough. The loop changes best[t] from
            # the highest price of one sequence to the largest total price of any number of sequences in t tokens.
            for length in rises.tolist():
                for start in range(length, len(best), length):
                    run = best[start : start + length]
                    np.maximum(run, best[start - length : start - length + len(run)] + prices[length - 1], out=run)
            limit = min(limit, int(best[-1]))
        return limit
    power, best = best, np.zeros(pack_tokens + 1, dtype=np.int64)
    while depth:
        if depth % 2:
            best = _compute_max_plus_product(best, power)
        depth //= 2
        power = _compute_max_plus_product(power, power) if depth else power
    return int(best[-1])


def compute_max_price_by_enumeration(prices: IntArray, lengths: IntArray, pack_tokens: int, depth: int) -> int | None:
    """Return the largest total price of the sequences in one pack, found by enumerating all ways to fill a pack with the
    given lengths. Return None if there are too many ways.

    Longer lengths are placed first. The shortest length takes as much of the remaining room as possible.

    Args:
        prices: int64 [n], ascending.
        lengths: int64 [n], ascending; the length to which each price belongs.
        pack_tokens: tokens of a pack.
        depth: the maximum number of sequences per pack.
    """
    room, slots, worth = np.array([pack_tokens]), np.array([depth]), np.array([0])
    for length, price in zip(lengths[:0:-1].tolist(), prices[:0:-1].tolist(), strict=True):
        choices = np.minimum(room // length, slots) + 1
        if int(choices.sum()) * len(lengths) > MAX_LISTED:
            return None
        copies = np.arange(int(choices.sum())) - np.repeat(np.cumsum(choices) - choices, choices)
        room, slots = np.repeat(room, choices) - copies * length, np.repeat(slots, choices) - copies
        worth = np.repeat(worth, choices) + copies * price
    return int(np.max(worth + np.minimum(room // int(lengths[0]), slots) * prices[0]))


def compute_fractional_knapsack_bound(prices: IntArray, lengths: IntArray, pack_tokens: int, depth: int) -> int:
    """Return an upper bound on the total price of the sequences in one pack, by solving a fractional knapsack problem. It is
    fast, because the ways to fill a pack are not enumerated.

    For each possible longest sequence of the pack, the other sequences (at most `depth` - 1) fill the remaining room at the
    best price per token of any length up to the longest. Fractions of sequences are allowed. The bound is the largest of
    these total prices. Floating-point results are rounded up, so that the result is never too small.

    Args:
        prices: int64 [n], ascending.
        lengths: int64 [n], ascending; the length to which each price belongs.
        pack_tokens: tokens of a pack.
        depth: the maximum number of sequences per pack.
    """
    per_token = np.nextafter(np.nextafter(prices.astype(np.float64), np.inf) / lengths, np.inf)
    per_token = np.concatenate(([0.0], np.maximum.accumulate(per_token)))
    others = np.searchsorted(lengths, np.minimum(lengths, pack_tokens - lengths), side="right")
    by_tokens = np.floor(np.nextafter(per_token[others] * (pack_tokens - lengths), np.inf))
    by_tokens = np.minimum(by_tokens, float(LARGEST_WORTH)).astype(np.int64)
    return int(np.max(prices + np.minimum(by_tokens, (depth - 1) * np.concatenate(([0], prices))[others])))


def _compute_max_plus_product(left: IntArray, right: IntArray) -> IntArray:
    """Compute the max-plus product of two arrays: result[t] = max over a of left[a] + right[t - a]."""
    result: IntArray = left + right[0]
    for part in range(1, len(left)):
        np.maximum(result[part:], left[: len(left) - part] + right[part], out=result[part:])
    return result
