"""Finding the features of a serialised tf.train.Example in place, without decoding it (numba kernels).

A record is `0A n (0A n (0A n key) (12 n (kind n (0A n values))))*`: lengths nest, so each length must end
exactly where its parent ends. Map entries may come in any order and unknown keys are skipped. Anything else
that protobuf allows (unpacked values, repeated keys, split messages) is not taken here but by the general
reader: the kernels say "unusual", and never guess.

A key is compared by its length and three words of eight bytes (its first, its second or last, its last),
which together cover keys of 8 to 24 bytes and read nothing outside the key.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numba import njit

from gaudi_bert.records.memory import KERNEL_OPTIONS, load_u8, load_word
from gaudi_bert.records.schema import FeatureSpec

__all__ = ["enter_field", "feature_keys", "locate_features", "read_varint"]

_MESSAGE, _VALUE, _FLOAT_LIST, _INT64_LIST = 0x0A, 0x12, 0x12, 0x1A
_KEY_LENGTH, _FIRST, _SECOND, _LAST, _KIND = range(5)


def feature_keys(features: Sequence[FeatureSpec]) -> np.ndarray:
    """[features, 5] int64: key length, three words of the key, and the tag of the list that the feature must
    hold."""
    rows = []
    for spec in features:
        key = spec.name.encode("ascii")
        if not 8 <= len(key) <= 24:
            raise ValueError(f"the kernels compare keys of 8 to 24 bytes, `{spec.name}` has {len(key)}")
        starts = (0, min(8, len(key) - 8), len(key) - 8)
        words = [struct.unpack_from("<q", key, start)[0] for start in starts]
        rows.append([len(key), *words, _FLOAT_LIST if spec.kind == "float32" else _INT64_LIST])
    return np.array(rows, dtype=np.int64)


@njit(inline="always")
def read_varint(at: int, end: int) -> tuple[int, int]:
    """A length of at most five bytes inside [at, end): (value, next address), or (-1, at) where it is cut
    short or longer."""
    value = 0
    shift = 0
    while at < end and shift < 35:
        byte = load_u8(at)
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return -1, at


@njit(inline="always")
def enter_field(at: int, end: int, tag: int) -> int:
    """The address of the content of a field with `tag` that spans exactly [at, end); -1 otherwise."""
    if at >= end or load_u8(at) != tag:
        return -1
    size, at = read_varint(at + 1, end)
    return at if size == end - at else -1


@njit(inline="always")
def _has_key(keys: np.ndarray, feature: int, size: int, first: int, second: int, last: int) -> bool:
    return (
        keys[feature, _KEY_LENGTH] == size
        and keys[feature, _FIRST] == first
        and keys[feature, _LAST] == last
        and keys[feature, _SECOND] == second
    )


@njit(**KERNEL_OPTIONS)
def _feature_of_key(at: int, size: int, keys: np.ndarray, guess: int) -> int:
    """Which feature the key of `size` bytes at `at` names, trying `guess` first; -1 for an unknown one."""
    if size < 8 or size > 24:
        return -1
    first, last = load_word(at), load_word(at + size - 8)
    second = load_word(at + min(8, size - 8))
    if _has_key(keys, guess, size, first, second, last):
        return guess
    for feature in range(keys.shape[0]):
        if _has_key(keys, feature, size, first, second, last):
            return feature
    return -1


@njit(**KERNEL_OPTIONS)
def locate_features(start: int, end: int, keys: np.ndarray, order: np.ndarray, spans: np.ndarray) -> bool:
    """Find the packed values of all features in the record [start, end).

    Args:
        start, end: addresses of the record's payload.
        keys: from `feature_keys`.
        order: int64 [features]: in which order the features came in the last record; it speeds the next one up.
        spans: int64 [features, 2]: set to the address and the size in bytes of each feature's values.

    Returns:
        Whether all are there, each once, each in the usual encoding.
    """
    found = 0
    features = keys.shape[0]
    entry = 0
    at = enter_field(start, end, _MESSAGE)
    if at < 0:
        return False
    while at < end:
        if load_u8(at) != _MESSAGE:
            return False
        size, at = read_varint(at + 1, end)
        if size < 2 or size > end - at:
            return False
        entry_end = at + size
        if load_u8(at) != _MESSAGE:
            return False
        key_size, at = read_varint(at + 1, entry_end)
        if key_size < 0 or key_size > entry_end - at:
            return False
        feature = _feature_of_key(at, key_size, keys, order[min(entry, features - 1)])
        if feature < 0:
            at = entry_end
            continue
        at = enter_field(at + key_size, entry_end, _VALUE)
        if at >= 0:
            at = enter_field(at, entry_end, keys[feature, _KIND])
        if at >= 0:
            at = enter_field(at, entry_end, _MESSAGE)
        if at < 0 or (found >> feature) & 1:
            return False
        spans[feature, 0] = at
        spans[feature, 1] = entry_end - at
        found |= 1 << feature
        order[min(entry, features - 1)] = feature
        entry += 1
        at = entry_end
    return found == (1 << features) - 1
