"""Strategies and mixtures: what every packing algorithm returns, and the check that it is a packing at all.

A strategy is a sorted tuple of lengths that share a pack, e.g. (67, 216, 229); a mixture says how often each strategy is
used (paper F.3). Mixtures here are exact: every sequence of the histogram has its slot, and no slot is left for a sequence
that does not exist. Algorithms that over-subscribe short lengths (the "padding sequences" of the NNLS methods) give up
those slots through `trim_to_exact`; the tokens of such a slot are padding either way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.packing.histogram import Histogram

__all__ = ["Mixture", "Strategy", "add_packs", "check_mixture", "coverage", "packs_of", "sorted_mixture", "trim_to_exact"]

Strategy = tuple[int, ...]
Mixture = dict[Strategy, int]


def packs_of(mixture: Mapping[Strategy, int]) -> int:
    """Number of packs."""
    return sum(mixture.values())


def add_packs(mixture: Mixture, strategy: Strategy, count: int) -> None:
    """Use `strategy` (sorted here) `count` times more."""
    if count:
        strategy = tuple(sorted(strategy))
        mixture[strategy] = mixture.get(strategy, 0) + int(count)


def sorted_mixture(mixture: Mapping[Strategy, int]) -> Mixture:
    """The same mixture in the order of its strategies, so that what is written is always the same."""
    return {strategy: int(mixture[strategy]) for strategy in sorted(mixture)}


def coverage(mixture: Mapping[Strategy, int], max_sequence_length: int) -> IntArray:
    """Slots that the mixture has for each length: int64 [max_sequence_length].

    Raises:
        FailedError: a strategy holds a length outside 1 .. max_sequence_length.
    """
    slots = [0] * (max_sequence_length + 1)
    for strategy, count in mixture.items():
        if strategy and not 1 <= min(strategy) <= max(strategy) <= max_sequence_length:
            raise FailedError(f"strategy {strategy} holds a length outside 1 .. {max_sequence_length}; this is a defect")
        for length in strategy:
            slots[length] += int(count)
    return np.asarray(slots[1:], dtype=np.int64)


def check_mixture(
    mixture: Mapping[Strategy, int], histogram: Histogram, depth: int, masked_slots: int | None = None
) -> None:
    """Check all that makes a mixture a packing of `histogram`, in exact integers.

    Args:
        mixture: what an algorithm returned.
        histogram: what it was asked to pack.
        depth: most sequences a pack.
        masked_slots: most masked positions a pack, held against the largest number seen at each length; None: no limit.

    Raises:
        FailedError: a strategy is empty, unsorted, too deep, too long, over the masked budget or used less than once; or a
            length has more or fewer slots than sequences. Each is a defect of the algorithm that made the mixture.
    """
    for strategy, count in mixture.items():
        problem = None
        if not strategy or list(strategy) != sorted(strategy):
            problem = "is empty or not sorted"
        elif count < 1:
            problem = f"is used {count} times"
        elif len(strategy) > depth:
            problem = f"holds {len(strategy)} sequences, more than the depth {depth}"
        elif sum(strategy) > histogram.max_sequence_length:
            problem = f"holds {sum(strategy)} tokens, more than {histogram.max_sequence_length}"
        elif masked_slots is not None and sum(map(histogram.masked_of, strategy)) > masked_slots:
            masked = sum(map(histogram.masked_of, strategy))
            problem = f"may hold {masked} masked positions, more than the {masked_slots} slots"
        if problem is not None:
            raise FailedError(f"strategy {strategy} {problem}; this is a defect of the packing algorithm")
    difference = coverage(mixture, histogram.max_sequence_length) - histogram.counts
    if difference.any():
        length = int(np.flatnonzero(difference)[0]) + 1
        raise FailedError(
            f"length {length} has {histogram.counts[length - 1] + difference[length - 1]} slots for"
            f" {histogram.counts[length - 1]} sequences; this is a defect of the packing algorithm"
        )


def trim_to_exact(mixture: Mapping[Strategy, int], counts: IntArray, *, whole_packs: bool = True) -> Mixture:
    """Give up the slots that no sequence fills, so that the coverage is exact; a pack left empty is dropped.

    Whole packs are given up first (fewer packs), then single slots, in the order of the strategies.

    Args:
        mixture: at least as many slots as sequences at every length.
        counts: int64 [L], sequences of length 1 .. L.
        whole_packs: False keeps to single slots, so that the number of packs stays what the published algorithms count.

    Raises:
        InputError: some length has fewer slots than sequences.
    """
    surplus = coverage(mixture, len(counts)) - counts
    if surplus.size and int(surplus.min()) < 0:
        length = int(np.argmin(surplus)) + 1
        raise InputError(f"length {length} has {-surplus[length - 1]} slots too few; only surplus slots can be trimmed")
    left = {length: int(surplus[length - 1]) for length in (np.flatnonzero(surplus) + 1).tolist()}
    result = sorted_mixture(mixture)
    if whole_packs:
        result = _drop_whole_packs(result, left)
    holders: defaultdict[int, set[Strategy]] = defaultdict(set)
    for strategy in result:
        _note(holders, strategy)
    for length in sorted(left, reverse=True):
        _drop_slots(result, holders, length, left[length])
    return sorted_mixture({strategy: count for strategy, count in result.items() if strategy and count})


def _drop_whole_packs(mixture: Mixture, left: dict[int, int]) -> Mixture:
    """Drop packs all of whose slots are surplus, the longest strategies first; `left` is what remains surplus."""
    result = dict(mixture)
    for strategy in sorted(mixture, key=lambda strategy: (-len(strategy), strategy)):
        if not all(left.get(length) for length in strategy):
            continue
        needed = Counter(strategy)
        dropped = min(mixture[strategy], *(left[length] // copies for length, copies in needed.items()))
        result[strategy] -= dropped
        for length, copies in needed.items():
            left[length] -= dropped * copies
    return result


def _note(holders: defaultdict[int, set[Strategy]], strategy: Strategy) -> None:
    """Enter a strategy at each of its lengths."""
    for length in strategy:
        holders[length].add(strategy)


def _drop_slots(mixture: Mixture, holders: defaultdict[int, set[Strategy]], length: int, surplus: int) -> None:
    """Take `surplus` slots of `length` out of the strategies that hold it, in order, one a pack at a time."""
    waiting = sorted(holders[length], reverse=True) if surplus else []
    while surplus:
        strategy = waiting.pop()
        taken = min(surplus, mixture[strategy])
        if not taken:
            continue
        surplus -= taken
        mixture[strategy] -= taken
        position = strategy.index(length)
        shorter = strategy[:position] + strategy[position + 1 :]
        mixture[shorter] = mixture.get(shorter, 0) + taken
        _note(holders, shorter)
        if length in shorter:
            waiting.insert(0, shorter)
