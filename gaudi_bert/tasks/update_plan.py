"""Updates of rows that belong together, as pairs of texts do: each has so many rows, and all are of one static shape.

The rows of all epochs are one stream, each epoch in an order of its own; update u takes the rows u M to (u + 1) M of it, so
every row is seen once an epoch, and only the last update of a run may have fewer. An epoch is dealt by strata: its rows are
sorted by their tokens, and every update takes one of each M-th part, so that all have about as many tokens. Sequences that
several rows of an update share are computed once. Packs are made by best fit, a few microseconds an update, without a
proof; the length of a pack is chosen so that the most that any update needs, a constant, leaves little room.

Letters: M rows of an update, N rows, E epochs, L positions of a pack, S depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray, random_words
from gaudi_bert.common.compiled import kernel
from gaudi_bert.packing.row_lengths import row_cost
from gaudi_bert.rows.packs import BatchShape, Packs

_LENGTH_STEP = 8
_USUAL_LONGEST = 512
# Of the lengths that cost at most so much more than the cheapest, the one with the fewest slots is taken.
_WORTH = 1.02
_SHAKE = 0.5
_SAMPLED_UPDATES = 256
_UPDATES_AT_ONCE = 4096


class GroupedRows(NamedTuple):
    """Rows of several sequences: row i has the sequences `members[starts[i] : starts[i + 1]]`, int64 [N + 1]."""

    members: IntArray
    starts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, rows: IntArray) -> IntArray:
        """The sequences of these rows, one row after the other."""
        sizes = self.starts[rows + 1] - self.starts[rows]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        chosen: IntArray = self.members[np.repeat(self.starts[rows], sizes) + within]
        return chosen


class UpdateShape(NamedTuple):
    """The static shape of an update: on each process, `micro_batches` of the packs of `batch`."""

    batch: BatchShape
    micro_batches: int
    processes: int

    @property
    def packs(self) -> int:
        """Of all micro-batches on all processes."""
        return self.batch.packs * self.micro_batches * self.processes


@dataclass(frozen=True, eq=False)
class RowStream:
    """The rows of all epochs, update by update; `lengths` are the tokens of each sequence."""

    lengths: IntArray
    rows: GroupedRows
    batch_rows: int
    epochs: int
    seed: int

    @property
    def updates(self) -> int:
        """Of all epochs."""
        return -(-self.epochs * len(self.rows) // self.batch_rows)

    def rows_of(self, first: int, last: int) -> IntArray:
        """The rows of the updates from `first` to before `last`, one update after the other."""
        each, begin = len(self.rows), first * self.batch_rows
        end = min(last * self.batch_rows, self.epochs * each)
        parts = [
            _order_of(self, epoch)[max(begin - epoch * each, 0) : end - epoch * each]
            for epoch in range(begin // each, -(-end // each))
        ]
        return np.concatenate(parts)

    def distinct(self, first: int, last: int) -> tuple[IntArray, IntArray]:
        """The sequences of each of these updates, every one once, in order; and where each update's begin, and the end."""
        rows = self.rows_of(first, last)
        sizes = self.rows.starts[rows + 1] - self.rows.starts[rows]
        update = np.repeat(np.arange(len(rows)) // self.batch_rows, sizes)
        found, sequences = np.divmod(np.unique(update * len(self.lengths) + self.rows.of(rows)), len(self.lengths))
        return sequences, np.searchsorted(found, np.arange(last - first + 1))

    def packs_of(self, update: int, shape: BatchShape) -> tuple[Packs, IntArray]:
        """The packs of an update, and its sequences; `members` of the packs are numbers of these sequences."""
        sequences, starts = self.distinct(update, update + 1)
        pack_of = np.zeros(len(sequences), np.int64)
        fill_packs(self.lengths[sequences], starts, shape.length, shape.depth, pack_of, np.zeros(1, np.int64))
        sizes = np.bincount(pack_of)
        return Packs(np.argsort(pack_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])), sequences

    def needs(self, length: int, depth: int, updates: int | None = None) -> tuple[int, int]:
        """The most packs of this length that an update needs, and the most sequences of a pack, of the first `updates`."""
        most, deepest = 0, 0
        for sequences, starts in self._parts(self.updates if updates is None else updates):
            needed = np.zeros(len(starts) - 1, np.int64)
            pack_of = np.zeros(len(sequences), np.int64)
            deepest = max(deepest, fill_packs(self.lengths[sequences], starts, length, depth, pack_of, needed))
            most = max(most, int(needed.max(initial=0)))
        return most, deepest

    def distinct_tokens(self, updates: int) -> int:
        """The tokens of the first updates, of sequences that are shared within an update once."""
        return sum(int(self.lengths[sequences].sum()) for sequences, _ in self._parts(updates))

    def _parts(self, updates: int) -> Iterator[tuple[IntArray, IntArray]]:
        for first in range(0, updates, _UPDATES_AT_ONCE):
            yield self.distinct(first, min(first + _UPDATES_AT_ONCE, updates))

    @cached_property
    def tokens(self) -> IntArray:
        """Of each row."""
        return np.add.reduceat(self.lengths[self.rows.members], self.rows.starts[:-1])


