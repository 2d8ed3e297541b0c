"""Writing tf.train.Example by hand: sizes of nested messages, heads of map entries, varints (numba kernels).

A map entry is `0A n (0A n key) (12 n (kind n (0A n values)))`: with the size of the values known, all lengths
are, so each byte is written once and in order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numba import njit

from gaudi_bert.records.schema import MAX_SEQUENCE_LENGTH, FeatureSpec
from gaudi_bert.records.wire.memory import KERNEL_OPTIONS, store_u8, store_word

__all__ = [
    "entry_size",
    "output_keys",
    "position_bytes",
    "position_table",
    "store_entry_head",
    "store_varint",
    "varint_size",
]


def position_table() -> np.ndarray:
    """The varints 0 .. 8191, one after the other."""
    values = np.arange(MAX_SEQUENCE_LENGTH)
    long = values[128:]
    pairs = np.stack([(long & 127) | 128, long >> 7], axis=1)
    return np.concatenate([values[:128], pairs.reshape(-1)]).astype(np.uint8)


def output_keys(features: Sequence[FeatureSpec]) -> np.ndarray:
    """[features, 5] int64: key length, the key as three words, the tag of its list."""
    rows = []
    for spec in features:
        key = spec.name.encode("ascii")
        rows.append([len(key), *struct.unpack("<3q", key.ljust(24, b"\0")), 0x12 if spec.kind == "float32" else 0x1A])
    return np.array(rows, dtype=np.int64)


@njit(inline="always")
def position_bytes(length: int) -> int:
    """Size of the varints 0 .. length - 1."""
    return length if length <= 128 else 2 * length - 128


@njit(inline="always")
def varint_size(value: int) -> int:
    """Bytes of a varint below 2**21."""
    return 1 if value < 128 else (2 if value < 16384 else 3)


@njit(inline="always")
def store_varint(at: int, value: int) -> int:
    """Write a varint; the address after it."""
    while value > 127:
        store_u8(at, (value & 127) | 128)
        at += 1
        value >>= 7
    store_u8(at, value)
    return at + 1


@njit(inline="always")
def entry_size(key_size: int, values_size: int) -> int:
    """Size of a map entry without its tag and length, for packed values of `values_size` bytes."""
    packed = 1 + varint_size(values_size) + values_size
    feature = 1 + varint_size(packed) + packed
    return 2 + key_size + 1 + varint_size(feature) + feature


@njit(**KERNEL_OPTIONS)
def store_entry_head(at: int, keys: np.ndarray, feature: int, values_size: int) -> int:
    """Write the head of a map entry, up to its values; the address of the first value."""
    key_size = keys[feature, 0]
    packed = 1 + varint_size(values_size) + values_size
    message = 1 + varint_size(packed) + packed
    store_u8(at, 0x0A)
    at = store_varint(at + 1, entry_size(key_size, values_size))
    store_u8(at, 0x0A)
    store_u8(at + 1, key_size)
    store_word(at + 2, keys[feature, 1])
    store_word(at + 10, keys[feature, 2])
    store_word(at + 18, keys[feature, 3])
    at += 2 + key_size
    store_u8(at, 0x12)
    at = store_varint(at + 1, message)
    store_u8(at, keys[feature, 4])
    at = store_varint(at + 1, packed)
    store_u8(at, 0x0A)
    return store_varint(at + 1, values_size)
