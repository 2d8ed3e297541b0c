"""The linear program of packing: the minimum number of packs, with fractions allowed, and the prices that prove it.

    minimise  sum of x_p    subject to    sum over p of (copies of length i in p) x_p + e_i - e_(i-1) >= demand_i ,
    x, e >= 0

There is one row for each length that occurs, and one column x_p for each known strategy p. An exchange e_i allows a slot of
the next longer length to hold a sequence of length i. Because of exchanges, dual prices never fall with length, and far
fewer strategies are needed than with equality (valid dual inequalities, Valerio de Carvalho 2005).

The program is solved by stabilised column generation (Gilmore and Gomory 1961): solve it over the known strategies with
HiGHS from the last basis, compute prices, add the best strategy of every length, repeat. The prices that are used are
between those of the program and the best proven ones (Wentges 1997). The first proven prices are length / L, the prices of
the token bound. Each pricing gives a new lower bound, (worth of all sequences) / (worth of the best pack), so the loop stops
as soon as no integer is between bound and objective.
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
from gaudi_bert.packing.heuristics import OpenPacks, pack_longest_first
from gaudi_bert.packing.knapsack import LONGEST_TABLE, BoundedKnapsackPricer, EnumeratedPricer, TablePricer, list_strategies
from gaudi_bert.packing.long_packs import MANY_LENGTHS
from gaudi_bert.packing.strategies import OperationBudget, Strategy

# The operation budget counts this many operations per simplex iteration, for each row and column of the linear program.
OPERATIONS_PER_ITERATION = 10

# Column generation adds strategies to the linear program later. A simplex iteration takes this many more operations for each
# of these columns, because the basis is then no longer sparse.
OPERATIONS_PER_ADDED_COLUMN = 25

# Starting the simplex method takes this many operations for each row and column of the linear program.
OPERATIONS_PER_SOLVE = 50

MOST_ITERATIONS = 2**31 - 1
# The tolerances of the solver are absolute. Therefore, if a length has more sequences than this, all right-hand sides of the
# linear program are scaled down.
LARGEST_DEMAND = 1e7


def _make_silent_solver(highspy: Any) -> Any:
    """Create a HiGHS solver that prints nothing.

    HiGHS 1.16 prints its version when its constructor calls `enableCallbacks`, before options can be set.
    """

    class SilentHighs(highspy.Highs):  # type: ignore[misc]
        """A HiGHS solver that turns off its output before the constructor can print anything."""

        def enableCallbacks(self) -> None:  # noqa: N802
            """Turn off the solver's output, and then enable its callbacks. The constructor of HiGHS calls this method, and
            HiGHS 1.16 would print its version here if the output were still on.
            """
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver = SilentHighs()
    solver.setOptionValue("output_flag", False)  # older versions do not call enableCallbacks
    return solver


class _MasterProgram:
    """The linear program that minimizes the number of packs. Its columns are the strategies found so far, each a tuple of
    lengths that can share a pack.

    After each change, HiGHS solves it again, starting from the last solution.

    Args:
        lengths: int64 [rows], the lengths that occur, ascending.
        demand: float64 [rows], the number of sequences of each length.
        budget: the operation budget.

    Attributes:
        strategies: the known strategies.
        iterations: simplex iterations so far, which are the same on every machine.
    """

    def __init__(self, lengths: IntArray, demand: FloatArray, budget: OperationBudget) -> None:
        self.lengths = lengths
        self.budget = budget
        self.strategies: list[Strategy] = []
        self.iterations = 0
        self._columns_at_first: int | None = None
        self._known: set[Strategy] = set()
        self._row_of_length = np.full(int(lengths[-1]) + 1, -1, dtype=np.int64)
        self._row_of_length[lengths] = np.arange(len(lengths))
        self._exchanges = len(lengths) - 1
        import highspy  # imported late: the training image lacks it and packs by LPFHP only

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

    def add_strategies(self, strategies: Iterable[Strategy]) -> int:
        """Add strategies as columns of the linear program, and return how many of them are new. A strategy is the sorted
        tuple of the lengths in one pack, which must occur in the histogram.
        """
        new = [strategy for strategy in dict.fromkeys(strategies) if strategy not in self._known]
        self._known.update(new)
        self.strategies += new
        columns = [Counter(strategy) for strategy in new]  # the number of copies of each length
        rows = self._row_of_length[[length for column in columns for length in column]]
        copies = np.array([float(number) for column in columns for number in column.values()])
        self._add_columns(np.ones(len(new)), np.cumsum([0, *map(len, columns)])[:-1], rows, copies)
        return len(new)

    def _add_columns(
        self, costs: FloatArray, starts: IntArray | Int32Array, rows: IntArray | Int32Array, values: FloatArray
    ) -> None:
        """Add non-negative variables to the linear program, given by their costs and their columns in sparse format."""
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
        """Set how many sequences of each length the linear program must pack. If a number is negative, its absolute value is
        the number of free slots of this length, which shorter sequences may use.

        `demand` is float64 [rows], with a row for each length that occurs.
        """
        rows = len(demand)
        self._unit = max(1.0, float(np.max(np.abs(demand))) / LARGEST_DEMAND)
        self._solver.changeRowsBounds(
            rows, np.arange(rows, dtype=np.int32), demand / self._unit, np.full(rows, self._highs.kHighsInf)
        )

    def minimize_packs(self, *, use_dual_simplex: bool = False) -> float:
        """Solve the linear program, starting from the last solution, and return the minimum number of packs, which may be a
        fraction.

        Args:
            use_dual_simplex: use the dual simplex, which suits a changed demand. The primal simplex suits new strategies.

        Returns:
            The number of packs, or infinity if the budget ended before there was a feasible solution.

        Raises:
            FailedError: HiGHS stopped for another reason than its iteration limit.
        """
        size = len(self.lengths) + self._exchanges + len(self.strategies)
        if self._columns_at_first is None:
            self._columns_at_first = len(self.strategies)
        per_iteration = OPERATIONS_PER_ITERATION * size
        per_iteration += OPERATIONS_PER_ADDED_COLUMN * (len(self.strategies) - self._columns_at_first)
        affordable = (self.budget.remaining - OPERATIONS_PER_SOLVE * size) / per_iteration
        self._solver.setOptionValue("simplex_strategy", 1 if use_dual_simplex else 4)
        self._solver.setOptionValue("simplex_iteration_limit", int(min(max(affordable, 0), MOST_ITERATIONS)))
        self._solver.run()
        status, information = self._solver.getModelStatus(), self._solver.getInfo()
        iterations = max(information.simplex_iteration_count, 0)
        self.iterations += iterations
        self.budget.spend(per_iteration * iterations + OPERATIONS_PER_SOLVE * size)
        if status == self._highs.HighsModelStatus.kIterationLimit:
            self.budget.spend(max(self.budget.remaining, 0.0))
            if information.primal_solution_status != self._highs.SolutionStatus.kSolutionStatusFeasible:
                return float("inf")
        elif status != self._highs.HighsModelStatus.kOptimal:
            raise FailedError(f"the LP solver stopped with status {status} on {len(self.lengths)} lengths; this is a bug")
        return float(information.objective_function_value) * self._unit

    def get_dual_prices(self) -> FloatArray:
        """Return the dual price of each length in the solved linear program, float64 [lengths]. Prices are non-negative and
        do not decrease with length.
        """
        duals = np.array(self._solver.getSolution().row_dual)
        return np.maximum.accumulate(np.maximum(duals, 0.0))

    def get_strategy_usage(self) -> FloatArray:
        """Return how many packs use each strategy in the last solution of the linear program, float64 [strategies]. These
        numbers may be fractions. A strategy is the tuple of lengths in one pack.
        """
        return np.maximum(np.array(self._solver.getSolution().col_value)[self._exchanges :], 0.0) * self._unit


# --- pricing and column generation

# Stabilized column generation searches for new columns at trial prices. The trial prices are a weighted mean of the best
# proven prices and the current dual prices of the program. These weights of the proven prices are tried in order until a
# column is found.
CENTRE_SHARES = (0.7, 0.45, 0.2, 0.0)

# Column generation searches for combinations of lengths, called strategies, that reduce the number of packs. A strategy is
# added only if the dual prices of its lengths add up to more than 1, the cost of a pack, plus this tolerance.
REDUCED_COST = 1e-9

# Without a depth limit, the linear program of very long packs uses unrounded lengths if (distinct lengths) * (pack length)
# is at most this number. Finding new columns then takes half a second.
MOST_CLOSED = 2**29

# Any of the classes that find new columns for the linear program.
Pricer = TablePricer | BoundedKnapsackPricer | EnumeratedPricer


def is_linear_program_too_large(length_counts: IntArray, depth: int) -> bool:
    """Return whether solving the linear program, which has a row for every distinct length, would take too long. If so, the
    lengths must first be rounded to a coarse grid of a few hundred values.
    """
    max_length, lengths = len(length_counts), np.flatnonzero(length_counts) + 1
    if max_length <= MAX_EXACT_LENGTH or len(lengths) > MANY_LENGTHS:
        return len(lengths) > MANY_LENGTHS
    closes = len(lengths) * max_length <= MOST_CLOSED
    return not (closes and depth >= max_length // int(lengths[0])) and list_strategies(lengths, max_length, depth) is None


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A solution of the linear program that minimizes the number of packs, where fractions of packs are allowed. It includes
    the lower bound that the dual prices prove.
    """

    objective: float  # packs over the known strategies, with fractions
    bound: float  # proven lower bound with fractions, in floating point; `prove_bound_by_linear_program` makes it exact
    prices: FloatArray  # float64 [rows], the prices that prove the bound: no pack is worth more than 1

    @property
    def rounding_tolerance(self) -> float:
        """The rounding error that is tolerated in the objective of the linear program, in packs."""
        return max(1e-6, 1e-13 * self.objective)

    @property
    def is_gap_closed(self) -> bool:
        """Whether the lower bound and the objective of the linear program round up to the same number of packs, apart from
        rounding errors.
        """
        small = self.rounding_tolerance
        return bool(self.objective - self.bound < small or np.ceil(self.bound - small) >= np.ceil(self.objective - small))


