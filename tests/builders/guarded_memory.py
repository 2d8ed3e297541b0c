"""Memory whose neighbours may not be touched: code that reads or writes one byte outside is killed by the processor."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
MOST_DATA = 16 * PAGE


class GuardedBuffer:
    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MOST_DATA + 2 * PAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        self._inside = whole[PAGE : PAGE + MOST_DATA]
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for page in (whole.ctypes.data, whole.ctypes.data + PAGE + MOST_DATA):
            if protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def of(self, size: int, at_the_end: bool) -> np.ndarray:
        """`size` bytes that touch the page after or the page before."""
        return self._inside[MOST_DATA - size :] if at_the_end else self._inside[:size]
