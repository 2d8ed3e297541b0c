"""An ordered map over worker processes that holds only a few items in flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from gaudi_bert.common.errors import FailedError

__all__ = ["default_workers", "ordered_map"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_workers() -> int:
    """The processors that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def _start_worker() -> None:
    """Keep one thread of the tokenizer, and end when the parent does, however that ends; Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`function` of each item, in the order of the items; with one worker, in this process.

    At most `workers` + 1 items and results are held at a time. Processes are spawned, not forked, because the tokenizer
    keeps threads.

    Raises:
        FailedError: a worker died.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker) as pool:
        in_flight: deque[Future[Result]] = deque()
        try:
            for item in items:
                in_flight.append(pool.submit(function, item))
                if len(in_flight) > workers:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        except BrokenProcessPool as error:
            raise FailedError(
                "a worker process died (out of memory?); run the same command again, with fewer --workers"
            ) from error
        finally:
            for future in in_flight:
                future.cancel()
