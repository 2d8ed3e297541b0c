"""How many cores this process may use at once: those that it may run on, within its container's share of their time.

A container with a limit of 4 cores on a machine of 160 may run on all of them, and is stopped for the rest of every tenth of
a second in which it has used up its share. Threads beyond the limit only wait for one another, so none is started.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

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
