"""Run a command and measure the time, memory, open files and disk reads of all its processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20
_LOOK_SECONDS = 0.05


@dataclass
class Watched:
    """The resources that a command used.

    Attributes:
        code: The exit code, which is negative if a signal ended the command.
        wall, cpu: The elapsed seconds, and the CPU seconds of all processes that were seen.
        peak: The peak resident memory in MiB of the largest process, including the pages of mapped files.
        own_peak: The peak memory in MiB of the largest process, without mapped files.
        files: The largest number of files that one process had open or mapped at the same time.
        read: The MiB that all processes together read from the disk and not from the page cache.
        output: The standard output and standard error of the command.
        cpu_of, read_of: The last known values of `cpu` and `read` of each process.
    """

    code: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    peak: float = 0.0
    own_peak: float = 0.0
    files: int = 0
    read: float = 0.0
    output: str = ""
    cpu_of: dict[int, float] = field(default_factory=dict)
    read_of: dict[int, float] = field(default_factory=dict)


def watch(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    open_files: int | None = None,
    kill_when: Callable[[], bool] | None = None,
) -> Watched:
    """Run a command until it ends, or kill all its processes as soon as `kill_when` returns True. Return the resources that
    it used.

    Args:
        command: The command and its arguments.
        environment: Additional environment variables.
        open_files: The limit on the number of open files per process, as set by `ulimit -n`.
        kill_when: A function that is called repeatedly.
    """

    def limit() -> None:
        if open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    seen, started = Watched(), time.perf_counter()
    with subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=limit,
        env={**os.environ, **(environment or {})},
    ) as process:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        reader.start()
        # A process that has ended stays in /proc until its parent waits for it. Detect the exit without waiting, so that the
        # last values can still be read.
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            _look(process.pid, seen)
            if kill_when is not None and kill_when():
                _kill_all(process.pid)
            time.sleep(_LOOK_SECONDS)
        _look(process.pid, seen)
        reader.join()
    seen.code, seen.wall, seen.output = process.returncode, time.perf_counter() - started, "".join(lines)
    seen.cpu, seen.read = sum(seen.cpu_of.values()), sum(seen.read_of.values())
    return seen


def _kill_all(session: int) -> None:
    """Kill every process of a session, even if a launcher has put processes into other process groups."""
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)


def _look(session: int, seen: Watched) -> None:
    """Record the values of every process of a session. If a process ends in the meantime, keep its last values."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                _look_at(Path(entry.path), session, seen)


def _look_at(process: Path, session: int, seen: Watched) -> None:
    """Record the values of one process if it belongs to the session."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    if int(fields[3]) != session:
        return
    number = int(process.name)
    seen.cpu_of[number] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    numbers = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
    seen.read_of[number] = int(numbers["read_bytes"]) / MIB
    memory = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    if "VmHWM" in memory:
        seen.peak = max(seen.peak, int(memory["VmHWM"].split()[0]) / 1024)
        seen.own_peak = max(seen.own_peak, int(memory["RssAnon"].split()[0]) / 1024)
    mapped = {line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if line.count(" /")}
    records = sum(path.endswith((".tfrecord", ".parquet")) for path in mapped)
    seen.files = max(seen.files, len(os.listdir(process / "fd")) + records)
