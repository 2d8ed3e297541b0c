"""Assign sequences to packs at random, but reproducibly for a seed.

A plan states how many packs use each strategy. The packs are put in random order, and so are the sequences of each length.
Each place in a pack then gets the next sequence of the length that the strategy requires. Therefore, any consecutive packs
are a representative sample of the data. The sequences are sorted by counting, so time and memory are proportional to the
number of sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import AnyArray, Int32Array, IntArray, draw_random_uint64, permutation
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.errors import InputError

# Loading the compiled kernels takes half a second. For fewer sequences than this, numpy is faster.
_MIN_COMPILED_SEQUENCES = 50_000


class SampledPacks(NamedTuple):
    """Lists which sequences each pack contains. Pack p contains the sequences `members[starts[p] : starts[p + 1]]`.

    Attributes:
        members: Sequence indices, each exactly once, int32 or int64 [sequences].
        starts: The start of each pack in `members`, followed by the end of the last pack, int64 [packs + 1].
    """

    members: AnyArray
    starts: IntArray

    def __len__(self) -> int:
        """Return the number of packs."""
        return len(self.starts) - 1


def sample_packs(
    lengths: AnyArray,
    strategies: Sequence[tuple[Sequence[int], int]],
    seed: int,
    group: int,
    dtype: type[np.signedinteger[Any]] = np.int32,
) -> SampledPacks:
    """Assign sequences to the packs of a plan at random.

    Args:
        lengths: The length of each sequence, integers [sequences] from 1.
        strategies: Pairs of a strategy (the lengths in a pack) and the number of packs that use it.
        seed: The seed of the assignment.
        group: The number of the group of sequences. Groups are assigned independently of each other.
        dtype: The dtype of the sequence numbers.

    Returns:
        The packs in random order.

    Raises:
        InputError: The slots of the strategies do not match the sequences.
    """
    sizes = np.array([len(strategy) for strategy, _ in strategies], dtype=np.int64)
    counts = np.array([count for _, count in strategies], dtype=np.int64)
    flat_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    flat_lengths = np.fromiter(
        itertools.chain.from_iterable(strategy for strategy, _ in strategies), np.int32, count=int(flat_starts[-1])
    )
    _check_plan_matches_lengths(lengths, flat_lengths, np.repeat(counts, sizes))
    starts_by_length = np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(np.bincount(lengths))]
    )  # sequences shorter than 0, 1, ...
    by_length = _shuffle_within_lengths(lengths, starts_by_length, seed, group)
    pack_strategies = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    pack_strategies = pack_strategies[permutation(pack_strategies.size, seed, "packs", group)]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[pack_strategies])])
    members = np.empty(lengths.size, dtype)
    if lengths.size < _MIN_COMPILED_SEQUENCES:
        slots = np.repeat(flat_starts[pack_strategies] - starts[:-1], sizes[pack_strategies]) + np.arange(lengths.size)
        members[np.argsort(flat_lengths[slots], kind="stable")] = by_length
    else:
        _fill_packs(pack_strategies, flat_starts, flat_lengths, by_length, starts_by_length, members)
    return SampledPacks(members, starts)


def _shuffle_within_lengths(lengths: AnyArray, starts_by_length: IntArray, seed: int, group: int) -> AnyArray:
    """Return the indices of all sequences, sorted by length. Sequences of the same length are in random order."""
    number = np.int32 if lengths.size < 1 << 31 else np.int64
    if lengths.size < _MIN_COMPILED_SEQUENCES:
        order = permutation(lengths.size, seed, "sequences", group, dtype=number)
        return order[np.argsort(lengths[order], kind="stable")]
    order = np.empty(lengths.size, number)
    bits = max(1, (lengths.size // 4096).bit_length())  # shifting by all 64 bits would be undefined
    _argsort_uniform_words(draw_random_uint64(lengths.size, seed, "sequences", group), bits, order)
    result = np.empty_like(order)
    _sort_by_length(order, lengths, starts_by_length.copy(), result)
    return result


@kernel
def _argsort_uniform_words(words: NDArray[np.uint64], bits: int, order: AnyArray) -> None:
    """Write the stable argsort of random 64-bit integers to `order`, as numpy's `argsort` would compute it.

    The integers in `words` must be uniformly distributed. They are first distributed to buckets by their first `bits` bits,
    so that each bucket fits in the processor's cache. Within a bucket, they are distributed again by further bits, and then
    sorted by insertion.
    """
    starts = np.zeros((1 << bits) + 1, np.int64)
    for word in words:
        starts[(word >> np.uint64(64 - bits)) + np.uint64(1)] += 1
    starts = np.cumsum(starts)
    ends = starts.copy()
    for index in range(words.size):
        bucket = words[index] >> np.uint64(64 - bits)
        order[ends[bucket]] = index
        ends[bucket] += 1
    most = np.max(starts[1:] - starts[:-1])
    bucket_words, ordered, placed = np.empty(most, np.uint64), np.empty(most, np.uint64), np.empty_like(order[:most])
    inner = 1
    while most >> inner > 2:
        inner += 1
    starts_by_length, lasts = np.empty((1 << inner) + 1, np.int64), np.empty((1 << inner) + 1, np.int64)
    for bucket in range(starts.size - 1):
        start, size = starts[bucket], starts[bucket + 1] - starts[bucket]
        starts_by_length[:] = 0
        for index in range(size):
            bucket_words[index] = words[order[start + index]]
            starts_by_length[(bucket_words[index] << np.uint64(bits) >> np.uint64(64 - inner)) + np.uint64(1)] += 1
        for number in range(1 << inner):
            starts_by_length[number + 1] += starts_by_length[number]
        lasts[:] = starts_by_length
        for index in range(size):
            word = bucket_words[index]
            number = word << np.uint64(bits) >> np.uint64(64 - inner)
            slot = lasts[number]
            lasts[number] += 1
            while slot > starts_by_length[number] and ordered[slot - 1] > word:
                ordered[slot], placed[slot] = ordered[slot - 1], placed[slot - 1]
                slot -= 1
            ordered[slot], placed[slot] = word, order[start + index]
        order[start : start + size] = placed[:size]


@kernel
def _sort_by_length(order: AnyArray, lengths: AnyArray, next_positions: IntArray, result: AnyArray) -> None:
    """Sort the sequence indices in `order` by length into `result`. Sequences of the same length keep their order.

    `next_positions[length]` is the position in `result` for the next sequence of this length. The array is changed in place.
    """
    for index in range(order.size):
        sequence = order[index]
        length = lengths[sequence]
        result[next_positions[length]] = sequence
        next_positions[length] += 1


@kernel
def _fill_packs(
    pack_strategies: Int32Array,
    flat_starts: IntArray,
    flat_lengths: Int32Array,
    by_length: AnyArray,
    next_positions: IntArray,
    members: AnyArray,
) -> None:
    """Write the sequence indices of each pack to `members`. Each slot of a pack gets the next sequence of the slot's length.

    Pack p uses the strategy with the number `pack_strategies[p]`, and the lengths of strategy s begin in `flat_lengths` at
    `flat_starts[s]`. `next_positions[length]` is the position in `by_length` of the next sequence of this length.
    """
    position = 0
    for pack in range(pack_strategies.size):
        for slot in range(flat_starts[pack_strategies[pack]], flat_starts[pack_strategies[pack] + 1]):
            length = flat_lengths[slot]
            members[position] = by_length[next_positions[length]]
            next_positions[length] += 1
            position += 1


def _check_plan_matches_lengths(lengths: AnyArray, planned_lengths: Int32Array, pack_counts: IntArray) -> None:
    """For every length, check that the packs of a plan have room for exactly as many sequences of this length as there are.

    Args:
        lengths: The length of each sequence, integers [sequences].
        planned_lengths: The lengths in all strategies of the plan, one strategy after the other.
        pack_counts: For each of the planned lengths, the number of packs that use its strategy.

    Raises:
        InputError: The numbers differ for a length.
    """
    most = int(max(lengths.max(initial=0), planned_lengths.max(initial=0)))
    counted = np.bincount(lengths, minlength=most + 1)
    planned = np.zeros(most + 1, dtype=np.int64)
    np.add.at(planned, planned_lengths, pack_counts)
    if not np.array_equal(counted, planned):
        length = int(np.flatnonzero(counted != planned)[0])
        raise InputError(
            f"the plan has slots for {planned[length]} sequences of length {length}, but the data contain "
            f"{counted[length]}; create the histogram and the plan again"
        )
