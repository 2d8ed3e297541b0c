"""Very long packs of very few lengths: all strategies listed, where a table over all tokens of a pack would be too long.

What a dynamic programme over tokens costs grows with the pack, what a list costs only with the number of strategies. Those
are listed that no further sequence of the shortest length would fit: any other is part of one of them, and worth no more.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.packing.mixture import Strategy
from gaudi_bert.packing.result import Work

LONGEST_TABLE = 1 << 16
"""Longer packs are priced from a list, if that is short enough."""

MOST_ENTRIES = 1 << 22
"""Of the list: strategies times lengths."""


def list_strategies(lengths: IntArray, max_length: int, depth: int, most_entries: int = MOST_ENTRIES) -> IntArray | None:
    """Copies of each length in every strategy that takes no more of the shortest, int64 [strategies, lengths]; None if there
    are too many.

    Args:
        lengths: int64 [lengths], ascending, at least one.
    """
    copies = np.zeros((1, len(lengths)), dtype=np.int64)
    room, slots = np.array([max_length]), np.array([depth])
    for column in range(len(lengths) - 1, -1, -1):
        most = np.minimum(room // lengths[column], slots)
        choices = most + 1 if column else np.ones_like(most)
        if int(choices.sum()) * len(lengths) > most_entries:
            return None
        parent = np.repeat(np.arange(len(choices)), choices)
        number = most if column == 0 else np.arange(len(parent)) - np.repeat(np.cumsum(choices) - choices, choices)
        copies = copies[parent]
        copies[:, column] = number
        room, slots = room[parent] - number * lengths[column], slots[parent] - number
    return copies


class ListedPricer:
    """Best strategies for given prices, from a list of all; as `linear_program.TablePricer`."""

    def __init__(self, lengths: IntArray, max_length: int, copies: IntArray, work: Work) -> None:
        self.work = work
        self.lengths = lengths
        self.max_length = max_length
        self._copies = copies
        self._worth = np.zeros(len(copies))

    def price(self, prices: FloatArray) -> FloatArray:
        """Worth of the best pack that holds each length: float64 [rows], as `prices`."""
        self.work.spend(2 * self._copies.size)
        self._worth = self._copies @ prices
        worth: FloatArray = np.max(np.where(self._copies > 0, self._worth[:, None], 0.0), axis=0)
        return worth

    def strategies(self, rows: IntArray, prices: FloatArray, least: float) -> list[Strategy]:
        """Those that hold these rows and were best in the last `price`, if they are worth more than `least` at `prices`."""
        self.work.spend(2 * self._copies.size)
        best = np.argmax(np.where(self._copies[:, rows] > 0, self._worth[:, None], -1.0), axis=0)
        chosen = self._copies[np.unique(best)]
        return [tuple(np.repeat(self.lengths, row).tolist()) for row in chosen[chosen @ prices > least]]
