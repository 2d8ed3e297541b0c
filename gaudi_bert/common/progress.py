"""Show the progress of long work: a line that is updated on a terminal, or separate lines in a log.

A stage calls the methods of a `Reporter`: `say` prints a line, and `task` shows the progress of work whose size is known.
Everything is printed to standard error, so that standard output contains only results. Native libraries write to standard
error without Python. `redirect_native_output` redirects this output to a log.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gaudi_bert.common.files import explain_os_errors

# If this environment variable is set, no reporter prints anything, even in child processes. The option `--quiet` sets it.
ONLY_RESULT_VARIABLE = "GAUDI_BERT_RESULT_ALONE"
LOG_LINE_EVERY_SECONDS = 10.0
# In a log, progress lines become rarer the longer some work takes. At most this many seconds pass between two of them.
_LONGEST_SILENCE_SECONDS = 60.0
TERMINAL_LINE_EVERY_SECONDS = 0.5
# `Task` shows the remaining time only after at least this many seconds, and only if it is at most this many seconds. A speed
# that is measured over a shorter time, or that is close to 0, would give an arbitrary estimate.
_MIN_ELAPSED_SECONDS, _MAX_REMAINING_SECONDS = 5.0, 1e8
# `Task` begins to show the remaining time only while the work is at least half as fast as before, because the estimate
# assumes a constant speed. Once it is shown, it grows by at most half from one line to the next.
_MAX_SLOWDOWN, _MAX_GROWTH = 2.0, 1.5
_BYTE_UNITS = {unit: 1000.0**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))}


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun, such as "1 pack", "1,500 packs" or "2 processes".

    Args:
        number: The count.
        noun: The noun in the singular. Its plural must be regular.
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{number:,} {noun}{ending}"


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as "1.5 GB"."""
    unit = next((unit for unit, size in _BYTE_UNITS.items() if abs(count) < 1000 * size), "PB")
    return f"{count:.0f} B" if unit == "B" else f"{count / _BYTE_UNITS[unit]:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration, such as "0.4 s", "12 s", "3 min 05 s" or "2 h 07 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_rate(rate: float, unit: str) -> str:
    """Format a rate in units per second, such as "2,500 sequences/s", "2.5 groups/s", "4.0 s per group" or "1.5 GB/s"."""
    if unit == "bytes":
        return f"{format_bytes(rate)}/s"
    if 0 < rate < 1:
        return f"{format_seconds(1 / rate)} per {unit.removesuffix('s')}"
    return f"{rate:,.1f} {unit}/s" if rate < 10 else f"{rate:,.0f} {unit}/s"


