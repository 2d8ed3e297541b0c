"""Strategies, mixtures and packings: what every algorithm returns, the check that it is a packing, and a limit of its work.

A strategy is a sorted tuple of lengths that share a pack, e.g. (67, 216, 229); a mixture states how often each strategy is
used (paper F.3). Mixtures here are exact: every sequence of the histogram has its slot, and no slot is for a sequence
that does not exist. Algorithms that over-subscribe short lengths (the "padding sequences" of the NNLS methods) give up
those slots through `drop_surplus_slots`; the tokens of such a slot are padding either way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from gaudi_bert.common.arrays import Int32Array, IntArray
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.features import PackingFigures
from gaudi_bert.packing.certificate import Certificate
from gaudi_bert.packing.histogram import Histogram

Strategy = tuple[int, ...]
StrategyCounts = dict[Strategy, int]


def count_packs(strategy_counts: Mapping[Strategy, int]) -> int:
    """Number of packs."""
    return sum(strategy_counts.values())


def add_packs(strategy_counts: StrategyCounts, strategy: Strategy, count: int) -> None:
    """Use `strategy` (sorted here) `count` times more."""
    if count:
        strategy = tuple(sorted(strategy))
        strategy_counts[strategy] = strategy_counts.get(strategy, 0) + int(count)


def sort_strategies(strategy_counts: Mapping[Strategy, int]) -> StrategyCounts:
    """Return the mixture in the order of its strategies, so that files are always the same."""
    return {strategy: int(strategy_counts[strategy]) for strategy in sorted(strategy_counts)}


def count_slots(strategy_counts: Mapping[Strategy, int], max_sequence_length: int) -> IntArray:
    """Slots that the mixture has for each length: int64 [max_sequence_length]."""
    slots = [0] * (max_sequence_length + 1)
    for strategy, count in strategy_counts.items():
        if strategy and not 1 <= min(strategy) <= max(strategy) <= max_sequence_length:
            raise FailedError(f"strategy {strategy} holds a length outside 1 .. {max_sequence_length}; this is a defect")
        for length in strategy:
            slots[length] += int(count)
    return np.asarray(slots[1:], dtype=np.int64)


def check_strategy_counts(
    strategy_counts: Mapping[Strategy, int], histogram: Histogram, depth: int, masked_slots: int | None = None
) -> None:
    """Check all that makes a mixture a packing of `histogram`, in exact integers; what fails is a defect of the algorithm.

    `masked_slots` is compared with the most masked positions seen at each length; None: no limit.
    """
    for strategy, count in strategy_counts.items():
        problem = None
        if not strategy or list(strategy) != sorted(strategy):
            problem = "is empty or not sorted"
        elif count < 1:
            problem = f"is used {count} times"
        elif len(strategy) > depth:
            problem = f"holds {len(strategy)} sequences, more than the depth {depth}"
        elif sum(strategy) > histogram.max_sequence_length:
            problem = f"holds {sum(strategy)} tokens, more than {histogram.max_sequence_length}"
        elif masked_slots is not None and sum(map(histogram.max_masked_at, strategy)) > masked_slots:
            masked = sum(map(histogram.max_masked_at, strategy))
            problem = f"may hold {masked} masked positions, more than the {masked_slots} slots"
        if problem is not None:
            raise FailedError(f"strategy {strategy} {problem}; this is a defect of the packing algorithm")
    difference = count_slots(strategy_counts, histogram.max_sequence_length) - histogram.counts
    if difference.any():
        length = int(np.flatnonzero(difference)[0]) + 1
        slots, sequences = difference[length - 1] + histogram.counts[length - 1], histogram.counts[length - 1]
        raise FailedError(f"length {length} has {slots} slots for {sequences} sequences; this is a defect of the algorithm")


def drop_surplus_slots(
    strategy_counts: Mapping[Strategy, int], counts: IntArray, *, whole_packs: bool = True
) -> StrategyCounts:
    """Give up the slots that no sequence fills, so that the coverage is exact; an empty pack is dropped.

    Complete packs are given up first (fewer packs), then single slots, in the order of the strategies.

    The mixture has, at every length, at least as many slots as there are sequences. Without `whole_packs` single slots alone
    are given up, so that the number of packs is that of the published algorithms.
    """
    surplus = count_slots(strategy_counts, len(counts)) - counts
    excess = {length: int(surplus[length - 1]) for length in (np.flatnonzero(surplus) + 1).tolist()}
    result = sort_strategies(strategy_counts)
    if whole_packs:
        result = _drop_whole_packs(result, excess)
    holders: defaultdict[int, set[Strategy]] = defaultdict(set)
    for strategy in result:
        for length in strategy:
            holders[length].add(strategy)
    for length in sorted(excess, reverse=True):
        _drop_slots(result, holders, length, excess[length])
    return sort_strategies({strategy: count for strategy, count in result.items() if strategy and count})


def _drop_whole_packs(strategy_counts: StrategyCounts, excess: dict[int, int]) -> StrategyCounts:
    """Drop packs all of whose slots are surplus, the longest strategies first; `excess` is reduced."""
    result = dict(strategy_counts)
    for strategy in sorted(strategy_counts, key=lambda strategy: (-len(strategy), strategy)):
        if not all(excess.get(length) for length in strategy):
            continue
        needed = Counter(strategy)
        dropped = min(strategy_counts[strategy], *(excess[length] // copies for length, copies in needed.items()))
        result[strategy] -= dropped
        for length, copies in needed.items():
            excess[length] -= dropped * copies
    return result


def _drop_slots(
    strategy_counts: StrategyCounts, holders: defaultdict[int, set[Strategy]], length: int, surplus: int
) -> None:
    """Take `surplus` slots of `length` out of the strategies that hold it, in order, one per pack at a time."""
    waiting = sorted(holders[length], reverse=True) if surplus else []
    while surplus:
        strategy = waiting.pop()
        taken = min(surplus, strategy_counts[strategy])
        if not taken:
            continue
        surplus -= taken
        strategy_counts[strategy] -= taken
        position = strategy.index(length)
        shorter = strategy[:position] + strategy[position + 1 :]
        strategy_counts[shorter] = strategy_counts.get(shorter, 0) + taken
        for held in shorter:
            holders[held].add(shorter)
        if length in shorter:
            waiting.insert(0, shorter)


# --- from slots to sequences: a slot of a plan may hold a shorter sequence, or none

_Share = list[int]  # [length of the sequence (0: none), slots]


def fill_slots(strategy_counts: Mapping[Strategy, int], counts: IntArray) -> StrategyCounts:
    """The mixture whose slots are exactly the sequences of `counts`.

    From the longest length to the shortest, a sequence takes a slot of its length, or else the shortest of the longer
    slots that are free. What no sequence needs is given up, and an empty pack is dropped. At every length, there must be at
    least as many slots of this length or more as sequences.
    """
    shares = _share_slots(count_slots(strategy_counts, len(counts)), counts)
    result: StrategyCounts = {}
    for strategy, count in sort_strategies(strategy_counts).items():
        remaining, copies = count, Counter(strategy)
        while remaining:
            part = min(remaining, *(shares[length][-1][1] // number for length, number in copies.items()))
            part = max(part, 1)  # where a share ends within a pack, its equal slots hold different sequences
            sequences = _take(shares, strategy, part)
            add_packs(result, tuple(sequence for sequence in sequences if sequence), part)
            remaining -= part
    result.pop((), None)
    return sort_strategies(result)


def _share_slots(slots: IntArray, counts: IntArray) -> dict[int, list[_Share]]:
    """For each slot length, which sequences its slots hold; the last share is used first."""
    shares: dict[int, list[_Share]] = {}
    free: list[_Share] = []  # [slot length, slots], the shortest last
    for length in (np.flatnonzero((slots > 0) | (counts > 0))[::-1] + 1).tolist():
        own, waiting = int(slots[length - 1]), int(counts[length - 1])
        shares[length] = [[length, min(own, waiting)]] if min(own, waiting) else []
        if own > waiting:
            free.append([length, own - waiting])
        waiting -= min(own, waiting)
        while waiting:
            moved = min(waiting, free[-1][1])
            shares[free[-1][0]].append([length, moved])
            waiting -= moved
            free[-1][1] -= moved
            if not free[-1][1]:
                free.pop()
    for length, number in free:
        shares[length].append([0, number])
    return shares


def _take(shares: dict[int, list[_Share]], strategy: Strategy, count: int) -> list[int]:
    """Fill the slots of so many packs; returns the sequence in each."""
    sequences = []
    for length in strategy:
        share = shares[length][-1]
        sequences.append(share[0])
        share[1] -= count
        if not share[1]:
            shares[length].pop()
    return sequences


# --- a mixture as arrays: the lengths of all packs one after the other, and where each pack begins


def flatten_packs(strategy_counts: Mapping[Strategy, int]) -> tuple[IntArray, IntArray]:
    """The length of each sequence, pack by pack, and where each pack begins: int64 [sequences], int64 [packs + 1]."""
    sizes = np.fromiter(map(len, strategy_counts), dtype=np.int64, count=len(strategy_counts))
    flat = np.fromiter(chain.from_iterable(strategy_counts), dtype=np.int64, count=int(sizes.sum()))
    packs = np.repeat(
        np.arange(len(strategy_counts)), np.fromiter(strategy_counts.values(), dtype=np.int64, count=len(strategy_counts))
    )
    starts = np.concatenate(([0], np.cumsum(sizes[packs])))
    from_strategy = (np.cumsum(sizes) - sizes)[packs] - starts[:-1]
    return flat[np.arange(starts[-1]) + np.repeat(from_strategy, sizes[packs])], starts


def count_strategies(lengths: Int32Array | IntArray, starts: IntArray) -> StrategyCounts:
    """The mixture of the packs in these arrays; lengths of 0 are omitted, and so are packs of nothing else."""
    sizes = np.diff(starts)
    strategy_counts: StrategyCounts = {}
    for size in np.unique(sizes).tolist():
        first = starts[:-1][sizes == size]
        members = np.sort(lengths[first[:, None] + np.arange(size)], axis=1)
        members = members[np.lexsort(members.T)]  # equal packs lie side by side: numpy's own unique takes ten times as long
        new = np.flatnonzero(np.concatenate(([True], (members[1:] != members[:-1]).any(axis=1))))
        repeats = np.diff(new, append=len(members))
        for strategy, repeat in zip(members[new].tolist(), repeats.tolist(), strict=True):
            add_packs(strategy_counts, tuple(strategy[strategy.count(0) :]), repeat)
    strategy_counts.pop((), None)
    return strategy_counts


# --- a finished packing, checked; and what solvers return


@dataclass(frozen=True)
class Packing(PackingFigures):
    """Packing of a histogram, and its distance from the best possible one. Checked on creation."""

    histogram: Histogram
    depth: int  # most sequences per pack that was allowed
    algorithm: str
    algorithm_used: str  # what returned the mixture, where `algorithm` chooses between several
    strategy_counts: Mapping[Strategy, int]
    certificate: Certificate  # integer prices that prove the bound
    masked_slots: int | None = None  # most masked positions per pack (Q), or None if unknown
    masked_slots_needed: int | None = None  # what the fullest strategy needs of them

    def __post_init__(self) -> None:
        check_strategy_counts(self.strategy_counts, self.histogram, self.depth, self.masked_slots)
        if self.packs < self.lower_bound:
            raise FailedError(f"{self.packs} packs are fewer than the bound {self.lower_bound}; the bound is wrong")

    @property
    def depth_used(self) -> int:
        """Sequences of the deepest strategy."""
        return max(map(len, self.strategy_counts), default=0)


Leftovers = Literal["best-fit", "complement"]
"""How `nnls` packs the sequences that its loop leaves over."""

Effort = Literal["bounded", "unlimited"]
"""Whether the search of `optimal` for fewer packs costs no more than it can gain, or continues until nothing helps."""


@dataclass(frozen=True)
class AlgorithmResult:
    """Result of an algorithm: the mixture, the algorithm that was used, and the proof of its bound if it has one."""

    strategy_counts: StrategyCounts
    algorithm_used: str
    certificate: Certificate | None = None


# --- how much a solver may do, in elementary operations: known beforehand and the same on every machine, unlike seconds
#
# Every loop that could take long reports to a `WorkBudget` what it does and stops where nothing remains; then it returns what
# it has, with the bound that is proven by then. An operation is about a nanosecond of one core. The published histograms stay
# far below every limit, so a limit changes none of their plans.

NNLS_WORK = 25e9
"""What all rounds of an NNLS method may do."""

BOUND_WORK = 6e9
"""What the proof of a bound may do where the algorithm proves none itself."""

ESTIMATE_WORK = ((1024, float("inf")), (4096, 180e9), (2**63, 40e9))
"""What all rows of an estimate may do together, by the longest packs for which it holds. Up to the first of these each row
may do what a plan may, so that it equals the plan."""

OPERATIONS_PER_STRATEGY, OPERATIONS_PER_LISTED = 4000, 100
"""Operations of a heuristic in Python, per strategy and per sequence that the strategies list."""


class WorkBudget:
    """Operations that may be done (infinitely many for no limit), and are `spent`; of a share, they are spent of all too."""

    def __init__(self, operations: float = float("inf"), whole: WorkBudget | None = None) -> None:
        self.spent = 0.0
        self._limit = operations
        self._whole = whole

    @property
    def remaining(self) -> float:
        """Operations that remain; negative where the last ones were more than that."""
        return self._limit - self.spent

    @property
    def exhausted(self) -> bool:
        """Whether nothing remains."""
        return self.remaining <= 0

    def spend(self, operations: float) -> None:
        """Count what was done, or is done next."""
        self.spent += operations
        if self._whole is not None:
            self._whole.spend(operations)

    def spend_on_heuristic(self, strategy_counts: Mapping[Strategy, int]) -> None:
        """Count what a heuristic did that returned this mixture."""
        self.spend(OPERATIONS_PER_STRATEGY * len(strategy_counts) + OPERATIONS_PER_LISTED * sum(map(len, strategy_counts)))

    def share(self, part: float) -> WorkBudget:
        """A limit of this part (0..1) of what remains, for one phase."""
        return WorkBudget(max(self.remaining, 0.0) * part, self)

    def at_most(self, operations: float) -> WorkBudget:
        """A limit of so many of the operations that remain."""
        return WorkBudget(min(operations, max(self.remaining, 0.0)), self)


def estimate_limit(max_sequence_length: int) -> WorkBudget | None:
    """Limit of the work of all rows of an estimate together; None where each has its algorithm's limit."""
    operations = next(operations for longest, operations in ESTIMATE_WORK if max_sequence_length <= longest)
    return None if operations == float("inf") else WorkBudget(operations)
