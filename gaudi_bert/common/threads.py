"""Work on files and shards in threads.

The kernels run outside Python's lock, so threads scale like processes and share memory. Results come in the order of the
items, whatever order they are done in. The first error in that order is the one that is raised, so the message does not
depend on timing; work not yet begun is then dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.cores import usable_cores
from gaudi_bert.common.errors import InputError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_AHEAD = 64  # items of a thread that are done, or given to it, before their turn comes: what bounds the results in memory


def worker_count(workers: int | None, items: int) -> int:
    """Return how many threads to use for so many items; `workers` None means all cores that this process may use."""
    if workers is not None and workers < 1:
        raise InputError(f"workers = {workers}: at least 1 is needed; leave it out for all cores")
    return max(1, min(items, workers if workers is not None else usable_cores()))


def each_in_threads(
    function: Callable[[_Item, ByteArray], _Result],
    items: Sequence[_Item],
    workers: int | None,
    make_buffer: Callable[[], ByteArray],
) -> Iterator[_Result]:
    """Yield `function(item, buffer)` for every item, in order; each thread has one buffer from `make_buffer`.

    At most 64 results a thread wait behind one that takes long.
    """
    count = worker_count(workers, len(items))
    if count == 1:
        buffer = make_buffer()
        for item in items:
            yield function(item, buffer)
        return
    local = threading.local()
    failed = threading.Event()

    def run(item: _Item) -> _Result | None:
        if failed.is_set():
            return None
        if not hasattr(local, "buffer"):
            local.buffer = make_buffer()
        try:
            return function(item, local.buffer)
        except BaseException:
            failed.set()
            raise

    waiting: deque[Future[_Result | None]] = deque()
    rest = iter(items)
    with ThreadPoolExecutor(count) as pool:
        try:
            waiting.extend(pool.submit(run, item) for item in itertools.islice(rest, _AHEAD * count))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(run, item) for item in itertools.islice(rest, 1))
                yield result  # type: ignore[misc]
        except BaseException:
            failed.set()  # also where this thread was interrupted: the others end after what they are at
            raise


def map_in_threads(
    function: Callable[[_Item, ByteArray], _Result],
    items: Sequence[_Item],
    workers: int | None,
    make_buffer: Callable[[], ByteArray],
) -> list[_Result]:
    """Return the results of `each_in_threads`."""
    return list(each_in_threads(function, items, workers, make_buffer))
