"""Which sequences go into which pack: seeded, and a function of the lengths, the strategies and the seed alone.

A plan states how many packs of each strategy there are. Its packs are put into a random order; the sequences of each
length are put into a random order; then each slot of a pack takes the next sequence of its length. Any run of packs is
therefore a fair sample. Sequences are sorted by counting, so work and memory are a few numbers a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Int32Array, IntArray, permutation, permutation_of_kind
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.errors import InputError

# Fewer sequences are dealt by numpy, which is ready at once: loading compiled code takes half a second.
_COMPILED_FROM = 50_000


class Assignment(NamedTuple):
    """Packs in their order: pack p holds `members[starts[p] : starts[p + 1]]`.

    Attributes:
        starts: int64 [packs + 1].
        members: int32 or int64 [sequences], numbers of sequences, each exactly once.
    """

    starts: IntArray
    members: AnyArray

    @property
    def packs(self) -> int:
        """Number of packs."""
        return self.starts.size - 1


def deal_sequences(
    lengths: AnyArray,
    strategies: Sequence[tuple[Sequence[int], int]],
    seed: int,
    group: int,
    kind: type[np.signedinteger[Any]] = np.int32,
) -> Assignment:
    """Deal sequences to the packs of a plan.

    Args:
        lengths: integers [sequences], from 1.
        strategies: pairs (lengths of a pack, how many such packs).
    """
    sizes = np.array([len(strategy) for strategy, _ in strategies], dtype=np.int64)
    counts = np.array([count for _, count in strategies], dtype=np.int64)
    flat_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    flat = np.fromiter(
        itertools.chain.from_iterable(strategy for strategy, _ in strategies), np.int32, count=int(flat_starts[-1])
    )
    _check_slots(lengths, flat, np.repeat(counts, sizes))
    firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(lengths))])  # sequences shorter than 0, 1, ...
    by_length = _by_length(lengths, firsts, seed, group)
    kinds = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    kinds = kinds[permutation(kinds.size, seed, "packs", group)]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[kinds])])
    members = np.empty(lengths.size, kind)
    if lengths.size < _COMPILED_FROM:
        slots = np.repeat(flat_starts[kinds] - starts[:-1], sizes[kinds]) + np.arange(lengths.size)
        members[np.argsort(flat[slots], kind="stable")] = by_length
    else:
        _fill_packs(kinds, flat_starts, flat, by_length, firsts, members)
    return Assignment(starts, members)


def _by_length(lengths: AnyArray, firsts: IntArray, seed: int, group: int) -> AnyArray:
    """The numbers of all sequences by their lengths, those of one length in their random order."""
    number = np.int32 if lengths.size < 1 << 31 else np.int64
    order = permutation_of_kind(number, lengths.size, seed, "sequences", group)
    if lengths.size < _COMPILED_FROM:
        return order[np.argsort(lengths[order], kind="stable")]
    result = np.empty_like(order)
    _sort_by_length(order, lengths, firsts.copy(), result)
    return result


@kernel
def _sort_by_length(order: AnyArray, lengths: AnyArray, nexts: IntArray, result: AnyArray) -> None:
    """Put the sequences of `order` where `nexts` has room for their lengths."""
    for index in range(order.size):
        sequence = order[index]
        length = lengths[sequence]
        result[nexts[length]] = sequence
        nexts[length] += 1


@kernel
def _fill_packs(
    kinds: Int32Array, flat_starts: IntArray, flat: Int32Array, by_length: AnyArray, nexts: IntArray, members: AnyArray
) -> None:
    """Give each slot of each pack the next sequence of its length; pack p has the strategy `kinds[p]`."""
    at = 0
    for pack in range(kinds.size):
        for slot in range(flat_starts[kinds[pack]], flat_starts[kinds[pack] + 1]):
            length = flat[slot]
            members[at] = by_length[nexts[length]]
            nexts[length] += 1
            at += 1


def _check_slots(lengths: AnyArray, flat: Int32Array, repeats: IntArray) -> None:
    """The plan must have as many slots of each length as there are sequences."""
    most = int(max(lengths.max(initial=0), flat.max(initial=0)))
    counted = np.bincount(lengths, minlength=most + 1)
    planned = np.zeros(most + 1, dtype=np.int64)
    np.add.at(planned, flat, repeats)
    if not np.array_equal(counted, planned):
        length = int(np.flatnonzero(counted != planned)[0])
        raise InputError(
            f"the plan has slots for {planned[length]} sequences of length {length}, the records hold {counted[length]};"
            " make the histogram and the plan again"
        )
