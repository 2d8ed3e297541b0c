"""The naive twins of the solvers: every strategy listed, dense matrices."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls


def strategies(max_length: int, depth: int, *, full: bool) -> list[tuple[int, ...]]:
    """All ascending tuples of at most `depth` lengths that add up to `max_length` (`full`) or to no more."""
    found: list[tuple[int, ...]] = []

    def extend(pack: tuple[int, ...], room: int) -> None:
        if pack and (room == 0 or not full):
            found.append(pack)
        if len(pack) < depth:
            for length in range(pack[-1] if pack else 1, room + 1):
                extend((*pack, length), room - length)

    extend((), max_length)
    return found


def matrix(packs: list[tuple[int, ...]], max_length: int) -> np.ndarray:
    columns = np.zeros((max_length, len(packs)))
    for column, pack in enumerate(packs):
        for length in pack:
            columns[length - 1, column] += 1
    return columns


def weighted_nnls(counts: np.ndarray, weights: np.ndarray, depth: int) -> tuple[float, np.ndarray]:
    """Objective and residual over all full strategies."""
    columns = matrix(strategies(len(counts), depth, full=True), len(counts))
    usage, objective = nnls(columns * weights[:, None], counts * weights, maxiter=100_000)
    return objective, counts - columns @ usage


def best_worth(prices: list[int], depth: int) -> int:
    return max(sum(prices[length - 1] for length in pack) for pack in strategies(len(prices), depth, full=False))
