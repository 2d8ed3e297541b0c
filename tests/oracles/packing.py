"""Naive twins: packings one sequence at a time, strategies listed, dense matrices. What the fast algorithms must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy.optimize import nnls

from gaudi_bert.common.arrays import permutation


def first_fit_decreasing(counts: np.ndarray, depth: int) -> Counter:
    capacity = len(counts)
    packs: list[list[int]] = []
    for length in range(capacity, 0, -1):
        for _ in range(counts[length - 1]):
            for pack in packs:
                if len(pack) < depth and sum(pack) + length <= capacity:
                    pack.append(length)
                    break
            else:
                packs.append([length])
    return Counter(tuple(sorted(pack)) for pack in packs)


def next_fit(lengths: list[int], capacity: int, depth: int, separators: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in lengths:
        used = sum(packs[-1]) + separators * len(packs[-1]) if packs else capacity + 1
        if not packs or used + length > capacity or len(packs[-1]) == depth:
            packs.append([])
        packs[-1].append(length)
    return packs


def sorted_batches(counts: np.ndarray, batch: int) -> int:
    """Tokens with padding."""
    lengths = sorted(np.repeat(np.arange(1, len(counts) + 1), counts).tolist(), reverse=True)
    return sum(len(part) * part[0] for part in (lengths[start : start + batch] for start in range(0, len(lengths), batch)))


def fewest_packs(counts: tuple[int, ...], depth: int) -> int:
    """The optimum, by trying everything; for a handful of sequences."""
    capacity = len(counts)

    @cache
    def best(left: tuple[int, ...]) -> int:
        if not any(left):
            return 0
        longest = max(length for length in range(1, capacity + 1) if left[length - 1])
        rest = list(left)
        rest[longest - 1] -= 1
        return 1 + min(best(after) for after in fillings(tuple(rest), capacity - longest, longest, depth - 1))

    @cache
    def fillings(left: tuple[int, ...], room: int, largest: int, places: int) -> frozenset[tuple[int, ...]]:
        found = {left}
        if places:
            for length in range(1, min(room, largest) + 1):
                if left[length - 1]:
                    rest = list(left)
                    rest[length - 1] -= 1
                    found |= fillings(tuple(rest), room - length, length, places - 1)
        return frozenset(found)

    return best(tuple(counts))


def strategies(capacity: int, depth: int, *, full: bool = True) -> list[tuple[int, ...]]:
    """All ascending tuples of at most `depth` lengths that add up to `capacity` (`full`) or to no more."""
    result: list[tuple[int, ...]] = []

    def extend(pack: tuple[int, ...], room: int) -> None:
        if pack and (room == 0 or not full):
            result.append(pack)
        if len(pack) < depth:
            for length in range(pack[-1] if pack else 1, room + 1):
                extend((*pack, length), room - length)

    extend((), capacity)
    return result


def strategy_matrix(packs: list[tuple[int, ...]], capacity: int) -> np.ndarray:
    matrix = np.zeros((capacity, len(packs)))
    for column, pack in enumerate(packs):
        for length in pack:
            matrix[length - 1, column] += 1
    return matrix


def weighted_nnls(counts: np.ndarray, weights: np.ndarray, depth: int) -> tuple[float, np.ndarray]:
    """Objective and residual over all full strategies."""
    columns = strategy_matrix(strategies(len(counts), depth), len(counts))
    usage, objective = nnls(columns * weights[:, None], counts * weights, maxiter=100_000)
    return objective, counts - columns @ usage


def compute_max_pack_price(prices: list[int], depth: int) -> int:
    return max(sum(prices[length - 1] for length in pack) for pack in strategies(len(prices), depth, full=False))


def deal(lengths: Sequence[int], strategies: Sequence[tuple[Sequence[int], int]], seed: int, group: int) -> list[list[int]]:
    waiting: dict[int, list[int]] = {}
    for sequence in permutation(len(lengths), seed, "sequences", group):
        waiting.setdefault(lengths[sequence], []).append(int(sequence))
    planned = [strategy for strategy, count in strategies for _ in range(count)]
    order = permutation(len(planned), seed, "packs", group)
    return [[waiting[length].pop(0) for length in planned[place]] for place in order]
