"""The one order in which packs are read, whatever the number of processes that read them: `order: 2`.

Packs are read from C streams at once, and a stream reads its shards one after the other, so that C shards are open, not all.
For an epoch, the shards that hold packs are sorted by packs, descending, ties permuted by (seed, epoch), and dealt: shard j
goes to stream j mod C. So streams are of nearly equal length, and none is longer than the one before it. The shards of a
stream are permuted by (seed, epoch, stream). Row t holds the t-th pack of every stream that has one, by the number of the
stream, and packs are numbered row after row, 0 .. packs - 1. Process r of W takes the packs whose number mod W is r.

A place in the data is one number, of packs that all processes have read; it means the same with any W. Packs of a shard
change places within windows of so many records only, and windows among themselves: to read a shard in its order is to read
a file nearly from front to back.
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
    """Where packs lie, int64 [n] each.

    Attributes:
        rows: of the dealing.
        streams: by number.
        shards: that hold them.
        positions: in the order of the shard, which `GlobalOrder.shard_order` tells.
        ends: the row at which the stream leaves the shard.
    """

    rows: IntArray
    streams: IntArray
    shards: IntArray
    positions: IntArray
    ends: IntArray


class Visits(NamedTuple):
    """The shards that a process comes to, sorted by the row at which it does, int64 [n] each.

    Attributes:
        shards: each once.
        streams: theirs.
        begins, ends: the rows at which their stream comes to them and leaves them.
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
        window_packs: how far a pack may move within its window of a shard; or what tells it for a shard.
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
        self._dealt: dict[int, _Dealt] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which deals the shards itself."""
        return GlobalOrder, (self.sizes, self.seed, self.window_packs, self.streams)

    def locate(self, epoch: int, numbers: IntArray) -> Located:
        """The shards of packs, and their positions in these; `numbers` are int64 [n], each 0 .. packs - 1."""
        return self._deal(epoch).locate(numbers)

    def places(self, epoch: int, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """The shards of packs and their records in these, int64 [n] each; `numbers` as in `locate`."""
        found = self.locate(epoch, numbers)
        records = np.empty(len(numbers), np.int64)
        for shard in np.unique(found.shards).tolist():
            here = found.shards == shard
            records[here] = self.shard_order(epoch, shard).records[found.positions[here]]
        return found.shards, records

    def shard_order(self, epoch: int, shard: int) -> ShardOrder:
        """The order of a shard's records; any thread may ask."""
        size = int(self.sizes[shard])
        window = self.window_packs if isinstance(self.window_packs, int) else self.window_packs(shard)
        windows = permutation(-(-size // window), self.seed, "window order", epoch, shard)
        place_of_window = np.argsort(windows)
        words = random_words(size, self.seed, "pack order", epoch, shard)
        records = np.lexsort((words, place_of_window[np.arange(size) // window]))
        firsts = windows * window
        lasts = np.minimum(firsts + window, size)
        begins = np.cumsum(lasts - firsts) - (lasts - firsts)
        return ShardOrder(records, np.stack([begins, firsts, lasts], axis=1))

    def visits(self, epoch: int, done: int, rank: int, world_size: int) -> Visits:
        """The shards that a process comes to in an epoch once `done` packs of it are read."""
        return self._deal(epoch).visits(done, rank, world_size)

    def shards_at_once(self, world_size: int) -> int:
        """How many shards one of so many processes reads at once, until the first stream ends."""
        return self.streams // math.gcd(self.streams, world_size)

    def full_rows(self, epoch: int) -> int:
        """How many rows hold a pack of every stream."""
        return int(self._deal(epoch).ends[0])

    def _deal(self, epoch: int) -> _Dealt:
        if epoch not in self._dealt:
            if len(self._dealt) == 2:  # one that is read, and the next one, whose first shards are opened ahead
                del self._dealt[min(self._dealt)]
            self._dealt[epoch] = _Dealt.of(self.sizes, self.streams, self.seed, epoch)
        return self._dealt[epoch]


class _Dealt(NamedTuple):
    """The shards of an epoch, stream after stream, each stream in its order; and where which streams have packs left.

    Attributes:
        shards: int64 [shards with packs].
        first_packs: int64 [shards with packs], packs before a shard, counted through all streams, one after the other.
        stream_firsts: int64 [streams], packs of the streams before.
        numbers, rows, streams: int64 [stretches]: from pack `numbers` and row `rows` on, so many streams have packs.
        ends: int64 [stretches], the row at which the first of these streams ends.
    """

    shards: IntArray
    first_packs: IntArray
    stream_firsts: IntArray
    numbers: IntArray
    rows: IntArray
    streams: IntArray
    ends: IntArray
    last_packs: IntArray

    @classmethod
    def of(cls, sizes: IntArray, most_streams: int, seed: int, epoch: int) -> _Dealt:
        order = permutation(len(sizes), seed, "shard order", epoch)
        order = order[np.argsort(-sizes[order], kind="stable")][: int(np.count_nonzero(sizes))]
        count = min(most_streams, len(order))
        hands = [order[stream::count] for stream in range(count)]
        shards = [hand[permutation(len(hand), seed, "stream order", epoch, stream)] for stream, hand in enumerate(hands)]
        lengths = np.array([sizes[hand].sum() for hand in hands], np.int64)
        ends = np.unique(lengths)
        rows = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
        streams = np.array([np.count_nonzero(lengths > row) for row in rows], np.int64)
        packs = (ends - rows) * streams
        laid = np.concatenate([*shards, np.empty(0, np.int64)])
        last_packs = np.cumsum(sizes[laid])
        firsts = last_packs - sizes[laid]
        return cls(laid, firsts, np.cumsum(lengths) - lengths, np.cumsum(packs) - packs, rows, streams, ends, last_packs)

    def locate(self, numbers: IntArray) -> Located:
        stretch = np.searchsorted(self.numbers, numbers, side="right") - 1
        rows, streams = np.divmod(numbers - self.numbers[stretch], self.streams[stretch])
        rows += self.rows[stretch]
        firsts = self.stream_firsts[streams]
        packs = firsts + rows
        slots = self._slots(packs)
        ends = self.last_packs[slots] - firsts
        return Located(rows, streams, self.shards[slots], packs - self.first_packs[slots], ends)

    def visits(self, done: int, rank: int, world_size: int) -> Visits:
        """The shards whose stream the process reads while it is in them, in each stretch with so many streams."""
        parts = [np.empty((4, 0), np.int64)]
        for number, row, count, end in zip(self.numbers, self.rows, self.streams, self.ends, strict=True):
            last = int(number + (end - row) * count)
            first = first_of_rank(max(done, int(number)), rank, world_size)
            if first >= last:
                continue
            cycle = min(int(count) // math.gcd(int(count), world_size), -(-(last - first) // world_size))
            streams = np.sort((first - number + world_size * np.arange(cycle)) % count)
            firsts = self.stream_firsts[streams]
            begin = row + max(0, done - number) // count
            slots, which = _ranges(self._slots(firsts + begin), self._slots(firsts + end - 1) + 1)
            begins = np.maximum(self.first_packs[slots] - firsts[which], begin)
            parts.append(np.stack([slots, streams[which], begins, self.last_packs[slots] - firsts[which]]))
        all_slots, all_streams, all_begins, all_ends = np.concatenate(parts, axis=1)
        _, firsts = np.unique(all_slots, return_index=True)
        kept = firsts[np.argsort(all_begins[firsts], kind="stable")]
        return Visits(self.shards[all_slots[kept]], all_streams[kept], all_begins[kept], all_ends[kept])

    def _slots(self, packs: AnyArray) -> IntArray:
        """In which shard packs lie that are counted through all streams."""
        return np.searchsorted(self.last_packs, packs, side="right")


def _ranges(firsts: IntArray, lasts: IntArray) -> tuple[IntArray, IntArray]:
    """All numbers from each of `firsts` up to below each of `lasts`, and in which of these ranges each of them is."""
    counts = lasts - firsts
    which = np.repeat(np.arange(len(firsts)), counts)
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + firsts[which], which
