"""Find out how many cores and which vector instructions this process can use, and process items in threads.

A container with a limit of 4 cores on a machine with 160 cores may run on all of them. When it has used its processor time,
the kernel stops it for the rest of a period of a tenth of a second. Therefore, the number of threads depends on the limits
of control groups, and not only on the cores that a process may run on.

Kernels run without Python's lock, so threads are as fast as processes and share memory. Results are returned in the order of
the items, and the first error in this order is raised, so that no message depends on timing.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gaudi_bert.common.errors import InputError

if TYPE_CHECKING:  # importing numpy starts threads, whose number this module determines
    from gaudi_bert.common.arrays import ByteArray

# --- cores

CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def count_usable_cores(cgroups: Path = CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """Return the number of cores that this process can use. A limit such as 2.5 cores is rounded up.

    Args:
        cgroups: The folder that contains the limits of control groups, version 1 or 2.
        own_cgroups: The file that lists the control groups of this process.
    """
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *_iterate_core_limits(cgroups, own_cgroups)])))


def count_cores_if_limited() -> int | None:
    """Return `count_usable_cores()` if a control group limits the cores of this process, otherwise None."""
    cores = count_usable_cores()
    return cores if cores < len(os.sched_getaffinity(0)) else None


def _iterate_core_limits(cgroups: Path, own_cgroups: Path) -> Iterator[float]:
    """Yield the limits, in cores, of the control groups of this process and of the groups above them."""
    for line in _read_or_empty(own_cgroups).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            for folder in _iterate_cgroup_folders(cgroups, name):
                yield _cores_from_quota(*_read_or_empty(folder / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for folder in _iterate_cgroup_folders(cgroups / "cpu", name):
                yield _cores_from_quota(
                    _read_or_empty(folder / "cpu.cfs_quota_us"), _read_or_empty(folder / "cpu.cfs_period_us")
                )


def _iterate_cgroup_folders(root: Path, name: str) -> Iterator[Path]:
    """Yield the folders of a control group and of the groups above it, up to `root`.

    In a container, some or all of these folders do not exist, because the container's own group is the root.
    """
    folder = root / name.lstrip("/")
    yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _cores_from_quota(quota: str = "", period: str = "") -> float:
    """Return the limit in cores, which is quota / period. Return infinity if there is no limit or the limit is unknown."""
    if quota.strip().isdigit() and period.strip().isdigit() and int(period):
        return int(quota) / int(period)
    return math.inf


def _read_or_empty(path: Path) -> str:
    """Return the content of a file, or an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


# --- vector instructions, which determine the speed of matrix products

# oneDNN and MKL choose their kernels according to the instructions that the processor supports. Each key is a flag in
# /proc/cpuinfo, and each value is its name in messages. The widest instructions come first. `bf16` is a flag of Arm
# processors.
_INSTRUCTION_SETS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with BF16",
    "avx512_vnni": "AVX-512 with VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "bf16": "BF16",
}
_MULTIPLY_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
# With these environment variables, users can limit which instructions oneDNN uses.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_BELOW_BFLOAT16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})


class Processor(NamedTuple):
    """The name and the widest vector instructions of a processor, and whether oneDNN uses them for bfloat16 matrices."""

    name: str
    instructions: str
    multiplies_bfloat16: bool


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo"), environment: Mapping[str, str] | None = None) -> Processor:
    """Return the name and the vector instructions of this machine's processor.

    Args:
        cpuinfo: The kernel's list of processors. If this file cannot be read, the processor has no flags and its name is
            that of the machine type.
        environment: The environment variables that may limit oneDNN's instructions, by default those of this process.
    """
    variables = os.environ if environment is None else environment
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    limit = next((variables[name].upper() for name in _LIMITS if name in variables), "DEFAULT")
    if limit not in ("DEFAULT", "ALL") and "AMX" not in limit:
        flags.discard("amx_bf16")
    if limit in _BELOW_BFLOAT16:
        flags.discard("avx512_bf16")
    widest = next((name for flag, name in _INSTRUCTION_SETS.items() if flag in flags), "no AVX2")
    return Processor(facts.get("model name", os.uname().machine), widest, not _MULTIPLY_BFLOAT16.isdisjoint(flags))


# --- processing items in threads

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MAX_PENDING_PER_THREAD = (
    64  # items per thread that are submitted or finished ahead of their turn, which limits the results held in memory
)


def choose_worker_count(workers: int | None, items: int) -> int:
    """Return how many threads or processes to use for a number of items.

    Args:
        workers: The number that the user requested, or None for all usable cores.
        items: The number of items.

    Raises:
        InputError: `workers` is less than 1.
    """
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: must be at least 1; omit the option to use all cores")
    return max(1, min(items, workers if workers is not None else count_usable_cores()))


def map_in_threads(
    function: Callable[[_Item, ByteArray], _Result],
    items: Sequence[_Item],
    workers: int | None,
    make_buffer: Callable[[], ByteArray],
) -> Iterator[_Result]:
    """Call `function(item, buffer)` for every item in several threads, and yield the results in item order.

    Each thread has its own buffer. At most 64 results per thread wait for an item that takes long. If several items fail,
    the error of the first of them is raised.

    Args:
        function: Processes an item.
        items: The items.
        workers: The number of threads, or None for all usable cores.
        make_buffer: Creates the buffer of a thread.
    """
    count = choose_worker_count(workers, len(items))
    if count == 1:
        buffer = make_buffer()
        for item in items:
            yield function(item, buffer)
        return
    local = threading.local()
    failed: list[int] = []

    def run(index: int, item: _Item) -> _Result | None:
        """Call `function` with an item and this thread's buffer. If an earlier item has failed, do nothing.

        An item before the one that failed is still processed, because its result is yielded before the error is raised.
        """
        if failed and index > min(failed):
            return None
        if not hasattr(local, "buffer"):
            local.buffer = make_buffer()
        try:
            return function(item, local.buffer)
        except BaseException:
            failed.append(index)
            raise

    waiting: deque[Future[_Result | None]] = deque()
    rest = enumerate(items)
    with ThreadPoolExecutor(count) as pool:
        try:
            waiting.extend(pool.submit(run, *item) for item in itertools.islice(rest, _MAX_PENDING_PER_THREAD * count))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(run, *item) for item in itertools.islice(rest, 1))
                yield result  # type: ignore[misc]
        except BaseException:
            failed.append(-1)  # this thread may have been interrupted, so stop the others after their current items
            raise
