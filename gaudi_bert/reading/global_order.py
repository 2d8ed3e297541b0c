"""The one order in which packs are read, whatever the number of processes that read them: `order: 4`.

Packs are read from C streams at once, and a stream reads its shards one after the other, so that C shards are open, not all.
There are several sets of C streams, which take turns of 32 rounds, so that the packs of a longer time come from more shards.
Streams are of nearly equal length.

While the same k streams have packs, their next 32 packs each are a block (the last one may be shorter). In a block the first
C of these streams take a turn, then the next C, and so on. Round t of a turn is the t-th pack of each of its streams, by
their numbers. Packs are numbered in this sequence, 0 .. packs - 1. Process r of W takes the packs whose number mod W is r.

A position in the data is one number, of packs that all processes have read; it means the same with any W. The packs of a
shard are permuted within windows of so many records, then the windows: a shard is read nearly from front to back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray, permutation, random_words, whole_number

# --- which stream reads which shards: those that are read together come from all parts of the input
#
# An input is often sorted: by topic, by source, by length. Shards of a group hold the same files, and groups whose files are
# neighbours hold similar text. So the streams are spread over the input like the teeth of a comb, which moves along it:
#
# 1. The input is a ring, cut at a random shard: its shards in the order of their regions. It falls into as many blocks of
#    equal packs as there are streams, and each stream reads one of them. So a part of the input has its share of the
#    streams, at any time, and streams are of nearly equal length: a shard belongs to the block in which its middle is.
# 2. All streams begin in the same part of their blocks, read to the end of these, and then from their beginning. Shards
#    change their turn with near ones, differently in each block and epoch.
# 3. The blocks of a set are at equal distances, those of further sets between them. In a round, the streams of a set have a
#    random sequence, so that few packs in a row come from all parts of the input, too.
#
# All of it follows from (seed, epoch) and the sizes, in integers, so it is the same on every machine.

MOST_SETS = 4
_TEETH_OF_SETS = (0, 2, 1, 3)
_JITTERS_OF_A_BLOCK = 8


def regions_of_groups(group_sizes: IntArray, input_files: int, seed: int) -> IntArray:
    """From which part of the input each shard comes: int64 [shards], equal in a group, ascending along the input.

    Groups of one file each are the sorted files in the permutation by which `packing.groups` dealt them. A group of several
    files is a sample of the input already; its number stands for its region. `group_sizes`, int64 [groups], are the shards
    of each group, and the seed is that of the plan.
    """
    groups = len(group_sizes)
    regions = permutation(groups, seed, "groups") if input_files == groups else np.arange(groups)
    return np.repeat(regions, group_sizes)


def _deal_shards(sizes: IntArray, regions: IntArray, streams: int, sets: int, seed: int, epoch: int) -> list[IntArray]:
    """The shards of each stream in the order in which it reads them; the streams of one set after those of the other.

    `sizes` are the packs of each shard; those without packs are not dealt. `streams` in a set, times `sets`, are at most as
    many as there are shards with packs, and fewer where a block has no shard.
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
    ahead = (in_block - begin) % total + np.array(jitter, np.int64) // _JITTERS_OF_A_BLOCK
    in_turn = np.lexsort((ahead, block_of))
    of_blocks = np.split(shards[in_turn], np.searchsorted(block_of[in_turn], np.arange(1, blocks)))
    in_set = permutation(streams, seed, "turns", epoch) * sets
    turns = np.concatenate([in_set + tooth for tooth in _TEETH_OF_SETS if tooth < sets])
    return [of_blocks[block] for block in turns.tolist() if len(of_blocks[block])]


ORDER = 4
"""The number of this order, which positions carry: those of another order mean other packs."""
WINDOW_PACKS = 4096
TURN_ROUNDS = 32
_FEWEST_STREAMS = 32
MOST_STREAMS = 512
_NUMBERS_AT_ONCE = 8192


