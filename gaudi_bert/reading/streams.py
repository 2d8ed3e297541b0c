"""Reads packs in the global order (`global_order.py`), and keeps only those shards open that are being read.

Code that reads the packs of a folder starts with a `StoredPacks` object. A process has at most C / gcd(C, W) shards open
until the first stream ends, and then at most C. Here C is the number of streams and W is the number of processes. Background
threads prepare the same number of shards in advance. They download the shards, find the records in them, and compute the
reading orders. A shard is closed when its stream has read it or when the turn of its stream ends. After that, only its order
and its number of prefetched windows are kept.

The packs of a shard are read in a random order, so the read-ahead of the operating system would read megabytes for each
pack. Instead, the next window of records is prefetched. Prefetching and preparing begin only after some hundreds of packs,
so that a process can read its first packs at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.reading.global_order import WINDOW_PACKS, GlobalOrder, PackLocations, ShardOrder, ShardVisit, check_rank

PreparedShard = TypeVar("PreparedShard")

# To make its first packs available quickly, a process reads this many packs before it starts to prefetch. Then it prefetches
# windows and prepares further shards.
_FIRST_PACKS = 512

_NEVER = np.iinfo(np.int64).max


class ShardFiles(Generic[PreparedShard]):
    """The shards of a data set. `StreamReader` opens them one by one.

    Each file format has a subclass, which overrides some of the methods.

    Attributes:
        threads: How many shards are prepared at the same time.
    """

    threads: int = 1

    def prepare_shard_for_opening(self, shard: int) -> PreparedShard:
        """Do the slow part of opening a shard, and return the result for `open_shard`.

        This method may be called in any thread. It must not keep a file open.
        """
        raise NotImplementedError

    def open_shard(self, shard: int, prepared: PreparedShard) -> None:
        """Open a shard. `prepared` is the result of `prepare_shard_for_opening`."""

    def close_shard(self, shard: int) -> None:
        """Close an open shard."""

    def discard_shard(self, shard: int) -> None:
        """Release a shard that was prepared but will not be opened."""

    def prefetch_records(self, shard: int, first: int, last: int) -> None:
        """Start to read the records `first` to `last` - 1 of an open shard into memory, without waiting for them."""

    def drop_pages(self, shard: int, first: int, last: int) -> None:
        """Release the memory of the records `first` to `last` - 1 of an open shard. They will not be read again."""


_EpochAndShard = tuple[int, int]
# The number of an epoch, and a visit in this epoch. In a visit, a process reads packs from one shard.
_EpochVisit = tuple[int, ShardVisit]


class PackRecords(NamedTuple):
    """Where n packs are stored. Each attribute is an int64 array [n].

    Attributes:
        shards: int64 [n], the shard of each pack.
        records: int64 [n], the number of each pack's record in its shard.
    """

    shards: IntArray
    records: IntArray


@dataclass
class _OpenShard:
    """How far a shard has been read in this epoch. The reader keeps this object after it closes the shard, because it may
    open the shard again later.

    Attributes:
        end: The number of rounds after which the stream has read all packs of the shard.
        order: The reading order of the shard's packs.
        prefetched: The number of windows that were prefetched, in reading order.
        dropped: The number of windows that were released from memory.
    """

    end: int
    order: ShardOrder
    prefetched: int
    dropped: int


class StreamReader(Generic[PreparedShard]):
    """Finds the records that contain the packs of one process. It opens the shards that are needed, and closes them after
    use.

    Args:
        files: The shards.
        order: The global order.
        rank: The number of this process.
        world_size: The number of processes.
    """

    def __init__(self, files: ShardFiles[PreparedShard], order: GlobalOrder, rank: int = 0, world_size: int = 1) -> None:
        self._files, self._order, self._rank_and_world_size = files, order, (rank, world_size)
        self._shards_at_once = order.count_open_shards_per_process(world_size)
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the constructor arguments. The process that unpickles the reader opens the shards itself."""
        return StreamReader, (self._files, self._order, *self._rank_and_world_size)

    def locate_and_open(self, epoch: int, pack_numbers: IntArray) -> PackRecords:
        """Open the shards of the given packs, and return the shard and the record number of each pack.

        The packs may precede the packs of an earlier call. In this case, their shards are opened again.

        Args:
            epoch: The epoch.
            pack_numbers: int64 [n], ascending, the numbers of packs of this process.
        """
        if self._process != os.getpid():  # the background threads do not exist in this process after a fork
            self._reset()
        locations = self._order.locate_packs(epoch, pack_numbers)
        if len(pack_numbers):
            self._advance_to(epoch, locations, int(pack_numbers[0]))
        records = [
            self._open[shard].order.records[position]
            for shard, position in zip(locations.shards.tolist(), locations.positions.tolist(), strict=True)
        ]
        return PackRecords(locations.shards, np.array(records, np.int64))

    def close(self) -> None:
        """Close all open shards, and stop preparing other shards."""
        self._close_shards(list(self._open))
        self._preparer.start_preparing([])
        self._reset()

    def _reset(self) -> None:
        """Reset the reader to its initial state, with no open shards and no packs read."""
        self._process = os.getpid()
        self._preparer = _ShardPreparer(self._files, self._order)
        self._open: dict[int, _OpenShard] = {}
        self._closed_shards: dict[int, _OpenShard] = {}  # the shards closed in this epoch, in the order of closing
        self._is_open = np.zeros(len(self._order.sizes), np.bool_)
        self._last_turn = np.full(len(self._order.sizes), -1)
        self._prefetch_at = np.full(len(self._order.sizes), _NEVER)
        # The streams of each set are numbered from 0. For each number, record whether this process has read from a stream
        # with this number.
        self._is_read = np.zeros(self._order.streams, np.bool_)
        self._epoch, self._turn_and_round, self._first_end = -1, (0, 0), _NEVER
        self._read_ahead_from, self._reads_ahead = 0, False
        self._visits: Iterator[_EpochVisit] = iter(())
        self._upcoming_visits: list[_EpochVisit] = []

    def _advance_to(self, epoch: int, locations: PackLocations, first_pack_number: int) -> None:
        """Open the shards of the given packs, and close the shards that are no longer needed.

        Args:
            epoch: The epoch.
            locations: The locations of the packs.
            first_pack_number: The number of the first of these packs.
        """
        now = int(locations.turns[0]), int(locations.rounds[0])
        if epoch != self._epoch or now < self._turn_and_round:
            self._close_shards(list(self._open))
            self._closed_shards.clear()
            self._visits = self._order.iterate_shard_visits(epoch, first_pack_number, *self._rank_and_world_size)
            self._read_ahead_from = (
                first_pack_number + _FIRST_PACKS * self._rank_and_world_size[1] if self._epoch < 0 else first_pack_number
            )
            self._reads_ahead, self._epoch, self._upcoming_visits = False, epoch, []
        ended = []
        if now[0] > self._turn_and_round[0] or now[1] >= self._first_end:
            needed = set(locations.shards.tolist())
            ended = [
                shard
                for shard, opened in self._open.items()
                if shard not in needed and (self._last_turn[shard] < now[0] or opened.end <= now[1])
            ]
        self._turn_and_round = now
        self._is_read[locations.streams % self._order.streams] = True
        self._close_shards(ended)
        self._last_turn[locations.shards] = locations.turns
        is_open = self._is_open[locations.shards]
        begins_read_ahead = not self._reads_ahead and first_pack_number >= self._read_ahead_from
        self._reads_ahead = self._reads_ahead or begins_read_ahead
        if ended or begins_read_ahead or not is_open.all():
            self._open_missing_shards(locations, np.flatnonzero(~is_open))
        self._preparer.submit_waiting_shards()
        due = locations.positions >= self._prefetch_at[locations.shards]
        if due.any():
            for shard in np.unique(locations.shards[due]).tolist():
                self._prefetch_windows(shard, int(locations.positions[locations.shards == shard].max()))

    def _close_shards(self, shards: list[int]) -> None:
        """Close the given shards. Keep their reading orders and positions, because a shard may be opened again later."""
        if not shards:
            return
        for shard in shards:
            self._closed_shards.pop(shard, None)
            self._closed_shards[shard] = self._open.pop(shard)
            self._files.close_shard(shard)
        for shard in list(self._closed_shards)[: max(0, len(self._closed_shards) - self._order.sets * self._order.streams)]:
            del self._closed_shards[shard]
        self._is_open[shards], self._prefetch_at[shards] = False, _NEVER
        self._first_end = min((opened.end for opened in self._open.values()), default=_NEVER)

    def _open_missing_shards(self, locations: PackLocations, missing_packs: IntArray) -> None:
        """Open the shards of the packs in `missing_packs`, and start to prepare the shards that will be needed next.

        Args:
            locations: The locations of the packs that the process reads now.
            missing_packs: int64 [m], the indices in `locations` of the packs whose shards are not open.
        """
        shards, firsts = np.unique(locations.shards[missing_packs], return_index=True)
        in_reading_order = np.argsort(firsts)
        keys = [(self._epoch, shard) for shard in shards[in_reading_order].tolist()]
        later = self._list_shards_to_prepare(
            int(locations.turns[-1]), int(locations.rounds[-1]), {shard for _, shard in keys}
        )
        self._preparer.start_preparing(keys + (later if self._reads_ahead else []))
        prepared = self._preparer.take_prepared_shards(keys)
        for (_, shard), first in zip(keys, missing_packs[firsts[in_reading_order]].tolist(), strict=True):
            content, order = prepared[shard]
            self._files.open_shard(shard, content)
            position, end = int(locations.positions[first]), int(locations.ends[first])
            window = _find_window_index(order, position)
            self._open[shard] = self._closed_shards.pop(shard, _OpenShard(end, order, window, window))
            self._is_open[shard] = True
            self._prefetch_at[shard] = position + (0 if self._reads_ahead else _FIRST_PACKS // self._shards_at_once)
        self._first_end = min((opened.end for opened in self._open.values()), default=_NEVER)

    def _list_shards_to_prepare(self, after_turn: int, after_round: int, current_shards: set[int]) -> list[_EpochAndShard]:
        """Return (epoch, shard) for each shard that this process will need next, in reading order.

        The list contains as many shards as the process reads at the same time. Shards that begin in the same round as the
        last of these are included, but the total number of open and prepared shards is limited. A stream from which this
        process has not read may belong to another worker of the process, so its shards are skipped. This rule no longer
        applies after the first stream has ended, because from then on the process may read from any stream.

        Args:
            after_turn: The turn of the last pack that is being opened.
            after_round: The round of this pack.
            current_shards: The shards that are being opened.
        """

        def is_upcoming(epoch_visit: _EpochVisit) -> bool:
            """Return whether a shard must still be opened for a visit.

            This is not the case if the visit is over, or if the shard is already open or is just being opened.
            """
            epoch, visit = epoch_visit
            if epoch > self._epoch:
                return True
            is_past = (visit.turn, visit.end) <= self._turn_and_round or visit.turn < self._turn_and_round[0]
            is_here = visit.turn <= after_turn and (visit.shard in current_shards or visit.shard in self._open)
            return not (is_past or is_here)

        def is_later(epoch_visit: _EpochVisit) -> bool:
            """Return whether a visit begins after the last of the packs that this process is reading now."""
            return epoch_visit[0] > self._epoch or (epoch_visit[1].turn, epoch_visit[1].begin) > (after_turn, after_round)

        upcoming = [epoch_visit for epoch_visit in self._upcoming_visits if is_upcoming(epoch_visit)]
        later = sum(map(is_later, upcoming))
        while later < self._shards_at_once and (epoch_visit := next(self._visits, None)) is not None:
            if is_upcoming(epoch_visit):
                upcoming.append(epoch_visit)
                later += is_later(epoch_visit)
        self._upcoming_visits = upcoming
        max_shards = self._order.streams + self._shards_at_once - len(self._open) - len(current_shards)
        own_shards = [
            (epoch, visit.shard)
            for epoch, visit in upcoming
            if not (epoch == self._epoch and (visit.shard in current_shards or visit.shard in self._open))
            and (
                self._is_read[visit.stream % self._order.streams]
                or visit.begin >= self._order.count_rounds_with_all_streams(epoch)
            )
        ]
        return list(dict.fromkeys(own_shards))[: max(0, max_shards)]

    def _prefetch_windows(self, shard: int, position: int) -> None:
        """Prefetch the window of records that contains a position in a shard, and release the memory of earlier windows.

        In the second half of a window, also prefetch the next window.
        """
        opened = self._open[shard]
        windows, current = opened.order.windows, _find_window_index(opened.order, position)
        behind = windows[current + 1 :, 0].tolist() + [len(opened.order.records)] * 2
        middle, next_middle = (int(windows[current, 0]) + behind[0]) // 2, (behind[0] + behind[1]) // 2
        prefetched = current + (2 if position >= middle else 1)
        for _, first, last in windows[max(opened.prefetched, current) : prefetched].tolist():
            self._files.prefetch_records(shard, first, last)
        for _, first, last in windows[opened.dropped : current].tolist():
            self._files.drop_pages(shard, first, last)
        opened.prefetched, opened.dropped = prefetched, current
        self._prefetch_at[shard] = next_middle if position >= middle else middle


def _find_window_index(order: ShardOrder, position: int) -> int:
    """Return the index of the window of records that contains a position in the reading order of a shard."""
    return int(np.searchsorted(order.windows[:, 0], position, side="right")) - 1


class _ShardPreparer(Generic[PreparedShard]):
    """Prepares shards in background threads and computes their reading orders. The shards that are needed first are prepared
    first.
    """

    def __init__(self, files: ShardFiles[PreparedShard], order: GlobalOrder) -> None:
        self._files = files
        # The sets of streams take turns, so a shard is closed and opened again several times. To avoid computing its reading
        # order each time, cache the orders. The cache has room for the open shards of all sets and of one more set.
        self._compute_shard_order = lru_cache((order.sets + 1) * order.streams)(order.compute_shard_order)
        self._pool = ThreadPoolExecutor(files.threads, thread_name_prefix="shards-ahead")
        self._waiting: list[_EpochAndShard] = []
        self._begun: dict[_EpochAndShard, Future[tuple[PreparedShard, ShardOrder]]] = {}

    def start_preparing(self, keys: Sequence[_EpochAndShard]) -> None:
        """Start to prepare the given shards, and discard all other prepared shards."""
        needed = set(keys)
        for key in [key for key in self._begun if key not in needed]:
            future = self._begun.pop(key)
            if not future.cancel():
                future.add_done_callback(lambda _, shard=key[1]: self._files.discard_shard(shard))  # type: ignore[misc]
        self._waiting = [key for key in keys if key not in self._begun]
        self.submit_waiting_shards()

    def submit_waiting_shards(self) -> None:
        """Submit the next shards in the queue to the background threads.

        Only a few shards are submitted at a time, because a process cannot end before its threads have prepared them.
        """
        if not self._waiting:
            return
        running = sum(not future.done() for future in self._begun.values())
        for key in self._waiting[: max(0, 2 * self._files.threads - running)]:
            self._begun[key] = self._pool.submit(self._prepare_shard, *key)
        self._waiting = [key for key in self._waiting if key not in self._begun]

    def take_prepared_shards(self, keys: Sequence[_EpochAndShard]) -> dict[int, tuple[PreparedShard, ShardOrder]]:
        """Wait until the given shards are prepared. Return the prepared content and the reading order of each shard, by
        shard number.

        Shards that no thread has begun to prepare are prepared in this thread, the last ones first.
        """
        prepared = {}
        for epoch, shard in reversed(keys):
            self.submit_waiting_shards()
            future = self._begun.pop((epoch, shard), None)
            if future is None:
                self._waiting.remove((epoch, shard))
            prepared[shard] = self._prepare_shard(epoch, shard) if future is None or future.cancel() else future.result()
        return prepared

    def _prepare_shard(self, epoch: int, shard: int) -> tuple[PreparedShard, ShardOrder]:
        """Prepare a shard and compute its reading order. Return both."""
        return self._files.prepare_shard_for_opening(shard), self._compute_shard_order(epoch, shard)


@dataclass(frozen=True, eq=False)
class StoredPacks:
    """The packs in the files of a folder, and how these files should be read.

    Attributes:
        files: The shards, as a `ShardFiles` object. The attribute `record_counts` holds the number of packs of each
            shard, and its method `read_records` returns packs by shard and record number.
        streams: The number of shards that are read at the same time.
        sets: The number of sets of streams that take turns.
        regions: int64 [shards], the region of the input from which each shard comes. None if the shards are in input order.
        window_rows: Returns the number of packs of a shard that can be read at the cost of one. None if there is no limit.
    """

    files: Any
    streams: int
    sets: int = 1
    regions: IntArray | None = None
    window_rows: Callable[[int], int] | None = None

    def make_order(self, seed: int, shuffle_packs: int | None = None) -> GlobalOrder:
        """Create the global reading order of these packs.

        Args:
            seed: The seed of the order.
            shuffle_packs: The number of packs within which a pack may move in its shard. By default, it is the number of
                packs that can be read without extra cost.
        """
        window: int | Callable[[int], int] = shuffle_packs or WINDOW_PACKS
        rows = self.window_rows
        if rows is not None:
            window = rows if shuffle_packs is None else lambda shard: min(shuffle_packs, rows(shard))
        return GlobalOrder(self.files.record_counts, seed, window, self.streams, self.sets, self.regions)

    def open_reader(self, order: GlobalOrder, rank: int = 0, world_size: int = 1) -> StreamReader[Any]:
        """Create the reader of one process. It opens the shards, and finds the records that contain the packs of the
        process.
        """
        check_rank(rank, world_size)
        return StreamReader(self.files, order, rank, world_size)
