"""The linear program of packing: the least number of packs, fractions allowed, and the prices that prove it.

    minimise  sum of x_p    subject to    sum over p of (copies of length i in p) x_p + e_i - e_(i-1) >=
    demand_i ,   x, e >= 0

with one row for each length that occurs, over the strategies that are known so far. An exchange e_i lets a slot of the next
longer length hold a sequence of length i, so the dual prices never fall with length, and far fewer strategies are needed
than with equality (valid dual inequalities, Valerio de Carvalho 2005).

Solved by stabilised column generation (Gilmore and Gomory 1961): solve the program over the known strategies (HiGHS,
started warm), price, add for every length its best strategy, repeat. The prices are taken between the program's and the
best proven ones (Wentges 1997), which start at length / L, the prices of the token bound; each pricing gives a new lower
bound (worth of the sequences) / (worth of the best pack), so the loop may stop as soon as no integer is between bound
and objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import FloatArray, Int32Array, IntArray
from gaudi_bert.common.errors import FailedError
from gaudi_bert.packing.certificate import MAX_EXACT_LENGTH
from gaudi_bert.packing.exact.pricers import BoundedPricer, TablePricer
from gaudi_bert.packing.heuristics import OpenPacks, pack_longest_first
from gaudi_bert.packing.long_packs import MANY_LENGTHS
from gaudi_bert.packing.pricing import LONGEST_TABLE, EnumeratedPricer, list_strategies
from gaudi_bert.packing.strategies import Strategy, WorkBudget

OPERATIONS_PER_ITERATION = 10
"""Of the simplex, for each row and column."""

OPERATIONS_PER_ADDED_COLUMN = 25
"""Of an iteration, for each strategy that was added after the first solution: its basis is not sparse."""

OPERATIONS_PER_SOLVE = 50
"""To start the simplex, for each row and column."""

MOST_ITERATIONS = 2**31 - 1
LARGEST_DEMAND = 1e7
"""The solver gets demands of this at most, so that its absolute tolerances make sense for any number of sequences."""


def _make_silent_solver(highspy: Any) -> Any:
    """A solver that prints nothing. HiGHS 1.16 prints its version where its constructor calls `enableCallbacks`."""

    class Silent(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver = Silent()
    solver.setOptionValue("output_flag", False)  # older versions make no such call
    return solver


class _MasterProgram:
    """The program over the strategies that are known so far, warm-started in HiGHS.

    `lengths`, int64 [rows], are those that occur, ascending, and `demand`, float64 [rows], the sequences of each.
    `iterations` counts the simplex iterations: unlike seconds, they are the same on every machine.
    """

    def __init__(self, lengths: IntArray, demand: FloatArray, work: WorkBudget) -> None:
        self.lengths = lengths
        self.work = work
        self.strategies: list[Strategy] = []
        self.iterations = 0
        self._columns_at_first: int | None = None
        self._known: set[Strategy] = set()
        self._row_of_length = np.full(int(lengths[-1]) + 1, -1, dtype=np.int64)
        self._row_of_length[lengths] = np.arange(len(lengths))
        self._exchanges = len(lengths) - 1
        import highspy  # not in the training image, which packs by LPFHP alone

        self._highs = highspy
        self._solver = _make_silent_solver(highspy)
        for option, value in (("threads", 1), ("presolve", "off")):
            self._solver.setOptionValue(option, value)
        rows = len(lengths)
        none = np.zeros(rows, dtype=np.int32)
        self._solver.addRows(rows, np.zeros(rows), np.full(rows, self._highs.kHighsInf), 0, none, none[:0], np.zeros(0))
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
                np.full(number, self._highs.kHighsInf),
                len(rows),
                starts.astype(np.int32),
                rows.astype(np.int32),
                values,
            )

    def set_demand(self, demand: FloatArray) -> None:
        """Change what has to be covered, float64 [rows]; a negative demand is a surplus that shorter lengths may use."""
        rows = len(demand)
        self._unit = max(1.0, float(np.max(np.abs(demand))) / LARGEST_DEMAND)
        unlimited = np.full(rows, self._highs.kHighsInf)
        self._solver.changeRowsBounds(rows, np.arange(rows, dtype=np.int32), demand / self._unit, unlimited)

    def solve(self, *, dual: bool = False) -> float:
        """Solve from the last basis, by the `dual` simplex after a change of demand, by the primal one after new strategies.

        Returns the objective, infinite where the work ended before there was any.
        """
        size = len(self.lengths) + self._exchanges + len(self.strategies)
        if self._columns_at_first is None:
            self._columns_at_first = len(self.strategies)
        per_iteration = OPERATIONS_PER_ITERATION * size
        per_iteration += OPERATIONS_PER_ADDED_COLUMN * (len(self.strategies) - self._columns_at_first)
        affordable = (self.work.remaining - OPERATIONS_PER_SOLVE * size) / per_iteration
        self._solver.setOptionValue("simplex_strategy", 1 if dual else 4)
        self._solver.setOptionValue("simplex_iteration_limit", int(min(max(affordable, 0), MOST_ITERATIONS)))
        self._solver.run()
        status, information = self._solver.getModelStatus(), self._solver.getInfo()
        iterations = max(information.simplex_iteration_count, 0)
        self.iterations += iterations
        self.work.spend(per_iteration * iterations + OPERATIONS_PER_SOLVE * size)
        if status == self._highs.HighsModelStatus.kIterationLimit:
            self.work.spend(max(self.work.remaining, 0.0))
            if information.primal_solution_status != self._highs.SolutionStatus.kSolutionStatusFeasible:
                return float("inf")
        elif status != self._highs.HighsModelStatus.kOptimal:
            raise FailedError(f"the LP solver stopped with status {status} on {len(self.lengths)} lengths")
        return float(information.objective_function_value) * self._unit

    def prices(self) -> FloatArray:
        """Dual prices per row, non-negative and non-decreasing: float64 [rows]."""
        duals = np.array(self._solver.getSolution().row_dual)
        return np.maximum.accumulate(np.maximum(duals, 0.0))

    def usage(self) -> FloatArray:
        """Number of times that each of `strategies` is used: float64 [strategies]."""
        return np.maximum(np.array(self._solver.getSolution().col_value)[self._exchanges :], 0.0) * self._unit


# --- pricing and column generation

CENTRE_SHARES = (0.7, 0.45, 0.2, 0.0)
"""Share of the best proven prices in what is priced; the next one when that cuts off nothing."""

REDUCED_COST = 1e-9

MOST_CLOSED = 2**29
"""Lengths, times tokens of a pack, that are priced exactly where depth has no limit: half a second."""

Pricer = TablePricer | BoundedPricer | EnumeratedPricer


def needs_coarse_grid(counts: IntArray, depth: int) -> bool:
    """Whether pricing all lengths of a histogram takes too long, so that its program is solved on a coarse grid."""
    max_length, lengths = len(counts), np.flatnonzero(counts) + 1
    if max_length <= MAX_EXACT_LENGTH or len(lengths) > MANY_LENGTHS:
        return len(lengths) > MANY_LENGTHS
    closes = len(lengths) * max_length <= MOST_CLOSED
    return not (closes and depth >= max_length // int(lengths[0])) and list_strategies(lengths, max_length, depth) is None


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The linear program's result."""

    objective: float  # packs over the known strategies, with fractions
    bound: float  # proven least number of packs, with fractions (in floating point; `certify_relaxation` makes it exact)
    prices: FloatArray  # float64 [rows], the prices that prove it: no pack is worth more than 1

    @property
    def rounding(self) -> float:
        """Largest rounding error of the objective."""
        return max(1e-6, 1e-13 * self.objective)

    @property
    def is_closed(self) -> bool:
        """Whether no integer is between bound and objective, allowing for rounding errors."""
        small = self.rounding
        return bool(self.objective - self.bound < small or np.ceil(self.bound - small) >= np.ceil(self.objective - small))


