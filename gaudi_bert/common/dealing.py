"""Which sequences go into which pack: seeded, and a function of the lengths, the strategies and the seed alone.

A plan states how many packs of each strategy there are. Its packs are put into a random order; the sequences of each
length are put into a random order; then each slot of a pack takes the next sequence of its length. Any run of packs is
therefore a fair sample. Sequences find their slots by stable sorts of small numbers, so the work and the memory are a few
numbers a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Int32Array, IntArray, permutation
from gaudi_bert.common.errors import InputError


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
    order = permutation(lengths.size, seed, "sequences", group).astype(kind)
    by_length, members = order[_order_of(lengths[order])], np.empty_like(order)
    del order
    kinds = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    kinds = kinds[permutation(kinds.size, seed, "packs", group)]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[kinds])])
    slots = np.arange(members.size) + np.repeat(flat_starts[kinds] - starts[:-1], sizes[kinds])
    members[_order_of(flat[slots])] = by_length
    return Assignment(starts, members)


def _order_of(lengths: AnyArray) -> IntArray:
    """The order by length, in which those of one length stay as they are; numbers of 16 bits take a third of the time."""
    return np.argsort(lengths.astype(np.uint16) if lengths.max(initial=0) < 1 << 16 else lengths, kind="stable")


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
