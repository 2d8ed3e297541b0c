"""Whole packs from a solution of the linear program, whose numbers of packs are fractions: round down, dive, and search the
last packs.

First the integer part of every usage is fixed. A few hundred sequences remain, for which the same program with the same
basis is still optimal. From there, some of the largest fractions are rounded up, and the program is solved again for the
remaining sequences (diving, as in Sadykov et al. 2019). As long as the fixed packs plus the objective of the rest stay
within the target, the known strategies are sufficient. Otherwise column generation supplies strategies for the rest.

After every step, an exhaustive search with a limit of nodes looks for packs for the rest that meet the target. A step that
loses the target is undone. If no other step is left, the step before it is undone as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray, make_bit_generator
from gaudi_bert.common.compiled import kernel_without_python_wrapper, kernel_without_refcounts
from gaudi_bert.packing.linear_program import LinearProgram, run_column_generation
from gaudi_bert.packing.strategies import OperationBudget, Strategy, StrategyCounts, add_packs, count_packs, count_strategies

# --- the last few packs by exhaustive search: do these sequences fit into that many packs?
#
# Diving fails in the last few packs, where fractions of packs no longer guide it. There the problem is small enough for a
# search. The prices of the linear program prune it: a pack is worth at most 1, so the amounts by which all packs fall short
# of 1 cannot exceed (packs - worth of all sequences). Each pack starts with the longest remaining sequence and is filled in
# order of decreasing length. A branch is cut if even the best completion of the pack leaves too little worth. (This is
# branch and bound on dual prices, as used by Belov and Scheithauer 2006. Equal sequences are one type, so that no two
# branches are equal.)

# The largest rounding error that is expected in sums of dual prices.
ROUNDING = 1e-9

# The exhaustive search first fills a table for the remaining sequences. If that would take more operations than this, the
# search is skipped, because it is unlikely to succeed.
MOST_TABLE_OPERATIONS = 1e9

# The operation budget counts this many operations for each node of the exhaustive search.
OPERATIONS_PER_NODE = 100

# The table of best packs has a row for packs of one sequence, a row for packs of two sequences, and so on, up to this
# number of rows. If a pack can hold more sequences, the last row is for packs with any number of sequences.
MAX_LEVELS = 12

# The search is tried several times, each time with two settings that leave out branches. The first attempt leaves out none,
# so it is exhaustive, but it may reach its limit of nodes before it finds packs. The later attempts visit other branches
# first. In each pair, the first number is `max_second_fraction`: the second sequence of a pack may fill at most this
# fraction of the room that the first one leaves. The second number is `slack_spending`: a pack may waste at most this many
# times the waste that it would be allowed if the waste were divided equally among the remaining packs.
ATTEMPTS = ((1.0, 1e9), (1.0, 8.0), (0.75, 8.0), (0.6, 4.0), (0.5, 8.0), (0.4, 4.0), (0.3, 4.0))


class _SearchProblem(NamedTuple):
    """The sequences that an exhaustive search has to pack. Sequences of the same length are interchangeable, so they form
    one type. There are T types, the longest first.
    """

    lengths: IntArray  # int64 [T]
    prices: FloatArray  # float64 [T]
    best: FloatArray  # float64 [k, t], see `_fill_best_price_table`
    packs: int  # the maximum number of packs
    depth: int  # the maximum number of sequences in a pack
    deepest: int  # the maximum number of sequences of these lengths that fit into a pack


class _SearchPath(NamedTuple):
    """The packs that an exhaustive search has filled so far. The placed sequences form a stack, so that the search can
    backtrack.
    """

    counts: IntArray  # int64 [T], sequences of each type that are not placed yet
    stack: IntArray  # int64 [sequences], the types in the order in which they were placed
    opening: IntArray  # int64 [packs + 2], the height of the stack where each pack starts
    # float64 [packs + 2], the waste that is allowed in this pack and all later packs together. The waste of a pack is 1
    # minus the total price of its sequences.
    slack: FloatArray
    free: IntArray  # int64 [packs + 2], how many slots within the depth this pack and all later packs may leave unused


class _SearchResult(NamedTuple):
    """The result of an exhaustive search for packs.

    Attributes:
        strategy_counts: The packs, or None if none were found.
        is_certain: Whether the search skipped no branch, so that no packs exist if none were found.
    """

    strategy_counts: StrategyCounts | None
    is_certain: bool


_NOTHING, _NONE_EXISTS = 0, -1


def _search_exhaustively(
    lengths: IntArray,
    counts: IntArray,
    prices: FloatArray,
    max_length: int,
    depth: int,
    max_packs: int,
    max_nodes: int,
    budget: OperationBudget,
) -> _SearchResult:
    """Search for at most `max_packs` packs that contain all given sequences, and return them if they are found.

    Args:
        lengths: int64 [types], ascending.
        counts: int64 [types], the number of sequences of each length.
        prices: float64 [types], for which no pack of at most `depth` sequences is worth more than 1.
        max_length: tokens of a pack.
        depth: the maximum number of sequences per pack.
        max_packs: the maximum number of packs.
        max_nodes: the maximum number of nodes in each attempt.
        budget: the operation budget.
    """
    order = np.flatnonzero(counts)[::-1]
    lengths, counts, prices = (
        lengths[order].astype(np.int64),
        counts[order].astype(np.int64),
        prices[order].astype(np.float64),
    )
    sequences = int(counts.sum())
    max_packs = min(max_packs, sequences)
    slack = max_packs - float(prices @ counts)
    if sequences == 0:
        return _SearchResult({}, True)
    if slack < -ROUNDING or sequences > max_packs * depth or int(lengths @ counts) > max_packs * max_length:
        return _SearchResult(None, True)
    deepest = min(depth, max_length // int(lengths[-1]), sequences)
    levels = min(deepest, MAX_LEVELS)
    table_operations = 2.0 * levels * max_length * len(lengths)
    if table_operations > min(budget.remaining, MOST_TABLE_OPERATIONS):
        return _SearchResult(None, False)
    budget.spend(table_operations)
    best = np.zeros((levels + 1, max_length + 1))
    _fill_best_price_table(lengths, prices, best, levels < deepest)
    problem = _SearchProblem(lengths, prices, best, max_packs, depth, deepest)
    for attempt in ATTEMPTS:
        if budget.is_exhausted:
            break
        budget.spend(OPERATIONS_PER_NODE * max_nodes)
        path = _SearchPath(
            counts=counts.copy(),
            stack=np.zeros(sequences, dtype=np.int64),
            opening=np.zeros(max_packs + 2, dtype=np.int64),
            slack=np.full(max_packs + 2, slack),
            free=np.full(max_packs + 2, max_packs * depth - sequences),
        )
        used = _search_depth_first(problem, path, *attempt, max_nodes)
        if used == _NONE_EXISTS and attempt is ATTEMPTS[0]:
            return _SearchResult(None, True)
        if used > 0:
            pack_starts = np.append(path.opening[:used], sequences)
            return _SearchResult(count_strategies(lengths[path.stack], pack_starts), True)
    return _SearchResult(None, False)


@kernel_without_refcounts
def _fill_best_price_table(
    lengths: IntArray, prices: FloatArray, best_prices: FloatArray, is_last_row_unlimited: bool
) -> None:
    """Fill a dynamic-programming table, except its first row. Entry [k, t] becomes the largest total price of at most k
    sequences in t tokens.

    If `is_last_row_unlimited` is set, the last row allows any number of sequences.
    """
    levels = best_prices.shape[0] - 1
    for slots in range(1, levels + 1):
        before = best_prices[slots] if is_last_row_unlimited and slots == levels else best_prices[slots - 1]
        for room in range(1, best_prices.shape[1]):
            value = best_prices[slots - 1, room]
            for kind in range(lengths.size):
                if lengths[kind] <= room:
                    value = max(value, prices[kind] + before[room - lengths[kind]])
            best_prices[slots, room] = value


@kernel_without_refcounts
def _search_depth_first(
    problem: _SearchProblem, path: _SearchPath, max_second_fraction: float, slack_spending: float, max_nodes: int
) -> int:
    """Search depth-first for packs that contain all sequences, and return the number of packs if they are found.

    If the sequences do not fit, return `_NONE_EXISTS`. If `max_nodes` is reached, return `_NOTHING`. `kind` is the index of
    the length to try next. While many packs remain, a pack may use only the fraction `slack_spending` / (remaining packs) of
    the slack, so that some is left for later packs.
    """
    lengths, prices, packs, depth = problem.lengths, problem.prices, problem.packs, problem.depth
    counts, stack, opening, slack, free = path
    max_length = problem.best.shape[1] - 1
    height, pack, room, worth, kind = 0, 0, max_length, 0.0, 0
    for _ in range(max_nodes):
        share = min(1.0, slack_spending / (packs - pack))
        enough = 1.0 - slack[pack] * share - ROUNDING
        used = height - opening[pack]
        kind = _find_next_fitting_length(problem, counts, kind, used, room, enough - worth)
        if kind >= 0:
            stack[height] = kind
            height += 1
            counts[kind] -= 1
            room -= lengths[kind]
            worth += prices[kind]
            if height == stack.size:
                return pack + 1
            if used == 0:
                longest = max_second_fraction * room
                while kind < lengths.size - 1 and lengths[kind] > longest:
                    kind += 1
        elif used > 0 and pack + 1 < packs and worth >= enough and depth - used <= np.ceil(free[pack] * share):
            slack[pack + 1] = slack[pack] - max(0.0, 1.0 - worth)
            free[pack + 1] = free[pack] - (depth - used)
            pack += 1
            opening[pack] = height
            room, worth, kind = max_length, 0.0, 0
        else:
            if used == 0:  # nothing can open this pack, so return to the previous one, whose first sequence is not a choice
                if pack == 0:
                    return _NONE_EXISTS
                pack -= 1
                room, worth = max_length, 0.0
                for index in range(opening[pack], height):
                    room -= lengths[stack[index]]
                    worth += prices[stack[index]]
            height -= 1
            kind = stack[height]
            counts[kind] += 1
            room += lengths[kind]
            worth -= prices[kind]
            kind = lengths.size if height == opening[pack] else kind + 1
    return _NOTHING


@kernel_without_python_wrapper
def _find_next_fitting_length(
    problem: _SearchProblem, remaining_counts: IntArray, first_index: int, used_slots: int, room: int, min_added_price: float
) -> int:
    """Find the next sequence length that the current pack of a depth-first search can take. Return its index, which is at
    least `first_index`, or -1 if there is no such length.

    A sequence of this length must remain and fit into the `room` tokens that are free. With it and further sequences, the
    total price of the pack, which contains `used_slots` sequences, must be able to rise by `min_added_price`. Only the
    longest remaining sequence may open a pack.
    """
    levels, slots = problem.best.shape[0] - 1, problem.deepest - used_slots
    index = first_index
    while slots > 0 and index < problem.lengths.size:
        if remaining_counts[index] > 0:
            room_after = room - problem.lengths[index]
            if (
                room_after >= 0
                and problem.prices[index] + problem.best[min(slots - 1, levels), room_after] >= min_added_price
            ):
                return index
            if used_slots == 0:
                break
        index += 1
    return -1


# --- from fractions of packs to integers

# Numbers of packs in the linear program's solution have small rounding errors. A number that is at most this much smaller
# than an integer is treated as that integer.
WHOLE = 1e-6

# A dive (the diving heuristic) rounds the solution of the linear program to whole packs in steps. Each step fixes the packs
# that the integer parts of this solution stand for. If these are more than MANY_PACKS packs, that is progress enough for one
# step. Otherwise the step also rounds some fractions up, because few packs would be fixed without that, and each step takes
# time to solve the program again.
MANY_PACKS = 1000

# A dive rounds the linear program's fractional solution to whole packs in steps. If a step makes the target number of packs
# unreachable, it is undone and tried again. For the new attempt, the share of the
# fractions that are rounded up is divided by this number.
FEWER = 3

# If rounding up a single fraction makes the target number of packs unreachable, the dive tries another one. After more
# failures than this in the same state, it also undoes the previous step.
MOST_BARRED = 2

# A dive rounds the largest fractions of the linear program's solution up first. If the dive has a seed, each fraction is
# first reduced by a random proportion, which is at most this number, so that the order varies.
NOISE = 0.5

# A dive packs the last sequences by exhaustive search if at most MOST_SEARCHED of them remain. Each attempt of the search
# examines at most SEARCH_NODES nodes.
MOST_SEARCHED, SEARCH_NODES = 2000, 50_000


@dataclass(frozen=True)
class DiveSettings:
    """Settings of a dive. A dive rounds the fractional solution of the linear program to whole packs step by step, and
    solves the program again after each step.
    """

    share: float = 0.15  # the part of the sum of all fractions that is rounded up in one step
    threshold: float = 0.5  # smaller fractions are rounded up only if none is larger
    max_steps: int = 1000  # the maximum number of programs that are solved
    max_failures: int = 12  # the dive ends after this many steps that lost the target
    seed: int = 0  # varies which of nearly equal fractions are rounded up; 0 for the largest


class _FixedPacks:
    """The packs that a dive has fixed so far, and the sequences that still have to be packed. A dive rounds the solution of
    the linear program to whole packs step by step.
    """

    def __init__(self, lengths: IntArray, counts: IntArray) -> None:
        self.lengths = lengths
        self.uncovered = counts.copy()  # negative entries are free slots, which shorter sequences may use
        self.packs = 0
        self.fixed: list[tuple[Strategy, int]] = []

    def fix_packs(self, strategies: list[Strategy], counts: IntArray) -> None:
        """Add `counts[i]` packs with the lengths in `strategies[i]` to the fixed packs. Subtract their slots from the
        numbers of sequences that are not covered yet.
        """
        for column in np.flatnonzero(counts).tolist():
            strategy, count = strategies[column], int(counts[column])
            self.fixed.append((strategy, count))
            self.packs += count
            np.subtract.at(self.uncovered, np.searchsorted(self.lengths, strategy), count)

    def restore_state(self, state: _DivingState) -> None:
        """Backtrack to an earlier state of the dive by removing the packs that were fixed after it."""
        del self.fixed[state.fixed :]
        self.packs, self.uncovered = state.packs, state.uncovered.copy()

    @property
    def unplaced_sequences(self) -> IntArray:
        """The number of sequences of each length that still have no slot, int64 [lengths]. Slots of the fixed packs may also
        hold sequences that are shorter than planned.
        """
        balance = np.cumsum(self.uncovered[::-1])
        unplaced = np.maximum.accumulate(np.maximum(balance, 0))
        return np.diff(unplaced, prepend=0)[::-1]

    def merge_with_other_packs(self, other_packs: StrategyCounts | None = None) -> StrategyCounts:
        """Merge the fixed packs with `other_packs`, and return how many packs there are of each strategy. A strategy is the
        tuple of lengths in a pack.
        """
        result = dict(other_packs or {})
        for strategy, count in self.fixed:
            add_packs(result, strategy, count)
        return result


class _DivingState:
    """A state to which a dive can backtrack. A dive rounds the solution of the linear program to whole packs in steps. The
    state contains the solution before a step, and which fractions must not be rounded up again, because that has failed.
    """

    def __init__(self, fixed_packs: _FixedPacks, usage: FloatArray, share: float) -> None:
        self.fixed, self.packs, self.uncovered = len(fixed_packs.fixed), fixed_packs.packs, fixed_packs.uncovered.copy()
        self._usage = usage
        self._share = share
        self._barred: list[int] = []
        self._raised: IntArray = np.zeros(0, dtype=np.int64)
        self.is_spent = False

    def round_next_pack_counts(self, settings: DiveSettings) -> IntArray:
        """Choose how many packs of each strategy the next step of the dive fixes, and return these numbers as an int64 array
        [strategies]. They are the integer parts of the solution. If these are few packs, the largest fractions are rounded
        up as well.
        """
        steps: FloatArray = np.floor(self._usage + WHOLE)
        fractions = self._usage - steps
        self._raised = self._raised[:0]
        if steps.sum() <= MANY_PACKS:
            number = max(1, int(self._share * np.sum(fractions)))
            if settings.seed:
                drawn = np.random.Generator(make_bit_generator(settings.seed, "dive", *self._barred)).random(len(fractions))
                fractions = fractions * (1.0 - NOISE * drawn)
            fractions[self._barred] = 0.0
            largest = np.argsort(-fractions, kind="stable")[:number]
            is_only_step = (np.arange(len(largest)) == 0) & (fractions[largest] > 0.0) & ~steps.any()
            self._raised = largest[(fractions[largest] >= settings.threshold) | is_only_step]
            steps[self._raised] += 1
        self.is_spent = not steps.any()
        return steps.astype(np.int64)

    def record_failed_rounding_step(self) -> None:
        """Record that the target number of packs can no longer be reached after the last rounding step. The next step from
        this state will round up fewer fractions, or different ones.
        """
        self._share /= FEWER
        if len(self._raised) <= 1:
            self._barred += self._raised.tolist()
        self.is_spent |= len(self._barred) > MOST_BARRED or not len(self._raised)


class DiveResult(NamedTuple):
    """The packs that a dive has found by rounding the solution of the linear program, and the sequences that it could not
    place.

    Attributes:
        strategy_counts: The packs. Their slots may hold shorter sequences (see `fill_planned_packs_with_sequences`).
        unplaced: The number of sequences of each occurring length that have no slot in these packs, int64 [rows].
        is_hopeless: Whether no packs can meet the target, whatever the settings.
    """

    strategy_counts: StrategyCounts
    unplaced: IntArray
    is_hopeless: bool


def run_diving_heuristic(linear_program: LinearProgram, target_packs: int, settings: DiveSettings) -> DiveResult:
    """Round the fractional solution of a linear program to whole packs by a diving heuristic. Try to use at most
    `target_packs` packs. Each step rounds a part of the solution and solves the program again for the other sequences.

    Afterwards, the program's demand is what the dive left uncovered.

    Args:
        linear_program: the program, with its relaxation.
        target_packs: the number of packs to reach.
        settings: how the dive rounds fractions up.
    """
    fixed_packs = _FixedPacks(linear_program.lengths, linear_program.demand)
    furthest: StrategyCounts = {}
    not_held = fixed_packs.unplaced_sequences
    packs, is_certain = _search_packs_for_unplaced_sequences(linear_program, fixed_packs, target_packs)
    if is_certain and packs is None:
        return DiveResult(furthest, not_held, True)
    linear_program.set_remaining_demand(fixed_packs.uncovered, fixed_packs.unplaced_sequences)
    linear_program.master.minimize_packs(use_dual_simplex=True)
    levels = [_DivingState(fixed_packs, linear_program.master.get_strategy_usage(), settings.share)]
    steps = failures = 0
    while packs is None and levels and steps < settings.max_steps and failures < settings.max_failures:
        if linear_program.budget.is_exhausted and fixed_packs.fixed:
            break
        fixed_packs.fix_packs(linear_program.master.strategies, levels[-1].round_next_pack_counts(settings))
        steps += 1
        packs, is_certain = _search_packs_for_unplaced_sequences(linear_program, fixed_packs, target_packs)
        if packs is None and not is_certain and _can_pack_rest_within_target(linear_program, fixed_packs, target_packs):
            levels.append(_DivingState(fixed_packs, linear_program.master.get_strategy_usage(), settings.share))
            if fixed_packs.packs > count_packs(furthest):
                furthest, not_held = fixed_packs.merge_with_other_packs(), fixed_packs.unplaced_sequences
        elif packs is None:  # undo the step, and those before it for which no other choice is left
            failures += 1
            levels[-1].record_failed_rounding_step()
            while levels and levels[-1].is_spent:
                levels.pop()
                if levels:
                    levels[-1].record_failed_rounding_step()
            if levels:
                fixed_packs.restore_state(levels[-1])
    if packs is None:
        return DiveResult(furthest, not_held, False)
    return DiveResult(fixed_packs.merge_with_other_packs(packs), np.zeros_like(linear_program.demand), False)


def _search_packs_for_unplaced_sequences(
    linear_program: LinearProgram, fixed_packs: _FixedPacks, target_packs: int
) -> _SearchResult:
    """Search exhaustively for a packing of the sequences that are not in the fixed packs of a dive. The fixed packs and the
    new ones together must be at most `target_packs`.
    """
    waiting = fixed_packs.unplaced_sequences
    if waiting.sum() > MOST_SEARCHED:
        return _SearchResult(None, False)
    return _search_exhaustively(
        linear_program.lengths,
        waiting,
        linear_program.dual_feasible_prices,
        linear_program.max_length,
        linear_program.depth,
        target_packs - fixed_packs.packs,
        SEARCH_NODES,
        linear_program.budget,
    )


def _can_pack_rest_within_target(linear_program: LinearProgram, fixed_packs: _FixedPacks, target_packs: int) -> bool:
    """Return whether the sequences that are not in the fixed packs of a dive can be packed so that there are at most
    `target_packs` packs in total. To find out, solve the linear program for these sequences.

    Fractions of packs are allowed. New strategies are added to the program if the known ones are not sufficient.
    """
    linear_program.set_remaining_demand(fixed_packs.uncovered, fixed_packs.unplaced_sequences)
    allowed = target_packs - fixed_packs.packs + WHOLE
    if linear_program.master.minimize_packs(use_dual_simplex=True) <= allowed:
        return True
    demand = fixed_packs.uncovered.astype(np.float64)
    rest = run_column_generation(
        linear_program.master, linear_program.pricer, demand, linear_program.relaxation, target_objective=allowed
    )
    return rest.objective <= allowed
