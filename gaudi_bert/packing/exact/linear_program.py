"""The parts of one linear program together: the lengths that occur, the known strategies, the pricing, and
the relaxation so far.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.packing.exact.column_generation import Pricer, Relaxation, generate_columns
from gaudi_bert.packing.exact.restricted_master import Master
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.mixture import Strategy
from gaudi_bert.packing.work import Work

__all__ = ["LinearProgram"]


class LinearProgram:
    """A linear program for a histogram with at least one sequence.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences in a pack.
        work: what its solution may do; None for no limit.
    """

    def __init__(self, counts: IntArray, depth: int, work: Work | None = None) -> None:
        self.work = Work() if work is None else work
        self.counts = counts
        self.max_length = len(counts)
        self.depth = depth
        self.lengths = np.flatnonzero(counts) + 1
        self.deepest = self.max_length // int(self.lengths[0])
        self.demand = counts[self.lengths - 1]
        self.master = Master(self.lengths, self.demand.astype(np.float64), self.work)
        self.pricer = Pricer(self.lengths, self.max_length, depth, self.work)
        self.relaxation: Relaxation | None = None
        self._row_below = np.searchsorted(self.lengths, np.arange(self.max_length + 1), side="right") - 1
        self.add((length,) for length in self.lengths.tolist())

    @property
    def prices(self) -> FloatArray:
        """The best prices so far: float64 [rows], no pack is worth more than 1. Before any relaxation, those of
        the token bound.
        """
        return self.lengths / self.max_length if self.relaxation is None else self.relaxation.prices

    @classmethod
    def limited(cls, counts: IntArray, depth: int, work: Work | None = None) -> LinearProgram:
        """With the strategies of LPFHP at this depth, which cover everything."""
        linear_program = cls(counts, depth, work)
        linear_program.add(pack_longest_first(counts, depth))
        return linear_program

    @classmethod
    def unlimited(cls, counts: IntArray, work: Work | None = None) -> LinearProgram:
        """As `limited`, without a limit on depth."""
        return cls.limited(counts, len(counts), work)

    def limit_work(self, work: Work) -> None:
        """What all further solutions may do."""
        self.work = self.master.work = self.pricer.work = work

    def add(self, strategies: Iterable[Strategy]) -> None:
        """Add strategies; lengths that do not occur shrink to the next one that does."""
        shrunk = (tuple(int(self._row_below[length]) for length in strategy) for strategy in strategies)
        kept = (tuple(int(self.lengths[row]) for row in rows if row >= 0) for rows in shrunk)
        self.master.add(strategy for strategy in kept if strategy)

    def generate(self, max_iterations: float = np.inf) -> Relaxation:
        """Column generation, on from the relaxation so far, until it is closed or the simplex has had its
        iterations.
        """
        self.relaxation = generate_columns(
            self.master,
            self.pricer,
            self.demand.astype(np.float64),
            self.relaxation,
            max_iterations=max_iterations,
        )
        return self.relaxation
