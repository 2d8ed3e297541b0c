"""A proof in integers, checkable by hand, that no packing can do with fewer packs.

Give every length a non-negative integer price. If no pack of at most `depth` sequences can hold more than M
worth of sequences, then packs >= (worth of all sequences) / M, whatever the algorithm. The best prices are
the dual solution of the cutting stock linear program, but any prices prove a bound, so nothing has to be
believed of the solver that computed them. The simplest are the lengths themselves, and 1 for every sequence.

`check_certificate` is the complete proof: it needs the prices, the histogram and the depth, uses integers only,
and shares no code with the solvers. `bounds` makes better certificates than the simple ones.

What the best pack is worth takes L^2 steps. For
packs of more than `MAX_EXACT_LENGTH` tokens it is computed where there are few
different prices; else an upper limit of it proves as well: of the longest sequence of a pack and what the rest can be worth,
or of the best pack of any number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError

MAX_EXACT_LENGTH = 1 << 17
"""Tokens of the longest packs whose best worth is computed exactly, with the limit of depth."""

MAX_STEPS = 2**34
"""Different prices, times tokens of a pack: some ten seconds. A proof by steps of length has half as many."""

MAX_LISTED = 2**22
"""Ways to fill a pack with sequences at whose length the price rises, times such lengths, that are looked at one by one."""

LARGEST_WORTH = 2**62
"""Of a pack, so that sums of prices fit int64."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """Integer prices and what they prove."""

    prices: IntArray  # int64 [L], the price of a sequence of length 1 .. L, >= 0
    depth: int
    bound: int  # fewest packs that any packing of the histogram needs, by these prices


def simple_certificate(counts: IntArray, depth: int) -> Certificate:
    """The better of the token bound and the count bound."""
    lengths = np.arange(1, len(counts) + 1)
    by_tokens = -(-total_worth(lengths, counts) // max(len(counts), 1))
    by_count = -(-int(counts.sum()) // depth)
    if by_count > by_tokens:
        return Certificate(np.ones_like(lengths), depth, by_count)
    return Certificate(lengths, depth, by_tokens)


def threshold_certificate(counts: IntArray, depth: int) -> Certificate:
    """The best bound of those that a threshold t gives, for each t up to half a pack, and a token more.

    A sequence of more than L - t tokens (and more than half a pack) shares its pack with none of t or more, so it is worth a
    full pack. Those from t on share one with at most min(depth, L // t) - 1 others, and with at most L tokens. Shorter ones
    are worth nothing (Martello and Toth 1990, with a limit of depth).
    """
    length = len(counts)
    thresholds = np.append(np.flatnonzero(counts[: length // 2]) + 1, length // 2 + 1)
    longest_shared = np.maximum(length - thresholds, length // 2)
    most = np.minimum(depth, length // thresholds)
    lengths = np.arange(1, length + 1)
    sequences, tokens = (np.concatenate(([0], np.cumsum(worth))) for worth in (counts, counts * lengths))
    alone = sequences[-1] - sequences[longest_shared]
    by_count = -((sequences[thresholds - 1] - sequences[longest_shared]) // most)
    by_tokens = -((tokens[thresholds - 1] - tokens[longest_shared]) // length)
    bounds = np.concatenate((alone + by_count, alone + by_tokens))
    is_by_tokens, best = divmod(int(np.argmax(bounds)), len(thresholds))
    pack = length if is_by_tokens else int(most[best])
    prices = np.where(lengths > longest_shared[best], pack, lengths if is_by_tokens else 1) * (lengths >= thresholds[best])
    return Certificate(prices, depth, int(np.max(bounds)))


def total_worth(prices: IntArray, counts: IntArray) -> int:
    """Return the exact worth of all sequences."""
    here = np.flatnonzero(counts)
    return sum(price * count for price, count in zip(prices[here].tolist(), counts[here].tolist(), strict=True))


def check_certificate(certificate: Certificate, counts: IntArray) -> int:
    """Recompute the bound from prices, histogram (int64 [L], from length 1) and depth alone, in exact integers."""
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
    best = np.maximum.accumulate(np.concatenate(([0], prices)))  # the best single sequence of at most t tokens
    rises = np.flatnonzero(np.diff(best) > 0) + 1
    listed = best_worth_by_enumeration(best[rises], rises, size, depth) if len(rises) else 0
    if listed is not None:
        return listed
    if size > MAX_EXACT_LENGTH:
        limit = worth_limit_by_longest(best[rises], rises, size, depth)
        if len(rises) * size <= MAX_STEPS and int(best[-1]) * (size // int(rises[0])) < LARGEST_WORTH:
            # With any number of sequences, and each price at its shortest length: `best` ends as the worth of the best pack.
            for length in rises.tolist():
                price = prices[length - 1]
                for start in range(length, len(best), length):
                    run = best[start : start + length]
                    np.maximum(run, best[start - length : start - length + len(run)] + price, out=run)
            limit = min(limit, int(best[-1]))
        return limit
    nothing = np.zeros(size + 1, dtype=np.int64)
    power, best = best, nothing
    while depth:
        if depth % 2:
            best = _max_plus_product(best, power)
        depth //= 2
        power = _max_plus_product(power, power) if depth else power
    return int(best[-1])


def best_worth_by_enumeration(prices: IntArray, lengths: IntArray, size: int, depth: int) -> int | None:
    """The most that a pack of at most `depth` sequences of these lengths is worth: each way to fill it is looked at, the
    shortest length last, which takes the remaining room. None if there are more than `MAX_LISTED`.
    """
    room, slots, worth = np.array([size]), np.array([depth]), np.array([0])
    for length, price in zip(lengths[:0:-1].tolist(), prices[:0:-1].tolist(), strict=True):
        choices = np.minimum(room // length, slots) + 1
        if int(choices.sum()) * len(lengths) > MAX_LISTED:
            return None
        copies = np.arange(int(choices.sum())) - np.repeat(np.cumsum(choices) - choices, choices)
        room, slots = np.repeat(room, choices) - copies * length, np.repeat(slots, choices) - copies
        worth = np.repeat(worth, choices) + copies * price
    return int(np.max(worth + np.minimum(room // int(lengths[0]), slots) * prices[0]))


def worth_limit_by_longest(prices: IntArray, lengths: IntArray, size: int, depth: int) -> int:
    """No pack of sequences of these lengths (ascending, as are their prices) is worth more: the longest of them, and a limit
    of what at most depth - 1 of its length or less can be worth in the remaining room. Fractions are rounded up.
    """
    per_token = np.nextafter(np.nextafter(prices.astype(np.float64), np.inf) / lengths, np.inf)
    per_token = np.concatenate(([0.0], np.maximum.accumulate(per_token)))
    others = np.searchsorted(lengths, np.minimum(lengths, size - lengths), side="right")
    by_tokens = np.floor(np.nextafter(per_token[others] * (size - lengths), np.inf))
    by_tokens = np.minimum(by_tokens, float(LARGEST_WORTH)).astype(np.int64)
    return int(np.max(prices + np.minimum(by_tokens, (depth - 1) * np.concatenate(([0], prices))[others])))


def _max_plus_product(one: IntArray, other: IntArray) -> IntArray:
    """result[t] = max over a of one[a] + other[t - a]."""
    result: IntArray = one + other[0]
    for part in range(1, len(one)):
        np.maximum(result[part:], one[: len(one) - part] + other[part], out=result[part:])
    return result