def generate_columns(
    master: _MasterProgram,
    pricer: Pricer,
    demand: FloatArray,
    known: Relaxation | None = None,
    *,
    enough: float = -np.inf,
    max_iterations: float = np.inf,
) -> Relaxation:
    """Add strategies to `master`, whose demand is `demand`, until its objective is proven the least, to within one pack.

    Strategies that cover everything must be in it already. The first centre are the prices of `known`, or the token bound.
    It stops as soon as the objective is at most `enough` or is proven to be more, and after `max_iterations` of the simplex.
    """
    last = master.iterations + max_iterations
    centre = pricer.lengths / pricer.max_length if known is None else known.prices
    centre = centre / pricer.best_pack_worths(centre).max()
    bound = float(centre @ demand)
    while True:
        objective = master.solve()
        if (
            objective <= enough
            or bound > enough > 0.0
            or Relaxation(objective, bound, centre).is_closed
            or master.iterations > last
            or master.work.exhausted
        ):
            break
        prices = master.prices()
        new: Iterable[Strategy] = ()
        for share in CENTRE_SHARES:
            trial = share * centre + (1.0 - share) * prices
            worth = pricer.best_pack_worths(trial)
            best = float(worth.max())
            new = pricer.improving_strategies(np.flatnonzero((worth > 0) & (demand > 0)), prices, 1.0 + REDUCED_COST)
            if float(trial @ demand) / best > bound:
                bound, centre = float(trial @ demand) / best, trial / best
            if new:
                break
            if master.work.exhausted:
                break
        if not master.add(new):
            break
    return Relaxation(objective, bound, centre)


