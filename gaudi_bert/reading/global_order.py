"""The global order in which packs are read. It does not depend on the number of processes (`order: 4` in stored positions).

Opening all shards at once would take too many files and too much memory. Therefore the packs are read by C *streams*, each
of which reads its shards one after the other. A *round* consists of one pack of each of the C streams. There are up to four
*sets* of C streams, which take turns. A *turn* consists of 32 rounds of one set. Packs that are read close together
therefore come from more than C shards. All streams have nearly the same number of packs. When some streams have ended, the
first C of the remaining streams are the first set, the next C are the second set, and so on.

The packs of an epoch are numbered in this order, starting at 0. Process r of W processes reads the packs whose number mod W
is r. A position in the data is therefore a single number, the number of packs that all processes together have read. It has
the same meaning for any W.

Within a shard, packs are permuted within *windows*, and the windows are permuted, so that a shard is read nearly
sequentially.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray, check_integer, draw_random_uint64, permutation

# --- which stream reads which shards: the streams are spread evenly over the input
#
# Inputs are often sorted, for example by topic, source or length. The shards of a group contain text of the same files, and
# groups whose files are neighbours contain similar text. If neighbouring shards were read at the same time, packs that are
# read together would be similar. Therefore:
#
# 1. The shards are arranged in the order of the input, beginning at a random shard, and divided into as many parts of
#    equally many packs as there are streams. Each stream reads one part, so that stream k starts at k/C of the input. A
#    shard belongs to the part that contains its middle, so that all streams have nearly the same number of packs.
# 2. All streams start at the same random position within their parts, read to the end of the part, and continue at its
#    beginning. Shards that are near each other are exchanged at random, differently in each part and epoch.
# 3. The parts of one set of streams are at equal distances from each other, and those of the other sets are between them.
#    The order of the streams within a round is random, so that even a few consecutive packs come from all of the input.
#
# All of this is computed in integers from (seed, epoch) and the sizes of the shards, so it is the same on every machine. The
# names that are passed to `permutation` and `draw_random_uint64` determine the random numbers, so they must not change.

# A stream reads its shards one after another. The streams are divided into at most this many sets, and the sets take turns.
# Only the shards of one set are open at a time, but the packs that are read come from the shards of all sets.
MAX_STREAM_SETS = 4
# The input is divided into as many consecutive parts as all sets together have streams, and each stream reads one part. With
# n sets, the streams of a set read every n-th part. These are the indices of the first part of each set, of which the ones
# below n are used. With four sets, the second set begins at part 2, so that its parts lie halfway between those of the first
# set, and the sets that are read one after the other have different text.
_SET_OFFSETS = (0, 2, 1, 3)
# Each stream reads one part of the input, and the shards within this part are shuffled. Each shard moves by at most 1/8 of
# the part's length.
_MAX_SHIFT_DIVISOR = 8


def find_input_region_of_shards(shards_per_group: IntArray, input_file_count: int, seed: int) -> IntArray:
    """Return for each shard the number of the region of the input that its text comes from, int64 [shards]. Regions with
    neighbouring numbers may contain similar text.

    Regions are numbered in the order of the input. All shards of a group have the same region. If every group consists of
    one file, the groups were formed by permuting the sorted files (`packing.histogram.divide_files_into_groups`), and this
    permutation gives their regions. A group of several files is a sample of the complete input, so its number is used as its
    region.

    Args:
        shards_per_group: int64 [groups], the number of shards of each group.
        input_file_count: The number of input files.
        seed: The seed of the plan.
    """
    groups = len(shards_per_group)
    regions = permutation(groups, seed, "groups") if input_file_count == groups else np.arange(groups)
    return np.repeat(regions, shards_per_group)


def _assign_shards_to_streams(
    sizes: IntArray, regions: IntArray, streams: int, sets: int, seed: int, epoch: int
) -> list[IntArray]:
    """Divide the shards among the streams, which each read one shard after another. Return the shards of each stream in
    reading order.

    The streams of the first set come first, then the streams of the second set, and so on.

    Args:
        sizes: int64 [shards], the number of packs of each shard. Shards without packs are not read.
        regions: int64 [shards], the region of the input from which each shard comes.
        streams: The number of streams in a set. `streams` * `sets` must not exceed the number of shards with packs.
        sets: The number of sets.
        seed: The seed of the order.
        epoch: The epoch.

    Returns:
        int64 arrays of shard numbers, fewer than `streams` * `sets` if a part of the input contains no shard.
    """
    shards, parts = np.flatnonzero(sizes), streams * sets
    shards = shards[np.lexsort((permutation(len(shards), seed, "shard order", epoch), regions[shards]))]
    if not len(shards):
        return []
    shards = np.roll(shards, -int(permutation(len(shards), seed, "ring", epoch)[0]))
    total = int(sizes.sum())
    middles = (np.cumsum(sizes[shards]) - (sizes[shards] + 1) // 2) * parts
    part_of_shard, position_in_part = np.divmod(middles, total)
    start_in_part, *random_shifts = (draw_random_uint64(len(shards) + 1, seed, "jitter", epoch) % np.uint64(total)).tolist()
    shifts = np.array(random_shifts, np.int64) // _MAX_SHIFT_DIVISOR
    distance_from_start = (position_in_part - start_in_part) % total + shifts
    reading_order = np.lexsort((distance_from_start, part_of_shard))
    shards_of_parts = np.split(shards[reading_order], np.searchsorted(part_of_shard[reading_order], np.arange(1, parts)))
    parts_of_first_set = permutation(streams, seed, "turns", epoch) * sets
    parts_of_streams = np.concatenate([parts_of_first_set + offset for offset in _SET_OFFSETS if offset < sets])
    return [shards_of_parts[part] for part in parts_of_streams.tolist() if len(shards_of_parts[part])]


# The version of the order in which packs are read. It is stored with every saved position, because the same position would
# mean other packs in another order.
ORDER_VERSION = 4
# Each shard is divided into windows, by default of this many packs. The packs are shuffled within each window, and the
# windows of a shard are shuffled too.
WINDOW_PACKS = 4096
# Packs are read in rounds. In one round, every stream of a set reads one pack. After at most this many rounds, another set
# of streams has its turn.
TURN_ROUNDS = 32
_MIN_STREAMS = 32
# The maximum number of streams in a set. It limits the number of open shards, because each stream reads one shard at a time.
MAX_STREAMS = 512
# `iterate_shard_visits` does not locate all packs of an epoch at once. In each step, it locates this many packs per process.
_NUMBERS_PER_STEP = 8192


def choose_shard_stream_count(shards_per_group_multiple: int) -> int:
    """Return how many streams read a packed folder. Each stream reads one shard at a time.

    The number of shards in each group of the folder is a multiple of `shards_per_group_multiple`.
    """
    return min(MAX_STREAMS, max(_MIN_STREAMS, shards_per_group_multiple))


def check_rank(rank: int, world_size: int) -> None:
    """Check that `rank` is the number of a process, from 0 to `world_size` - 1.

    Raises:
        ArgumentError: It is not from 0 to `world_size` - 1.
    """
    check_integer("rank", rank, 0, check_integer("world_size", world_size, 1) - 1)


def pack_numbers_of_rank(start: int, end: int, rank: int, world_size: int) -> IntArray:
    """Return the numbers of the packs that the process `rank` reads, from `start` to `end` - 1. The result is an ascending
    int64 array.
    """
    return np.arange(first_pack_number_of_rank(start, rank, world_size), end, world_size, dtype=np.int64)


def first_pack_number_of_rank(start: int, rank: int, world_size: int) -> int:
    """Return the smallest pack number that is at least `start` and belongs to a pack that the process `rank` reads."""
    return start + (rank - start) % world_size


class PackLocations(NamedTuple):
    """The locations of n packs in the order of an epoch. Each attribute is an int64 array [n].

    Attributes:
        turns: The turn of each pack. Its number stays the same while only one set of streams has packs.
        rounds: The number of packs that the stream reads before each pack.
        streams: The stream that reads each pack.
        shards: The shard that contains each pack.
        positions: The position of each pack in the reading order of its shard (`GlobalOrder.compute_shard_order`).
        ends: The number of rounds after which the stream has read all packs of the shard.
    """

    turns: IntArray
    rounds: IntArray
    streams: IntArray
    shards: IntArray
    positions: IntArray
    ends: IntArray


class ShardVisit(NamedTuple):
    """A period in which a process reads packs of one shard. It ends when the shard has been read, or when the process
    switches to other shards for a while.

    The process switches when the turn of the shard's set of streams ends, and continues with the shard in a later visit.

    Attributes:
        turn: The number of the turn.
        shard: The shard.
        stream: The stream that reads it.
        begin: The round of the first pack that the process reads in this visit.
        end: The number of rounds after which the stream has read all packs of the shard.
    """

    turn: int
    shard: int
    stream: int
    begin: int
    end: int


class ShardOrder(NamedTuple):
    """The reading order of the packs of one shard in an epoch.

    Attributes:
        records: int64 [packs], the record that is read at each position.
        windows: int64 [windows, 3], for each window, in reading order: its first position, its first record, and the record
            after its last one.
    """

    records: IntArray
    windows: IntArray


class GlobalOrder:
    """The reading order of all packs in each epoch. It stores only a few numbers for each shard.

    Args:
        sizes: The number of packs of each shard.
        seed: The seed, which determines the order of every epoch.
        window_packs: The number of packs in a window, within which a pack may move, or a function that returns it for a
            shard.
        streams: The number of shards that are read at the same time (C).
        sets: The number of sets of streams that take turns. Use 1 if opening a shard again is expensive.
        regions: The region of the input from which each shard comes, from `find_input_region_of_shards`, or None if unknown.

    Attributes:
        streams: The number of streams in a set, reduced if there are fewer shards with packs.
        sets: The number of sets, reduced in the same way.
        packs: The number of packs in an epoch.
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
        """Pickle only the constructor arguments. The process that unpickles the order computes the schedules itself."""
        return GlobalOrder, (self.sizes, self.seed, self.window_packs, self.streams, self.sets, self._regions)

    def locate_packs(self, epoch: int, pack_numbers: IntArray) -> PackLocations:
        """Return the shard of each given pack of an epoch, the position of the pack in the shard's reading order, and when
        the pack is read.

        `pack_numbers` is an int64 array [n] of numbers from 0 to `packs` - 1.
        """
        return self._get_schedule(epoch).locate_packs(pack_numbers)

    def compute_shard_order(self, epoch: int, shard: int) -> ShardOrder:
        """Return the reading order of the packs of a shard in an epoch. Any thread may call this method."""
        size = int(self.sizes[shard])
        window = self.window_packs if isinstance(self.window_packs, int) else self.window_packs(shard)
        windows = permutation(-(-size // window), self.seed, "window order", epoch, shard)
        rank_of_window = np.argsort(windows)
        words = draw_random_uint64(size, self.seed, "pack order", epoch, shard)
        records = np.lexsort((words, rank_of_window[np.arange(size) // window]))
        firsts = windows * window
        lasts = np.minimum(firsts + window, size)
        begins = np.cumsum(lasts - firsts) - (lasts - firsts)
        return ShardOrder(records, np.stack([begins, firsts, lasts], axis=1))

    def iterate_shard_visits(
        self, epoch: int, packs_done: int, rank: int, world_size: int
    ) -> Iterator[tuple[int, ShardVisit]]:
        """Yield (epoch, visit) for each period when a process will read packs of a shard, until the end of the next epoch.

        The visits are in reading order. Each shard comes at most once in a turn.

        Args:
            epoch: The current epoch.
            packs_done: The number of packs of this epoch that all processes have read.
            rank: The number of the process.
            world_size: The number of processes.
        """
        last_turn, shards_of_turn = (epoch, -1), set[int]()
        step = _NUMBERS_PER_STEP * world_size
        epochs = (epoch, packs_done), (epoch + 1, 0)
        for visit_epoch, begin in [(number, begin) for number, first in epochs for begin in range(first, self.packs, step)]:
            locations = self.locate_packs(
                visit_epoch, pack_numbers_of_rank(begin, min(begin + step, self.packs), rank, world_size)
            )
            _, firsts = np.unique(locations.turns * len(self.sizes) + locations.shards, return_index=True)
            firsts.sort()
            columns = (locations.turns, locations.shards, locations.streams, locations.rounds, locations.ends)
            for visit in map(ShardVisit._make, zip(*(values[firsts].tolist() for values in columns), strict=True)):
                if (visit_epoch, visit.turn) != last_turn:
                    last_turn, shards_of_turn = (visit_epoch, visit.turn), set()
                if visit.shard not in shards_of_turn:
                    shards_of_turn.add(visit.shard)
                    yield visit_epoch, visit

    def count_open_shards_per_process(self, world_size: int) -> int:
        """Return how many shards each of `world_size` processes reads at the same time.

        At the end of an epoch, when the first stream has read all its packs, the processes read other shards, and a process
        may then read up to `streams` shards at the same time.
        """
        return self.streams // math.gcd(self.streams, world_size)

    def count_rounds_with_all_streams(self, epoch: int) -> int:
        """Return the number of rounds of an epoch in which every stream still has a pack to read.

        This is the number of packs of the stream with the fewest packs.
        """
        return int(self._get_schedule(epoch).ends[0])

    def _get_schedule(self, epoch: int) -> _ShardSchedule:
        """Return the schedule of an epoch. A cache keeps the schedules of two epochs."""
        if epoch not in self._schedules:
            if len(self._schedules) == 2:  # keep the current epoch, and the next one, whose first shards are opened early
                del self._schedules[min(self._schedules)]
            regions = np.arange(len(self.sizes)) if self._regions is None else self._regions
            shards_of_streams = _assign_shards_to_streams(self.sizes, regions, self.streams, self.sets, self.seed, epoch)
            self._schedules[epoch] = _ShardSchedule.from_streams(self.sizes, shards_of_streams, self.streams)
        return self._schedules[epoch]


class _ShardSchedule(NamedTuple):
    """Which shards each stream reads in one epoch, and when it reads them.

    The shards are listed stream after stream, in reading order. The epoch is divided into segments. Within the
    rounds of a segment, the same streams have packs.

    Attributes:
        shards: int64 [shards with packs], the shards.
        first_packs: int64 [shards with packs], the number of packs before each shard, in this shard order.
        last_packs: int64 [shards with packs], the number of packs up to the end of each shard, in this shard order.
        stream_firsts: int64 [streams], the number of packs of all earlier streams.
        numbers: int64 [segments], the number of the first pack.
        rounds: int64 [segments], the first round.
        stream_counts: int64 [segments], the number of streams that have packs.
        ends: int64 [segments], the number of rounds after which the first of these streams ends.
        turns: int64 [segments], the number of the first turn.
        lengths: int64 [streams], the number of packs of each stream.
        streams_per_set: The number of streams in a set.
    """

    shards: IntArray
    first_packs: IntArray
    last_packs: IntArray
    stream_firsts: IntArray
    numbers: IntArray
    rounds: IntArray
    stream_counts: IntArray
    ends: IntArray
    turns: IntArray
    lengths: IntArray
    streams_per_set: int

    @classmethod
    def from_streams(cls, sizes: IntArray, shards_of_streams: Sequence[IntArray], streams_per_set: int) -> _ShardSchedule:
        """Compute the schedule of an epoch from the sizes of all shards and the shards of each stream."""
        lengths = np.array([sizes[each].sum() for each in shards_of_streams], np.int64)
        ends = np.unique(lengths)
        rounds = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
        stream_counts = np.array([np.count_nonzero(lengths > first) for first in rounds], np.int64)
        packs = (ends - rounds) * stream_counts
        turns = np.where(
            stream_counts > streams_per_set, -(-(ends - rounds) // TURN_ROUNDS) * -(-stream_counts // streams_per_set), 0
        )
        shards = np.concatenate([*shards_of_streams, np.empty(0, np.int64)]).astype(np.int64)
        last_packs = np.cumsum(sizes[shards])
        first_packs, stream_firsts = last_packs - sizes[shards], np.cumsum(lengths) - lengths
        numbers, first_turns = np.cumsum(packs) - packs, np.cumsum(turns) - turns
        by_segment = (numbers, rounds, stream_counts, ends, first_turns)
        return cls(shards, first_packs, last_packs, stream_firsts, *by_segment, lengths, streams_per_set)

    def locate_packs(self, pack_numbers: IntArray) -> PackLocations:
        """Return the shard of each given pack, the position of the pack in the shard's reading order, and when the pack is
        read.
        """
        segment = np.searchsorted(self.numbers, pack_numbers, side="right") - 1
        count = self.stream_counts[segment]
        block, in_block = np.divmod(pack_numbers - self.numbers[segment], TURN_ROUNDS * count)
        first_rounds = self.rounds[segment] + TURN_ROUNDS * block
        turn_rounds = np.minimum(TURN_ROUNDS, self.ends[segment] - first_rounds)
        set_number, in_turn = np.divmod(in_block, turn_rounds * self.streams_per_set)
        first_streams = set_number * self.streams_per_set
        round_of_turn, stream_of_set = np.divmod(in_turn, np.minimum(self.streams_per_set, count - first_streams))
        rounds, numbers_of_active = first_rounds + round_of_turn, first_streams + stream_of_set
        streams = numbers_of_active.copy()
        for later in np.unique(segment[segment > 0]).tolist():
            active = np.flatnonzero(self.lengths > self.rounds[later])
            streams[segment == later] = active[numbers_of_active[segment == later]]
        sets = -(-count // self.streams_per_set)
        turns = self.turns[segment] + np.where(sets > 1, block * sets + set_number, 0)
        packs_of_earlier_streams = self.stream_firsts[streams]
        pack_indices = packs_of_earlier_streams + rounds
        schedule_entries = np.searchsorted(self.last_packs, pack_indices, side="right")
        ends = self.last_packs[schedule_entries] - packs_of_earlier_streams
        return PackLocations(
            turns, rounds, streams, self.shards[schedule_entries], pack_indices - self.first_packs[schedule_entries], ends
        )
