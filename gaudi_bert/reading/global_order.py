"""The global order in which packs are read, which does not depend on the number of processes (`order: 4` in positions).

Opening all shards at once would take too many files and too much memory. Therefore packs are read from C streams at once,
and each stream reads its shards one after the other. There are several sets of C streams, which take turns of 32 rounds, so
that packs that are read close together come from more shards. All streams have nearly the same length.

While the same k streams have packs left, their next 32 packs each form a block (the last block may be shorter). In a block,
the first C of these streams take a turn, then the next C, and so on. Round t of a turn consists of the t-th pack of each of
its streams, in the order of the streams. Packs are numbered in this order, 0 .. packs - 1. Process r of W processes reads
the packs whose number mod W is r.

A position in the data is therefore a single number, the packs that all processes have read together, and means the same for
any W. Within a shard, packs are permuted within windows, and the windows are permuted, so that a shard is read nearly
sequentially.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray, check_integer, permutation, random_words

# --- which stream reads which shards: streams that are read together come from all parts of the input
#
# Inputs are often sorted, for example by topic, source or length. The shards of a group contain the same files, and groups
# whose files are neighbours contain similar text. If streams read neighbouring shards, packs that are read together would be
# similar. Therefore the streams are spread evenly over the input, and all of them move through it at the same speed:
#
# 1. The shards are arranged in a circle in the order of their input regions, starting at a random shard. The circle is
#    divided into as many blocks of equally many packs as there are streams, and each stream reads one block: stream k starts
#    at k/C of the input. A shard belongs to the block that contains its middle, so all streams have nearly the same length.
# 2. All streams start at the same relative position of their blocks, read to the end of the block and continue at its
#    beginning. Shards that are near each other are exchanged at random, differently in each block and epoch.
# 3. The blocks of a set of streams have equal distances from each other, and those of further sets are between them. The
#    order of the streams within a round is random, so that even a few consecutive packs come from all parts of the input.
#
# All of this is computed in integers from (seed, epoch) and the sizes of the shards, so it is the same on every machine.

MAX_STREAM_SETS = 4
"""The most sets of streams."""
_SET_OFFSETS = (0, 2, 1, 3)
"""The distances of the sets from the first one, in blocks. Of four sets, the second is in the middle between the first's
blocks.
"""
_JITTER_DIVISOR = 8
"""Shards move at random by at most 1 / 8 of a block."""


def regions_of_shards(group_sizes: IntArray, input_files: int, seed: int) -> IntArray:
    """Return the part of the input from which each shard comes, int64 [shards], ascending along the input.

    All shards of a group have the same region. Groups of one file each were formed by permuting the sorted files
    (`packing.histogram.form_groups`), so this permutation gives their regions. A group of several files is a sample of the
    whole input, so its number is used as its region.

    Args:
        group_sizes: int64 [groups], the shards of each group.
        input_files: the number of input files.
        seed: the seed of the plan.
    """
    groups = len(group_sizes)
    regions = permutation(groups, seed, "groups") if input_files == groups else np.arange(groups)
    return np.repeat(regions, group_sizes)


def _assign_shards_to_streams(
    sizes: IntArray, regions: IntArray, streams: int, sets: int, seed: int, epoch: int
) -> list[IntArray]:
    """Return the shards of each stream in reading order, with the streams of one set after those of another.

    Args:
        sizes: int64 [shards], the packs of each shard. Shards without packs are not read.
        regions: int64 [shards], the part of the input from which each shard comes.
        streams: streams per set. `streams` * `sets` must not exceed the number of shards with packs.
        sets: the number of sets.
        seed: the seed of the order.
        epoch: the epoch.

    Returns:
        int64 arrays of shard numbers, fewer than `streams` * `sets` if a block contains no shard.
    """
    shards, blocks = np.flatnonzero(sizes), streams * sets
    shards = shards[np.lexsort((permutation(len(shards), seed, "shard order", epoch), regions[shards]))]
    if not len(shards):
        return []
    shards = np.roll(shards, -int(permutation(len(shards), seed, "ring", epoch)[0]))
    total = int(sizes.sum())
    middles = (np.cumsum(sizes[shards]) - (sizes[shards] + 1) // 2) * blocks
    block_of, in_block = np.divmod(middles, total)
    begin, *jitter = (random_words(len(shards) + 1, seed, "jitter", epoch) % np.uint64(total)).tolist()
    ahead = (in_block - begin) % total + np.array(jitter, np.int64) // _JITTER_DIVISOR
    in_turn = np.lexsort((ahead, block_of))
    of_blocks = np.split(shards[in_turn], np.searchsorted(block_of[in_turn], np.arange(1, blocks)))
    in_set = permutation(streams, seed, "turns", epoch) * sets
    turns = np.concatenate([in_set + offset for offset in _SET_OFFSETS if offset < sets])
    return [of_blocks[block] for block in turns.tolist() if len(of_blocks[block])]


ORDER_VERSION = 4
"""The version of this order. Positions contain it, because a position of another version would mean other packs."""
WINDOW_PACKS = 4096
"""The default size of a window, in packs."""
TURN_ROUNDS = 32
"""The rounds of a turn."""
_MIN_STREAMS = 32
MAX_STREAMS = 512
"""The most streams per set."""
_NUMBERS_PER_STEP = 8192
"""Pack numbers of a process that `visits` examines at once."""


def choose_stream_count(shard_multiple: int) -> int:
    """Return the number of streams for a folder in which each group has a multiple of `shard_multiple` shards."""
    return min(MAX_STREAMS, max(_MIN_STREAMS, shard_multiple))


def check_rank(rank: int, world_size: int) -> None:
    """Check that `rank` is a valid process number.

    Raises:
        ArgumentError: it is not from 0 to `world_size` - 1.
    """
    check_integer("rank", rank, 0, check_integer("world_size", world_size, 1) - 1)


def pack_numbers_of_rank(done: int, end: int, rank: int, world_size: int) -> IntArray:
    """Return the pack numbers from `done` to `end` - 1 that this rank reads, int64, ascending."""
    return np.arange(first_pack_number_of_rank(done, rank, world_size), end, world_size, dtype=np.int64)


def first_pack_number_of_rank(done: int, rank: int, world_size: int) -> int:
    """Return the first pack number from `done` on that this rank reads."""
    return done + (rank - done) % world_size


class PackLocations(NamedTuple):
    """Where packs are; each field is int64 [n]."""

    turns: IntArray  # the turn in which each pack is read; constant while only a single set of streams has packs
    rounds: IntArray  # the round of its stream
    streams: IntArray  # the number of its stream
    shards: IntArray  # the shard that contains it
    positions: IntArray  # its position in the order of the shard (`GlobalOrder.shard_order`)
    ends: IntArray  # the round at which its stream has read the whole shard


class ShardVisit(NamedTuple):
    """A shard that a process reads in a turn.

    Attributes:
        turn: the turn.
        shard: the shard.
        stream: the stream that reads it.
        begin: the round of the stream in which reading begins.
        end: the round in which the whole shard has been read.
    """

    turn: int
    shard: int
    stream: int
    begin: int
    end: int


class ShardOrder(NamedTuple):
    """The order in which the packs of a shard are read in an epoch."""

    records: IntArray  # int64 [packs], the record at each position
    # int64 [windows, 3], per window in reading order: its first position, its first record, the end of its records
    windows: IntArray


class GlobalOrder:
    """The order of the packs in every epoch. It holds only a few arrays over the shards.

    Args:
        sizes: the packs of each shard.
        seed: determines, together with the epoch, all orders.
        window_packs: the packs of a window within which a pack may move, or a function that returns this for a shard.
        streams: how many shards are read at once (C).
        sets: the number of sets of streams that take turns. Use 1 if opening a shard again is expensive.
        regions: the part of the input from which each shard comes, from `regions_of_shards`; None if unknown.

    Attributes:
        streams: streams per set, reduced if there are fewer shards with packs.
        sets: the number of sets, reduced likewise.
        packs: the packs of an epoch.
    """

    def __init__(
        self,
        sizes: Sequence[int] | IntArray,
        seed: int,
        window_packs: int | Callable[[int], int] = WINDOW_PACKS,
        streams: int = _MIN_STREAMS,
        sets: int = MAX_STREAM_SETS,
        regions: IntArray | None = None,
    ) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        self.seed, self.window_packs, self._regions = seed, window_packs, regions
        shards = int(np.count_nonzero(self.sizes))
        self.streams = max(1, min(streams, shards))
        self.sets = max(1, min(sets, MAX_STREAM_SETS, shards // self.streams))
        self.packs = int(self.sizes.sum())
        self._schedules: dict[int, _ShardSchedule] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only. The other process computes the schedules itself."""
        return GlobalOrder, (self.sizes, self.seed, self.window_packs, self.streams, self.sets, self._regions)

    def locate(self, epoch: int, numbers: IntArray) -> PackLocations:
        """Return where packs are, for pack numbers int64 [n], each from 0 to packs - 1."""
        return self._get_schedule(epoch).locate(numbers)

    def shard_order(self, epoch: int, shard: int) -> ShardOrder:
        """Return the order in which the packs of a shard are read in an epoch. May be called from any thread."""
        size = int(self.sizes[shard])
        window = self.window_packs if isinstance(self.window_packs, int) else self.window_packs(shard)
        windows = permutation(-(-size // window), self.seed, "window order", epoch, shard)
        rank_of_window = np.argsort(windows)
        words = random_words(size, self.seed, "pack order", epoch, shard)
        records = np.lexsort((words, rank_of_window[np.arange(size) // window]))
        firsts = windows * window
        lasts = np.minimum(firsts + window, size)
        begins = np.cumsum(lasts - firsts) - (lasts - firsts)
        return ShardOrder(records, np.stack([begins, firsts, lasts], axis=1))

    def upcoming_visits(self, epoch: int, done: int, rank: int, world_size: int) -> Iterator[tuple[int, ShardVisit]]:
        """Yield (epoch, visit) for the shards that a process reads next, until the end of the next epoch.

        Visits come in reading order, and each shard once per turn.

        Args:
            epoch: the current epoch.
            done: the packs of this epoch that all processes have read.
            rank: the number of the process.
            world_size: the number of processes.
        """
        last_turn, seen = (epoch, -1), set[int]()
        step = _NUMBERS_PER_STEP * world_size
        epochs = (epoch, done), (epoch + 1, 0)
        starts = [(number, begin) for number, first in epochs for begin in range(first, self.packs, step)]
        for now, begin in starts:
            locations = self.locate(now, pack_numbers_of_rank(begin, min(begin + step, self.packs), rank, world_size))
            _, firsts = np.unique(locations.turns * len(self.sizes) + locations.shards, return_index=True)
            firsts.sort()
            columns = (locations.turns, locations.shards, locations.streams, locations.rounds, locations.ends)
            for visit in map(ShardVisit._make, zip(*(values[firsts].tolist() for values in columns), strict=True)):
                if (now, visit.turn) != last_turn:
                    last_turn, seen = (now, visit.turn), set()
                if visit.shard not in seen:
                    seen.add(visit.shard)
                    yield now, visit

    def count_open_shards(self, world_size: int) -> int:
        """Return how many shards one of `world_size` processes reads at once, until the first stream ends."""
        return self.streams // math.gcd(self.streams, world_size)

    def count_full_rounds(self, epoch: int) -> int:
        """Return the number of rounds in which every stream has a pack."""
        return int(self._get_schedule(epoch).ends[0])

    def _get_schedule(self, epoch: int) -> _ShardSchedule:
        """Return the schedule of an epoch, from a cache of two."""
        if epoch not in self._schedules:
            if len(self._schedules) == 2:  # the current epoch, and the next one, whose first shards are opened in advance
                del self._schedules[min(self._schedules)]
            regions = np.arange(len(self.sizes)) if self._regions is None else self._regions
            shards_of_streams = _assign_shards_to_streams(self.sizes, regions, self.streams, self.sets, self.seed, epoch)
            self._schedules[epoch] = _ShardSchedule.from_streams(self.sizes, shards_of_streams, self.streams)
        return self._schedules[epoch]


class _ShardSchedule(NamedTuple):
    """Which stream reads which shard when, in one epoch.

    Shards are listed stream after stream, in reading order. The epoch is divided into segments of rounds; within a segment,
    the same streams have packs.
    """

    shards: IntArray  # int64 [shards with packs]
    first_packs: IntArray  # int64 [shards with packs], the packs before each shard, counted through all streams
    last_packs: IntArray  # int64 [shards with packs], the packs up to the end of each shard, counted likewise
    stream_firsts: IntArray  # int64 [streams], the packs of all earlier streams
    numbers: IntArray  # int64 [segments], the number of the first pack
    rounds: IntArray  # int64 [segments], the first round
    stream_counts: IntArray  # int64 [segments], how many streams have packs
    ends: IntArray  # int64 [segments], the round at which the first of these streams ends
    turns: IntArray  # int64 [segments], the number of the first turn
    lengths: IntArray  # int64 [streams], the packs of each stream
    at_once: int  # streams per turn

    @classmethod
    def from_streams(cls, sizes: IntArray, streams: Sequence[IntArray], at_once: int) -> _ShardSchedule:
        """Compute the schedule from the sizes of the shards and the shards of each stream."""
        lengths = np.array([sizes[each].sum() for each in streams], np.int64)
        ends = np.unique(lengths)
        rounds = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
        stream_counts = np.array([np.count_nonzero(lengths > first) for first in rounds], np.int64)
        packs = (ends - rounds) * stream_counts
        turns = np.where(stream_counts > at_once, -(-(ends - rounds) // TURN_ROUNDS) * -(-stream_counts // at_once), 0)
        shards = np.concatenate([*streams, np.empty(0, np.int64)]).astype(np.int64)
        last_packs = np.cumsum(sizes[shards])
        first_packs, stream_firsts = last_packs - sizes[shards], np.cumsum(lengths) - lengths
        numbers, first_turns = np.cumsum(packs) - packs, np.cumsum(turns) - turns
        by_segment = (numbers, rounds, stream_counts, ends, first_turns)
        return cls(shards, first_packs, last_packs, stream_firsts, *by_segment, lengths, at_once)

    def locate(self, numbers: IntArray) -> PackLocations:
        """Return where packs are, for pack numbers int64 [n]."""
        segment = np.searchsorted(self.numbers, numbers, side="right") - 1
        count = self.stream_counts[segment]
        block, in_block = np.divmod(numbers - self.numbers[segment], TURN_ROUNDS * count)
        first_rounds = self.rounds[segment] + TURN_ROUNDS * block
        turn_rounds = np.minimum(TURN_ROUNDS, self.ends[segment] - first_rounds)
        set_number, in_turn = np.divmod(in_block, turn_rounds * self.at_once)
        first_streams = set_number * self.at_once
        round_of_turn, stream_of_set = np.divmod(in_turn, np.minimum(self.at_once, count - first_streams))
        rounds, numbers_of_active = first_rounds + round_of_turn, first_streams + stream_of_set
        streams = numbers_of_active.copy()
        for later in np.unique(segment[segment > 0]).tolist():
            active = np.flatnonzero(self.lengths > self.rounds[later])
            streams[segment == later] = active[numbers_of_active[segment == later]]
        sets = -(-count // self.at_once)
        turns = self.turns[segment] + np.where(sets > 1, block * sets + set_number, 0)
        firsts = self.stream_firsts[streams]
        packs = firsts + rounds
        slots = np.searchsorted(self.last_packs, packs, side="right")
        ends = self.last_packs[slots] - firsts
        return PackLocations(turns, rounds, streams, self.shards[slots], packs - self.first_packs[slots], ends)
