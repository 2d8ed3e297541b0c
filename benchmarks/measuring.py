"""Timing and printing of the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def show(label: str, values: Sequence[float], unit: str, goal: str = "") -> None:
    """Median and range of one figure."""
    middle = float(np.median(values))
    text = f"  {label:<58} {middle:>9.3g} {unit:<9} [{min(values):.3g} to {max(values):.3g}]"
    print(text + (f"   goal {goal}" if goal else ""), flush=True)


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of CPU (all threads) and of wall time that `function` takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall
