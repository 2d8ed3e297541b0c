"""Progress of long work: a live line on a terminal, plain lines in a log, nothing where a machine reads.

A stage is handed a `Reporter`; it calls `say` for a line of what was done and `task` for work whose size is known.
All goes to standard error, so that standard output holds only results.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TextIO, TypeVar

LOG_LINE_EVERY_SECONDS = 10.0
TERMINAL_LINE_EVERY_SECONDS = 0.2
_BYTE_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def count_of(number: int, noun: str) -> str:
    """How many things there are, for people: 1 pack, 1,500 packs, 2 processes. `noun` has a regular plural."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def human_bytes(count: float) -> str:
    """`count` bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def human_seconds(seconds: float) -> str:
    """`seconds` for people: 0.4 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True)
class TaskProgress:
    """How far a task is.

    Attributes:
        name: of the task.
        share: what is done, in percent.
        rate: units per second.
        unit: "bytes", "sequences", ...
        seconds_left: at this rate; infinite where nothing is done yet.
    """

    name: str
    share: float
    rate: float
    unit: str
    seconds_left: float

    def line(self) -> str:
        """As one line: share done, speed, time left."""
        rate = f"{human_bytes(self.rate)}/s" if self.unit == "bytes" else f"{self.rate:,.0f} {self.unit}/s"
        remaining = human_seconds(self.seconds_left) if self.seconds_left != float("inf") else "?"
        return f"{self.name}: {self.share:.0f} %, {rate}, {remaining} left"

    @staticmethod
    def parse(text: str) -> TaskProgress | None:
        """What such a line says, to the precision that it has; None for any other line."""
        match = re.fullmatch(r"([^:]+): (\d+) %, ([\d.,]+) ([^/]+)/s, (.+) left", text)
        if match is None:
            return None
        times = re.findall(r"([\d.]+) (s|min|h)\b", match[5])
        seconds = sum(float(value) * _SECONDS[unit] for value, unit in times) if times else float("inf")
        scale = _BYTE_UNITS.get(match[4])
        rate = float(match[3].replace(",", "")) * (scale or 1.0)
        return TaskProgress(match[1], float(match[2]), rate, "bytes" if scale else match[4], seconds)


class Task:
    """One piece of work of known size; `advance` may be called from several threads."""

    def __init__(self, reporter: Reporter, name: str, total: float, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0.0
        self.started = time.monotonic()
        self._reporter = reporter
        self._last_line = self.started
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        """Say that `amount` more units are done."""
        with self._lock:
            self.done += amount
            now = time.monotonic()
            every = TERMINAL_LINE_EVERY_SECONDS if self._reporter.live else LOG_LINE_EVERY_SECONDS
            if now - self._last_line >= every:
                self._last_line = now
                self._reporter.show(self.line(now))

    def line(self, now: float) -> str:
        """The state of the task as one line: share done, speed, time left."""
        elapsed = max(now - self.started, 1e-9)
        speed = self.done / elapsed
        share = 100.0 * self.done / self.total if self.total else 100.0
        remaining = (self.total - self.done) / speed if speed > 0 else float("inf")
        return TaskProgress(self.name, share, speed, self.unit, remaining).line()


class Reporter:
    """Where a stage says what it does.

    Args:
        stream: where the lines go; standard error by default.
        quiet: say nothing at all (for `--json` and for tests).
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream
        self.quiet = quiet
        self.live = not quiet and self.stream.isatty()
        self._line_width = 0

    @property
    def stream(self) -> TextIO:
        """Where the lines go; standard error is looked up anew each time, because it may be another stream by then."""
        return self._stream if self._stream is not None else sys.stderr

    def say(self, text: str) -> None:
        """Print one finished line."""
        if self.quiet:
            return
        self._clear()
        print(text, file=self.stream, flush=True)

    def show(self, text: str) -> None:
        """Print a passing line: on a terminal it is overwritten by the next one."""
        if self.quiet:
            return
        if not self.live:
            print(text, file=self.stream, flush=True)
            return
        self._clear()
        self.stream.write(text)
        self.stream.flush()
        self._line_width = len(text)

    def _clear(self) -> None:
        if self._line_width:
            self.stream.write("\r" + " " * self._line_width + "\r")
            self._line_width = 0

    @contextmanager
    def task(self, name: str, total: float, unit: str) -> Iterator[Task]:
        """Work of `total` units (`unit` is "bytes", "sequences", "packs", "updates", ...)."""
        task = Task(self, name, total, unit)
        try:
            yield task
        finally:
            if self._line_width:
                self._clear()
                self.stream.flush()


# --- the time and the memory that a call takes

Result = TypeVar("Result")


@dataclass(frozen=True)  # Python 3.10 has no generic named tuples
class _Measured(Generic[Result]):
    """What a call returned, its wall time, and by how much the peak of resident memory rose above what was in use before."""

    result: Result
    seconds: float
    memory_bytes: int | None


def measured(function: Callable[[], Result]) -> _Measured[Result]:
    """Call `function`; its memory is None where the operating system does not tell."""
    before = _reset_peak()
    started = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - started
    after = _status_bytes("VmHWM")
    return _Measured(result, seconds, None if before is None or after is None else max(after - before, 0))


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
