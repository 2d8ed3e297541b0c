"""Packed shards of an object store on the local disk: fetched when they are first needed, several at once, within a bound.

The one order in which packs are read goes through all shards of a process side by side, so those of an epoch have to be on
the disk together; which they are changes with the epoch where several processes train. What was used longest ago goes first.
Where a run stands is a number of packs, so nothing of this is kept: a run that is resumed fetches what it needs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError

__all__ = ["ShardCache"]


class ShardCache:
    """Shards by name.

    Args:
        objects: the stores.
        url: the packed folder.
        folder: where the copies go.
        sizes: bytes of each shard, as metadata.json says.

    Attributes:
        folder: where the copies are while they are there.
    """

    def __init__(self, objects: Objects, url: str, folder: Path, sizes: Mapping[str, int]) -> None:
        self.folder = folder
        self._objects, self._url, self._sizes = objects, url, sizes
        self._lock = threading.Lock()
        self._there: OrderedDict[str, None] = OrderedDict()

    def check_room(self, processes: int) -> None:
        """Refuse an epoch whose shards of one process do not fit together.

        Raises:
            InputError: there is too little room.
        """
        shared = processes if len(self._sizes) % processes == 0 else 1
        needed, room = -(-sum(self._sizes.values()) // shared), self._objects.settings.cache_bytes
        if needed > room:
            raise InputError(
                f"{self._url}: a process reads {needed:,} bytes of shards an epoch, store.cache_bytes is {room:,}; raise it "
                "(on Kubernetes kubernetes.scratch, to twice as much), or train with more processes"
            )

    def bring(self, paths: Sequence[Path]) -> list[Path]:
        """Have the copies `paths` on the disk; the copies that had to go for them.

        Raises:
            InputError: a shard is missing, or was replaced.
            FailedError: the store refuses.
        """
        with self._lock:
            names = [path.name for path in paths]
            missing = [name for name in names if name not in self._there]
            gone = self._make_room(missing, set(names))
            with ThreadPoolExecutor(self._objects.settings.connections) as pool:
                for _ in pool.map(self._fetch, missing):
                    pass
            for name in names:
                self._there[name] = None
                self._there.move_to_end(name)
            return gone

    def _fetch(self, name: str) -> None:
        self._objects.fetch(f"{self._url}/{name}", self.folder / name)

    def _make_room(self, missing: Sequence[str], wanted: set[str]) -> list[Path]:
        gone: list[Path] = []
        held = sum(self._sizes[name] for name in (*missing, *self._there))
        for name in [name for name in self._there if name not in wanted]:
            if not missing or held <= self._objects.settings.cache_bytes:
                break
            del self._there[name]
            gone.append(self.folder / name)
            gone[-1].unlink(missing_ok=True)
            held -= self._sizes[name]
        return gone
