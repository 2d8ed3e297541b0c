"""A proof that no packing can do with fewer packs, made of integers and checkable by hand.

Give every length a non-negative integer price. If no pack of at most `depth` sequences can hold more than M
worth of sequences, then packs >= (worth of all sequences) / M, whoever packs and however. The best prices are
the dual solution of the cutting stock linear program, but any prices prove a bound, so nothing has to be
believed of the solver that found them. The simplest are the lengths themselves, and 1 for every sequence.

`check_certificate` is the whole proof: it needs the prices, the histogram and the depth, uses integers only,
and shares no code with the solvers. `bounds` makes better certificates than the simple ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError


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
    by_tokens = -(
        -sum(int(length) * int(count) for length, count in zip(lengths, counts, strict=True)) // max(len(counts), 1)
    )
    by_count = -(-int(counts.sum()) // depth)
    if by_count > by_tokens:
        return Certificate(np.ones_like(lengths), depth, by_count)
    return Certificate(lengths, depth, by_tokens)


def check_certificate(certificate: Certificate, counts: IntArray) -> int:
    """Recompute the bound from prices, histogram and depth alone, in exact integers.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
    """
    most = _best_pack_worth(certificate.prices, certificate.depth)
    worth = sum(int(price) * int(count) for price, count in zip(certificate.prices, counts, strict=True))
    bound = -(-worth // most) if most else 0
    if bound < certificate.bound:
        raise FailedError(f"the prices prove {bound} packs, not the {certificate.bound} that the certificate claims")
    return bound


def _best_pack_worth(prices: IntArray, depth: int) -> int:
    """The most that at most `depth` sequences of together at most L tokens can be worth, exactly."""
    size = len(prices)
    depth = min(depth, size)
    if size and (int(prices.min()) < 0 or int(prices.max()) * max(depth, 1) >= 2**62):
        raise InputError(f"prices must lie in 0 .. {2**62 // max(depth, 1)}")
    nothing = np.zeros(size + 1, dtype=np.int64)
    power = np.maximum.accumulate(np.concatenate(([0], prices)))  # the best single sequence of at most t tokens
    best = nothing
    while depth:
        if depth % 2:
            best = _combine(best, power)
        depth //= 2
        power = _combine(power, power) if depth else power
    return int(best[-1])


def _combine(left: IntArray, right: IntArray) -> IntArray:
    """result[t] = max over a of left[a] + right[t - a]."""
    result: IntArray = left + right[0]
    for part in range(1, len(left)):
        np.maximum(result[part:], left[: len(left) - part] + right[part], out=result[part:])
    return result