def streams_of(shard_multiple: int) -> int:
    """From how many streams a folder is read whose groups have a multiple of so many shards."""
    return min(MOST_STREAMS, max(_FEWEST_STREAMS, shard_multiple))


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a number that no process has."""
    whole_number("rank", rank, 0, whole_number("world_size", world_size, 1) - 1)


def numbers_of_rank(done: int, end: int, rank: int, world_size: int) -> IntArray:
    """The numbers mod `world_size` of `rank`, int64, ascending, from `done` on and below `end`."""
    return np.arange(first_of_rank(done, rank, world_size), end, world_size, dtype=np.int64)


def first_of_rank(done: int, rank: int, world_size: int) -> int:
    """The first number mod `world_size` of `rank` from `done` on."""
    return done + (rank - done) % world_size


class Located(NamedTuple):
    """Positions of packs in their shards, int64 [n] each."""

    turns: IntArray  # in which they are read; one turn for all rounds in which a single set of streams has packs
    rounds: IntArray  # of their streams
    streams: IntArray  # by number
    shards: IntArray  # that hold them
    positions: IntArray  # in the order of the shard (`GlobalOrder.shard_order`)
    ends: IntArray  # the round at which the stream has read the shard


class Visit(NamedTuple):
    """A shard that a process reads in a turn: from one round of its stream on; `end` is where the shard ends."""

    turn: int
    shard: int
    stream: int
    begin: int
    end: int


class ShardOrder(NamedTuple):
    """The order of one shard in an epoch."""

    records: IntArray  # int64 [packs], the record at each position
    windows: IntArray  # int64 [windows, 3], in this order: its first position, its first record, the record behind its last


class GlobalOrder:
    """The order of every epoch; it holds a few arrays over the shards.

    Args:
        sizes: packs of each shard.
        seed: decides, with the number of the epoch, all orders.
        window_packs: records of a window, within which a pack may move; or a function of the shard that gives them.
        streams: how many shards are read at once (C).
        sets: of streams, which take turns; 1 where to open a shard again is expensive.
        regions: of the input, from which each shard comes (`dealing.regions_of_groups`); None where unknown.

    Its `streams` and `sets` are fewer where there are not enough shards with packs; `packs` are those of an epoch.
    """

    def __init__(
        self,
        sizes: Sequence[int] | IntArray,
        seed: int,
        window_packs: int | Callable[[int], int] = WINDOW_PACKS,
        streams: int = _FEWEST_STREAMS,
        sets: int = MOST_SETS,
        regions: IntArray | None = None,
    ) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        self.seed, self.window_packs, self._regions = seed, window_packs, regions
        shards = int(np.count_nonzero(self.sizes))
        self.streams = max(1, min(streams, shards))
        self.sets = max(1, min(sets, MOST_SETS, shards // self.streams))
        self.packs = int(self.sizes.sum())
        self._schedules: dict[int, _ShardSchedule] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which deals the shards itself."""
        return GlobalOrder, (self.sizes, self.seed, self.window_packs, self.streams, self.sets, self._regions)

    def locate(self, epoch: int, numbers: IntArray) -> Located:
        """The shards of packs, and their positions in these; `numbers` are int64 [n], each 0 .. packs - 1."""
        return self._schedule(epoch).locate(numbers)

    def shard_order(self, epoch: int, shard: int) -> ShardOrder:
        """The order of a shard's records; any thread may call it."""
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

    def visits(self, epoch: int, done: int, rank: int, world_size: int) -> Iterator[tuple[int, Visit]]:
        """The shards that a process reads once `done` packs of an epoch are read, and in the next epoch, as it reads them.

        Each comes once a turn, with its epoch.
        """
        last_turn, seen = (epoch, -1), set[int]()
        step = _NUMBERS_AT_ONCE * world_size
        epochs = (epoch, done), (epoch + 1, 0)
        starts = [(number, begin) for number, first in epochs for begin in range(first, self.packs, step)]
        for now, begin in starts:
            located = self.locate(now, numbers_of_rank(begin, min(begin + step, self.packs), rank, world_size))
            _, firsts = np.unique(located.turns * len(self.sizes) + located.shards, return_index=True)
            firsts.sort()
            columns = (located.turns, located.shards, located.streams, located.rounds, located.ends)
            for visit in map(Visit._make, zip(*(values[firsts].tolist() for values in columns), strict=True)):
                if (now, visit.turn) != last_turn:
                    last_turn, seen = (now, visit.turn), set()
                if visit.shard not in seen:
                    seen.add(visit.shard)
                    yield now, visit

    def shards_at_once(self, world_size: int) -> int:
        """Count the shards that one of so many processes reads at once, until the first stream ends."""
        return self.streams // math.gcd(self.streams, world_size)

    def full_rounds(self, epoch: int) -> int:
        """Count the rounds that hold a pack of every stream."""
        return int(self._schedule(epoch).ends[0])

    def _schedule(self, epoch: int) -> _ShardSchedule:
        if epoch not in self._schedules:
            if len(self._schedules) == 2:  # one that is read, and the next one, whose first shards are opened ahead
                del self._schedules[min(self._schedules)]
            regions = np.arange(len(self.sizes)) if self._regions is None else self._regions
            dealt = _deal_shards(self.sizes, regions, self.streams, self.sets, self.seed, epoch)
            self._schedules[epoch] = _ShardSchedule.of(self.sizes, dealt, self.streams)
        return self._schedules[epoch]


class _ShardSchedule(NamedTuple):
    """Which stream reads which shard when, in one epoch: the shards stream after stream, each stream in its order.

    The epoch falls into segments of rounds; in the rounds of one segment, the same streams have packs.
    """

    shards: IntArray  # int64 [shards with packs]
    first_packs: IntArray  # int64 [shards with packs], packs before each, counted through all streams one after the other
    last_packs: IntArray  # int64 [shards with packs], the same up to its end
    stream_firsts: IntArray  # int64 [streams], packs of the streams before
    numbers: IntArray  # int64 [segments], the first pack
    rounds: IntArray  # int64 [segments], the first round
    stream_counts: IntArray  # int64 [segments], how many streams have packs
    ends: IntArray  # int64 [segments], the round at which the first of these streams ends
    turns: IntArray  # int64 [segments], the number of the first turn
    lengths: IntArray  # int64 [streams], the packs of each
    at_once: int  # how many streams are read in a turn

    @classmethod
    def of(cls, sizes: IntArray, streams: Sequence[IntArray], at_once: int) -> _ShardSchedule:
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

    def locate(self, numbers: IntArray) -> Located:
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
        return Located(turns, rounds, streams, self.shards[slots], packs - self.first_packs[slots], ends)
