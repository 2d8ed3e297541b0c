"""Packed shards of an object store on the local disk: complete, and within a bound.

Shards are fetched ahead of the reader, by the threads that prepare them (`reading/streams.py`), from front to back. One that
is here is complete. A reader has at most a shard of each stream open, has the next ones prepared, and returns to those of
the other sets, so its space follows from the largest shards, whatever the size of the data. Shards that were read stay until
their room is needed, and the least recently used goes first: data that fits is fetched once.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.shards import ShardTable
from gaudi_bert.artefacts.store.mirrored_folder import fetch, release, shown_path
from gaudi_bert.common.errors import InputError


@dataclass
class _Copy:
    """A shard that is here, or comes; `users` counts how often it was brought and not released."""

    users: int = 0
    fetching: threading.Lock = field(default_factory=threading.Lock)


class ShardCache:
    """The shards of a mirrored folder that are here: at most `room` bytes; `threads` are fetched at once."""

    def __init__(self, folder: Path, table: ShardTable, room: int, threads: int) -> None:
        self.threads = threads
        self._folder, self._table, self._room = folder, table, room
        self._lock = threading.Lock()
        self._copies: dict[int, _Copy] = {}  # the least recently used first

    def check_room(self, streams: int, processes: int, sets: int = 1) -> None:
        """Refuse shards of which those of all sets of streams and those that a process reads next may not fit."""
        ahead = streams // math.gcd(streams, processes)
        needed = int(np.sort(self._table.bytes)[::-1][: streams * sets + ahead].sum())
        if needed > self._room:
            raise InputError(
                f"{self._folder}: a process needs {needed:,} bytes for the shards of {streams * sets} streams and the "
                f"next {ahead}, store.cache_bytes is {self._room:,}; raise it (on Kubernetes kubernetes.scratch, to twice "
                "as much)"
            )

    def bring(self, number: int) -> None:
        """Have a complete shard here until it is released as often as it was brought."""
        path, size = self._folder / self._table.name(number), int(self._table.bytes[number])
        with self._lock:
            copy = self._copies[number] = self._copies.pop(number, _Copy())
            copy.users += 1
            self._make_room()
        with copy.fetching:  # two readers of one shard fetch it once
            fetch(path)
        stored = path.stat().st_size if path.exists() else None
        if stored != size:
            problem = "no such object" if stored is None else f"has {stored:,} bytes, but {size:,} in the metadata"
            raise InputError(f"{shown_path(path)}: {problem}; write the packed data again")

    def release(self, number: int) -> None:
        """Let go of a shard that was brought."""
        with self._lock:
            copy = self._copies[number] = self._copies.pop(number)
            copy.users -= 1

    def _make_room(self) -> None:
        """Remove shards that nobody reads, as long as there are more bytes than there is room."""
        here = int(self._table.bytes[list(self._copies)].sum())
        for number in [number for number, copy in self._copies.items() if not copy.users]:
            if here <= self._room:
                return
            del self._copies[number]
            here -= int(self._table.bytes[number])
            release(self._folder / self._table.name(number))
