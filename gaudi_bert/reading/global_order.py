"""The one order in which packs are read, whatever the number of processes that read them: `order: 2`.

Packs are read from C streams at once, and a stream reads its shards one after the other, so that C shards are open, not all.
For an epoch, the shards that hold packs are sorted by packs, descending, ties permuted by (seed, epoch), and dealt: shard j
goes to stream j mod C. So streams are of nearly equal length, and none is longer than the one before it. The shards of a
stream are permuted by (seed, epoch, stream). Round t is the t-th pack of every stream that has one, by the number of the
stream, and packs are numbered round after round, 0 .. packs - 1. Process r of W takes the packs whose number mod W is r.

A position in the data is one number, of packs that all processes have read; it means the same with any W. The packs of a
shard are permuted within windows of so many records, then the windows: a shard is read nearly from front to back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray, permutation, random_words, whole_number

ORDER = 2
"""The number of this order, which positions carry: those of another order mean other packs."""
WINDOW_PACKS = 4096
_FEWEST_STREAMS, _MOST_STREAMS = 32, 512


def streams_of(shard_multiple: int) -> int:
    """From how many streams a folder is read whose groups have a multiple of so many shards."""
    return min(_MOST_STREAMS, max(_FEWEST_STREAMS, shard_multiple))


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
    """Where packs are stored, int64 [n] each.

    Attributes:
        rounds: in which they are read.
        streams: by number.
        shards: that hold them.
        positions: in the order of the shard (`GlobalOrder.shard_order`).
        ends: the round at which the stream has read the shard.
    """

    rounds: IntArray
    streams: IntArray
    shards: IntArray
    positions: IntArray
    ends: IntArray


class _Visits(NamedTuple):
    """The shards that a process reads, each once, sorted by the round at which it begins, int64 [n] each.

    Attributes:
        begins, ends: the rounds at which their stream begins to read them and has read them.
    """

    shards: IntArray
    streams: IntArray
    begins: IntArray
    ends: IntArray


class ShardOrder(NamedTuple):
    """The order of one shard in an epoch.

    Attributes:
        records: int64 [packs], the record at each position.
        windows: int64 [windows, 3], for each window in this order its first position, its first record and the record
            behind its last.
    """

    records: IntArray
    windows: IntArray


class GlobalOrder:
    """The order of every epoch; it holds a few arrays over the shards.

    Args:
        sizes: packs of each shard.
        seed: decides, with the number of the epoch, all orders.
        window_packs: records of a window, within which a pack may move; or a function of the shard that gives them.
        streams: how many shards are read at once (C).

    Attributes:
        packs: of an epoch.
        streams: with fewer shards, as many as there are shards with packs.
    """

    def __init__(
        self,
        sizes: Sequence[int] | IntArray,
        seed: int,
        window_packs: int | Callable[[int], int] = WINDOW_PACKS,
        streams: int = _FEWEST_STREAMS,
    ) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        self.seed, self.window_packs = seed, window_packs
        self.streams = max(1, min(streams, int(np.count_nonzero(self.sizes))))
        self.packs = int(self.sizes.sum())
        self._schedules: dict[int, _ShardSchedule] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which deals the shards itself."""
        return GlobalOrder, (self.sizes, self.seed, self.window_packs, self.streams)

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

    def visits(self, epoch: int, done: int, rank: int, world_size: int) -> _Visits:
        """The shards that a process reads in an epoch once `done` packs of it are read."""
        return self._schedule(epoch).visits(done, rank, world_size)

    def shards_at_once(self, world_size: int) -> int:
        """How many shards one of so many processes reads at once, until the first stream ends."""
        return self.streams // math.gcd(self.streams, world_size)

    def full_rounds(self, epoch: int) -> int:
        """How many rounds hold a pack of every stream."""
        return int(self._schedule(epoch).ends[0])

    def _schedule(self, epoch: int) -> _ShardSchedule:
        if epoch not in self._schedules:
            if len(self._schedules) == 2:  # one that is read, and the next one, whose first shards are opened ahead
                del self._schedules[min(self._schedules)]
            self._schedules[epoch] = _ShardSchedule.of(self.sizes, self.streams, self.seed, epoch)
        return self._schedules[epoch]