class LinearProgram:
    """The program of a histogram, int64 [L], with at least one sequence: strategies, pricing, and the relaxation so far."""

    def __init__(self, counts: IntArray, depth: int, work: WorkBudget | None = None) -> None:
        self.work = WorkBudget() if work is None else work
        self.counts = counts
        self.max_length = len(counts)
        self.depth = depth
        self.lengths = np.flatnonzero(counts) + 1
        self.deepest = self.max_length // int(self.lengths[0])
        self.demand = counts[self.lengths - 1]
        self.master = _MasterProgram(self.lengths, self.demand.astype(np.float64), self.work)
        copies = list_strategies(self.lengths, self.max_length, depth) if self.max_length > LONGEST_TABLE else None
        self.pricer: Pricer = (
            TablePricer(self.lengths, self.max_length, depth, self.work)
            if copies is None
            else EnumeratedPricer(self.lengths, self.max_length, copies, self.work)
        )
        self.relaxation: Relaxation | None = None
        self._row_below = np.searchsorted(self.lengths, np.arange(self.max_length + 1), side="right") - 1
        self.add((length,) for length in self.lengths.tolist())

    @property
    def prices(self) -> FloatArray:
        """The best prices so far, float64 [rows], by which no pack is worth more than 1; at first those of the tokens."""
        return self.lengths / self.max_length if self.relaxation is None else self.relaxation.prices

    @property
    def min_packs(self) -> int:
        """Integer number of packs that the program needs, with the strategies that it knows; 0 before it is solved."""
        if self.relaxation is None or not np.isfinite(self.relaxation.objective):
            return 0
        return int(np.ceil(self.relaxation.objective - self.relaxation.rounding))

    @classmethod
    def from_heuristic(cls, counts: IntArray, depth: int, work: WorkBudget | None = None) -> LinearProgram:
        """With the strategies of LPFHP at this depth, which cover everything."""
        linear_program = cls(counts, depth, work)
        linear_program.add(pack_longest_first(counts, depth, OpenPacks(depth, np.inf)))
        return linear_program

    @classmethod
    def with_bounded_copies(cls, whole: LinearProgram, work: WorkBudget) -> LinearProgram:
        """The program of the same sequences over those strategies alone that hold no more of a length than there are."""
        linear_program = cls(whole.counts, whole.depth, work)
        linear_program.pricer = BoundedPricer(whole.lengths, whole.max_length, whole.depth, whole.demand, work)
        available = dict(zip(whole.lengths.tolist(), whole.demand.tolist(), strict=True))
        linear_program.add(
            strategy
            for strategy in whole.master.strategies
            if all(copies <= available[length] for length, copies in Counter(strategy).items())
        )
        return linear_program

    def set_remaining_demand(self, uncovered: IntArray, waiting: IntArray) -> None:
        """Change what the master has to cover, as its `set_demand`; `waiting` are the sequences that have no slot."""
        self.master.set_demand(uncovered.astype(np.float64))
        if isinstance(self.pricer, BoundedPricer):
            self.pricer.counts = waiting

    def limit_work(self, work: WorkBudget) -> None:
        """Limit the work of all further solutions."""
        self.work = self.master.work = self.pricer.work = work

    def add(self, strategies: Iterable[Strategy]) -> None:
        """Add strategies; lengths that do not occur shrink to the next one that does."""
        rows_of = (tuple(int(self._row_below[length]) for length in strategy) for strategy in strategies)
        shrunk = (tuple(int(self.lengths[row]) for row in rows if row >= 0) for rows in rows_of)
        self.master.add(strategy for strategy in shrunk if strategy)

    def generate(self, max_iterations: float = np.inf) -> Relaxation:
        """Column generation, on from the relaxation so far, until it is closed or the simplex has had its iterations."""
        self.relaxation = generate_columns(
            self.master, self.pricer, self.demand.astype(np.float64), self.relaxation, max_iterations=max_iterations
        )
        return self.relaxation
