"""Finding the features of a serialised tf.train.Example without decoding it (numba kernels).

A record has the form `0A n (0A n (0A n key) (12 n (kind n (0A n values))))*`, in which every n is the length of the
following message. Each message must end exactly at the end of its parent. An entry with an unknown key is skipped if its key
is ASCII and its value is one well-formed list. The kernels do not support anything else that protobuf permits. They report
such a record as unusual, and the general reader (`scan`) then decides whether it is valid.

A key is compared by its length and by three words of eight bytes. Together the words cover a key of 8 to 24 bytes, and they
read nothing outside the key. Functions that take arrays and run for every entry are inlined, because passing an array takes
as long as comparing a key.

Parameters named `at`, `start` and `end` are addresses, and `end` is exclusive.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.memory import load_u8, load_word
from gaudi_bert.tfrecords.wire.example import encode_varint
from gaudi_bert.tfrecords.wire.schema import FeatureSpec

_MESSAGE, _VALUE, _BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 0x0A, 0x12, 0x0A, 0x12, 0x1A
_LONGEST_VARINT = 10
_SMALL_VALUES = ("input_mask", "segment_ids", "next_sentence_labels")  # one byte per value, nearly always

_HEAD_WORDS = ("head_0", "head_8", "head_16", "head_24", "head_last")
_KEY_WORDS = ("key_bytes", "key_first", "key_second", "key_last", "list_tag", "head_bytes", "values_bytes", *_HEAD_WORDS)
_KEY_ROW = np.dtype([(name, np.int64) for name in _KEY_WORDS])
_SPAN_ROW = np.dtype([("start", np.int64), ("bytes", np.int64)])


class FeatureTable(NamedTuple):
    """The features that `locate_features` searches for, and their places in the last record. Each thread needs its own
    table.

    Attributes:
        keys: A structured array [features] of constants. `key_bytes`, `key_first`, `key_second` and `key_last` are the
            length and the three words of the key, and `list_tag` is the tag of the list that the feature must contain. If
            the values of a feature (nearly) always have the same size, the head of its map entry is always the same. Then
            `head_bytes` is the size of the head, `values_bytes` the size of the values, and `head_0` to `head_last` are the
            words of the head. Otherwise these fields are 0.
        spans: A structured array [features] with the address (`start`) and the size in bytes (`bytes`) of the values in the
            last record.
        order: int64 [features], the features in the order of the last record. The next record probably has the same order,
            so that its keys are found at the first comparison.
    """

    keys: RowArray
    spans: RowArray
    order: IntArray


def feature_table(features: Sequence[FeatureSpec]) -> FeatureTable:
    """Return a new table for records with the given features."""
    count = len(features)
    keys = np.array([_key_row(spec) for spec in features], _KEY_ROW)
    return FeatureTable(keys, np.zeros(count, _SPAN_ROW), np.zeros(count, np.int64))


@functools.cache
def _key_row(spec: FeatureSpec) -> tuple[int, ...]:
    """Return the row of `FeatureTable.keys` for a feature.

    Raises:
        ValueError: The key does not have 8 to 24 bytes, which is an error of the caller.
    """
    key = spec.key_bytes
    if not 8 <= len(key) <= 24:
        raise ValueError(f"the kernels compare keys of 8 to 24 bytes, `{spec.name}` has {len(key)}")
    starts = (0, min(8, len(key) - 8), len(key) - 8)
    words = [struct.unpack_from("<q", key, start)[0] for start in starts]
    tag = _FLOAT_LIST if spec.kind == "float32" else _INT64_LIST
    return len(key), *words, tag, *_usual_head(spec, tag)


def _usual_head(spec: FeatureSpec, tag: int) -> list[int]:
    """Return the fields of a key row that describe the head of a map entry if the values have their usual size.

    The fields are the size of the head, the size of the values, and the five words of the head. If the size of the values
    varies, all of them are 0.
    """
    if spec.kind != "float32" and spec.name not in _SMALL_VALUES:
        return [0] * (2 + len(_HEAD_WORDS))
    key, size = spec.key_bytes, spec.length * (4 if spec.kind == "float32" else 1)
    values = bytes([_MESSAGE]) + encode_varint(size)
    inner = bytes([tag]) + encode_varint(len(values) + size) + values
    entry = bytes([_MESSAGE, len(key)]) + key + bytes([_VALUE]) + encode_varint(len(inner) + size) + inner
    head = bytes([_MESSAGE]) + encode_varint(len(entry) + size) + entry
    starts = [min(start, len(head) - 8) for start in (0, 8, 16, 24, len(head) - 8)]
    return [len(head), size, *(struct.unpack_from("<q", head, start)[0] for start in starts)]


@inlined_kernel
def read_varint(at: int, end: int) -> tuple[int, int]:
    """Read a varint of at most five bytes from [at, end).

    Returns:
        (value, next address). The value is -1 if the varint is truncated or longer.
    """
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


@inlined_kernel
def _enter_field(at: int, end: int, tag: int) -> int:
    """Return the address of the content of a field, or -1 unless [at, end) is exactly one field with the tag `tag`."""
    if at >= end or load_u8(at) != tag:
        return -1
    size, at = read_varint(at + 1, end)
    return at if size == end - at else -1


@inlined_kernel
def _has_key(keys: RowArray, feature: int, size: int, first: int, second: int, last: int) -> bool:
    """Return whether the key of a feature has this size and these words."""
    key = keys[feature]
    return key.key_bytes == size and key.key_first == first and key.key_last == last and key.key_second == second  # type: ignore[no-any-return]


@inlined_kernel
def _feature_of_key(at: int, size: int, keys: RowArray, guess: int) -> int:
    """Return the number of the feature that the key at `at` names, or -1 if the key is unknown.

    The feature `guess` is compared first.
    """
    if size < 8 or size > 24:
        return -1
    first, last = load_word(at), load_word(at + size - 8)
    second = load_word(at + min(8, size - 8))
    if _has_key(keys, guess, size, first, second, last):
        return guess
    for feature in range(keys.size):
        if _has_key(keys, feature, size, first, second, last):
            return feature
    return -1


@inlined_kernel
def _has_usual_head(at: int, end: int, keys: RowArray, feature: int) -> bool:
    """Return whether the map entry at `at` has the usual head of `feature`, and its values end before or at `end`."""
    usual = keys[feature]
    size = usual.head_bytes
    if size == 0 or size + usual.values_bytes > end - at:
        return False
    different: int = load_word(at) ^ usual.head_0
    different |= load_word(at + 8) ^ usual.head_8
    different |= load_word(at + min(16, size - 8)) ^ usual.head_16
    different |= load_word(at + min(24, size - 8)) ^ usual.head_24
    different |= load_word(at + size - 8) ^ usual.head_last
    return different == 0


@borrowing_kernel
def _is_ascii(at: int, size: int) -> bool:
    """Return whether all `size` bytes from `at` on are ASCII."""
    seen = 0
    for number in range(size):
        seen |= load_u8(at + number)
    return seen < 128


@borrowing_kernel
def _are_varints(at: int, end: int) -> bool:
    """Return whether [at, end) is a sequence of complete varints of at most ten bytes."""
    size = 0
    while at < end:
        size = size + 1 if load_u8(at) >= 128 else 0
        if size == _LONGEST_VARINT:
            return False
        at += 1
    return size == 0


@borrowing_kernel
def _are_strings(at: int, end: int) -> bool:
    """Return whether [at, end) is a sequence of the values of a BytesList."""
    while at < end:
        if load_u8(at) != _MESSAGE:
            return False
        size, at = read_varint(at + 1, end)
        if size < 0 or size > end - at:
            return False
        at += size
    return True


@borrowing_kernel
def _is_usual_value(at: int, end: int) -> bool:
    """Return whether [at, end) is the value of a map entry that contains one list of any kind, with packed numbers."""
    at = _enter_field(at, end, _VALUE)
    if at < 0 or at == end:
        return at == end
    kind = load_u8(at)
    at = _enter_field(at, end, kind)
    if at < 0 or at == end:
        return at == end and kind in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST)
    if kind == _BYTES_LIST:
        return _are_strings(at, end)
    at = _enter_field(at, end, _MESSAGE)
    if at < 0:
        return False
    return ((end - at) & 3) == 0 if kind == _FLOAT_LIST else (kind == _INT64_LIST and _are_varints(at, end))


@inlined_kernel
def _locate_entry(at: int, end: int, table: FeatureTable, guess: int) -> tuple[int, int]:
    """Read one map entry, and set the span of its feature.

    Args:
        at: The address of the entry.
        end: The address after the last entry.
        table: The feature table.
        guess: The feature that is compared first.

    Returns:
        (feature, next address). The feature is -1 if the key is unknown. The address is -1 if the entry has an encoding that
        the kernel does not support.
    """
    if load_u8(at) != _MESSAGE:
        return -1, -1
    size, at = read_varint(at + 1, end)
    if size < 2 or size > end - at:
        return -1, -1
    entry_end = at + size
    if load_u8(at) != _MESSAGE:
        return -1, -1
    key_size, at = read_varint(at + 1, entry_end)
    if key_size < 0 or key_size > entry_end - at:
        return -1, -1
    feature = _feature_of_key(at, key_size, table.keys, guess)
    if feature < 0:
        usual = _is_ascii(at, key_size) and _is_usual_value(at + key_size, entry_end)
        return -1, entry_end if usual else -1
    at = _enter_field(at + key_size, entry_end, _VALUE)
    if at >= 0:
        at = _enter_field(at, entry_end, table.keys[feature].list_tag)
    if at >= 0:
        at = _enter_field(at, entry_end, _MESSAGE)
    if at < 0:
        return -1, -1
    span = table.spans[feature]
    span.start = at
    span.bytes = entry_end - at
    return feature, entry_end


@borrowing_kernel
def locate_features(start: int, end: int, table: FeatureTable) -> bool:
    """Find the values of all features in the payload [start, end), and store their addresses and sizes in `table.spans`.

    Returns:
        True if the payload contains every feature of the table exactly once, in an encoding that the kernel supports.
    """
    keys, spans, order = table
    seen, entry, last = 0, 0, keys.size - 1
    at = _enter_field(start, end, _MESSAGE)
    if at < 0:
        return False
    while at < end:
        guess = order[min(entry, last)]
        if _has_usual_head(at, end, keys, guess):
            feature = guess
            span = spans[feature]
            at += keys[feature].head_bytes
            span.start = at
            span.bytes = keys[feature].values_bytes
            at += span.bytes
        else:
            feature, at = _locate_entry(at, end, table, guess)
            if at < 0:
                return False
            if feature < 0:
                continue
        if (seen >> feature) & 1:
            return False
        seen |= 1 << feature
        order[min(entry, last)] = feature
        entry += 1
    return seen == (1 << keys.size) - 1
