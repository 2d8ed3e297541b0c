"""Which few lengths of rows cost least where every sequence has a row of its own. No TensorFlow.

Sequences of about one length are not packed; but a row of 300 tokens need not be computed with 512 because another one has
as many. Every length is another shape to compile, so there are few, on a grid that is the same for all windows.

Letters: G lengths of the grid.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gaudi_bert.common.arrays import IntArray

__all__ = ["best_row_lengths"]

GRID = 32
MOST_LENGTHS = 4


def best_row_lengths(counts: IntArray, longest: int, cost: Callable[[int], float]) -> tuple[list[int], float]:
    """Row lengths that hold all sequences at the least cost, and that cost.

    Args:
        counts: int64, of sequences by their length from 1.
        longest: length of the longest rows; at least that of the longest sequence.
        cost: of a row of some length.

    Returns:
        At most MOST_LENGTHS lengths, ascending, each of which some sequence needs.
    """
    grid = np.append(np.arange(GRID, longest, GRID), longest)
    below_G = np.cumsum(np.pad(counts, (0, max(0, longest - len(counts)))))[grid - 1]
    costs_G = np.array([cost(int(length)) for length in grid])
    # best_G[j]: cost of all sequences that grid[j] holds, by so many lengths of which grid[j] is the longest.
    best_G = below_G * costs_G
    before = []
    for _ in range(MOST_LENGTHS - 1):
        totals_GG = best_G[:, np.newaxis] + (below_G - below_G[:, np.newaxis]) * costs_G
        totals_GG[np.tril_indices(len(grid), -1)] = np.inf
        before.append(totals_GG.argmin(axis=0))
        best_G = totals_GG.min(axis=0)
    chosen = [len(grid) - 1]
    for choices in reversed(before):
        chosen.append(int(choices[chosen[-1]]))
    places = np.unique(chosen)
    held = np.diff(below_G[places], prepend=0)
    return [int(length) for length in grid[places[held > 0]]], float(best_G[-1])
