"""A proof that no packing can do with fewer packs, made of integers and checkable by hand.

Give every length a non-negative integer price. If no pack of at most `depth` sequences can hold more than M
worth of sequences, then packs >= (worth of all sequences) / M, whoever packs and however. The best prices are
the dual solution of the cutting stock linear program, but any prices prove a bound, so nothing has to be
believed of the solver that found them. The simplest are the lengths themselves, and 1 for every sequence.

`check_certificate` is the whole proof: it needs the prices, the histogram and the depth, uses integers only,
and shares no code with the solvers. `bounds` makes better certificates than the simple ones.

What the best pack is worth takes L^2 steps. For packs of more than `LONGEST_EXACT` tokens an upper limit of it proves as
well: L times the highest price per token, `depth` times the highest price, or, where there are few different prices, what
the best pack of any number of sequences is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError

LONGEST_EXACT = 1 << 17
"""Tokens of the longest packs whose best worth is computed exactly, with the limit of depth."""

MOST_STEPS = 2**34
"""Different prices, times tokens of a pack: some ten seconds. A proof by steps of length has half as many."""

LARGEST_WORTH = 2**62
"""Of a pack, so that sums of prices fit int64."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """Integer prices and what they prove.

    Attributes:
        prices: int64 [L], the price of a sequence of length 1 .. L, >= 0.
        bound: fewest packs that any packing of the histogram needs, by these prices.
    """

    prices: IntArray
    depth: int
    bound: int


def simple_certificate(counts: IntArray, depth: int) -> Certificate:
    """The better of the token bound and the count bound."""
    lengths = np.arange(1, len(counts) + 1)
    by_tokens = -(-total_worth(lengths, counts) // max(len(counts), 1))
    by_count = -(-int(counts.sum()) // depth)
    if by_count > by_tokens:
        return Certificate(np.ones_like(lengths), depth, by_count)
    return Certificate(lengths, depth, by_tokens)


def total_worth(prices: IntArray, counts: IntArray) -> int:
    """What all sequences are worth, exactly."""
    here = np.flatnonzero(counts)
    return sum(price * count for price, count in zip(prices[here].tolist(), counts[here].tolist(), strict=True))


def check_certificate(certificate: Certificate, counts: IntArray) -> int:
    """Recompute the bound from prices, histogram and depth alone, in exact integers.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
    """
    most = _best_pack_worth(certificate.prices, certificate.depth)
    worth = total_worth(certificate.prices, counts)
    bound = -(-worth // most) if most else 0
    if bound < certificate.bound:
        raise FailedError(f"the prices prove {bound} packs, not the {certificate.bound} that the certificate claims")
    return bound


def _best_pack_worth(prices: IntArray, depth: int) -> int:
    """The most that at most `depth` sequences of together at most L tokens can be worth, exactly."""
    size = len(prices)
    depth = min(depth, size)
    if size and (int(prices.min()) < 0 or int(prices.max()) * max(depth, 1) >= LARGEST_WORTH):
        raise InputError(f"prices must lie in 0 .. {LARGEST_WORTH // max(depth, 1)}")
    if size > LONGEST_EXACT:
        return _limit_of_worth(prices, depth)
    nothing = np.zeros(size + 1, dtype=np.int64)
    power = np.maximum.accumulate(np.concatenate(([0], prices)))  # the best single sequence of at most t tokens
    best = nothing
    while depth:
        if depth % 2:
            best = _combine(best, power)
        depth //= 2
        power = _combine(power, power) if depth else power
    return int(best[-1])


def _limit_of_worth(prices: IntArray, depth: int) -> int:
    """No pack is worth more than this: the least of three upper limits, of which the last takes `MOST_STEPS` at most."""
    per_token = -(-prices // np.arange(1, len(prices) + 1))
    limit = min(len(prices) * int(per_token.max()), depth * int(prices.max()))
    best = np.maximum.accumulate(np.concatenate(([0], prices)))
    rises = np.flatnonzero(np.diff(best) > 0) + 1
    return min(limit, _worth_at_any_depth(prices, best, rises)) if len(rises) * len(prices) <= MOST_STEPS else limit


def _worth_at_any_depth(prices: IntArray, best: IntArray, rises: IntArray) -> int:
    """The most that any number of sequences of together at most L tokens can be worth: each price at its shortest length.

    `best` begins as the price of the best single sequence of at most t tokens, and ends as the worth of the best pack.
    """
    for length in rises.tolist():
        price = prices[length - 1]
        for start in range(length, len(best), length):
            run = best[start : start + length]
            np.maximum(run, best[start - length : start - length + len(run)] + price, out=run)
    return int(best[-1])


def _combine(left: IntArray, right: IntArray) -> IntArray:
    """result[t] = max over a of left[a] + right[t - a]."""
    result: IntArray = left + right[0]
    for part in range(1, len(left)):
        np.maximum(result[part:], left[: len(left) - part] + right[part], out=result[part:])
    return result
