"""From fractions of packs to whole packs: round the solution down, dive, search the last packs.

The integer part of every usage is fixed. What remains is a few hundred sequences, for which the same program, with the same
basis, is still optimal; from there some of the largest fractions are fixed to one more pack and the program is solved again
with what remains to cover (diving, as in Sadykov et al. 2019). While fixed packs plus the rest's objective stay within the
target, the known strategies are enough; when they do not, column generation supplies strategies for the rest. After every
step the rest is searched exhaustively, within a limit of nodes, for packs that meet the target (`last_packs`). A step that
loses the target is taken back; where no other is left, so is the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray, philox
from gaudi_bert.packing.exact.last_packs import Searched, search_packs
from gaudi_bert.packing.exact.linear_program import LinearProgram, generate_columns
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs, packs_of

WHOLE = 1e-6
"""A usage this close below an integer is treated as it."""

MANY_PACKS = 1000
"""As long as more whole packs than this can be fixed, no fractions are."""

FEWER = 3
"""After a step that lost the target, so many times fewer fractions are rounded up."""

MOST_BARRED = 2
"""Single fractions that may lose the target at a state, before the step that led to it is taken back too."""

NOISE = 0.5
"""The part of a fraction that is drawn at random where a dive has a seed."""

MOST_SEARCHED = 2000
"""A rest of more sequences than this is not searched."""


@dataclass(frozen=True)
class DiveSettings:
    """How a dive goes.

    Attributes:
        share: part of the sum of all fractions that is rounded up in one step.
        threshold: fractions below this are only rounded up if none is larger.
        search_nodes: effort of the search of each rest.
        max_steps: programs that are solved at most.
        max_failures: steps that may lose the target before the dive is given up.
        seed: which of nearly equal fractions are rounded up; 0 for the largest.
    """

    share: float = 0.15
    threshold: float = 0.5
    search_nodes: int = 50_000
    max_steps: int = 1000
    max_failures: int = 12
    seed: int = 0


class _Path:
    """The packs that are fixed so far, and every state on the way."""

    def __init__(self, lengths: IntArray, counts: IntArray) -> None:
        self.lengths = lengths
        self.uncovered = counts.copy()  # may be negative: free slots, which shorter sequences may use
        self.packs = 0
        self.fixed: list[tuple[Strategy, int]] = []
        self.states: list[tuple[int, int, IntArray]] = []  # length of `fixed`, packs, uncovered

    def fix_all(self, strategies: list[Strategy], counts: IntArray) -> None:
        """Fix so many packs of each strategy."""
        for column in np.flatnonzero(counts).tolist():
            strategy, count = strategies[column], int(counts[column])
            self.fixed.append((strategy, count))
            self.packs += count
            np.subtract.at(self.uncovered, np.searchsorted(self.lengths, strategy), count)

    def remember(self) -> None:
        self.states.append((len(self.fixed), self.packs, self.uncovered.copy()))

    def undo(self) -> None:
        """Go back to the last state."""
        number, self.packs, self.uncovered = self.states.pop()
        del self.fixed[number:]

    @property
    def waiting(self) -> IntArray:
        """Sequences that find no free slot of their length or more: int64 [rows]."""
        balance = np.cumsum(self.uncovered[::-1])
        unplaced = np.maximum.accumulate(np.maximum(balance, 0))
        return np.diff(unplaced, prepend=0)[::-1]

    def mixture(self, rest: Mixture | None = None) -> Mixture:
        """All packs, with those of the rest."""
        result = dict(rest or {})
        for strategy, count in self.fixed:
            add_packs(result, strategy, count)
        return result


class _Level:
    """The program's solution at a state of the path, and which steps from there have lost the target."""

    def __init__(self, usage: FloatArray, share: float) -> None:
        self._usage = usage
        self._share = share
        self._barred: list[int] = []
        self._raised: IntArray = np.zeros(0, dtype=np.int64)
        self.is_spent = False

    def step(self, settings: DiveSettings) -> IntArray:
        """Packs to fix now: the integer parts if there are many, else also the largest fractions. int64 [strategies]."""
        steps: FloatArray = np.floor(self._usage + WHOLE)
        fractions = self._usage - steps
        self._raised = self._raised[:0]
        if steps.sum() <= MANY_PACKS:
            number = max(1, int(self._share * np.sum(fractions)))
            if settings.seed:
                drawn = np.random.Generator(philox(settings.seed, "dive", *self._barred)).random(len(fractions))
                fractions = fractions * (1.0 - NOISE * drawn)
            fractions[self._barred] = 0.0
            largest = np.argsort(-fractions, kind="stable")[:number]
            is_only_step = (np.arange(len(largest)) == 0) & (fractions[largest] > 0.0) & ~steps.any()
            self._raised = largest[(fractions[largest] >= settings.threshold) | is_only_step]
            steps[self._raised] += 1
        self.is_spent = not steps.any()
        return steps.astype(np.int64)

    def fail(self) -> None:
        """The last step lost the target: round up fewer next time, or another one."""
        self._share /= FEWER
        if len(self._raised) <= 1:
            self._barred += self._raised.tolist()
        self.is_spent |= len(self._barred) > MOST_BARRED or not len(self._raised)