def run_column_generation(
    master: _MasterProgram,
    pricer: Pricer,
    demand: FloatArray,
    initial_relaxation: Relaxation | None = None,
    *,
    target_objective: float = -np.inf,
    max_iterations: float = np.inf,
) -> Relaxation:
    """Minimize the number of packs by column generation, and return the solution. Strategies, which are tuples of lengths in
    one pack, are added as columns until they can no longer save a pack.

    Args:
        master: the program. Its strategies must already cover all sequences.
        pricer: finds new strategies.
        demand: float64 [rows], the current demand of `master`.
        initial_relaxation: an earlier relaxation, whose prices are the first proven ones; None for the prices of the token
            bound.
        target_objective: stop once the objective is at most this, or is proven to be more.
        max_iterations: the maximum number of simplex iterations.
    """
    last = master.iterations + max_iterations
    centre = pricer.lengths / pricer.max_length if initial_relaxation is None else initial_relaxation.prices
    centre = centre / pricer.compute_best_pack_prices(centre).max()
    bound = float(centre @ demand)
    while True:
        objective = master.minimize_packs()
        if (
            objective <= target_objective
            or bound > target_objective > 0.0
            or Relaxation(objective, bound, centre).is_gap_closed
            or master.iterations > last
            or master.budget.is_exhausted
        ):
            break
        prices = master.get_dual_prices()
        new: Iterable[Strategy] = ()
        for share in CENTRE_SHARES:
            trial = share * centre + (1.0 - share) * prices
            worth = pricer.compute_best_pack_prices(trial)
            best = float(worth.max())
            new = pricer.find_improving_strategies(np.flatnonzero((worth > 0) & (demand > 0)), prices, 1.0 + REDUCED_COST)
            if float(trial @ demand) / best > bound:
                bound, centre = float(trial @ demand) / best, trial / best
            if new or master.budget.is_exhausted:
                break
        if not master.add_strategies(new):
            break
    return Relaxation(objective, bound, centre)