class Task:
    """Tracks the progress of some work and estimates the remaining time. Several threads may call `advance` at once.

    The remaining time is estimated from the speed in the second half of the elapsed time. It is shown only if some work was
    also done in the first half, and if the first half was at most `_MAX_SLOWDOWN` times as fast. From one line to the next,
    the remaining time grows by at most half.

    Args:
        name: The name of the work, which begins each line.
        total: The size of the work in units.
        unit: The plural of the unit, such as "sequences".
    """

    def __init__(self, name: str, total: float, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0.0
        self.started = self._speed_since = time.monotonic()
        self._done_before = 0.0
        self._observations: deque[tuple[float, float]] = deque([(self.started, 0.0)])
        self._last_shown_seconds: float | None = None
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        """Add `amount` to the number of units that are done."""
        with self._lock:
            self.done += amount

    def reset_progress(self, done: float, total: float | None = None) -> None:
        """Set the number of units that are done, and discard the speed measured so far.

        Use this if the remaining units take another time than those that are done, for example because an earlier run did
        them.

        Args:
            done: The number of units that are done.
            total: The size of the work, if it has changed.
        """
        with self._lock:
            self.total = self.total if total is None else total
            self.done = self._done_before = done
            self._speed_since, self._last_shown_seconds = time.monotonic(), None
            self._observations = deque([(self._speed_since, done)])

    def format_line(self, now: float) -> str:
        """Return a line with the percentage, the speed and the remaining time.

        While the speed is unknown, the line contains the elapsed time instead.

        Args:
            now: The present time in seconds of `time.monotonic`.
        """
        with self._lock:
            share = 100.0 * self.done / self.total if self.total else 100.0
            speed = self._recent_speed(now)
            so_far = f"{self.name}: {share:.0f} %, {format_seconds(now - self.started)} so far"
            if self.done >= self.total:
                return f"{so_far}, ending"
            if speed is None:
                return so_far
            remaining = (self.total - self.done) / speed
            if self._last_shown_seconds is not None:
                remaining = min(remaining, _MAX_GROWTH * self._last_shown_seconds)
            self._last_shown_seconds = remaining
            return f"{self.name}: {share:.0f} %, {format_rate(speed, self.unit)}, {format_seconds(remaining)} left"

    def record_progress(self, now: float) -> None:
        """Record how much work is done at the time `now`. `format_line` computes the speed from such records."""
        with self._lock:
            self._observations.append((now, self.done))
            self._discard_older_observations(now)

    def _discard_older_observations(self, now: float) -> None:
        """Remove the progress records from the first half of the elapsed time, except for the last of these records."""
        while len(self._observations) > 1 and self._observations[1][0] <= (self._speed_since + now) / 2:
            self._observations.popleft()

    def _recent_speed(self, now: float) -> float | None:
        """Return the speed in the second half of the elapsed time, in units per second, or None if it is not reliable."""
        self._discard_older_observations(now)
        middle, done = self._observations[0]
        before = (done - self._done_before) / max(middle - self._speed_since, 1e-9)
        lately = (self.done - done) / max(now - middle, 1e-9)
        is_steady = now - self._speed_since >= _MIN_ELAPSED_SECONDS and 0 < before <= _MAX_SLOWDOWN * lately
        is_shown = is_steady or self._last_shown_seconds is not None
        return lately if is_shown and self.total - self.done < _MAX_REMAINING_SECONDS * lately else None


class Reporter:
    """Prints messages and progress lines of a stage to standard error. Any thread may call its methods.

    Args:
        stream: The stream to print to, by default standard error.
        quiet: Whether to print nothing.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream
        self.quiet = quiet or bool(os.environ.get(ONLY_RESULT_VARIABLE))
        self.live = not self.quiet and self.stream.isatty()
        self._line_width = 0
        self._lock = threading.Lock()
        self._last_line = time.monotonic()

    @property
    def stream(self) -> TextIO:
        """The stream to print to. By default, this is the current `sys.stderr`, which may have been replaced."""
        return self._stream if self._stream is not None else sys.stderr

    def say(self, text: str) -> None:
        """Print a line that later lines do not overwrite."""
        if self.quiet:
            return
        with self._lock:
            self._erase_temporary_line()
            self._last_line = time.monotonic()
            print(text, file=self.stream, flush=True)

    def show(self, text: str) -> None:
        """Print a line that the next line overwrites if the output is a terminal."""
        if not self.live:
            self.say(text)
            return
        with self._lock:
            self._erase_temporary_line()
            shown = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be overwritten
            self.stream.write(shown)
            self.stream.flush()
            self._line_width = len(shown)

    def clear(self) -> None:
        """Erase the line that `show` printed. Call this method before something else prints to the terminal."""
        with self._lock:
            if self._line_width:
                self._erase_temporary_line()
                self.stream.flush()

    def _erase_temporary_line(self) -> None:
        """Erase the line that `show` printed. The caller must hold the lock."""
        if self._line_width:
            self.stream.write("\r" + " " * self._line_width + "\r")
            self._line_width = 0

    @contextmanager
    def task(self, name: str, total: float, unit: str) -> Iterator[Task]:
        """Show the progress of the work that is done in the `with` block.

        Args:
            name: The name of the work.
            total: The size of the work in units.
            unit: The plural of the unit, such as "bytes", "sequences" or "packs".

        Yields:
            A task. The block must call its method `advance` as the work proceeds.
        """
        task = Task(name, total, unit)
        ended = threading.Event()
        watch = threading.Thread(target=self._print_progress_until, args=(task, ended), daemon=True)
        if not self.quiet:
            watch.start()
        try:
            yield task
        finally:
            ended.set()
            if not self.quiet:
                watch.join()
            self.clear()

    def _print_progress_until(self, task: Task, ended: threading.Event) -> None:
        """Print the progress of a task repeatedly until the event `ended` is set.

        On a terminal, the line is updated twice a second. In a log, a line is printed only if nothing was printed for a
        while.
        """
        while not ended.wait(TERMINAL_LINE_EVERY_SECONDS if self.live else 1.0):
            now = time.monotonic()
            task.record_progress(now)
            silence = min(max(LOG_LINE_EVERY_SECONDS, (now - task.started) / 60), _LONGEST_SILENCE_SECONDS)
            if self.live or now - max(self._last_line, task.started) >= silence - 0.5:
                self.show(task.format_line(now))


# --- output of native libraries, which write to standard error without Python

_STANDARD_ERROR = 2


@contextmanager
def redirect_native_output(log: Path) -> Iterator[None]:
    """While the `with` block runs, append everything that native libraries write to standard error to the file `log`.

    The file descriptor 2 is redirected, and `sys.stderr` is replaced by a stream that still writes to the previous target.
    Code that has kept a reference to the old `sys.stderr` must read it again inside the block.
    """
    python_stream = sys.stderr
    with explain_os_errors(log, "write"):
        file = log.open("ab")
    with file, os.fdopen(os.dup(_STANDARD_ERROR), "w", buffering=1) as terminal:
        if _writes_to(python_stream, _STANDARD_ERROR):
            python_stream.flush()
            sys.stderr = terminal
        os.dup2(file.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            os.dup2(terminal.fileno(), _STANDARD_ERROR)
            sys.stderr = python_stream


def _writes_to(stream: TextIO | None, descriptor: int) -> bool:
    """Return whether a stream writes to the given file descriptor. Return False for a stream in memory."""
    try:
        return stream is not None and stream.fileno() == descriptor
    except (OSError, ValueError):
        return False
