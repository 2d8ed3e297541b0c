"""Updates of rows that belong together, as pairs of texts do: each has so many rows, and all are of one static shape.

The rows of all epochs are one stream, each epoch in another random order; update u takes the rows u M to (u + 1) M of it,
so every row is seen once an epoch, and only the last update of a run may have fewer. Sequences that several rows of an
update share are computed once. Updates swap rows until all need as many tokens. Packs are built by best fit, without a
proof; their length is chosen so that the most packs that an update needs, a constant, leave little room.

Letters: M rows of an update, N rows, E epochs, L positions of a pack, S depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import FloatArray, IntArray, permutation
from gaudi_bert.common.compiled import kernel
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.packing.row_lengths import row_cost
from gaudi_bert.rows.packs import BatchShape

_LENGTH_STEP = 8
_USUAL_LONGEST = 512
# Of the lengths that cost at most so much more than the cheapest, the one with the fewest slots is taken.
_WORTH = 1.03
# All lengths are tried on the updates of so many rows, and so many of the cheapest on all.
_SAMPLED_ROWS, _TRIED = 2**17, 8
_UPDATES_AT_ONCE = 4096
_MOST_SWEEPS = 16


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
        """Return the packs of all micro-batches on all processes."""
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
        """Return the updates of all epochs."""
        return -(-self.epochs * len(self.rows) // self.batch_rows)

    @property
    def looked_at(self) -> int:
        """Return how many updates are looked at before a run: those of an epoch, or of so many rows."""
        an_epoch = -(-len(self.rows) // self.batch_rows)
        return min(self.updates, max(an_epoch, _SAMPLED_ROWS // self.batch_rows + 1))

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
        of_update, sequences = np.divmod(np.unique(update * len(self.lengths) + self.rows.of(rows)), len(self.lengths))
        return sequences, np.searchsorted(of_update, np.arange(last - first + 1))

    def packs_of(self, update: int, shape: BatchShape) -> tuple[SampledPacks, IntArray]:
        """The packs of an update, and its sequences; `members` of the packs are numbers of these sequences."""
        sequences, starts = self.distinct(update, update + 1)
        pack_of = np.zeros(len(sequences), np.int64)
        _fill_packs(self.lengths[sequences], starts, shape.length, shape.depth, pack_of, np.zeros(1, np.int64))
        sizes = np.bincount(pack_of)
        return SampledPacks(np.argsort(pack_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])), sequences

    def needs(self, lengths: Sequence[int], depth: int, updates: int) -> list[tuple[int, int]]:
        """For packs of each length: the most that one of the first updates needs, and the most sequences of a pack."""
        most, deepest = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
        for sequences, starts in self._parts(updates):
            needed, pack_of = np.zeros(len(starts) - 1, np.int64), np.zeros(len(sequences), np.int64)
            for number, length in enumerate(lengths):
                held = _fill_packs(self.lengths[sequences], starts, length, depth, pack_of, needed)
                deepest[number] = max(deepest[number], held)
                most[number] = max(most[number], needed.max())
        return [(int(packs), int(held)) for packs, held in zip(most, deepest, strict=True)]

    def distinct_tokens(self, updates: int) -> int:
        """The tokens of the first updates, of sequences that are shared within an update once."""
        return sum(int(self.lengths[sequences].sum()) for sequences, _ in self._parts(updates))

    def _parts(self, updates: int) -> Iterator[tuple[IntArray, IntArray]]:
        for first in range(0, updates, _UPDATES_AT_ONCE):
            yield self.distinct(first, min(first + _UPDATES_AT_ONCE, updates))

    @cached_property
    def tokens(self) -> IntArray:
        """Return the tokens of each row."""
        return np.add.reduceat(self.lengths[self.rows.members], self.rows.starts[:-1])


@lru_cache(maxsize=4)
def _order_of(stream: RowStream, epoch: int) -> IntArray:
    count = len(stream.rows)
    update = np.arange(epoch * count, (epoch + 1) * count) // stream.batch_rows
    return _balanced(stream, permutation(count, stream.seed, "rows", epoch), update - update[0])


# --- the static shape


def choose_shape(
    stream: RowStream, *, most_packs: int, processes: int, hidden_size: int, longest: int, depth: int | None = None
) -> UpdateShape:
    """Return a shape that the updates that are looked at fit, of micro-batches of at most `most_packs`.

    Packs have at most `longest` positions.

    `depth` is the most sequences of a pack; None for as many as fit.
    """
    shortest = -(-int(stream.lengths.max()) // _LENGTH_STEP) * _LENGTH_STEP
    lengths = list(range(shortest, max(shortest, min(longest, _USUAL_LONGEST)) + 1, _LENGTH_STEP))

    def shapes(updates: int) -> list[UpdateShape]:
        """For each length, the cheapest first."""
        shapes = []
        for length, (packs, deepest) in zip(lengths, stream.needs(lengths, depth or lengths[-1], updates), strict=True):
            micro_batches = -(-packs // (most_packs * processes))
            batch = BatchShape(-(-packs // (micro_batches * processes)), length, deepest)
            shapes.append(UpdateShape(batch, micro_batches, processes))
        return sorted(shapes, key=cost)

    def cost(shape: UpdateShape) -> float:
        return shape.packs * row_cost(shape.batch.length, hidden_size)

    sampled = _SAMPLED_ROWS // stream.batch_rows + 1
    if sampled < stream.looked_at:
        lengths = [shape.batch.length for shape in shapes(sampled)[:_TRIED]]
    tried = shapes(stream.looked_at)
    worth = [shape for shape in tried if cost(shape) <= _WORTH * cost(tried[0])]
    return min(worth, key=lambda shape: (shape.packs * shape.batch.length, shape.batch.length))


# --- the order of rows, and packs by best fit


def _balanced(stream: RowStream, order: IntArray, update: IntArray) -> IntArray:
    """The rows of an epoch in an order in which all updates need as many tokens; `update` is that of each row in `order`.

    The update with the most tokens swaps rows with that with the fewest, the second with the last but one, and so on, until
    nothing changes. Only rows that share no sequence with others of the two are swapped, so each update shares as many as
    before: equal sequences are neither gathered nor spread.
    """
    lengths, rows, tokens = stream.lengths, stream.rows, stream.tokens
    sizes = np.bincount(update)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    sequences = np.unique(np.repeat(update, np.diff(rows.starts)[order]) * len(lengths) + rows.of(order))
    needed = np.bincount(sequences // len(lengths), lengths[sequences % len(lengths)], len(sizes))
    # This epoch may have only some of the rows of an update; expected are the tokens that so many random rows need, rounded:
    # ranks on other processors must swap the same rows.
    uses = np.bincount(rows.members, minlength=len(lengths))
    known_sizes, of_update = np.unique(sizes, return_inverse=True)
    expected = np.rint([lengths @ (1 - (1 - size / len(order)) ** uses) for size in known_sizes])
    excess = needed - expected[of_update]
    for _ in range(_MOST_SWEEPS):
        order = order[np.lexsort((tokens[order], update))]
        by_excess = np.argsort(excess, kind="stable")
        pair = np.empty(len(sizes), np.int64)
        pair[by_excess] = np.minimum(np.arange(len(sizes)), np.arange(len(sizes))[::-1])
        # Free is a row that has no sequence of another row of its pair of updates.
        texts, free = np.diff(rows.starts)[order], np.ones(len(order), np.bool_)
        sequences = np.repeat(pair[update], texts) * len(lengths) + rows.of(order)
        _, which, uses = np.unique(sequences, return_inverse=True, return_counts=True)
        free[np.repeat(np.arange(len(order)), texts)[uses[which] > 1]] = False
        if not _swap_rows(order, tokens, free, starts, by_excess, excess):
            break
    return order


@kernel
def _swap_rows(
    order: IntArray,
    tokens: IntArray,
    free: NDArray[np.bool_],
    starts: IntArray,
    by_excess: IntArray,
    excess: FloatArray,
) -> int:
    """Swap free rows of two updates while that brings their excess together; the number of swaps.

    Rows of an update are sorted by their tokens. All but `tokens` and `starts` are changed.
    """
    swaps, updates = 0, starts.size - 1
    for pair in range(updates // 2):
        small, large = by_excess[pair], by_excess[updates - 1 - pair]
        while True:
            target = 0.5 * (excess[large] - excess[small])
            closest, first, second, other = target, -1, -1, starts[small]
            for candidate in range(starts[large], starts[large + 1]):
                while free[candidate] and other < starts[small + 1]:
                    if free[other]:
                        moved = tokens[order[candidate]] - tokens[order[other]]
                        if abs(moved - target) < closest:
                            closest, first, second = abs(moved - target), other, candidate
                        if moved < target:
                            break
                    other += 1
            if first < 0:
                break
            moved = tokens[order[second]] - tokens[order[first]]
            order[first], order[second] = order[second], order[first]
            free[first] = free[second] = False
            excess[small] += moved
            excess[large] -= moved
            swaps += 1
    return swaps


@kernel
def _fill_packs(lengths: IntArray, starts: IntArray, length: int, depth: int, pack_of: IntArray, needed: IntArray) -> int:
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
                    pack, room_after = packs, length - size
                    packs += 1
                else:
                    pack, room_after = pack_with[room], room - size
                    pack_with[room] = next_pack[pack]
                pack_of[begin + index] = pack
                held[pack] += 1
                deepest = max(deepest, held[pack])
                if held[pack] < depth:
                    next_pack[pack] = pack_with[room_after]
                    pack_with[room_after] = pack
                    room = min(room, max(room_after, size))
                index = next_sequence[index]
        needed[update] = packs
    return deepest