@lru_cache(maxsize=4)
def _order_of(stream: RowStream, epoch: int) -> IntArray:
    return stratified_order(stream.tokens, stream.batch_rows, stream.seed, epoch)


# --- the static shape


def choose_shape(
    stream: RowStream, *, most_packs: int, processes: int, hidden_size: int, longest: int, depth: int | None = None
) -> UpdateShape:
    """A shape that all updates fit, of micro-batches of at most `most_packs`, and of packs of at most `longest` positions.

    `depth` is the most sequences of a pack; None for as many as fit.
    """
    shortest = _rounded_up(int(stream.lengths.max()))
    lengths = range(shortest, max(shortest, min(longest, _USUAL_LONGEST)) + 1, _LENGTH_STEP)
    most_depth, sampled = depth or lengths[-1], min(stream.updates, _SAMPLED_UPDATES)

    def divided(packs: int, length: int) -> UpdateShape:
        micro_batches = -(-packs // (most_packs * processes))
        batch = BatchShape(-(-packs // (micro_batches * processes)), length, most_depth)
        return UpdateShape(batch, micro_batches, processes)

    tried = [divided(stream.needs(length, most_depth, sampled)[0], length) for length in lengths]
    costs = [shape.packs * row_cost(shape.batch.length, hidden_size) for shape in tried]
    worth = [shape for shape, cost in zip(tried, costs, strict=True) if cost <= _WORTH * min(costs)]
    chosen = min(worth, key=lambda shape: (shape.packs * shape.batch.length, shape.batch.length))
    length = chosen.batch.length
    while True:  # of all updates, one may need more than those that were sampled
        packs, deepest = stream.needs(length, most_depth)
        if packs <= chosen.packs or length + _LENGTH_STEP > lengths[-1]:
            shape = chosen if packs <= chosen.packs else divided(packs, length)
            return shape._replace(batch=shape.batch._replace(length=length, depth=deepest))
        length += _LENGTH_STEP


def _rounded_up(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


# --- the order of rows, and packs by best fit


def stratified_order(tokens: IntArray, batch_rows: int, seed: int, epoch: int) -> IntArray:
    """The rows of an epoch, [N], in an order where every M of the stream, counted over all epochs, are alike.

    Of the rows of an update in this epoch, the k-th has a rank by tokens of about (k + u) / M, u random. Ranks are shaken by
    part of a stratum, so that strata are others in each epoch.
    """
    count = len(tokens)
    shake, draw = random_words(2 * count, seed, "strata", epoch).reshape(2, -1).astype(np.float64) / 2.0**64
    by_tokens = np.argsort(tokens, kind="stable")
    by_tokens = by_tokens[np.argsort(np.arange(count) + _SHAKE * shake * count / batch_rows, kind="stable")]
    place = np.arange(epoch * count, (epoch + 1) * count)
    update = place // batch_rows
    sizes = np.bincount(update - update[0])
    within = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.empty(count, np.int64)
    order[np.argsort((within + draw) / np.repeat(sizes, sizes), kind="stable")] = by_tokens
    return order


@kernel
def fill_packs(lengths: IntArray, starts: IntArray, length: int, depth: int, pack_of: IntArray, needed: IntArray) -> int:
    """Best fit, the longest first, for each update by itself; the sequences of update i are `starts[i] : starts[i + 1]`.

    Fills in the pack of each sequence, and the packs of each update; returns the most sequences of a pack.
    """
    deepest = 0
    for update in range(starts.size - 1):
        begin, end = starts[update], starts[update + 1]
        # Sequences by their lengths, and open packs by the room that they have: lists, of which these are the heads.
        sequence_with, pack_with = np.full(length + 1, -1), np.full(length + 1, -1)
        next_sequence, next_pack = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
        held = np.zeros(end - begin, np.int64)
        for index in range(begin, end):
            next_sequence[index - begin] = sequence_with[lengths[index]]
            sequence_with[lengths[index]] = index - begin
        packs = 0
        for size in range(length, 0, -1):
            room = size
            index = sequence_with[size]
            while index >= 0:
                while room <= length and pack_with[room] < 0:
                    room += 1
                if room > length:
                    pack, left = packs, length - size
                    packs += 1
                else:
                    pack, left = pack_with[room], room - size
                    pack_with[room] = next_pack[pack]
                pack_of[begin + index] = pack
                held[pack] += 1
                deepest = max(deepest, held[pack])
                if held[pack] < depth:
                    next_pack[pack] = pack_with[left]
                    pack_with[left] = pack
                    room = min(room, max(left, size))
                index = next_sequence[index]
        needed[update] = packs
    return deepest
