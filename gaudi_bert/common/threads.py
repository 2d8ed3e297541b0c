"""How many threads are worth it, and work on files and shards in them.

A process may use the cores that it may run on, within its container's share of their time: with a limit of 4 on a machine of
160 it may run on all of them, and is stopped for the rest of every tenth of a second in which it has used up its share.

The kernels run outside Python's lock, so threads scale like processes and share memory. Results come in the order of the
items, and the first error in that order is the one that is raised, so no message depends on timing.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gaudi_bert.common.errors import InputError

if TYPE_CHECKING:  # numpy starts threads when it is loaded, and this sets how many
    from gaudi_bert.common.arrays import ByteArray

CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """The cores that this process can keep busy, at least 1; part of a core counts as one.

    `own` lists the control groups of this process, and the folder `cgroups` holds their limits, of version 1 or 2.
    """
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *_limits(cgroups, own)])))


def limited_cores() -> int | None:
    """`usable_cores()` where a limit makes them fewer than the cores that this process may run on, else None."""
    cores = usable_cores()
    return cores if cores < len(os.sched_getaffinity(0)) else None


def _limits(cgroups: Path, own: Path) -> Iterator[float]:
    """The limit in cores of each control group that this process is in, and of those above it."""
    for line in _text(own).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            for folder in _with_those_above(cgroups, name):
                yield _ratio(*_text(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for folder in _with_those_above(cgroups / "cpu", name):
                yield _ratio(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _with_those_above(root: Path, name: str) -> Iterator[Path]:
    """The folder of the control group `name`, and those above it as far as `root`.

    Inside a container some or all of them are missing: its own group is the root there.
    """
    folder = root / name.lstrip("/")
    yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _ratio(quota: str = "", period: str = "") -> float:
    """Time per period; infinite where no limit is set, or none is known."""
    if quota.strip().isdigit() and period.strip().isdigit() and int(period):
        return int(quota) / int(period)
    return math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


# --- work in threads

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
