"""Fingerprints: that two sets of sequences are the same, in any order and in constant memory (numba kernels).

Each sequence has a 64-bit hash of all that it is: tokens, segments, masked positions (relative to its start),
masked ids, label, length. A multiset of sequences has, for each of 4096 classes of hashes, the count and the
sum (modulo 2**64) of its hashes, which depend neither on the order nor on the file layout. Two different
multisets have the same sums with probability about 2**-64; where the sums differ, the classes that differ say
which sequences to look at in a second pass.

The hash runs over the canonical bytes of the values, sixteen at a time, with the multiply-and-fold step of
wyhash (Wang Yi, 2019).
It is computed alike from an unpacked record (by its index row) and from a packed one, whose whole layout is
checked on the way:
numbers, positions, starts, weights and padding must be exactly what packing makes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gaudi_bert.records.read.unpacked_index import (
    IDS,
    IDS_BYTES,
    LABEL,
    LENGTH,
    MASKED,
    MASKED_IDS,
    MASKED_IDS_BYTES,
    POSITIONS,
    SEGMENTS,
)
from gaudi_bert.records.wire.memory import KERNEL_OPTIONS, add_words, load_u8, load_word, multiply_mix

__all__ = [
    "CLASSES",
    "IDS_SEED",
    "MASKED_IDS_SEED",
    "POSITIONS_SEED",
    "SEGMENTS_SEED",
    "add_hashes",
    "class_of",
    "hash_bytes",
    "hash_positions",
    "hash_together",
    "hash_unpacked",
]

CLASSES = 4096

_FIRST_KEY = np.int64(0x1F3D5B79A2C4E687)
_SECOND_KEY = np.int64(0x6C8E944D1F123BB5)
_THIRD_KEY = np.int64(0x2545F4914F6CDD1D)
# Where the chains of the parts start: never one of the keys, with which a product would be symmetric in its two words, or 0.
IDS_SEED = np.int64(0x5851F42D4C957F2D)
SEGMENTS_SEED = np.int64(0x14057B7EF767814F)
MASKED_IDS_SEED = np.int64(0x369DEA0F31A53F85)
POSITIONS_SEED = np.int64(0x4F1BBCDCBFA53E0B)
_OTHER_CHAIN = np.int64(0x61C8864680B583EB)


@njit(**KERNEL_OPTIONS)
def hash_bytes(at: int, size: int, state: int) -> int:
    """Mix `size` bytes into `state`; at least eight bytes of the same record lie before `at`."""
    end = at + size
    other = state ^ _OTHER_CHAIN
    while at + 32 <= end:  # two chains side by side, because a multiplication takes longer than it occupies the processor
        state = multiply_mix(load_word(at) ^ _FIRST_KEY, load_word(at + 8) ^ state)
        other = multiply_mix(load_word(at + 16) ^ _SECOND_KEY, load_word(at + 24) ^ other)
        at += 32
    if size >= 32:
        state = multiply_mix(state ^ _THIRD_KEY, other ^ _SECOND_KEY)
    if at + 16 <= end:
        state = multiply_mix(load_word(at) ^ _FIRST_KEY, load_word(at + 8) ^ state)
        at += 16
    first, second = np.int64(0), np.int64(0)
    rest = end - at
    if rest >= 8:
        first, second = load_word(at), load_word(end - 8)
    elif rest > 0:
        first = load_word(end - 8) >> (8 * (8 - rest))
    return multiply_mix(first ^ _FIRST_KEY, second ^ state ^ (size + 1))


@njit(inline="always")
def hash_together(length: int, masked: int, label: int, ids: int, segments: int, masked_ids: int, positions: int) -> int:
    """The hash of a sequence from those of its parts, each of which has its own place in the chain."""
    state = multiply_mix((length | (masked << 16) | (label << 32)) ^ _SECOND_KEY, ids ^ _THIRD_KEY)
    state = multiply_mix(state ^ _FIRST_KEY, segments ^ _SECOND_KEY)
    state = multiply_mix(state ^ _SECOND_KEY, masked_ids ^ _THIRD_KEY)
    return multiply_mix(state ^ _THIRD_KEY, positions ^ _FIRST_KEY)


@njit(**KERNEL_OPTIONS)
def hash_positions(at: int, count: int, offset: int, state: int) -> int:
    """Mix `count` masked positions, less `offset`, into `state`; they are varints of one or two bytes."""
    word = np.int64(0)
    for number in range(count):
        value = load_u8(at)
        at += 1
        if value >= 128:
            value += (load_u8(at) - 1) << 7
            at += 1
        word = (word << 16) | (value - offset)
        if (number & 3) == 3:
            state = multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)
            word = np.int64(0)
    return multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)


@njit(**KERNEL_OPTIONS)
def hash_unpacked(base: int, offsets: np.ndarray, index: np.ndarray, rows: int, hashes: np.ndarray) -> None:
    """Set `hashes` (int64) to the hashes of the first `rows` sequences of an index."""
    for number in range(rows):
        row = index[number]
        payload = base + offsets[number]
        length, masked = np.int64(row[LENGTH]), np.int64(row[MASKED])
        ids = hash_bytes(payload + row[IDS], np.int64(row[IDS_BYTES]), IDS_SEED)
        segments = hash_bytes(payload + row[SEGMENTS], length, SEGMENTS_SEED)
        masked_ids = hash_bytes(payload + row[MASKED_IDS], np.int64(row[MASKED_IDS_BYTES]), MASKED_IDS_SEED)
        positions = hash_positions(payload + row[POSITIONS], masked, 0, POSITIONS_SEED)
        hashes[number] = hash_together(length, masked, np.int64(row[LABEL]), ids, segments, masked_ids, positions)


@njit(inline="always")
def class_of(value: int) -> int:
    """The class of a hash: twelve of its bits."""
    return (value >> 20) & 4095


@njit(**KERNEL_OPTIONS)
def add_hashes(hashes: np.ndarray, count: int, sums: np.ndarray) -> None:
    """Add the first `count` hashes to `sums`, int64 [CLASSES, 2]: count and sum of each class."""
    for number in range(count):
        value = hashes[number]
        sums[class_of(value), 0] += 1
        mixed = multiply_mix(value ^ _FIRST_KEY, _THIRD_KEY)
        sums[class_of(value), 1] = add_words(sums[class_of(value), 1], mixed)