class Dived(NamedTuple):
    """What a dive comes to.

    Attributes:
        packs: slots may hold shorter sequences, see `fill_slots`.
        waiting: int64 [rows], the sequences that they do not hold.
        is_hopeless: there are no packs that meet the target, whatever the settings.
    """

    packs: Mixture
    waiting: IntArray
    is_hopeless: bool = False


def dive(linear_program: LinearProgram, target: int, settings: DiveSettings) -> Dived:
    """Whole packs for the program's sequences, in `target` packs if the dive goes well.

    Args:
        linear_program: with its relaxation; what its master has to cover is afterwards what the dive did not.
    """
    path = _Path(linear_program.lengths, linear_program.demand)
    furthest = Dived({}, path.waiting)
    searched = _search_rest(linear_program, path, target, settings)
    if searched.is_certain and searched.packs is None:
        return furthest._replace(is_hopeless=True)
    linear_program.set_rest(path.uncovered, path.waiting)
    linear_program.master.solve(dual=True)
    levels = [_Level(linear_program.master.usage(), settings.share)]
    steps = failures = 0
    while searched.packs is None and levels and steps < settings.max_steps and failures < settings.max_failures:
        if linear_program.work.exhausted and path.fixed:
            break
        path.remember()
        path.fix_all(linear_program.master.strategies, levels[-1].step(settings))
        steps += 1
        searched = _search_rest(linear_program, path, target, settings)
        if searched.packs is None and not searched.is_certain and _resolve(linear_program, path, target):
            levels.append(_Level(linear_program.master.usage(), settings.share))
            if path.packs > packs_of(furthest.packs):
                furthest = Dived(path.mixture(), path.waiting)
        elif searched.packs is None:
            failures += 1
            _go_back(path, levels)
    if searched.packs is not None:
        return Dived(path.mixture(searched.packs), np.zeros_like(linear_program.demand))
    return furthest


def _go_back(path: _Path, levels: list[_Level]) -> None:
    """Undo the last step; and those before it for which no other choice remains."""
    path.undo()
    levels[-1].fail()
    while levels and levels[-1].is_spent:
        levels.pop()
        if levels:
            path.undo()
            levels[-1].fail()


def _search_rest(linear_program: LinearProgram, path: _Path, target: int, settings: DiveSettings) -> Searched:
    """Packs for what is not covered yet that meet the target."""
    waiting = path.waiting
    if waiting.sum() > MOST_SEARCHED:
        return Searched(None, is_certain=False)
    return search_packs(
        linear_program.lengths,
        waiting,
        linear_program.prices,
        linear_program.max_length,
        linear_program.depth,
        target - path.packs,
        settings.search_nodes,
        linear_program.work,
    )


def _resolve(linear_program: LinearProgram, path: _Path, target: int) -> bool:
    """Solve for what is not covered yet; False if it provably needs more packs than the target leaves."""
    linear_program.set_rest(path.uncovered, path.waiting)
    allowed = target - path.packs + WHOLE
    if linear_program.master.solve(dual=True) <= allowed:
        return True
    demand = path.uncovered.astype(np.float64)
    rest = generate_columns(linear_program.master, linear_program.pricer, demand, linear_program.relaxation, enough=allowed)
    return rest.objective <= allowed
