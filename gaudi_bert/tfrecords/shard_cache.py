"""Packed shards of an object store on the local disk: what is read of them, within a bound.

A process begins before its shards are here. The packs that it reads first are fetched one by one, where the index of their
group locates them; packs that are close together come in one request. Once some hundreds are read, complete shards are
fetched in the background, from front to back, and a pack that has not come by then is still fetched by itself. A small
shard is fetched completely at once: that is as fast as a few packs of it.

A reader has at most a shard of each stream open, has the next ones prepared (`reading/streams.py`), and returns to those
of the other sets. So its space follows from the largest shards, whatever the size of the data. Shards that were read
stay until their room is needed, and the least recently used goes first: data that fits is fetched once. The state of a
run is a number of packs, so nothing of this is stored: a run that is resumed fetches again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.shards import ShardTable
from gaudi_bert.artefacts.store.mirrored_folder import fetch_part, release, reserve, shown_path
from gaudi_bert.common.errors import InputError

_SMALL_BYTES = 8 << 20
"""Shards of up to this size are fetched completely at once."""
_PIECE_BYTES = 32 << 20
"""So much of a shard is fetched by a request; in between, the fetch may end."""


@dataclass
class _Copy:
    """A shard that is here, or comes.

    Attributes:
        users: how often it was brought and not released.
        filled: all bytes before this one are here.
        filling: what fetches all of it.
        is_removed: its room was needed.
    """

    users: int = 0
    filled: int = 0
    filling: Future[None] | None = None
    is_removed: bool = False


class ShardCache:
    """The shards of a mirrored folder that are here: at most `room` bytes at any time; `threads` are fetched at once."""

    def __init__(self, folder: Path, table: ShardTable, room: int, threads: int, small_bytes: int = _SMALL_BYTES) -> None:
        self.folder, self.threads = folder, threads
        self._table, self._room, self._small_bytes = table, room, small_bytes
        self._lock = threading.Lock()
        self._copies: dict[int, _Copy] = {}  # the least recently used first
        self._whole = ThreadPoolExecutor(threads, thread_name_prefix="complete-shards")
        self._parts = ThreadPoolExecutor(3 * threads, thread_name_prefix="parts-of-shards")

    def check_room(self, streams: int, processes: int, sets: int = 1) -> None:
        """Refuse shards of which those of all sets of streams and those that a process reads next may not fit."""
        ahead = streams // math.gcd(streams, processes)
        needed = int(np.sort(self._table.bytes)[::-1][: streams * sets + ahead].sum())
        if needed > self._room:
            raise InputError(
                f"{self.folder}: a process needs {needed:,} bytes for the shards of {streams * sets} streams and the "
                f"next {ahead}, store.cache_bytes is {self._room:,}; raise it (on Kubernetes kubernetes.scratch, to twice "
                "as much)"
            )

    def bring(self, number: int, complete: bool = True) -> None:
        """Have a shard here until it is released as often as it was brought: all of it, or what `fetch_parts` fetches."""
        with self._lock:
            copy = self._copies.setdefault(number, _Copy())
            copy.users += 1
            self._make_room()
        path, size = self._path(number), int(self._table.bytes[number])
        stored = reserve(path)
        if stored != size:
            problem = "no such object" if stored is None else f"has {stored:,} bytes, but {size:,} in the metadata"
            raise InputError(f"{shown_path(path)}: {problem}; write the packed data again")
        if complete or size <= self._small_bytes:
            self.fill(number).result()

    def release(self, number: int) -> None:
        """A shard that was brought is not read any more."""
        with self._lock:
            copy = self._copies.pop(number)
            copy.users -= 1
            self._copies[number] = copy

    def fill(self, number: int) -> Future[None]:
        """Begin to fetch all of a shard that was brought."""
        with self._lock:
            copy = self._copies[number]
            if copy.filling is None:
                copy.filling = self._whole.submit(self._fill, number, copy)
            return copy.filling

    def bytes_here(self, number: int) -> int:
        """How many bytes of a shard that was brought are here, from its first on."""
        copy = self._copies[number]
        if copy.filling is not None and copy.filling.done():
            copy.filling.result()  # or why they did not come
        return copy.filled

    def fetch_parts(self, parts: Iterable[tuple[int, int, int]]) -> None:
        """Fetch parts of shards that were brought: the number of each, its first byte and the byte behind its last."""
        begun = [self._parts.submit(fetch_part, self._path(number), begin, end) for number, begin, end in parts]
        for part in begun:
            part.result()

    def close(self) -> None:
        """Fetch no more."""
        for copy in list(self._copies.values()):
            copy.is_removed = True
        for pool in (self._whole, self._parts):
            pool.shutdown(cancel_futures=True)

    def _path(self, number: int) -> Path:
        return self.folder / self._table.name(number)

    def _fill(self, number: int, copy: _Copy) -> None:
        path, size = self._path(number), int(self._table.bytes[number])
        try:
            while copy.filled < size and not copy.is_removed:
                end = min(copy.filled + _PIECE_BYTES, size)
                fetch_part(path, copy.filled, end)
                copy.filled = end
        except InputError:
            if not copy.is_removed:  # its file is gone then
                raise

    def _make_room(self) -> None:
        """Remove shards that nobody reads, as long as there are more bytes than there is room."""
        here = int(self._table.bytes[list(self._copies)].sum())
        for number in [number for number, copy in self._copies.items() if not copy.users]:
            if here <= self._room:
                return
            self._copies.pop(number).is_removed = True
            here -= int(self._table.bytes[number])
            release(self._path(number))
