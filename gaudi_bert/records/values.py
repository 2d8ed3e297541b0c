"""Checks on the values of a feature where they lie, eight bytes at a time (numba kernels).

Values are varints: seven bits a byte, the high bit set on all bytes but the last. Padding is one zero byte a
value, so a list of `values` of which the first `real` are not padding takes `size - (values - real)` bytes
for those: no scan is needed to find where they end, only one to make sure. Tricks on words: bits 7 of each
byte (`_HIGH`) tell continuation bytes apart; `(w & 0x7F..) + 0x7F..` sets bit 7 of each byte that is not
zero, without carries between bytes.

Preconditions: a field is preceded by at least eight bytes of the same record (its headers and key), so the
word that ends with a field's last byte lies in the record.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gaudi_bert.records.memory import KERNEL_OPTIONS, count_bits, load_u8, load_u32, load_word

__all__ = ["all_bytes_are", "count_leading_ones", "count_unit_floats", "is_zero", "real_bytes", "scan_positions"]

_HIGH = np.int64(-0x7F7F7F7F7F7F7F80)  # 0x8080808080808080
_LOW_SEVEN = np.int64(0x7F7F7F7F7F7F7F7F)
_ONE_EACH = np.int64(0x0101010101010101)
_ONE_FLOAT = np.int64(0x3F800000)
_TWO_FLOATS = np.int64(0x3F8000003F800000)


@njit(**KERNEL_OPTIONS)
def is_zero(at: int, size: int) -> bool:
    """Whether `size` bytes are all zero."""
    end = at + size
    seen = 0
    while at + 8 <= end:
        seen |= load_word(at)
        at += 8
    if at < end:
        seen |= load_word(end - 8) >> (8 * (8 - (end - at)))
    return seen == 0


@njit(**KERNEL_OPTIONS)
def all_bytes_are(at: int, size: int, value: int) -> bool:
    """Whether `size` bytes all equal `value`."""
    end = at + size
    pattern = value * _ONE_EACH
    different = 0
    while at + 8 <= end:
        different |= load_word(at) ^ pattern
        at += 8
    if at < end:
        different |= (load_word(end - 8) ^ pattern) >> (8 * (8 - (end - at)))
    return different == 0


@njit(**KERNEL_OPTIONS)
def _is_canonical(at: int, size: int, count: int) -> bool:
    """Whether `size` bytes are exactly `count` varints of at most three bytes, none longer than need be."""
    if size == 0:
        return count == 0
    end = at + size
    continued = 0
    wrong = 0
    while at + 8 <= end:
        word, before = load_word(at), load_word(at - 1)
        zero_bytes = ~(((word & _LOW_SEVEN) + _LOW_SEVEN) | word)
        wrong |= before & (zero_bytes | (word & load_word(at - 2)))
        continued += count_bits(word & _HIGH)
        at += 8
    if at < end:
        kept = _HIGH << (8 * (8 - (end - at)))
        word, before = load_word(end - 8), load_word(end - 9)
        zero_bytes = ~(((word & _LOW_SEVEN) + _LOW_SEVEN) | word)
        wrong |= before & (zero_bytes | (word & load_word(end - 10))) & kept
        continued += count_bits(word & kept)
    return (wrong & _HIGH) == 0 and size - continued == count and load_u8(end - 1) < 128


@njit(**KERNEL_OPTIONS)
def real_bytes(at: int, size: int, values: int, real: int) -> int:
    """How many bytes the first `real` of `values` varints take, when the others are zero; -1 when it is not
    so."""
    prefix = size - (values - real)
    if prefix < real or not is_zero(at + prefix, values - real) or not _is_canonical(at, prefix, real):
        return -1
    return prefix


@njit(**KERNEL_OPTIONS)
def count_leading_ones(at: int, size: int) -> int:
    """n of a mask of `size` bytes that is n ones and then zeros; -1 for anything else."""
    start, end = at, at + size
    while at + 8 <= end and load_word(at) == _ONE_EACH:
        at += 8
    while at < end and load_u8(at) == 1:
        at += 1
    return at - start if is_zero(at, end - at) else -1


@njit(**KERNEL_OPTIONS)
def count_unit_floats(at: int, size: int) -> int:
    """n of float32 weights in `size` bytes that are n ones and then zeros; -1 for anything else."""
    if size & 3:
        return -1
    start, end = at, at + size
    while at + 8 <= end and load_word(at) == _TWO_FLOATS:
        at += 8
    while at < end and load_u32(at) == _ONE_FLOAT:
        at += 4
    return (at - start) >> 2 if is_zero(at, end - at) else -1


@njit(**KERNEL_OPTIONS)
def scan_positions(at: int, size: int, values: int, real: int, length: int) -> int:
    """How many bytes the first `real` of `values` positions take; -1 unless each lies in 0 .. length - 1 and
    the rest is zero."""
    start, end = at, at + size
    largest = -1
    for _ in range(real):
        if at >= end:
            return -1
        value = load_u8(at)
        at += 1
        if value >= 128:
            if at >= end:
                return -1
            high = load_u8(at)
            at += 1
            if high == 0 or high >= 128:
                return -1
            value += (high - 1) << 7
        largest = max(largest, value)
    if largest >= length or end - at != values - real or not is_zero(at, end - at):
        return -1
    return at - start
