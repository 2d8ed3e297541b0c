"""Objects fetched to local scratch in the order in which they are wanted, the next ones while the present are worked on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.artefacts.store.objects import ObjectInfo, Objects

__all__ = ["ReadAhead", "Turns", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """An object, where its copy goes, and what the store said of it."""

    url: str
    path: Path
    info: ObjectInfo | None = None


class ReadAhead:
    """Batches of objects, each there as local files while it is used and removed afterwards.

    Args:
        objects: the stores.
        batches: what is wanted together, in the order in which it will be asked for.
        ahead: how many batches after the one that is asked for are fetched meanwhile.
    """

    def __init__(self, objects: Objects, batches: Sequence[Sequence[Wanted]], ahead: int = 1) -> None:
        self._objects, self._batches, self._ahead = objects, batches, ahead
        self._pool = ThreadPoolExecutor(objects.settings.connections, thread_name_prefix="read-ahead")
        self._lock = threading.Lock()
        self._fetches: list[list[Future[None]]] = []

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def batch(self, number: int) -> Iterator[None]:
        """Batch `number` is there as local files inside the block.

        Raises:
            InputError, FailedError: as `Objects.fetch`.
        """
        with self._lock:
            for wanted in self._batches[len(self._fetches) : number + 1 + self._ahead]:
                self._fetches.append([self._pool.submit(self._objects.fetch, one.url, one.path, one.info) for one in wanted])
        try:
            for fetch in self._fetches[number]:
                fetch.result()
            yield
        finally:
            for one in self._batches[number]:
                one.path.unlink(missing_ok=True)


class Turns:
    """The local copies of batches of files: those that a `ReadAhead` fetches, or files that are there anyway."""

    def __init__(self, ahead: ReadAhead | None = None) -> None:
        self._ahead = ahead

    @contextmanager
    def batch(self, number: int) -> Iterator[None]:
        """The files of batch `number` are there inside the block; each is asked for once, in order or nearly so."""
        with self._ahead.batch(number) if self._ahead is not None else nullcontext():
            yield