class _ShardSchedule(NamedTuple):
    """Which stream reads which shard when, in one epoch: the shards stream after stream, each stream in its order.

    The epoch falls into segments of rounds; in the rounds of one segment, the same streams have packs.

    Attributes:
        shards: int64 [shards with packs].
        first_packs, last_packs: int64 [shards with packs], packs before a shard and up to its end, counted through all
            streams, one after the other.
        stream_firsts: int64 [streams], packs of the streams before.
        numbers, rounds, stream_counts: int64 [segments], the first pack, the first round, and how many streams have packs.
        ends: int64 [segments], the round at which the first of these streams ends.
    """

    shards: IntArray
    first_packs: IntArray
    stream_firsts: IntArray
    numbers: IntArray
    rounds: IntArray
    stream_counts: IntArray
    ends: IntArray
    last_packs: IntArray

    @classmethod
    def of(cls, sizes: IntArray, most_streams: int, seed: int, epoch: int) -> _ShardSchedule:
        order = permutation(len(sizes), seed, "shard order", epoch)
        order = order[np.argsort(-sizes[order], kind="stable")][: int(np.count_nonzero(sizes))]
        count = min(most_streams, len(order))
        dealt = [order[stream::count] for stream in range(count)]
        streams = [each[permutation(len(each), seed, "stream order", epoch, stream)] for stream, each in enumerate(dealt)]
        lengths = np.array([sizes[each].sum() for each in streams], np.int64)
        ends = np.unique(lengths)
        rounds = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
        stream_counts = np.array([np.count_nonzero(lengths > first) for first in rounds], np.int64)
        packs = (ends - rounds) * stream_counts
        shards = np.concatenate([*streams, np.empty(0, np.int64)])
        last_packs = np.cumsum(sizes[shards])
        first_packs, stream_firsts = last_packs - sizes[shards], np.cumsum(lengths) - lengths
        numbers = np.cumsum(packs) - packs
        return cls(shards, first_packs, stream_firsts, numbers, rounds, stream_counts, ends, last_packs)

    def locate(self, numbers: IntArray) -> Located:
        segment = np.searchsorted(self.numbers, numbers, side="right") - 1
        rounds, streams = np.divmod(numbers - self.numbers[segment], self.stream_counts[segment])
        rounds += self.rounds[segment]
        firsts = self.stream_firsts[streams]
        packs = firsts + rounds
        slots = self._slots(packs)
        ends = self.last_packs[slots] - firsts
        return Located(rounds, streams, self.shards[slots], packs - self.first_packs[slots], ends)

    def visits(self, done: int, rank: int, world_size: int) -> _Visits:
        """The shards whose streams the process reads, from segment to segment."""
        parts = [np.empty((4, 0), np.int64)]
        for number, first_round, count, end in zip(self.numbers, self.rounds, self.stream_counts, self.ends, strict=True):
            last = int(number + (end - first_round) * count)
            first = first_of_rank(max(done, int(number)), rank, world_size)
            if first >= last:
                continue
            cycle = min(int(count) // math.gcd(int(count), world_size), -(-(last - first) // world_size))
            streams = np.sort((first - number + world_size * np.arange(cycle)) % count)
            firsts = self.stream_firsts[streams]
            begin = first_round + max(0, done - number) // count
            slots, which = _ranges(self._slots(firsts + begin), self._slots(firsts + end - 1) + 1)
            begins = np.maximum(self.first_packs[slots] - firsts[which], begin)
            parts.append(np.stack([slots, streams[which], begins, self.last_packs[slots] - firsts[which]]))
        slots, streams, begins, ends = np.concatenate(parts, axis=1)
        _, firsts = np.unique(slots, return_index=True)
        chosen = firsts[np.argsort(begins[firsts], kind="stable")]
        return _Visits(self.shards[slots[chosen]], streams[chosen], begins[chosen], ends[chosen])

    def _slots(self, packs: AnyArray) -> IntArray:
        """The positions in `shards` of packs that are counted through all streams."""
        return np.searchsorted(self.last_packs, packs, side="right")


def _ranges(firsts: IntArray, lasts: IntArray) -> tuple[IntArray, IntArray]:
    """All numbers from each of `firsts` up to below each of `lasts`, and in which of these ranges each of them is."""
    counts = lasts - firsts
    which = np.repeat(np.arange(len(firsts)), counts)
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + firsts[which], which
