"""Strategies, strategy counts and packings, which all algorithms return, and budgets, which limit the work of a solver.

A strategy is a sorted tuple of lengths that share a pack, such as (67, 216, 229). Strategy counts state how many packs use
each strategy (paper F.3). In this package they are exact: every sequence of the histogram has its slot, and no slot is left
without a sequence. The NNLS algorithms first produce surplus slots for short lengths ("padding sequences");
`drop_surplus_slots` removes them, which turns their tokens into padding.

`check_packing` verifies that strategy counts are a packing, and `Packing` calls it on creation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import Int32Array, IntArray
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.features import PackingMetrics
from gaudi_bert.packing.certificate import Certificate
from gaudi_bert.packing.histogram import Histogram

# The lengths of the sequences in a pack, in ascending order.
Strategy = tuple[int, ...]

# Maps each strategy, which is the tuple of lengths in a pack, to the number of such packs.
StrategyCounts = dict[Strategy, int]


def count_packs(strategy_counts: Mapping[Strategy, int]) -> int:
    """Return the total number of packs. `strategy_counts` maps each strategy, which is the tuple of lengths in a pack, to
    the number of such packs.
    """
    return sum(strategy_counts.values())


def add_packs(strategy_counts: StrategyCounts, strategy: Strategy, count: int) -> None:
    """Add `count` packs with the lengths in `strategy` to a mapping from strategies to numbers of packs. The lengths may be
    in any order.
    """
    if count:
        strategy = tuple(sorted(strategy))
        strategy_counts[strategy] = strategy_counts.get(strategy, 0) + int(count)


def sort_strategies(strategy_counts: Mapping[Strategy, int]) -> StrategyCounts:
    """Return the strategy counts sorted by strategy, which is the tuple of lengths in a pack. The output then does not
    depend on the order of discovery.
    """
    return {strategy: int(strategy_counts[strategy]) for strategy in sorted(strategy_counts)}


def count_slots(strategy_counts: Mapping[Strategy, int], max_sequence_length: int) -> IntArray:
    """Count how many sequences of each length the packs contain, and return int64 [max_sequence_length].

    Raises:
        FailedError: a strategy contains a length that is out of range, which is a defect.
    """
    slots = [0] * (max_sequence_length + 1)
    for strategy, count in strategy_counts.items():
        if strategy and not 1 <= min(strategy) <= max(strategy) <= max_sequence_length:
            raise FailedError(f"strategy {strategy} contains a length outside 1 to {max_sequence_length}; this is a bug")
        for length in strategy:
            slots[length] += int(count)
    return np.asarray(slots[1:], dtype=np.int64)


def check_packing(
    strategy_counts: Mapping[Strategy, int], histogram: Histogram, depth: int, masked_slots: int | None = None
) -> None:
    """Check, in exact integers, that the packs satisfy all limits and contain every sequence of a histogram exactly once.

    Args:
        strategy_counts: how many packs use each strategy.
        histogram: the sequences that have to be packed.
        depth: the maximum number of sequences per pack.
        masked_slots: the maximum number of masked positions per pack, compared with the most that the data show at each
            length; None for no limit.

    Raises:
        FailedError: the strategy counts are not a packing, which is a defect of the algorithm.
    """
    for strategy, count in strategy_counts.items():
        problem = None
        if not strategy or list(strategy) != sorted(strategy):
            problem = "is empty or not sorted"
        elif count < 1:
            problem = f"is used {count} times"
        elif len(strategy) > depth:
            problem = f"contains {len(strategy)} sequences, more than the depth {depth}"
        elif sum(strategy) > histogram.max_sequence_length:
            problem = f"contains {sum(strategy)} tokens, more than {histogram.max_sequence_length}"
        elif masked_slots is not None and (masked := sum(map(histogram.max_masked_positions, strategy))) > masked_slots:
            problem = f"may contain {masked} masked positions, more than the {masked_slots} masked slots of a pack"
        if problem is not None:
            raise FailedError(f"strategy {strategy} {problem}; this is a bug in the packing algorithm")
    difference = count_slots(strategy_counts, histogram.max_sequence_length) - histogram.counts
    if difference.any():
        length = int(np.flatnonzero(difference)[0]) + 1
        slots, sequences = difference[length - 1] + histogram.counts[length - 1], histogram.counts[length - 1]
        raise FailedError(
            f"length {length} has {slots} slots for {sequences} sequences; this is a bug in the packing algorithm"
        )


def drop_surplus_slots(
    strategy_counts: Mapping[Strategy, int], length_counts: IntArray, *, drop_whole_packs: bool = True
) -> StrategyCounts:
    """Remove slots for which there is no sequence, so that the packs contain exactly as many slots of each length as there
    are sequences. A slot is the place of one sequence in a planned pack.

    First whole packs are dropped, which reduces the number of packs, and then single slots, in the order of the strategies.
    Packs that become empty are dropped as well.

    Args:
        strategy_counts: strategy counts with at least as many slots of each length as there are sequences.
        length_counts: int64 [L], the number of sequences of length 1 .. L.
        drop_whole_packs: whether to drop whole packs first. The published algorithms drop single slots only.
    """
    surplus = count_slots(strategy_counts, len(length_counts)) - length_counts
    surplus_of_length = {length: int(surplus[length - 1]) for length in (np.flatnonzero(surplus) + 1).tolist()}
    result = sort_strategies(strategy_counts)
    if drop_whole_packs:
        _drop_surplus_packs(result, surplus_of_length)
    strategies_by_length: defaultdict[int, set[Strategy]] = defaultdict(set)
    for strategy in result:
        for length in strategy:
            strategies_by_length[length].add(strategy)
    for length in sorted(surplus_of_length, reverse=True):
        _drop_surplus_slots_of_length(result, strategies_by_length, length, surplus_of_length[length])
    return sort_strategies({strategy: count for strategy, count in result.items() if strategy and count})


def _drop_surplus_packs(strategy_counts: StrategyCounts, surplus_of_length: dict[int, int]) -> None:
    """Drop packs that consist only of slots for which there is no sequence, starting with the packs that have the most
    slots. Subtract the dropped packs from `strategy_counts` and their slots from `surplus_of_length`.
    """
    for strategy in sorted(strategy_counts, key=lambda strategy: (-len(strategy), strategy)):
        if not all(surplus_of_length.get(length) for length in strategy):
            continue
        needed = Counter(strategy)
        dropped = min(strategy_counts[strategy], *(surplus_of_length[length] // copies for length, copies in needed.items()))
        strategy_counts[strategy] -= dropped
        for length, copies in needed.items():
            surplus_of_length[length] -= dropped * copies


def _drop_surplus_slots_of_length(
    strategy_counts: StrategyCounts, strategies_by_length: defaultdict[int, set[Strategy]], length: int, surplus_slots: int
) -> None:
    """Remove `surplus_slots` slots of one length from packs that contain this length, because there is no sequence for these
    slots. If a pack contains the length several times, remove one slot at a time.
    """
    waiting = sorted(strategies_by_length[length], reverse=True) if surplus_slots else []
    while surplus_slots:
        strategy = waiting.pop()
        taken = min(surplus_slots, strategy_counts[strategy])
        if not taken:
            continue
        surplus_slots -= taken
        strategy_counts[strategy] -= taken
        position = strategy.index(length)
        shorter = strategy[:position] + strategy[position + 1 :]
        strategy_counts[shorter] = strategy_counts.get(shorter, 0) + taken
        for held in shorter:
            strategies_by_length[held].add(shorter)
        if length in shorter:
            waiting.insert(0, shorter)


# --- from slots to sequences: a slot of a plan may be filled by a shorter sequence, or stay empty

# A pair [length, number] of a sequence length and a number of sequences. The length 0 stands for slots that stay empty.
_LengthCount = list[int]


def fill_planned_packs_with_sequences(planned_packs: Mapping[Strategy, int], length_counts: IntArray) -> StrategyCounts:
    """Put sequences into planned packs, where a slot may hold a sequence that is shorter than planned. Return how many packs
    there are of each strategy. A strategy is the tuple of lengths in a pack.

    From the longest length to the shortest, a sequence takes a slot of its own length or, if there is none, the shortest
    free slot that is longer. Slots that no sequence needs are removed, and so are packs that stay empty.

    Args:
        planned_packs: how many packs are planned with each tuple of slot lengths. For each length, there must be at least as
            many slots of this length or more as there are such sequences.
        length_counts: int64 [L], the number of sequences of length 1 .. L.
    """
    waiting = _distribute_sequences_over_slots(count_slots(planned_packs, len(length_counts)), length_counts)
    result: StrategyCounts = {}
    for strategy, count in sort_strategies(planned_packs).items():
        remaining, copies = count, Counter(strategy)
        while remaining:
            part = min(remaining, *(waiting[length][-1][1] // number for length, number in copies.items()))
            part = max(part, 1)  # if a pair runs out within a pack, equal slots of this pack get different sequences
            add_packs(result, tuple(length for length in _take_sequence_lengths(waiting, strategy, part) if length), part)
            remaining -= part
    result.pop((), None)
    return sort_strategies(result)


def _distribute_sequences_over_slots(slots: IntArray, length_counts: IntArray) -> dict[int, list[_LengthCount]]:
    """Decide which sequences fill the planned slots. A slot holds a sequence of the planned length or a shorter one. Return
    a dictionary from each planned length to a list of pairs [sequence length, number of sequences].

    The pair to use first is at the end of its list, from which `_take_sequence_lengths` removes sequences.
    """
    sequences_by_slot_length: dict[int, list[_LengthCount]] = {}
    free: list[_LengthCount] = []  # [slot length, number of slots], the shortest last
    for length in (np.flatnonzero((slots > 0) | (length_counts > 0))[::-1] + 1).tolist():
        own, waiting = int(slots[length - 1]), int(length_counts[length - 1])
        sequences_by_slot_length[length] = [[length, min(own, waiting)]] if min(own, waiting) else []
        if own > waiting:
            free.append([length, own - waiting])
        waiting -= min(own, waiting)
        while waiting:
            moved = min(waiting, free[-1][1])
            sequences_by_slot_length[free[-1][0]].append([length, moved])
            waiting -= moved
            free[-1][1] -= moved
            if not free[-1][1]:
                free.pop()
    for length, number in free:
        sequences_by_slot_length[length].append([0, number])
    return sequences_by_slot_length


def _take_sequence_lengths(
    sequences_by_slot_length: dict[int, list[_LengthCount]], strategy: Strategy, pack_count: int
) -> list[int]:
    """Take the sequences for `pack_count` equal packs, and return the length of the sequence in each slot of such a pack.
    Subtract the sequences from their pairs [sequence length, number of sequences] in `sequences_by_slot_length`.
    """
    taken = []
    for slot_length in strategy:
        pair = sequences_by_slot_length[slot_length][-1]
        taken.append(pair[0])
        pair[1] -= pack_count
        if not pair[1]:
            sequences_by_slot_length[slot_length].pop()
    return taken


# --- strategy counts as arrays: the lengths of all packs one after the other, and where each pack begins


class FlatPacks(NamedTuple):
    """Packs as two arrays.

    Attributes:
        lengths: The length of each sequence, pack by pack, int64 [sequences].
        starts: The position in `lengths` where each pack begins, and the end of the last pack, int64 [packs + 1].
    """

    lengths: IntArray
    starts: IntArray


def flatten_packs(strategy_counts: Mapping[Strategy, int]) -> FlatPacks:
    """List all packs one by one, and return the lengths of their sequences and the start of each pack as two arrays."""
    sizes = np.fromiter(map(len, strategy_counts), dtype=np.int64, count=len(strategy_counts))
    flat = np.fromiter(chain.from_iterable(strategy_counts), dtype=np.int64, count=int(sizes.sum()))
    packs = np.repeat(
        np.arange(len(strategy_counts)), np.fromiter(strategy_counts.values(), dtype=np.int64, count=len(strategy_counts))
    )
    starts = np.concatenate(([0], np.cumsum(sizes[packs])))
    from_strategy = (np.cumsum(sizes) - sizes)[packs] - starts[:-1]
    return FlatPacks(flat[np.arange(starts[-1]) + np.repeat(from_strategy, sizes[packs])], starts)


def count_strategies(lengths: Int32Array | IntArray, starts: IntArray) -> StrategyCounts:
    """Count how many packs use each strategy, which is the sorted tuple of lengths in a pack. The packs are given as two
    arrays, as `flatten_packs` returns them.

    Lengths of 0 are ignored, and packs that contain nothing else are dropped.
    """
    sizes = np.diff(starts)
    strategy_counts: StrategyCounts = {}
    for size in np.unique(sizes).tolist():
        first = starts[:-1][sizes == size]
        members = np.sort(lengths[first[:, None] + np.arange(size)], axis=1)
        members = members[np.lexsort(members.T)]  # np.unique on rows would take ten times as long
        new = np.flatnonzero(np.concatenate(([True], (members[1:] != members[:-1]).any(axis=1))))
        repeats = np.diff(new, append=len(members))
        for strategy, repeat in zip(members[new].tolist(), repeats.tolist(), strict=True):
            add_packs(strategy_counts, tuple(strategy[strategy.count(0) :]), repeat)
    strategy_counts.pop((), None)
    return strategy_counts


# --- finished packings and the results of solvers


@dataclass(frozen=True)
class Packing(PackingMetrics):
    """The packs for a histogram, and a proven lower bound on the number of packs. The constructor checks that the packs are
    valid.

    Raises:
        FailedError: the strategy counts are not a packing, or there are fewer packs than the bound allows. Both are defects.
    """

    histogram: Histogram
    depth: int  # the maximum number of sequences per pack that was allowed
    algorithm: str
    algorithm_used: str  # the algorithm that produced the packs, if `algorithm` chooses between several
    strategy_counts: Mapping[Strategy, int]
    certificate: Certificate  # integer prices that prove the bound
    masked_slots: int | None = None  # the maximum number of masked positions per pack (Q); None if unknown
    masked_slots_needed: int | None = None  # the masked positions that the fullest strategy may contain

    def __post_init__(self) -> None:
        check_packing(self.strategy_counts, self.histogram, self.depth, self.masked_slots)
        if self.packs < self.lower_bound:
            raise FailedError(f"there are {self.packs} packs, fewer than the lower bound, {self.lower_bound}; this is a bug")

    @property
    def depth_used(self) -> int:
        """The largest number of sequences in any pack."""
        return max(map(len, self.strategy_counts), default=0)


# How `nnls` packs the sequences that remain after its last round. "best-fit" adds them by best fit, and "complement" pairs
# each of them with a padding slot, as published.
Leftovers = Literal["best-fit", "complement"]

# How long `optimal` searches for fewer packs. "bounded" stops if the possible gain does not justify more work, and
# "unlimited" continues until nothing helps.
Effort = Literal["bounded", "unlimited"]


@dataclass(frozen=True)
class AlgorithmResult:
    """The packs that an algorithm found, counted by the lengths that they contain. If the algorithm proved a lower bound on
    the number of packs, the certificate that proves it is included.
    """

    strategy_counts: StrategyCounts
    algorithm_used: str
    certificate: Certificate | None = None


# --- budgets: how many elementary operations a solver may do
#
# Limits in seconds would give other plans on other machines, so budgets count operations. Every loop that could take long
# reports its operations to a `OperationBudget` and stops once the budget is spent. It then returns the best packing and the
# best bound so far. An operation takes about 1 ns on one core. The published histograms stay far below every budget, so no
# budget changes their plans.

# The maximum number of operations for all rounds of a least-squares packing algorithm.
NNLS_WORK = 25e9

# The maximum number of operations for proving a lower bound after packing.
BOUND_WORK = 6e9

# An estimate table packs the same data with several algorithms and depths, one per row. For long packs this would take too
# long, so all rows share one operation budget. Each pair is a maximum pack length and the budget for packs up to this
# length, and the first pair that covers the pack length is used. Up to 1,024 tokens there is no limit, so that each row
# shows the result that a plan with its settings would have.
ESTIMATE_WORK = ((1024, float("inf")), (4096, 180e9), (2**63, 40e9))

# A heuristic written in Python takes 4,000 operations for each distinct combination of lengths in its packs, and 100 for
# each length in these combinations.
OPERATIONS_PER_STRATEGY, OPERATIONS_PER_LISTED = 4000, 100


class OperationBudget:
    """A limit on the number of operations that a solver may perform. Operations are counted instead of seconds so that every
    machine finds the same packing.

    The default limit is infinite.

    Operations that are spent from a part of the budget (`take_fraction`, `take_at_most`) are also spent from the whole
    budget.

    Args:
        operations: the limit.
        whole: the budget that this one is a part of, or None.

    Attributes:
        spent: operations spent so far.
    """

    def __init__(self, operations: float = float("inf"), whole: OperationBudget | None = None) -> None:
        self.spent = 0.0
        self._limit = operations
        self._whole = whole

    @property
    def remaining(self) -> float:
        """The number of operations that may still be spent. It is negative if more were spent than allowed."""
        return self._limit - self.spent

    @property
    def is_exhausted(self) -> bool:
        """Whether no operations remain."""
        return self.remaining <= 0

    def spend(self, operations: float) -> None:
        """Subtract operations from this budget, and from the larger budget that it was taken from, if any."""
        self.spent += operations
        if self._whole is not None:
            self._whole.spend(operations)

    def spend_on_heuristic(self, strategy_counts: Mapping[Strategy, int]) -> None:
        """Subtract the operations of a packing heuristic, which are estimated from the strategy counts that it returned."""
        self.spend(OPERATIONS_PER_STRATEGY * len(strategy_counts) + OPERATIONS_PER_LISTED * sum(map(len, strategy_counts)))

    def take_fraction(self, fraction: float) -> OperationBudget:
        """Return a new budget with the given fraction (0 to 1) of the remaining operations. Operations that are spent from
        the new budget also count against this one.
        """
        return OperationBudget(max(self.remaining, 0.0) * fraction, self)

    def take_at_most(self, max_operations: float) -> OperationBudget:
        """Return a new budget with `max_operations`, or with all remaining operations if they are fewer. Operations that are
        spent from the new budget also count against this one.
        """
        return OperationBudget(min(max_operations, max(self.remaining, 0.0)), self)


def create_budget_for_estimates(max_sequence_length: int) -> OperationBudget | None:
    """Create the operation budget that all rows of a table of packing estimates share. Return None for short packs, because
    each row then has its own budget.
    """
    operations = next(operations for longest, operations in ESTIMATE_WORK if max_sequence_length <= longest)
    return None if operations == float("inf") else OperationBudget(operations)
