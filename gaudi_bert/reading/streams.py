"""Reading shards in the global order (`global_order.py`), with only those shards open that are being read.

Every reader of a packed folder starts from its `StoredPacks`. A process has at most C / gcd(C, W) shards open until the
first stream ends, and then at most C. Threads prepare as many again, namely those that the process reads next: they fetch
the shards, locate their records and compute their orders. A shard is closed once its stream has read it or the turn of its
stream ends. Then only its order and the number of prefetched windows are kept.

Packs of a shard are read in permuted order, so the read-ahead of the operating system would read megabytes for each pack.
Instead, the next window of records is prefetched. Prefetching and preparation start only after some hundreds of packs, so
that a process can begin at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.reading.global_order import WINDOW_PACKS, GlobalOrder, PackLocations, ShardOrder, ShardVisit, check_rank

Prepared = TypeVar("Prepared")

_FIRST_PACKS = 512
"""Packs that a process reads before it prefetches windows and prepares shards."""

_NEVER = np.iinfo(np.int64).max


class ShardFiles(Generic[Prepared]):
    """The shards of a data set, which are opened one by one. Each file format overrides some of the methods.

    Attributes:
        threads: how many shards are prepared at once.
    """

    threads: int = 1

    def prepare(self, shard: int) -> Prepared:
        """Do the slow part of opening a shard. Called in any thread; must not keep a file open."""
        raise NotImplementedError

    def open(self, shard: int, prepared: Prepared) -> None:
        """Open a prepared shard."""

    def close(self, shard: int) -> None:
        """Close an open shard."""

    def discard(self, shard: int) -> None:
        """Release a shard that was prepared but will not be opened."""

    def prefetch(self, shard: int, first: int, last: int) -> None:
        """Start to read the records from `first` to `last` - 1 of an open shard."""

    def drop_pages(self, shard: int, first: int, last: int) -> None:
        """Release the memory of the records from `first` to `last` - 1, which will not be read again."""


_Key = tuple[int, int]
"""An epoch and a shard."""
_EpochVisit = tuple[int, ShardVisit]
"""An epoch and a visit in it."""


@dataclass
class _OpenShard:
    """A shard that is being read, in this turn or between turns."""

    end: int  # the round in which its stream has read all of it
    order: ShardOrder
    prefetched: int  # the windows before this one, in reading order, were prefetched
    dropped: int  # the windows before this one were dropped from memory


class StreamReader(Generic[Prepared]):
    """Locates the packs that a process reads, and keeps their shards open.

    Args:
        files: the shards.
        order: the global order.
        rank: the number of this process.
        world_size: the number of processes.
    """

    def __init__(self, files: ShardFiles[Prepared], order: GlobalOrder, rank: int = 0, world_size: int = 1) -> None:
        self._files, self._order, self._share = files, order, (rank, world_size)
        self._shards_at_once = order.count_open_shards(world_size)
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only. The other process opens the shards itself."""
        return StreamReader, (self._files, self._order, *self._share)

    def locate(self, epoch: int, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Return the shard and the record of each pack, int64 [n] each, and make sure that these shards are open.

        Going back to earlier packs opens their shards again.

        Args:
            epoch: the epoch.
            numbers: int64 [n], ascending, the numbers of packs of this process.
        """
        if self._process != os.getpid():  # after a fork, the thread does not exist in this process
            self._reset()
        locations = self._order.locate(epoch, numbers)
        if len(numbers):
            self._advance_to(epoch, locations, int(numbers[0]))
        pairs = zip(locations.shards.tolist(), locations.positions.tolist(), strict=True)
        records = [self._open[shard].order.records[position] for shard, position in pairs]
        return locations.shards, np.array(records, np.int64)

    def close(self) -> None:
        """Close all shards and stop preparing shards."""
        self._close_shards(list(self._open))
        self._prefetcher.prepare([])
        self._reset()

    def _reset(self) -> None:
        """Return to the state in which nothing is open and nothing has been read."""
        self._process = os.getpid()
        self._prefetcher = _Prefetcher(self._files, self._order)
        self._open: dict[int, _OpenShard] = {}
        self._earlier: dict[int, _OpenShard] = {}  # shards of this epoch that were closed at the end of a turn
        self._is_open = np.zeros(len(self._order.sizes), np.bool_)
        self._last_turn = np.full(len(self._order.sizes), -1)
        self._prefetch_at = np.full(len(self._order.sizes), _NEVER)
        self._is_read = np.zeros(self._order.streams, np.bool_)  # the streams of a set from which this process has read
        self._epoch, self._now, self._first_end, self._settles_at, self._is_settled = -1, (0, 0), _NEVER, 0, False
        self._visits: Iterator[_EpochVisit] = iter(())
        self._soon: list[_EpochVisit] = []

    def _advance_to(self, epoch: int, locations: PackLocations, number: int) -> None:
        """Open the shards of these packs, the first of which is pack `number`, and close those that are no longer needed."""
        now = int(locations.turns[0]), int(locations.rounds[0])
        if epoch != self._epoch or now < self._now:
            self._close_shards(list(self._open))
            self._earlier.clear()
            self._visits = self._order.upcoming_visits(epoch, number, *self._share)
            self._settles_at = number + _FIRST_PACKS * self._share[1] if self._epoch < 0 else number
            self._is_settled, self._epoch, self._soon = False, epoch, []
        ended = []
        if now[0] > self._now[0] or now[1] >= self._first_end:
            needed = set(locations.shards.tolist())
            ended = [
                shard
                for shard, opened in self._open.items()
                if shard not in needed and (self._last_turn[shard] < now[0] or opened.end <= now[1])
            ]
        self._now = now
        self._is_read[locations.streams % self._order.streams] = True
        self._close_shards(ended)
        self._last_turn[locations.shards] = locations.turns
        is_open = self._is_open[locations.shards]
        settles = not self._is_settled and number >= self._settles_at
        self._is_settled = self._is_settled or settles
        if ended or settles or not is_open.all():
            self._open_shards(locations, np.flatnonzero(~is_open))
        self._prefetcher.submit()
        due = locations.positions >= self._prefetch_at[locations.shards]
        if due.any():
            for shard in np.unique(locations.shards[due]).tolist():
                self._prefetch(shard, int(locations.positions[locations.shards == shard].max()))

    def _close_shards(self, shards: list[int]) -> None:
        """Close shards, and remember how far each was prefetched in case it is opened again."""
        if not shards:
            return
        for shard in shards:
            self._earlier.pop(shard, None)
            self._earlier[shard] = self._open.pop(shard)
            self._files.close(shard)
        for shard in list(self._earlier)[: max(0, len(self._earlier) - self._order.sets * self._order.streams)]:
            del self._earlier[shard]
        self._is_open[shards], self._prefetch_at[shards] = False, _NEVER
        self._first_end = min((opened.end for opened in self._open.values()), default=_NEVER)

    def _open_shards(self, locations: PackLocations, missing: IntArray) -> None:
        """Open the shards of the packs `missing`, int64 [m], and prepare the shards that follow."""
        shards, firsts = np.unique(locations.shards[missing], return_index=True)
        in_turn = np.argsort(firsts)
        keys = [(self._epoch, shard) for shard in shards[in_turn].tolist()]
        later = self._list_next_shards(int(locations.turns[-1]), int(locations.rounds[-1]), {shard for _, shard in keys})
        self._prefetcher.prepare(keys + (later if self._is_settled else []))
        prepared = self._prefetcher.take_prepared(keys)
        for (_, shard), first in zip(keys, missing[firsts[in_turn]].tolist(), strict=True):
            content, order = prepared[shard]
            self._files.open(shard, content)
            position, end = int(locations.positions[first]), int(locations.ends[first])
            window = _window_index_at(order, position)
            self._open[shard] = self._earlier.pop(shard, _OpenShard(end, order, window, window))
            self._is_open[shard] = True
            waits = 0 if self._is_settled else _FIRST_PACKS // self._shards_at_once
            self._prefetch_at[shard] = position + waits
        self._first_end = min((opened.end for opened in self._open.values()), default=_NEVER)

    def _list_next_shards(self, turn: int, last_round: int, now: set[int]) -> list[_Key]:
        """Return the (epoch, shard) keys of the shards that this process reads after the current ones.

        They are as many as the process reads at once. Shards that begin in the same round as the last of these are included,
        but the number of open and prepared shards stays limited. Streams from which the process has not read so far, such as
        those of other workers of a process, are skipped. Once streams have ended, any stream may be its own.
        """

        def comes(epoch_visit: _EpochVisit) -> bool:
            """Return whether the visit is still to come."""
            epoch, visit = epoch_visit
            if epoch > self._epoch:
                return True
            is_past = (visit.turn, visit.end) <= self._now or visit.turn < self._now[0]
            is_here = visit.turn <= turn and (visit.shard in now or visit.shard in self._open)
            return not (is_past or is_here)

        def is_later(epoch_visit: _EpochVisit) -> bool:
            """Return whether the visit begins after the packs that are being opened."""
            return epoch_visit[0] > self._epoch or (epoch_visit[1].turn, epoch_visit[1].begin) > (turn, last_round)

        soon = [epoch_visit for epoch_visit in self._soon if comes(epoch_visit)]
        later = sum(map(is_later, soon))
        while later < self._shards_at_once and (epoch_visit := next(self._visits, None)) is not None:
            if comes(epoch_visit):
                soon.append(epoch_visit)
                later += is_later(epoch_visit)
        self._soon = soon
        most = self._order.streams + self._shards_at_once - len(self._open) - len(now)
        mine = [
            (epoch, visit.shard)
            for epoch, visit in soon
            if not (epoch == self._epoch and (visit.shard in now or visit.shard in self._open))
            and (self._is_read[visit.stream % self._order.streams] or visit.begin >= self._order.count_full_rounds(epoch))
        ]
        return list(dict.fromkeys(mine))[: max(0, most)]

    def _prefetch(self, shard: int, position: int) -> None:
        """Prefetch the window of a position and, from its middle on, the next window too. Drop the windows before it."""
        opened = self._open[shard]
        windows, now = opened.order.windows, _window_index_at(opened.order, position)
        behind = windows[now + 1 :, 0].tolist() + [len(opened.order.records)] * 2
        middle, next_middle = (int(windows[now, 0]) + behind[0]) // 2, (behind[0] + behind[1]) // 2
        prefetched = now + (2 if position >= middle else 1)
        for _, first, last in windows[max(opened.prefetched, now) : prefetched].tolist():
            self._files.prefetch(shard, first, last)
        for _, first, last in windows[opened.dropped : now].tolist():
            self._files.drop_pages(shard, first, last)
        opened.prefetched, opened.dropped = prefetched, now
        self._prefetch_at[shard] = next_middle if position >= middle else middle


def _window_index_at(order: ShardOrder, position: int) -> int:
    """Return the index of the window that contains a position."""
    return int(np.searchsorted(order.windows[:, 0], position, side="right")) - 1


class _Prefetcher(Generic[Prepared]):
    """Prepares shards and their orders in threads, in the order in which they are needed."""

    def __init__(self, files: ShardFiles[Prepared], order: GlobalOrder) -> None:
        self._files = files
        # Shards of several sets are opened again in later turns, so cache the orders of all sets and of one more.
        self._shard_order = lru_cache((order.sets + 1) * order.streams)(order.shard_order)
        self._pool = ThreadPoolExecutor(files.threads, thread_name_prefix="shards-ahead")
        self._waiting: list[_Key] = []
        self._begun: dict[_Key, Future[tuple[Prepared, ShardOrder]]] = {}

    def prepare(self, keys: Sequence[_Key]) -> None:
        """Prepare these shards, each once, and discard all others."""
        needed = set(keys)
        for key in [key for key in self._begun if key not in needed]:
            future = self._begun.pop(key)
            if not future.cancel():
                future.add_done_callback(lambda _, shard=key[1]: self._files.discard(shard))  # type: ignore[misc]
        self._waiting = [key for key in keys if key not in self._begun]
        self.submit()

    def submit(self) -> None:
        """Give work to the threads, but only a little at a time, because a process that ends has to wait for it."""
        if not self._waiting:
            return
        running = sum(not future.done() for future in self._begun.values())
        for key in self._waiting[: max(0, 2 * self._files.threads - running)]:
            self._begun[key] = self._pool.submit(self._prepare, *key)
        self._waiting = [key for key in self._waiting if key not in self._begun]

    def take_prepared(self, keys: Sequence[_Key]) -> dict[int, tuple[Prepared, ShardOrder]]:
        """Return the prepared shards with their orders, by shard number.

        Shards that no thread has begun are prepared here, last ones first.
        """
        prepared = {}
        for epoch, shard in reversed(keys):
            self.submit()
            future = self._begun.pop((epoch, shard), None)
            if future is None:
                self._waiting.remove((epoch, shard))
            prepared[shard] = self._prepare(epoch, shard) if future is None or future.cancel() else future.result()
        return prepared

    def _prepare(self, epoch: int, shard: int) -> tuple[Prepared, ShardOrder]:
        """Prepare a shard and compute its order."""
        return self._files.prepare(shard), self._shard_order(epoch, shard)


@dataclass(frozen=True, eq=False)
class StoredPacks:
    """The packs of a folder and how to read them.

    Attributes:
        files: a `ShardFiles` with the `sizes` of all shards, whose `read` returns packs by shard and record number.
        streams: how many shards are read at once.
        sets: the number of sets of streams that take turns.
        regions: int64 [shards], the part of the input from which each shard comes; None if shards are in input order.
        window_rows: returns for a shard how many packs can be read at the cost of one; None for any number.
    """

    files: Any
    streams: int
    sets: int = 1
    regions: IntArray | None = None
    window_rows: Callable[[int], int] | None = None

    def make_order(self, seed: int, shuffle_packs: int | None = None) -> GlobalOrder:
        """Return the global order of these packs.

        Args:
            seed: the seed of the order.
            shuffle_packs: the packs within which a pack of a shard may move; None for as many as can be read without extra
                cost.
        """
        window: int | Callable[[int], int] = shuffle_packs or WINDOW_PACKS
        rows = self.window_rows
        if rows is not None:
            window = rows if shuffle_packs is None else lambda shard: min(shuffle_packs, rows(shard))
        return GlobalOrder(self.files.sizes, seed, window, self.streams, self.sets, self.regions)

    def open_reader(self, order: GlobalOrder, rank: int = 0, world_size: int = 1) -> StreamReader[Any]:
        """Return a reader for the packs of one process."""
        check_rank(rank, world_size)
        return StreamReader(self.files, order, rank, world_size)
