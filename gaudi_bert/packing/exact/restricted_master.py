"""The linear program of packing, over the strategies that are known so far, kept warm in HiGHS.

    minimise  sum of x_p    subject to    sum over p of (copies of length i in p) x_p + e_i - e_(i-1) >=
    demand_i ,   x, e >= 0

with one row for each length that occurs. An exchange e_i lets a slot of the next longer length hold a sequence
of length i, so the dual prices never fall with length, and far fewer strategies are needed than with equality
(valid dual inequalities, Valerio de Carvalho 2005). The program of Gilmore and Gomory (1961);
`column_generation` supplies the strategies. `iterations` counts the simplex iterations: unlike seconds, they
are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable

import highspy
import numpy as np

from gaudi_bert.common.arrays import FloatArray, Int32Array, IntArray
from gaudi_bert.common.errors import FailedError
from gaudi_bert.packing.mixture import Strategy
from gaudi_bert.packing.work import Work

__all__ = ["Master"]

OPERATIONS_PER_ITERATION = 20
"""Of the simplex, for each row and column."""

OPERATIONS_PER_SOLVE = 50
"""To start the simplex, for each row and column."""

MOST_ITERATIONS = 2**31 - 1
LARGEST_DEMAND = 1e7
"""The solver gets demands of this at most, so that its absolute tolerances make sense for any number of sequences."""


class Master:
    """The restricted master program.

    Args:
        lengths: int64 [rows], the lengths that occur, ascending.
        demand: float64 [rows], sequences of each.
        work: what the simplex may do.
    """

    def __init__(self, lengths: IntArray, demand: FloatArray, work: Work) -> None:
        self.lengths = lengths
        self.work = work
        self.strategies: list[Strategy] = []
        self.iterations = 0
        self._known: set[Strategy] = set()
        self._row_of_length = np.full(int(lengths[-1]) + 1, -1, dtype=np.int64)
        self._row_of_length[lengths] = np.arange(len(lengths))
        self._exchanges = len(lengths) - 1
        self._solver = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("presolve", "off")):
            self._solver.setOptionValue(option, value)
        rows = len(lengths)
        none = np.zeros(rows, dtype=np.int32)
        self._solver.addRows(rows, np.zeros(rows), np.full(rows, highspy.kHighsInf), 0, none, none[:0], np.zeros(0))
        self.set_demand(demand)
        below = np.arange(self._exchanges, dtype=np.int32)
        self._add_columns(
            np.zeros(self._exchanges),
            2 * below,
            np.column_stack((below, below + 1)).ravel(),
            np.tile((1.0, -1.0), self._exchanges),
        )

    def add(self, strategies: Iterable[Strategy]) -> int:
        """Add the strategies that are new (sorted tuples of lengths that occur); returns how many were."""
        starts: list[int] = []
        rows: list[int] = []
        copies: list[float] = []
        for strategy in strategies:
            if strategy in self._known:
                continue
            self._known.add(strategy)
            self.strategies.append(strategy)
            starts.append(len(rows))
            before = 0
            for length in strategy:
                if length == before:
                    copies[-1] += 1.0
                else:
                    rows.append(int(self._row_of_length[length]))
                    copies.append(1.0)
                before = length
        self._add_columns(
            np.ones(len(starts)), np.array(starts, dtype=np.int64), np.array(rows, dtype=np.int64), np.array(copies)
        )
        return len(starts)

    def _add_columns(
        self, costs: FloatArray, starts: IntArray | Int32Array, rows: IntArray | Int32Array, values: FloatArray
    ) -> None:
        number = len(costs)
        if number:
            self._solver.addCols(
                number,
                costs,
                np.zeros(number),
                np.full(number, highspy.kHighsInf),
                len(rows),
                starts.astype(np.int32),
                rows.astype(np.int32),
                values,
            )

    def set_demand(self, demand: FloatArray) -> None:
        """Change what has to be covered (float64 [rows]; a negative demand is a surplus that shorter lengths
        may use).
        """
        rows = len(demand)
        self._unit = max(1.0, float(np.max(np.abs(demand))) / LARGEST_DEMAND)
        unlimited = np.full(rows, highspy.kHighsInf)
        self._solver.changeRowsBounds(rows, np.arange(rows, dtype=np.int32), demand / self._unit, unlimited)

    def solve(self, *, dual: bool = False) -> float:
        """Solve from the last basis; returns the objective, infinite where the work ended before there was any.

        Args:
            dual: use the dual simplex (after a change of demand) instead of the primal one (after new strategies).

        Raises:
            FailedError: HiGHS gave up.
        """
        size = len(self.lengths) + self._exchanges + len(self.strategies)
        affordable = (self.work.left / size - OPERATIONS_PER_SOLVE) / OPERATIONS_PER_ITERATION
        self._solver.setOptionValue("simplex_strategy", 1 if dual else 4)
        self._solver.setOptionValue("simplex_iteration_limit", int(min(max(affordable, 0), MOST_ITERATIONS)))
        self._solver.run()
        status, information = self._solver.getModelStatus(), self._solver.getInfo()
        iterations = max(information.simplex_iteration_count, 0)
        self.iterations += iterations
        self.work.spend(size * (OPERATIONS_PER_ITERATION * iterations + OPERATIONS_PER_SOLVE))
        if status == highspy.HighsModelStatus.kIterationLimit:
            self.work.spend(max(self.work.left, 0.0))
            if information.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
                return float("inf")
        elif status != highspy.HighsModelStatus.kOptimal:
            raise FailedError(f"the LP solver stopped with status {status} on {len(self.lengths)} lengths")
        return float(information.objective_function_value) * self._unit

    def prices(self) -> FloatArray:
        """Dual prices per row, made non-negative and non-decreasing: float64 [rows]."""
        duals = np.array(self._solver.getSolution().row_dual)
        return np.maximum.accumulate(np.maximum(duals, 0.0))

    def usage(self) -> FloatArray:
        """How often each of `strategies` is used: float64 [strategies]."""
        return np.array(self._solver.getSolution().col_value)[self._exchanges :] * self._unit