class LinearProgram:
    """The linear program for packing a histogram into as few packs as possible. It keeps its last solution, and the pricer
    that finds new columns for column generation.

    Args:
        counts: int64 [L], the number of sequences of length 1 .. L; at least one sequence.
        depth: the maximum number of sequences per pack.
        budget: the operation budget, or None for no limit.
    """

    def __init__(self, length_counts: IntArray, depth: int, budget: OperationBudget | None = None) -> None:
        self.budget = OperationBudget() if budget is None else budget
        self.counts = length_counts
        self.max_length = len(length_counts)
        self.depth = depth
        self.lengths = np.flatnonzero(length_counts) + 1
        self.deepest = self.max_length // int(self.lengths[0])
        self.demand = length_counts[self.lengths - 1]
        self.master = _MasterProgram(self.lengths, self.demand.astype(np.float64), self.budget)
        copies = list_strategies(self.lengths, self.max_length, depth) if self.max_length > LONGEST_TABLE else None
        self.pricer: Pricer = (
            TablePricer(self.lengths, self.max_length, depth, self.budget)
            if copies is None
            else EnumeratedPricer(self.lengths, self.max_length, copies, self.budget)
        )
        self.relaxation: Relaxation | None = None
        self._index_rounded_down = np.searchsorted(self.lengths, np.arange(self.max_length + 1), side="right") - 1
        self.add_strategies((length,) for length in self.lengths.tolist())

    @property
    def dual_feasible_prices(self) -> FloatArray:
        """The dual prices of the lengths that prove the best lower bound so far, float64 [lengths]. They are dual feasible,
        which means that no pack can contain sequences with a total price above 1.

        Before the program is solved, the price of a length is length / L.
        """
        return self.lengths / self.max_length if self.relaxation is None else self.relaxation.prices

    @property
    def min_packs(self) -> int:
        """The objective of the last solution, rounded up to whole packs, or 0 if there is no solution yet. With only the
        combinations of lengths found so far, no packing has fewer packs.
        """
        if self.relaxation is None or not np.isfinite(self.relaxation.objective):
            return 0
        return int(np.ceil(self.relaxation.objective - self.relaxation.rounding_tolerance))

    @classmethod
    def from_heuristic(cls, length_counts: IntArray, depth: int, budget: OperationBudget | None = None) -> LinearProgram:
        """Create a linear program that starts with the columns of a heuristic packing. The LPFHP heuristic packs the
        histogram with at most `depth` sequences per pack.
        """
        linear_program = cls(length_counts, depth, budget)
        linear_program.add_strategies(pack_longest_first(length_counts, depth, OpenPacks(depth, np.inf)))
        return linear_program

    @classmethod
    def with_bounded_knapsack_pricing(cls, unbounded_program: LinearProgram, budget: OperationBudget) -> LinearProgram:
        """Create a linear program for the same sequences whose packs contain each length at most as often as it occurs in
        the histogram. New columns for it are therefore found by solving bounded knapsack problems.
        """
        linear_program = cls(unbounded_program.counts, unbounded_program.depth, budget)
        linear_program.pricer = BoundedKnapsackPricer(
            unbounded_program.lengths,
            unbounded_program.max_length,
            unbounded_program.depth,
            unbounded_program.demand,
            budget,
        )
        available = dict(zip(unbounded_program.lengths.tolist(), unbounded_program.demand.tolist(), strict=True))
        linear_program.add_strategies(
            strategy
            for strategy in unbounded_program.master.strategies
            if all(copies <= available[length] for length, copies in Counter(strategy).items())
        )
        return linear_program

    def set_remaining_demand(self, uncovered: IntArray, unplaced: IntArray) -> None:
        """Change the demand of the linear program, which is the number of sequences of each length to pack, so that only the
        remaining sequences count. The others are in packs that the rounding heuristic has already fixed.

        Args:
            uncovered: int64 [rows]; negative entries are free slots that shorter sequences may use.
            unplaced: int64 [rows], the sequences that have no slot.
        """
        self.master.set_demand(uncovered.astype(np.float64))
        if isinstance(self.pricer, BoundedKnapsackPricer):
            self.pricer.counts = unplaced

    def replace_budget(self, budget: OperationBudget) -> None:
        """Use another operation budget from now on."""
        self.budget = self.master.budget = self.pricer.budget = budget

    def add_strategies(self, strategies: Iterable[Strategy]) -> None:
        """Add strategies as columns of the linear program. A strategy is the tuple of lengths in one pack. Replace a length
        that does not occur in the histogram with the next shorter length that does.
        """
        rows_of = (tuple(int(self._index_rounded_down[length]) for length in strategy) for strategy in strategies)
        shrunk = (tuple(int(self.lengths[row]) for row in rows if row >= 0) for rows in rows_of)
        self.master.add_strategies(strategy for strategy in shrunk if strategy)

    def solve(self, max_iterations: float = np.inf) -> Relaxation:
        """Solve the linear program by column generation, and return the solution. Stop early after `max_iterations` simplex
        iterations.
        """
        self.relaxation = run_column_generation(
            self.master, self.pricer, self.demand.astype(np.float64), self.relaxation, max_iterations=max_iterations
        )
        return self.relaxation
