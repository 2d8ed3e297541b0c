"""The least number of packs, fractions allowed, and the prices that prove it: stabilised column generation.

Solve the linear program over the known strategies (`master`), price, add for every length its best strategy,
repeat (Gilmore and Gomory 1961). The prices are taken between the program's and the best proven ones (Wentges
1997), which start at length / L, the prices of the token bound; each pricing gives a new lower bound (worth of
the sequences) / (worth of the best pack), so the loop may stop as soon as no whole pack lies between bound and
objective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.exact.restricted_master import Master
from gaudi_bert.packing.mixture import Strategy
from gaudi_bert.packing.pricing import completion_values, power_chain, unwind
from gaudi_bert.packing.work import Work

__all__ = ["Pricer", "Relaxation", "generate_columns"]

CENTRE_SHARES = (0.7, 0.45, 0.2, 0.0)
"""Share of the best proven prices in what is priced; the next one when that cuts off nothing."""

REDUCED_COST = 1e-9

OPERATIONS_PER_PRODUCT = 0.2
"""Of a max-plus product, for each pair of totals."""

UNWINDING_WORK = 4e9
"""What unwinding strategies may do in one round."""


class Pricer:
    """Best strategies for given prices of the lengths that occur.

    Args:
        lengths: int64 [rows], the lengths that occur, ascending.
        max_length: tokens in a pack (L).
        depth: most sequences in a pack.
        work: what pricing may do.
    """

    def __init__(self, lengths: IntArray, max_length: int, depth: int, work: Work) -> None:
        self.work = work
        self.lengths = lengths
        self.max_length = max_length
        self.depth = depth
        deepest = max_length // int(lengths[0])
        self._most_items = min(depth, deepest)
        self.chain = power_chain(max_length if depth >= deepest else depth - 1, max_length)
        self._table = np.zeros((len(self.chain) + 1, max_length + 1))
        self._row_below = np.searchsorted(lengths, np.arange(max_length + 1), side="right") - 1

    def price(self, prices: FloatArray) -> FloatArray:
        """Worth of the best pack that holds each length, for non-decreasing `prices`: float64 [rows] both."""
        self.work.spend(OPERATIONS_PER_PRODUCT * len(self.chain) * self.max_length**2)
        by_length: FloatArray = np.where(self._row_below >= 0, prices[self._row_below], 0.0)
        completion = completion_values(self.chain, by_length, self._table)
        worth: FloatArray = prices + completion[self.max_length - self.lengths]
        return worth

    def strategies(self, rows: IntArray, prices: FloatArray) -> list[Strategy]:
        """The strategies behind the last `price`, for these rows, that are worth more than one pack at `prices`."""
        # Each split is searched for among all totals; where packs are deep the longest lengths have to do.
        row_operations = self._most_items * self.max_length
        affordable = max(1, int(min(max(self.work.left, 0.0) / 4, UNWINDING_WORK) // row_operations))
        rows = rows[-affordable:]
        self.work.spend(len(rows) * row_operations)
        items, ends, worths = _unwind_rows(self.chain, self._table, self.lengths, self._row_below, rows, prices)
        found: list[Strategy] = []
        start = 0
        for end, worth in zip(ends.tolist(), worths.tolist(), strict=True):
            if worth > 1.0 + REDUCED_COST:
                found.append(tuple(sorted(items[start:end].tolist())))
            start = end
        return found


@kernel
def _unwind_rows(
    chain: IntArray, table: FloatArray, lengths: IntArray, row_below: IntArray, rows: IntArray, prices: FloatArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """For each row its best pack: the lengths one after the other, where each pack ends, and its worth.

    Slots of lengths that do not occur shrink to the next one that does.
    """
    top = table.shape[1] - 1
    items = np.empty(4 * top + 16, dtype=np.int64)
    pack = np.empty(top + 2, dtype=np.int64)
    ends = np.empty(rows.size, dtype=np.int64)
    worths = np.zeros(rows.size)
    end = 0
    for number, row in enumerate(rows):
        pack[0] = lengths[row]
        size = unwind(chain, table, top - lengths[row], pack, 1)
        if end + size > items.size:
            longer = np.empty(2 * (end + size), dtype=np.int64)
            longer[:end] = items[:end]
            items = longer
        for item in pack[:size]:
            below = row_below[item]
            if below >= 0:
                items[end] = lengths[below]
                worths[number] += prices[below]
                end += 1
        ends[number] = end
    return items[:end], ends, worths


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The linear program's result.

    Attributes:
        objective: packs over the known strategies, with fractions.
        bound: proven least number of packs, with fractions (in floating point; `certificate` makes it exact).
        prices: float64 [rows], the prices that prove it: no pack is worth more than 1.
    """

    objective: float
    bound: float
    prices: FloatArray

    @property
    def closed(self) -> bool:
        """Whether no whole number lies between bound and objective, allowing for rounding errors."""
        small = max(1e-6, 1e-13 * self.objective)
        return bool(self.objective - self.bound < small or np.ceil(self.bound - small) >= np.ceil(self.objective - small))


def generate_columns(
    master: Master,
    pricer: Pricer,
    demand: FloatArray,
    known: Relaxation | None = None,
    *,
    enough: float = -np.inf,
    max_iterations: float = np.inf,
) -> Relaxation:
    """Add strategies to `master` until its objective is proven to be the least, to within a whole pack.

    Args:
        master: the program; strategies that cover everything must be in it already.
        pricer: of the same lengths.
        demand: float64 [rows], sequences of each length; the master's demand.
        known: an earlier relaxation whose prices are the first centre; None: the token bound.
        enough: stop as soon as the objective is no more than this, or is proven to be more.
        max_iterations: stop when the simplex has taken more iterations than this.
    """
    last = master.iterations + max_iterations
    centre = pricer.lengths / pricer.max_length if known is None else known.prices
    centre = centre / pricer.price(centre).max()
    bound = float(centre @ demand)
    while True:
        objective = master.solve()
        if (
            objective <= enough
            or bound > enough > 0.0
            or Relaxation(objective, bound, centre).closed
            or master.iterations > last
            or master.work.exhausted
        ):
            break
        prices = master.prices()
        new: Iterable[Strategy] = ()
        for share in CENTRE_SHARES:
            trial = share * centre + (1.0 - share) * prices
            worth = pricer.price(trial)
            best = float(worth.max())
            new = pricer.strategies(np.flatnonzero((worth > 0) & (demand > 0)), prices)
            if float(trial @ demand) / best > bound:
                bound, centre = float(trial @ demand) / best, trial / best
            if new:
                break
            if master.work.exhausted:
                break
        if not master.add(new):
            break
    return Relaxation(objective, bound, centre)
