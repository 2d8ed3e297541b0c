"""Dense matrices to framed records, all at once: the way back from `gaudi_bert.records.read.columns`.

Row n of every matrix makes one tf.train.Example, keys sorted and lists packed, byte-equal to what `encode_example` and
`frame` give for it. The kernel measures a record's lists first, because protobuf puts sizes before contents, then writes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numba import njit

from gaudi_bert.records.wire.crc32c import crc32c_kernel, mask_crc
from gaudi_bert.records.wire.memory import KERNEL_OPTIONS, address_of

__all__ = ["encode_rows"]

_LONGEST_VARINT = 5  # of a value below 2^31
_HEAD_BYTES = 32  # tags and lengths around the values of one feature, at most
_FRAME_BYTES = 16
_FLOAT_LIST, _INT64_LIST = 0x12, 0x1A


def encode_rows(features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Serialise and frame N examples.

    Args:
        features: by name a matrix [N, k], float32, or of integers from 0 to 2^31 - 1.

    Returns:
        The framed records, one after the other (uint8), and the bytes of each (int64 [N]).

    Raises:
        ValueError: the matrices are not all of N rows, or an integer is out of range.
    """
    names = sorted(features)
    keys = np.zeros((len(names), max(map(len, names), default=1)), np.uint8)
    layout = np.zeros((len(names), 4), np.int64)
    columns, first = [], 0
    for row, name in enumerate(names):
        values = np.asarray(features[name])
        is_float = values.dtype.kind == "f"
        if not is_float and values.size and not 0 <= values.min() <= values.max() < 2**31:
            raise ValueError(f"feature `{name}` holds {values.min()} .. {values.max()}; 0 .. {2**31 - 1} is allowed")
        columns.append(values.astype("<f4").view(np.int32) if is_float else values.astype(np.int32))
        keys[row, : len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
        layout[row] = (len(name), first, values.shape[1], _FLOAT_LIST if is_float else _INT64_LIST)
        first += values.shape[1]
    values_all = np.ascontiguousarray(np.concatenate(columns, axis=1))
    most = _FRAME_BYTES + _HEAD_BYTES * (len(names) + 1) + keys.size + _LONGEST_VARINT * first
    out = np.empty(len(values_all) * most, np.uint8)
    lengths = np.zeros(len(values_all), np.int64)
    return out[: _encode(values_all, keys, layout, out, address_of(out), lengths)].copy(), lengths


@njit(**KERNEL_OPTIONS)
def _varint_size(value: int) -> int:
    size = 1
    while value > 127:
        value >>= 7
        size += 1
    return size


@njit(**KERNEL_OPTIONS)
def _store_varint(out: np.ndarray, at: int, value: int) -> int:
    while value > 127:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@njit(**KERNEL_OPTIONS)
def _store_fixed(out: np.ndarray, at: int, value: int, count: int) -> int:
    for byte in range(count):
        out[at + byte] = (value >> (8 * byte)) & 255
    return at + count


@njit(**KERNEL_OPTIONS)
def _sizes_of_feature(values: np.ndarray, key_size: int, tag: int) -> tuple[int, int, int, int]:
    """Bytes of the values, of the list, of the feature and of the map entry around them."""
    if tag == _FLOAT_LIST:
        size = 4 * len(values)
    else:
        size = 0
        for value in values:
            size += _varint_size(np.int64(value))
    list_size = 1 + _varint_size(size) + size
    feature_size = 1 + _varint_size(list_size) + list_size
    return size, list_size, feature_size, 2 + key_size + 1 + _varint_size(feature_size) + feature_size


@njit(**KERNEL_OPTIONS)
def _store_feature(out: np.ndarray, at: int, values: np.ndarray, key: np.ndarray, tag: int) -> int:
    size, list_size, feature_size, entry_size = _sizes_of_feature(values, len(key), tag)
    out[at] = 0x0A
    at = _store_varint(out, at + 1, entry_size)
    out[at], out[at + 1] = 0x0A, len(key)
    out[at + 2 : at + 2 + len(key)] = key
    at += 2 + len(key)
    out[at] = 0x12
    at = _store_varint(out, at + 1, feature_size)
    out[at] = tag
    at = _store_varint(out, at + 1, list_size)
    out[at] = 0x0A
    at = _store_varint(out, at + 1, size)
    for value in values:
        if tag == _FLOAT_LIST:
            at = _store_fixed(out, at, np.int64(value), 4)
        else:
            at = _store_varint(out, at, np.int64(value))
    return at


@njit(**KERNEL_OPTIONS)
def _encode(
    values: np.ndarray, keys: np.ndarray, layout: np.ndarray, out: np.ndarray, address: int, lengths: np.ndarray
) -> int:
    """Write all rows of `values`; the bytes written."""
    at = 0
    for row in range(len(values)):
        content = 0
        for feature in range(len(layout)):
            key_size, first, count, tag = layout[feature]
            entry_size = _sizes_of_feature(values[row, first : first + count], key_size, tag)[3]
            content += 1 + _varint_size(entry_size) + entry_size
        start, payload = at, at + 12
        _store_fixed(out, start, 1 + _varint_size(content) + content, 8)
        _store_fixed(out, start + 8, np.int64(mask_crc(crc32c_kernel(address + start, 8, 0))), 4)
        out[payload] = 0x0A
        at = _store_varint(out, payload + 1, content)
        for feature in range(len(layout)):
            key_size, first, count, tag = layout[feature]
            at = _store_feature(out, at, values[row, first : first + count], keys[feature, :key_size], tag)
        at = _store_fixed(out, at, np.int64(mask_crc(crc32c_kernel(address + payload, at - payload, 0))), 4)
        lengths[row] = at - start
    return at
