"""Naive packings, one sequence at a time: what the fast algorithms on counts must equal."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np


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


def sorted_batches(counts: np.ndarray, batch: int) -> tuple[int, int]:
    """(batches, tokens with padding)."""
    lengths = sorted(np.repeat(np.arange(1, len(counts) + 1), counts).tolist(), reverse=True)
    cut = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    return len(cut), sum(len(part) * part[0] for part in cut)


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


def all_strategies(capacity: int, depth: int) -> list[tuple[int, ...]]:
    """Every sorted tuple of at most `depth` lengths that adds up to exactly `capacity`."""
    found = []

    def extend(prefix: tuple[int, ...], room: int) -> None:
        if room == 0:
            found.append(prefix)
        elif len(prefix) < depth:
            for length in range(prefix[-1] if prefix else 1, room + 1):
                extend((*prefix, length), room - length)

    extend((), capacity)
    return found


def strategy_matrix(strategies: list[tuple[int, ...]], capacity: int) -> np.ndarray:
    """The matrix A of the paper: float64 [capacity, strategies]."""
    matrix = np.zeros((capacity, len(strategies)))
    for column, strategy in enumerate(strategies):
        for length in strategy:
            matrix[length - 1, column] += 1
    return matrix
