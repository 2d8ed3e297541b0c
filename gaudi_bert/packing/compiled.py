"""How the numeric kernels of this room are compiled: once for a machine, vectorised, outside Python's lock.

`cache=True` keeps the machine code beside the module, so only the first call after installation pays for the
compiler. The floating point relaxations let a maximum run in vector lanes; no kernel uses infinities or NaN. Sums keep
their order and products are not fused with them, so a plan is the same on every processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

__all__ = ["MINUS_INFINITY", "kernel"]

Function = TypeVar("Function", bound=Callable[..., Any])

MINUS_INFINITY = -1e300
"""Stands for "not possible" in the kernels: finite, because the compiler may assume that no infinity occurs."""


def kernel(function: Function) -> Function:
    """Compile `function` for the machine it runs on (numba, cached on disk, without the interpreter lock)."""
    relaxations = {"nnan", "ninf", "nsz"}
    compiled: Function = njit(cache=True, nogil=True, fastmath=relaxations)(function)
    return compiled
