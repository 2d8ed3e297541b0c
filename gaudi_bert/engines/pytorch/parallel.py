"""Compute batches on several CPU threads, with one thread for each batch.

PyTorch divides every operation among all threads, which then wait for each other before the next operation. Waiting takes
CPU time, and on a busy machine it takes longer than the computation. If each thread computes a batch of its own, threads
wait only at the end. With up to 8 threads, no operation is divided, so the number of threads does not change the results.

Only models whose passes can run at the same time may be computed in this way. `TorchBert` is such a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MAX_BATCHES_AT_ONCE = 8  # each of them needs memory for its intermediate results


@contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    """Limit the number of CPU threads that operations of the current thread use inside a `with` block."""
    usual_threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, usual_threads))
    try:
        yield
    finally:
        torch.set_num_threads(usual_threads)


def map_batches_in_parallel(function: Callable[[_Item], _Result], batches: Iterable[_Item]) -> Iterator[_Result]:
    """Yield `function(batch)` for every batch, in order. Several batches are computed at the same time.

    With more than 8 CPU threads, 8 batches are computed at once, and the operations of each are divided among its threads.

    Args:
        function: Computes a batch with PyTorch. It is called in several threads.
        batches: The batches. At most two for each thread are taken in advance.
    """
    threads = torch.get_num_threads()
    workers = min(threads, _MAX_BATCHES_AT_ONCE)
    if workers == 1:
        yield from map(function, batches)
        return
    waiting: deque[Future[_Result]] = deque()
    try:
        with ThreadPoolExecutor(workers, "batches", torch.set_num_threads, (threads // workers,)) as pool:
            try:
                for batch in batches:
                    waiting.append(pool.submit(function, batch))
                    if len(waiting) == 2 * workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        # `torch.set_num_threads` also affects threads that start later. The worker threads, which have all ended now, have
        # called it with a smaller number, so restore the usual number.
        torch.set_num_threads(threads)
