"""Helpers with which the benchmarks measure time and memory, and print the results.

If the environment variable `GAUDI_BERT_FIGURES` names a file, for example `docs/figures.json`, a benchmark also writes the
figures that it prints to this file, under the key `runs`.
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

# Environment variables that make libraries use only the instructions of an older processor.
IMITATIONS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES")


def describe_processor() -> str:
    """Return the name of this machine's processor with its vector instructions and number of cores, for example `AMD EPYC,
    AVX2, 2 cores`, followed by the environment variables that limit its instructions.
    """
    found = read_processor()
    imitated = [f"{name}={os.environ[name]}" for name in IMITATIONS if name in os.environ]
    cores = len(os.sched_getaffinity(0))
    return ", ".join([found.name, found.instructions, f"{cores} cores", *imitated])


def print_processor() -> None:
    """Print the kind of processor, because figures that were measured on different processors cannot be compared."""
    print(f"measured on {describe_processor()}", flush=True)


def print_figure(label: str, values: Sequence[float], unit: str, goal: str = "") -> None:
    """Print the median and the range of repeated measurements, and record them in the file of figures.

    Args:
        label: What was measured.
        values: The measurements.
        unit: The unit of the measurements.
        goal: The value that should be reached, which is printed after the measurements.
    """
    middle = float(np.median(values))
    _record_figure(label, {"median": middle, "lowest": min(values), "highest": max(values), "unit": unit})
    text = f"  {label:<58} {middle:>9.3g} {unit:<9} [{min(values):.3g} to {max(values):.3g}]"
    print(text + (f"   goal {goal}" if goal else ""), flush=True)


def _record_figure(label: str, figure: dict[str, Any]) -> None:
    """Write a figure to the file that the environment variable `GAUDI_BERT_FIGURES` names, under the command line of this
    benchmark. If the variable is not set, do nothing.
    """
    name = os.environ.get("GAUDI_BERT_FIGURES")
    if not name:
        return
    path = Path(name)
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"figures": [], "runs": {}}
    command = shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    run = content["runs"].setdefault(command, {})
    run["processor"] = describe_processor()
    run.setdefault("figures", {})[label] = {
        key: float(f"{value:.4g}") if isinstance(value, (int, float)) else value for key, value in figure.items()
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a Markdown table. Each row is printed as soon as it was computed."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header), flush=True)
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def measure_seconds(function: Callable[[], Any]) -> tuple[float, float]:
    """Call `function`, and return the CPU seconds (of all threads of this process) and the elapsed seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


class BenchmarkProcess:
    """An object that is built and run in another process. Only the parent process receives the measured times.

    Args:
        build: A function that builds the object. The object must have a method `run(updates)`.
        arguments: The arguments of `build`.

    PyTorch's engine configures the memory allocator of its process to keep freed memory. In the same process, this setting
    would also make other tools faster, so each tool is measured in a process of its own.
    """

    def __init__(self, build: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        context.Process(target=_serve, args=(other, build, arguments), daemon=True).start()

    def measure_run(self, updates: int) -> tuple[float, float]:
        """Run `run(updates)` of the object, and return the CPU seconds and the elapsed seconds."""
        self._end.send(updates)
        cpu, wall = self._end.recv()
        return cpu, wall


def _serve(end: Connection, build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Build an object, and measure its method `run` each time a number of updates arrives through the pipe."""
    built = build(*arguments)
    with contextlib.suppress(EOFError):  # the benchmark closes its end of the pipe when it is done
        while True:
            updates = end.recv()
            end.send(measure_seconds(lambda updates=updates: built.run(updates)))


# --- time and memory of a call

Result = TypeVar("Result")


@dataclass(frozen=True)  # Python 3.10 has no generic named tuples
class MeasuredCall(Generic[Result]):
    """The result of a call, its elapsed seconds, and by how many bytes the peak of resident memory rose during the call. The
    memory is None if the operating system does not report it.
    """

    result: Result
    seconds: float
    memory_bytes: int | None


def measure_time_and_memory(function: Callable[[], Result]) -> MeasuredCall[Result]:
    """Call `function`, and return its result with its elapsed time and its peak memory."""
    before = _reset_peak()
    started = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - started
    after = _status_bytes("VmHWM")
    return MeasuredCall(result, seconds, None if before is None or after is None else max(after - before, 0))


def _reset_peak() -> int | None:
    """Reset the kernel's peak of resident memory (Linux only), and return the resident memory in bytes, or None if it is not
    available.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    """Return a memory value from /proc/self/status in bytes, or None if it is not available."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
