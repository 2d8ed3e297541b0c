"""The time and the memory that a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

__all__ = ["Measured", "measured"]

Result = TypeVar("Result")


@dataclass(frozen=True)  # Python 3.10 has no generic named tuples
class Measured(Generic[Result]):
    """What a call returned, its wall time, and by how much the peak of resident memory rose above what was in use before."""

    result: Result
    seconds: float
    memory_bytes: int | None


def measured(function: Callable[[], Result]) -> Measured[Result]:
    """Call `function`; its memory is None where the operating system does not tell."""
    before = _reset_peak()
    started = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - started
    after = _status_bytes("VmHWM")
    return Measured(result, seconds, None if before is None or after is None else max(after - before, 0))


def _reset_peak() -> int | None:
    """Reset the kernel's record of the peak (Linux); the memory in use now, or None where that cannot be known."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
