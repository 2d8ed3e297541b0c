"""Seeded permutations that never change with a library's version.

`numpy.random.Philox` is a counter-based bit generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
whose raw output is fixed by its key. The key is the SHA-256 of (seed, purpose, indices); a permutation of n is the stable
argsort of n raw 64-bit outputs. Library shuffles may change between versions; this definition cannot.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import IntArray

__all__ = ["permutation", "philox", "random_words"]


def philox(seed: int, purpose: str, *indices: int) -> np.random.Philox:
    """A bit generator keyed by `seed`, `purpose` and `indices` (any integers, e.g. the number of a group or an epoch)."""
    text = ":".join([str(int(seed)), purpose, *(str(int(index)) for index in indices)])
    key = np.frombuffer(hashlib.sha256(text.encode("utf-8")).digest()[:16], dtype="<u8")
    return np.random.Philox(key=key)


def random_words(count: int, seed: int, purpose: str, *indices: int) -> NDArray[np.uint64]:
    """`count` raw uint64 words."""
    return philox(seed, purpose, *indices).random_raw(count)


def permutation(count: int, seed: int, purpose: str, *indices: int) -> IntArray:
    """A permutation of 0 .. count - 1, int64, fixed for ever by its arguments."""
    return np.argsort(random_words(count, seed, purpose, *indices), kind="stable")
