"""Shards read in the one order (`global_order.py`): those that are being read are open, and no others.

Every reader of a packed folder begins with its `StoredPacks`.

A process has at most C / gcd(C, W) shards open until the first stream ends, then at most C. A thread prepares as many again,
those that the process reads next (at the end of an epoch, of the next epoch): it fetches them, locates their records and
permutes these. A shard is closed when its stream has read it, or when the turn of its stream ends; then only its order and
the windows that were prefetched are remembered.

The order of a shard is permuted, so the disk's own read-ahead would fetch megabytes for each pack. Instead the next window
of records is prefetched. That, and preparing the next shards, begins when some hundreds of packs are read, so that a process
begins at once.
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
from gaudi_bert.reading.global_order import WINDOW_PACKS, GlobalOrder, Located, ShardOrder, Visit, check_rank

Prepared = TypeVar("Prepared")

_FIRST_PACKS = 512
_NEVER = np.iinfo(np.int64).max


class ShardFiles(Generic[Prepared]):
    """The shards of a data set, opened one by one, `threads` prepared at once. A kind of shards overrides some methods."""

    threads: int = 1

    def prepare(self, shard: int) -> Prepared:
        """Do the slow part of opening a shard, in any thread; it holds no file open."""
        raise NotImplementedError

    def open(self, shard: int, prepared: Prepared) -> None:
        """Open a shard that was prepared."""

    def close(self, shard: int) -> None:
        """Close an open shard."""

    def discard(self, shard: int) -> None:
        """Release a shard that was prepared and is not opened after all."""

    def prefetch(self, shard: int, first: int, last: int) -> None:
        """Start to read records `first` up to below `last` of an open shard."""

    def drop_pages(self, shard: int, first: int, last: int) -> None:
        """Release the memory of these records, which are not read again."""


_Key = tuple[int, int]
"""An epoch and a shard."""
_Coming = tuple[int, Visit]
"""An epoch and a visit in it."""


@dataclass
class _OpenShard:
    """A shard that is read, in this turn or in others."""

    end: int  # the round at which its stream has read it
    order: ShardOrder
    prefetched: int  # the windows before this number, in its order, are prefetched
    dropped: int  # and those before this number dropped


class StreamReader(Generic[Prepared]):
    """Locates the packs that a process reads, and has their shards open."""

    def __init__(self, files: ShardFiles[Prepared], order: GlobalOrder, rank: int = 0, world_size: int = 1) -> None:
        self._files, self._order, self._share = files, order, (rank, world_size)
        self._shards_at_once = order.shards_at_once(world_size)
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which opens the shards itself."""
        return StreamReader, (self._files, self._order, *self._share)

    def locate(self, epoch: int, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """The shards of packs and their records in these, int64 [n] each, for `read` of the files.

        `numbers`, int64 [n], ascending, are of packs of this process. A jump back opens the shards again.
        """
        if self._process != os.getpid():  # forked: the thread does not exist there
            self._reset()
        located = self._order.locate(epoch, numbers)
        if len(numbers):
            self._go_to(epoch, located, int(numbers[0]))
        pairs = zip(located.shards.tolist(), located.positions.tolist(), strict=True)
        records = [self._open[shard].order.records[position] for shard, position in pairs]
        return located.shards, np.array(records, np.int64)

    def close(self) -> None:
        """Close all shards, and prepare no more."""
        self._close(list(self._open))
        self._ahead.prepare([])
        self._reset()

    def _reset(self) -> None:
        """Nothing is open, and nothing is read."""
        self._process = os.getpid()
        self._ahead = _Ahead(self._files, self._order)
        self._open: dict[int, _OpenShard] = {}
        self._earlier: dict[int, _OpenShard] = {}  # of this epoch, closed at the end of a turn
        self._is_open = np.zeros(len(self._order.sizes), np.bool_)
        self._last_turn = np.full(len(self._order.sizes), -1)
        self._prefetch_at = np.full(len(self._order.sizes), _NEVER)
        self._is_read = np.zeros(self._order.streams, np.bool_)  # the streams of a set of which this process has read
        self._epoch, self._now, self._first_end, self._settles_at, self._is_settled = -1, (0, 0), _NEVER, 0, False
        self._visits: Iterator[_Coming] = iter(())
        self._soon: list[_Coming] = []

    def _go_to(self, epoch: int, located: Located, number: int) -> None:
        """Open the shards of these packs, `number` being the first pack, and close those that are read."""
        now = int(located.turns[0]), int(located.rounds[0])
        if epoch != self._epoch or now < self._now:
            self._close(list(self._open))
            self._earlier.clear()
            self._visits = self._order.visits(epoch, number, *self._share)
            self._settles_at = number + _FIRST_PACKS * self._share[1] if self._epoch < 0 else number
            self._is_settled, self._epoch, self._soon = False, epoch, []
        ended = []
        if now[0] > self._now[0] or now[1] >= self._first_end:
            needed = set(located.shards.tolist())
            ended = [
                shard
                for shard, opened in self._open.items()
                if shard not in needed and (self._last_turn[shard] < now[0] or opened.end <= now[1])
            ]
        self._now = now
        self._is_read[located.streams % self._order.streams] = True
        self._close(ended)
        self._last_turn[located.shards] = located.turns
        is_open = self._is_open[located.shards]
        settles = not self._is_settled and number >= self._settles_at
        self._is_settled = self._is_settled or settles
        if ended or settles or not is_open.all():
            self._open_these(located, np.flatnonzero(~is_open))
        self._ahead.submit()
        due = located.positions >= self._prefetch_at[located.shards]
        if due.any():
            for shard in np.unique(located.shards[due]).tolist():
                self._prefetch(shard, int(located.positions[located.shards == shard].max()))

    def _close(self, shards: list[int]) -> None:
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

    def _open_these(self, located: Located, missing: IntArray) -> None:
        """Open the shards of the packs `missing`, int64 [m], and prepare the next ones."""
        shards, firsts = np.unique(located.shards[missing], return_index=True)
        in_turn = np.argsort(firsts)
        keys = [(self._epoch, shard) for shard in shards[in_turn].tolist()]
        later = self._next(int(located.turns[-1]), int(located.rounds[-1]), {shard for _, shard in keys})
        self._ahead.prepare(keys + (later if self._is_settled else []))
        prepared = self._ahead.take(keys)
        for (_, shard), first in zip(keys, missing[firsts[in_turn]].tolist(), strict=True):
            content, order = prepared[shard]
            self._files.open(shard, content)
            position, end = int(located.positions[first]), int(located.ends[first])
            window = _window_at(order, position)
            self._open[shard] = self._earlier.pop(shard, _OpenShard(end, order, window, window))
            self._is_open[shard] = True
            waits = 0 if self._is_settled else _FIRST_PACKS // self._shards_at_once
            self._prefetch_at[shard] = position + waits
        self._first_end = min((opened.end for opened in self._open.values()), default=_NEVER)

    def _next(self, turn: int, last_round: int, now: set[int]) -> list[_Key]:
        """The shards that this process reads later: as many as it reads at once, and those that begin with the last of them.

        With the open ones they are at most so many more than are read at once. Streams that it has not read, as those of
        other workers of a process, are skipped; but when streams have ended, any may be its own.
        """

        def comes(coming: _Coming) -> bool:
            epoch, visit = coming
            if epoch > self._epoch:
                return True
            is_past = (visit.turn, visit.end) <= self._now or visit.turn < self._now[0]
            is_here = visit.turn <= turn and (visit.shard in now or visit.shard in self._open)
            return not (is_past or is_here)

        def is_later(coming: _Coming) -> bool:
            return coming[0] > self._epoch or (coming[1].turn, coming[1].begin) > (turn, last_round)

        soon = [coming for coming in self._soon if comes(coming)]
        later = sum(map(is_later, soon))
        while later < self._shards_at_once and (coming := next(self._visits, None)) is not None:
            if comes(coming):
                soon.append(coming)
                later += is_later(coming)
        self._soon = soon
        most = self._order.streams + self._shards_at_once - len(self._open) - len(now)
        mine = [
            (epoch, visit.shard)
            for epoch, visit in soon
            if not (epoch == self._epoch and (visit.shard in now or visit.shard in self._open))
            and (self._is_read[visit.stream % self._order.streams] or visit.begin >= self._order.full_rounds(epoch))
        ]
        return list(dict.fromkeys(mine))[: max(0, most)]

    def _prefetch(self, shard: int, position: int) -> None:
        """Prefetch the window of a position and, from its middle on, the next one; drop those before."""
        opened = self._open[shard]
        windows, now = opened.order.windows, _window_at(opened.order, position)
        behind = windows[now + 1 :, 0].tolist() + [len(opened.order.records)] * 2
        middle, next_middle = (int(windows[now, 0]) + behind[0]) // 2, (behind[0] + behind[1]) // 2
        prefetched = now + (2 if position >= middle else 1)
        for _, first, last in windows[max(opened.prefetched, now) : prefetched].tolist():
            self._files.prefetch(shard, first, last)
        for _, first, last in windows[opened.dropped : now].tolist():
            self._files.drop_pages(shard, first, last)
        opened.prefetched, opened.dropped = prefetched, now
        self._prefetch_at[shard] = next_middle if position >= middle else middle


def _window_at(order: ShardOrder, position: int) -> int:
    return int(np.searchsorted(order.windows[:, 0], position, side="right")) - 1


class _Ahead(Generic[Prepared]):
    """Shards and their orders, prepared by threads in the order in which they are needed."""

    def __init__(self, files: ShardFiles[Prepared], order: GlobalOrder) -> None:
        self._files = files
        # A shard of several sets is opened again in later turns.
        self._shard_order = lru_cache((order.sets + 1) * order.streams)(order.shard_order)
        self._pool = ThreadPoolExecutor(files.threads, thread_name_prefix="shards-ahead")
        self._waiting: list[_Key] = []
        self._begun: dict[_Key, Future[tuple[Prepared, ShardOrder]]] = {}

    def prepare(self, keys: Sequence[_Key]) -> None:
        """Prepare these, each once, and no others."""
        needed = set(keys)
        for key in [key for key in self._begun if key not in needed]:
            future = self._begun.pop(key)
            if not future.cancel():
                future.add_done_callback(lambda _, shard=key[1]: self._files.discard(shard))  # type: ignore[misc]
        self._waiting = [key for key in keys if key not in self._begun]
        self.submit()

    def submit(self) -> None:
        """Give the threads work: not all at once, since a process that ends waits for what they were given."""
        if not self._waiting:
            return
        running = sum(not future.done() for future in self._begun.values())
        for key in self._waiting[: max(0, 2 * self._files.threads - running)]:
            self._begun[key] = self._pool.submit(self._prepare, *key)
        self._waiting = [key for key in self._waiting if key not in self._begun]

    def take(self, keys: Sequence[_Key]) -> dict[int, tuple[Prepared, ShardOrder]]:
        """Return the prepared shards; those that no thread has begun are prepared here, from the last on."""
        prepared = {}
        for epoch, shard in reversed(keys):
            self.submit()
            future = self._begun.pop((epoch, shard), None)
            if future is None:
                self._waiting.remove((epoch, shard))
            prepared[shard] = self._prepare(epoch, shard) if future is None or future.cancel() else future.result()
        return prepared

    def _prepare(self, epoch: int, shard: int) -> tuple[Prepared, ShardOrder]:
        return self._files.prepare(shard), self._shard_order(epoch, shard)


@dataclass(frozen=True, eq=False)
class StoredPacks:
    """Packs of a folder."""

    files: Any  # `ShardFiles` with the `sizes` of all shards, which `read` packs by shard and number
    streams: int  # how many shards are read at once; `sets` of so many take turns
    sets: int = 1
    regions: IntArray | None = None  # int64 [shards], the part of the input each comes from; None for their sequence
    window_rows: Callable[[int], int] | None = None  # of a shard, packs that cost no more to read than one; None for any

    def order(self, seed: int, shuffle_packs: int | None = None) -> GlobalOrder:
        """The one order; packs of a shard move within `shuffle_packs`, by default as far as costs no more."""
        window: int | Callable[[int], int] = shuffle_packs or WINDOW_PACKS
        rows = self.window_rows
        if rows is not None:
            window = rows if shuffle_packs is None else lambda shard: min(shuffle_packs, rows(shard))
        return GlobalOrder(self.files.sizes, seed, window, self.streams, self.sets, self.regions)

    def reader(self, order: GlobalOrder, rank: int = 0, world_size: int = 1) -> StreamReader[Any]:
        """Locates the packs of one process, and has their shards open."""
        check_rank(rank, world_size)
        return StreamReader(self.files, order, rank, world_size)
