"""Work on files and shards in threads: the kernels run outside Python's lock, so threads scale like processes
and share memory.

Results come in the order of the items, whatever order they are done in. The first error in that order is the
one that is raised, so the message does not depend on timing; work not yet begun is then dropped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.read.scan import scan_buffer

__all__ = ["map_files", "map_in_threads", "worker_count"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count(workers: int | None, items: int) -> int:
    """How many threads to use for so many items; `workers` None means all cores that this process may use.

    Raises:
        InputError: `workers` is less than 1.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers = {workers}: at least 1 is needed; leave it out for all cores")
    return max(1, min(items, workers if workers is not None else len(os.sched_getaffinity(0))))


def map_in_threads(
    function: Callable[[Item, ByteArray], Result],
    items: Sequence[Item],
    workers: int | None,
    make_buffer: Callable[[], ByteArray],
) -> list[Result]:
    """`function(item, buffer)` for every item; each thread has one buffer from `make_buffer`."""
    count = worker_count(workers, len(items))
    if count == 1:
        buffer = make_buffer()
        return [function(item, buffer) for item in items]
    local = threading.local()
    failed = threading.Event()

    def run(item: Item) -> Result | None:
        if failed.is_set():
            return None
        if not hasattr(local, "buffer"):
            local.buffer = make_buffer()
        try:
            return function(item, local.buffer)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, item) for item in items]
        try:
            return [future.result() for future in futures]  # type: ignore[misc]
        except BaseException:
            failed.set()  # also where this thread was interrupted: the others end after what they are at
            raise


def map_files(function: Callable[[Item, ByteArray], Result], files: Sequence[Item], workers: int | None) -> list[Result]:
    """`function(file, buffer)` for every file, with a buffer for scans in constant memory."""
    return map_in_threads(function, files, workers, scan_buffer)
