"""Timing and printing of the benchmarks.

`GAUDI_BERT_FIGURES=docs/figures.json python benchmarks/...` also writes what it prints to that file, under `runs`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from gaudi_bert.common.processor import read_processor

# What makes a processor behave as an older one.
IMITATIONS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES")


def processor() -> str:
    """The kind of this machine's processor, for example `AMD EPYC, AVX2, 2 cores`, and what it imitates."""
    found = read_processor()
    imitated = [f"{name}={os.environ[name]}" for name in IMITATIONS if name in os.environ]
    cores = len(os.sched_getaffinity(0))
    return ", ".join([found.name, found.instructions, f"{cores} cores", *imitated])


def show_processor() -> None:
    """Print the kind of processor: figures of another kind differ."""
    print(f"measured on {processor()}", flush=True)


def show(label: str, values: Sequence[float], unit: str, goal: str = "") -> None:
    """Median and range of one figure."""
    middle = float(np.median(values))
    _record(label, {"median": middle, "lowest": min(values), "highest": max(values), "unit": unit})
    text = f"  {label:<58} {middle:>9.3g} {unit:<9} [{min(values):.3g} to {max(values):.3g}]"
    print(text + (f"   goal {goal}" if goal else ""), flush=True)


def _record(label: str, figure: dict[str, Any]) -> None:
    """Add a figure to those of this command in the file that `GAUDI_BERT_FIGURES` names."""
    name = os.environ.get("GAUDI_BERT_FIGURES")
    if not name:
        return
    path = Path(name)
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"figures": [], "runs": {}}
    command = shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    run = content["runs"].setdefault(command, {})
    run["processor"] = processor()
    run.setdefault("figures", {})[label] = {
        key: float(f"{value:.4g}") if isinstance(value, (int, float)) else value for key, value in figure.items()
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A Markdown table, row by row as they come."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header), flush=True)
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of CPU (all threads) and of wall time that `function` takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


class InOwnProcess:
    """What `build(*arguments)` gives, built and run in another process, as its users run it.

    PyTorch's engine tells the allocator of its process to keep freed memory, which would make a peer faster too.
    """

    def __init__(self, build: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        context.Process(target=_serve, args=(other, build, arguments), daemon=True).start()

    def timed(self, updates: int) -> tuple[float, float]:
        """Seconds of CPU and of wall time of its `run(updates)`."""
        self._end.send(updates)
        cpu, wall = self._end.recv()
        return cpu, wall


def _serve(end: Connection, build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    built = build(*arguments)
    with contextlib.suppress(EOFError):  # until the benchmark has what it needs
        while True:
            updates = end.recv()
            end.send(timed(lambda updates=updates: built.run(updates)))


# --- the time and the memory that a call takes

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
