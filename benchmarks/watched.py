"""A command and all its processes, watched from outside: time, memory, files, bytes read."""

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
    """What a command took.

    Attributes:
        code: its exit code; negative where a signal ended it.
        wall, cpu: seconds; those of the processor over all its processes that were seen.
        peak: MiB of the largest of its processes: its own memory and the pages of mapped files.
        own_peak: MiB of its own memory alone, of the largest.
        files: the most files that one of its processes had open or mapped at once.
        read: MiB that came from the disk, not from the page cache, over all processes.
        cpu_of, read_of: the same by process, as they were last seen.
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
    """Run a command to its end, or kill all its processes at once when `kill_when` says so.

    Args:
        open_files: the limit on open files of each process, as `ulimit -n` sets it.
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
        # Its exit is noticed before its facts are gone: a process that has ended stays in /proc until it is waited for.
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
    """Kill every process of a session, whatever groups a launcher has put them in."""
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)


def _look(session: int, seen: Watched) -> None:
    """Note the figures of every process of a session; one that ends meanwhile keeps what was noted."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                _look_at(Path(entry.path), session, seen)


def _look_at(process: Path, session: int, seen: Watched) -> None:
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
