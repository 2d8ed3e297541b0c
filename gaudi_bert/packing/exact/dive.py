"""From fractions of packs to whole packs: round the solution down, dive, and search the last packs.

The whole part of every usage is fixed. What remains is a few hundred sequences, for which the same program,
with the same basis, is still optimal; from there some of the largest fractions are fixed to one more pack and
the program is solved again with what is left to cover (diving, as in Sadykov et al. 2019). While fixed packs
plus the rest's objective stay within the target the strategies at hand are enough; when they do not, column
generation supplies strategies for the rest. After every step the rest is searched exhaustively, within a limit of
nodes, for packs that meet the target (`last_packs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.packing.exact.column_generation import generate_columns
from gaudi_bert.packing.exact.linear_program import LinearProgram
from gaudi_bert.packing.exact.pack_search import search_packs
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs

__all__ = ["DiveSettings", "dive"]

WHOLE = 1e-6
"""A usage this close below a whole number is taken for it."""

SMALLEST_SHARE = 0.01
"""A step that loses the target is taken back and tried again with a third of the share, down to this."""


@dataclass(frozen=True)
class DiveSettings:
    """How a dive goes.

    Attributes:
        share: part of the sum of all fractions that is rounded up in one step.
        threshold: fractions below this are only rounded up if there is no larger one.
        search_nodes: effort of the search of each rest.
        max_steps: programs that are solved at most.
    """

    share: float = 0.15
    threshold: float = 0.5
    search_nodes: int = 50_000
    max_steps: int = 1000


class _Path:
    """The packs that are fixed so far, and every state on the way."""

    def __init__(self, lengths: IntArray, counts: IntArray) -> None:
        self.lengths = lengths
        self.left = counts.copy()  # may be negative: free slots, which shorter sequences may use
        self.packs = 0
        self.fixed: list[tuple[Strategy, int]] = []
        self.states: list[tuple[int, int, IntArray]] = []  # length of `fixed`, packs, left

    def fix(self, strategy: Strategy, count: int) -> None:
        self.fixed.append((strategy, count))
        self.packs += count
        np.subtract.at(self.left, np.searchsorted(self.lengths, strategy), count)

    def remember(self) -> None:
        self.states.append((len(self.fixed), self.packs, self.left.copy()))

    def undo(self) -> None:
        """Go back to the last state."""
        kept, self.packs, self.left = self.states.pop()
        del self.fixed[kept:]

    def waiting(self, left: IntArray) -> IntArray:
        """Sequences that find no free slot of their length or more: int64 [rows]."""
        balance = np.cumsum(left[::-1])
        unplaced = np.maximum.accumulate(np.maximum(balance, 0))
        return np.diff(unplaced, prepend=0)[::-1]

    def mixture(self, rest: Mixture) -> Mixture:
        result = dict(rest)
        for strategy, count in self.fixed:
            add_packs(result, strategy, count)
        return result


def dive(linear_program: LinearProgram, target: int, settings: DiveSettings) -> tuple[Mixture, IntArray]:
    """Whole packs for the program's sequences, in `target` packs if the dive goes well.

    Args:
        linear_program: with its relaxation; the demand of its master is what was left by the last dive afterwards.
        target: number of packs that would be optimal.
        settings: step sizes and effort.

    Returns:
        The packs (slots may hold shorter sequences, see `fill_slots`) and the sequences that they do not hold:
        int64 [rows].
    """
    master = linear_program.master
    path = _Path(linear_program.lengths, linear_program.demand)
    master.set_demand(linear_program.demand.astype(np.float64))
    master.solve(dual=True)
    usage = master.usage()
    share = settings.share
    for _ in range(settings.max_steps):
        if share <= SMALLEST_SHARE or (linear_program.work.exhausted and path.fixed):
            break
        steps = _round(usage, share, settings.threshold)
        path.remember()
        for column in np.flatnonzero(steps).tolist():
            path.fix(master.strategies[column], int(steps[column]))
        rest = search_packs(
            linear_program.lengths,
            path.waiting(path.left),
            linear_program.prices,
            linear_program.max_length,
            linear_program.depth,
            target - path.packs,
            settings.search_nodes,
            linear_program.work,
        )
        if rest is not None:
            return path.mixture(rest), np.zeros_like(linear_program.demand)
        if steps.any() and _resolve(linear_program, path, target):
            usage, share = master.usage(), settings.share
        else:
            path.undo()
            share /= 3
    return path.mixture({}), path.waiting(path.left)


def _resolve(linear_program: LinearProgram, path: _Path, target: int) -> bool:
    """Solve for what is left; False if it provably needs more packs than the target leaves."""
    demand = path.left.astype(np.float64)
    linear_program.master.set_demand(demand)
    allowed = target - path.packs + WHOLE
    if linear_program.master.solve(dual=True) <= allowed:
        return True
    rest = generate_columns(linear_program.master, linear_program.pricer, demand, linear_program.relaxation, enough=allowed)
    return rest.objective <= allowed


def _round(usage: FloatArray, share: float, threshold: float) -> IntArray:
    """Packs to fix now: the whole parts if there are many, else also the largest fractions. int64 [strategies]."""
    steps: FloatArray = np.floor(usage + WHOLE)
    fractions = usage - steps
    if steps.sum() <= 1000:
        number = max(1, int(share * np.sum(fractions)))
        chosen = np.argsort(-fractions, kind="stable")[:number]
        chosen = chosen[(fractions[chosen] >= threshold) | ((np.arange(len(chosen)) == 0) & ~steps.any())]
        steps[chosen] += 1
    return steps.astype(np.int64)
