"""Planning updates whose rows consist of several texts, such as pairs, so that all updates have the same static shape.

The rows of all epochs form one stream, in which each epoch has another random order. With M rows per update, update u takes
the rows from u M to (u + 1) M. Therefore every row occurs once per epoch, and only the last update of a run may have fewer
rows. A sequence that several rows of an update share is computed once. Rows are swapped between updates until all updates
need about equally many tokens. Packs are built by best fit, without a proof of optimality. Every update computes as many
packs as the largest update needs, and the length of a pack is chosen so that this leaves little room unused.

Letters:
    M: rows of an update.
    N: rows.
    E: epochs.
    L: positions of a pack.
    S: depth, the largest number of sequences in a pack.
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
from gaudi_bert.packing.row_lengths import estimate_row_cost
from gaudi_bert.rows.packs import BatchShape

_LENGTH_STEP = 8
_USUAL_LONGEST = 512
# Pack lengths that cost at most 3 % more than the cheapest one count as equally good. Of these, the length that needs the
# fewest token slots is chosen.
_ACCEPTABLE_COST = 1.03
# To save time, the cost of each pack length is first estimated from about _SAMPLED_ROWS rows. Then only the _TRIED_LENGTHS
# cheapest lengths are compared on all examined updates.
_SAMPLED_ROWS, _TRIED_LENGTHS = 2**17, 8
_UPDATES_AT_ONCE = 4096
_MAX_SWEEPS = 16


class SequenceGroups(NamedTuple):
    """Groups of sequences, such as the sequences of each row or of each weight update. Group i consists of the sequences
    `members[starts[i] : starts[i + 1]]`.

    Attributes:
        members: int64, the sequences of all groups, group by group.
        starts: int64 [groups + 1], where each group begins in `members`, followed by the end of the last group.
    """

    members: IntArray
    starts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def select_sequences(self, groups: IntArray) -> IntArray:
        """Return the sequences of the given groups in one array, group by group."""
        sizes = self.starts[groups + 1] - self.starts[groups]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        chosen: IntArray = self.members[np.repeat(self.starts[groups], sizes) + within]
        return chosen


class UpdateShape(NamedTuple):
    """The static shape of all weight updates. It consists of the shape of a micro-batch and the number of micro-batches on
    each process.

    Attributes:
        batch: The shape of a micro-batch.
        micro_batches: The number of micro-batches on each process.
        processes: The number of processes.
    """

    batch: BatchShape
    micro_batches: int
    processes: int

    @property
    def pack_count(self) -> int:
        """The number of packs in all micro-batches on all processes."""
        return self.batch.packs * self.micro_batches * self.processes


@dataclass(frozen=True, eq=False)
class RowStream:
    """The training rows of all epochs in one long sequence, which is divided into weight updates with equally many rows.

    Attributes:
        lengths: int64, the number of tokens in each sequence.
        rows: The sequences of each row.
        batch_rows: The number of rows M in an update.
        epochs: The number of epochs.
        seed: The seed of the order.
    """

    lengths: IntArray
    rows: SequenceGroups
    batch_rows: int
    epochs: int
    seed: int

    @property
    def update_count(self) -> int:
        """The number of updates in all epochs."""
        return -(-self.epochs * len(self.rows) // self.batch_rows)

    @property
    def updates_examined_for_shape(self) -> int:
        """The number of updates that are examined before a run, to choose one static shape for the whole run.

        These are the updates of one epoch, or of _SAMPLED_ROWS rows if that is more, but not more than there are.
        """
        an_epoch = -(-len(self.rows) // self.batch_rows)
        return min(self.update_count, max(an_epoch, _SAMPLED_ROWS // self.batch_rows + 1))

    def select_update_rows(self, first_update: int, end_update: int) -> IntArray:
        """Return the rows of the updates `first_update` to `end_update` - 1 in one array, update by update."""
        each, begin = len(self.rows), first_update * self.batch_rows
        end = min(end_update * self.batch_rows, self.epochs * each)
        return np.concatenate(
            [
                _order_epoch_rows(self, epoch)[max(begin - epoch * each, 0) : end - epoch * each]
                for epoch in range(begin // each, -(-end // each))
            ]
        )

    def find_distinct_sequences(self, first_update: int, end_update: int) -> SequenceGroups:
        """Return the distinct sequences of each of the updates `first_update` to `end_update` - 1, as one group per update.

        The sequences of an update are in ascending order.
        """
        rows = self.select_update_rows(first_update, end_update)
        sizes = self.rows.starts[rows + 1] - self.rows.starts[rows]
        update = np.repeat(np.arange(len(rows)) // self.batch_rows, sizes)
        of_update, sequences = np.divmod(
            np.unique(update * len(self.lengths) + self.rows.select_sequences(rows)), len(self.lengths)
        )
        return SequenceGroups(sequences, np.searchsorted(of_update, np.arange(end_update - first_update + 1)))

    def pack_update(self, update: int, shape: BatchShape) -> SampledPacks:
        """Pack the distinct sequences of the update with the index `update`. An update after the last one has no packs."""
        if update >= self.update_count:
            return SampledPacks(np.zeros(0, np.int64), np.zeros(1, np.int64))
        sequences, starts = self.find_distinct_sequences(update, update + 1)
        pack_of = np.zeros(len(sequences), np.int64)
        _pack_updates_and_find_depth(
            self.lengths[sequences], starts, shape.length, shape.depth, pack_of, np.zeros(1, np.int64)
        )
        sizes = np.bincount(pack_of)
        return SampledPacks(sequences[np.argsort(pack_of, kind="stable")], np.concatenate([[0], np.cumsum(sizes)]))

    def compute_shape_per_pack_length(
        self, pack_lengths: Sequence[int], max_depth: int, update_count: int
    ) -> list[BatchShape]:
        """Pack the first `update_count` updates into packs of each given length. For each length, return the smallest shape
        of a batch that can hold any single one of these updates.

        Args:
            pack_lengths: The lengths of a pack to try.
            max_depth: The largest number of sequences that a pack may contain.
            update_count: The number of updates to pack.

        Returns:
            For each length, the largest number of packs of an update, the length, and the largest number of sequences in a
            pack.
        """
        shapes = [BatchShape(0, length, 0) for length in pack_lengths]
        for sequences, starts in self._iterate_distinct_sequences(update_count):
            packs_of_update, pack_of = np.zeros(len(starts) - 1, np.int64), np.zeros(len(sequences), np.int64)
            for index, (packs, length, depth) in enumerate(shapes):
                depth_used = _pack_updates_and_find_depth(
                    self.lengths[sequences], starts, length, max_depth, pack_of, packs_of_update
                )
                shapes[index] = BatchShape(max(packs, int(packs_of_update.max())), length, max(depth, int(depth_used)))
        return shapes

    def count_tokens_of_distinct_sequences(self, update_count: int) -> int:
        """Return the number of tokens that the model processes in the first `update_count` updates. A sequence that several
        rows of an update share is processed only once in this update, and its tokens are counted once.
        """
        return sum(int(self.lengths[sequences].sum()) for sequences, _ in self._iterate_distinct_sequences(update_count))

    def _iterate_distinct_sequences(self, update_count: int) -> Iterator[SequenceGroups]:
        """Yield the distinct sequences of the first `update_count` updates, a few thousand updates at a time. Each result
        has one group per update.
        """
        for first in range(0, update_count, _UPDATES_AT_ONCE):
            yield self.find_distinct_sequences(first, min(first + _UPDATES_AT_ONCE, update_count))

    @cached_property
    def row_token_counts(self) -> IntArray:
        """The number of tokens in each row."""
        return np.add.reduceat(self.lengths[self.rows.members], self.rows.starts[:-1])


@lru_cache(maxsize=4)
def _order_epoch_rows(stream: RowStream, epoch: int) -> IntArray:
    """Return a random order of the rows in an epoch. Rows are swapped between weight updates so that all updates need about
    the same number of tokens.
    """
    count = len(stream.rows)
    update = np.arange(epoch * count, (epoch + 1) * count) // stream.batch_rows
    return _balance_tokens_between_updates(stream, permutation(count, stream.seed, "rows", epoch), update - update[0])


# --- the static shape


def choose_update_shape(
    stream: RowStream,
    *,
    max_micro_batch_packs: int,
    processes: int,
    hidden_size: int,
    longest: int,
    depth: int | None = None,
) -> UpdateShape:
    """Choose one static shape for all weight updates. The shape is cheap to compute, and all examined updates fit into it.

    Args:
        stream: The rows.
        max_micro_batch_packs: The largest number of packs in a micro-batch.
        processes: The number of processes.
        hidden_size: The hidden size of the model, from which the cost of a row is estimated.
        longest: The largest number of positions in a pack.
        depth: The largest number of sequences in a pack. None for no limit.
    """
    shortest = -(-int(stream.lengths.max()) // _LENGTH_STEP) * _LENGTH_STEP
    lengths = list(range(shortest, max(shortest, min(longest, _USUAL_LONGEST)) + 1, _LENGTH_STEP))

    def find_sufficient_shapes(update_count: int) -> list[UpdateShape]:
        """For each pack length in `lengths`, find an update shape that is large enough for any of the first `update_count`
        updates. Return these shapes, the one with the lowest estimated cost first.
        """
        shapes = []
        for needed in stream.compute_shape_per_pack_length(lengths, depth or lengths[-1], update_count):
            micro_batches = -(-needed.packs // (max_micro_batch_packs * processes))
            batch = needed._replace(packs=-(-needed.packs // (micro_batches * processes)))
            shapes.append(UpdateShape(batch, micro_batches, processes))
        return sorted(shapes, key=cost)

    def cost(shape: UpdateShape) -> float:
        """Return the estimated computation cost of an update with this shape."""
        return shape.pack_count * estimate_row_cost(shape.batch.length, hidden_size)

    sampled = _SAMPLED_ROWS // stream.batch_rows + 1
    if sampled < stream.updates_examined_for_shape:
        lengths = [shape.batch.length for shape in find_sufficient_shapes(sampled)[:_TRIED_LENGTHS]]
    tried = find_sufficient_shapes(stream.updates_examined_for_shape)
    worth = [shape for shape in tried if cost(shape) <= _ACCEPTABLE_COST * cost(tried[0])]
    return min(worth, key=lambda shape: (shape.pack_count * shape.batch.length, shape.batch.length))


# --- the order of rows, and packs by best fit


def _balance_tokens_between_updates(stream: RowStream, row_order: IntArray, update_of_row: IntArray) -> IntArray:
    """Swap rows between the updates of an epoch so that all updates need about the same number of tokens, and return the new
    order of the rows.

    The update that needs the most tokens swaps rows with the update that needs the fewest, the second with the last but one,
    and so on, until nothing changes. A row is swapped only if it shares no sequence with other rows of the two updates.
    Therefore the number of shared sequences in each update stays the same.

    Args:
        stream: The rows.
        row_order: The rows of the epoch in random order.
        update_of_row: The update of each row in `row_order`, from 0.
    """
    lengths, rows, tokens = stream.lengths, stream.rows, stream.row_token_counts
    sizes = np.bincount(update_of_row)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    sequences = np.unique(
        np.repeat(update_of_row, np.diff(rows.starts)[row_order]) * len(lengths) + rows.select_sequences(row_order)
    )
    needed = np.bincount(sequences // len(lengths), lengths[sequences % len(lengths)], len(sizes))
    # Swaps move tokens from updates with too many tokens to updates with too few. The token counts alone do not tell which
    # updates these are, because the first and the last update of an epoch may have fewer rows than the others: their other
    # rows belong to the neighbouring epochs. So compute by how many tokens each update exceeds the expected count of as many
    # random rows. Round the expected count, because its last bits may differ between CPUs, but all processes must swap the
    # same rows.
    uses = np.bincount(rows.members, minlength=len(lengths))
    known_sizes, of_update = np.unique(sizes, return_inverse=True)
    expected = np.rint([lengths @ (1 - (1 - size / len(row_order)) ** uses) for size in known_sizes])
    excess = needed - expected[of_update]
    for _ in range(_MAX_SWEEPS):
        row_order = row_order[np.lexsort((tokens[row_order], update_of_row))]
        updates_by_excess = np.argsort(excess, kind="stable")
        pair = np.empty(len(sizes), np.int64)
        pair[updates_by_excess] = np.minimum(np.arange(len(sizes)), np.arange(len(sizes))[::-1])
        # A row may move to the other update of its pair only if no other row of the two updates contains one of its
        # sequences. Otherwise the move would change how often sequences are repeated within an update.
        texts, free = np.diff(rows.starts)[row_order], np.ones(len(row_order), np.bool_)
        sequences = np.repeat(pair[update_of_row], texts) * len(lengths) + rows.select_sequences(row_order)
        _, which, uses = np.unique(sequences, return_inverse=True, return_counts=True)
        free[np.repeat(np.arange(len(row_order)), texts)[uses[which] > 1]] = False
        if not _swap_rows_between_updates(row_order, tokens, free, starts, updates_by_excess, excess):
            break
    return row_order


@kernel
def _swap_rows_between_updates(
    order: IntArray,
    tokens: IntArray,
    free: NDArray[np.bool_],
    starts: IntArray,
    updates_by_excess: IntArray,
    excess: FloatArray,
) -> int:
    """Swap rows between pairs of updates while this makes their token counts more equal, and return the number of swaps.

    All arguments except `tokens`, `starts` and `updates_by_excess` are changed in place.

    Args:
        order: The rows, update by update. The rows of an update are sorted by their number of tokens.
        tokens: The number of tokens in each row.
        free: Whether each position of `order` has a row that may be swapped.
        starts: Where each update begins in `order`.
        updates_by_excess: The updates, sorted by their excess.
        excess: By how many tokens each update exceeds the expectation.
    """
    swaps, updates = 0, starts.size - 1
    for pair in range(updates // 2):
        small, large = updates_by_excess[pair], updates_by_excess[updates - 1 - pair]
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
def _pack_updates_and_find_depth(
    sequence_lengths: IntArray,
    update_starts: IntArray,
    pack_length: int,
    max_depth: int,
    pack_of_sequence: IntArray,
    packs_of_update: IntArray,
) -> int:
    """Pack the sequences of each weight update by best-fit decreasing, and return the largest number of sequences in a pack.

    Args:
        sequence_lengths: The lengths of the sequences, update by update.
        update_starts: Where each update begins in `sequence_lengths`.
        pack_length: The length of a pack.
        max_depth: The largest number of sequences that a pack may contain.
        pack_of_sequence: Filled with the pack of each sequence, counted within its update.
        packs_of_update: Filled with the number of packs of each update.
    """
    deepest = 0
    for update in range(update_starts.size - 1):
        begin, end = update_starts[update], update_starts[update + 1]
        # Packs with the same number of free slots form a linked list, and so do sequences of the same length. These arrays
        # contain the first element of each list, or -1 if the list is empty.
        sequence_with, pack_with = np.full(pack_length + 1, -1), np.full(pack_length + 1, -1)
        next_sequence, next_pack = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
        held = np.zeros(end - begin, np.int64)
        for index in range(begin, end):
            next_sequence[index - begin] = sequence_with[sequence_lengths[index]]
            sequence_with[sequence_lengths[index]] = index - begin
        packs = 0
        for size in range(pack_length, 0, -1):
            room = size
            index = sequence_with[size]
            while index >= 0:
                while room <= pack_length and pack_with[room] < 0:
                    room += 1
                if room > pack_length:
                    pack, room_after = packs, pack_length - size
                    packs += 1
                else:
                    pack, room_after = pack_with[room], room - size
                    pack_with[room] = next_pack[pack]
                pack_of_sequence[begin + index] = pack
                held[pack] += 1
                deepest = max(deepest, held[pack])
                if held[pack] < max_depth:
                    next_pack[pack] = pack_with[room_after]
                    pack_with[room_after] = pack
                    room = min(room, max(room_after, size))
                index = next_sequence[index]
        packs_of_update[update] = packs
    return deepest
