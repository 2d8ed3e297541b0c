"""Finding the features of a serialised tf.train.Example in place, without decoding it (numba kernels).

A record is `0A n (0A n (0A n key) (12 n (kind n (0A n values))))*`: lengths nest, so each length must end
exactly where its parent ends. Map entries may come in any order. Entries with unknown keys are skipped if they are as
writers write them: an ASCII key, and one well-formed list. Anything else that protobuf allows (unpacked values,
repeated keys, split messages) is not taken here but by the general reader: the kernels say "unusual", and never guess.

A key is compared by its length and three words of eight bytes (its first, its second or last, its last),
which together cover keys of 8 to 24 bytes and read nothing outside the key.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numba import njit

from gaudi_bert.records.schema import FeatureSpec
from gaudi_bert.records.wire.example import encode_varint
from gaudi_bert.records.wire.memory import KERNEL_OPTIONS, load_u8, load_word, store_word, word_at

__all__ = ["enter_field", "feature_keys", "locate_features", "read_varint", "work_space"]

_MESSAGE, _VALUE, _BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 0x0A, 0x12, 0x0A, 0x12, 0x1A
_LONGEST_VARINT = 10
_SMALL_VALUES = ("input_mask", "segment_ids", "next_sentence_labels")  # one byte a value, nearly always

# Columns of the table of features.
_KEY_LENGTH, _FIRST, _SECOND, _LAST, _KIND, _HEAD_SIZE, _VALUES_SIZE, _HEAD = range(8)
_HEAD_WORDS = 5
_COLUMNS = 7 + _HEAD_WORDS


def feature_keys(features: Sequence[FeatureSpec]) -> np.ndarray:
    """[features, 12] int64: what the kernels know of each feature.

    Key length, three words of the key, the tag of the list that the feature must hold; and where the values of a
    feature always take the same number of bytes (or nearly always), so that the head of its map entry is always the
    same: the bytes of that head, those of the values, and the head's first four words and last word.
    """
    rows = []
    for spec in features:
        key = spec.name.encode("ascii")
        if not 8 <= len(key) <= 24:
            raise ValueError(f"the kernels compare keys of 8 to 24 bytes, `{spec.name}` has {len(key)}")
        starts = (0, min(8, len(key) - 8), len(key) - 8)
        words = [struct.unpack_from("<q", key, start)[0] for start in starts]
        tag = _FLOAT_LIST if spec.kind == "float32" else _INT64_LIST
        rows.append([len(key), *words, tag, *_usual_head(spec, tag)])
    return np.array(rows, dtype=np.int64)


def work_space(features: Sequence[FeatureSpec]) -> np.ndarray:
    """The work space of `locate_features`; one a thread."""
    return np.zeros(3 * len(features), np.int64)


def _usual_head(spec: FeatureSpec, tag: int) -> list[int]:
    """Size of the head, size of the values, four words from the front of the head and its last; zeros if it varies."""
    if spec.kind != "float32" and spec.name not in _SMALL_VALUES:
        return [0] * (2 + _HEAD_WORDS)
    key, size = spec.name.encode("ascii"), spec.length * (4 if spec.kind == "float32" else 1)
    values = bytes([_MESSAGE]) + encode_varint(size)
    inner = bytes([tag]) + encode_varint(len(values) + size) + values
    entry = bytes([_MESSAGE, len(key)]) + key + bytes([_VALUE]) + encode_varint(len(inner) + size) + inner
    head = bytes([_MESSAGE]) + encode_varint(len(entry) + size) + entry
    front = [struct.unpack_from("<q", head, min(8 * number, len(head) - 8))[0] for number in range(_HEAD_WORDS - 1)]
    return [len(head), size, *front, struct.unpack_from("<q", head, len(head) - 8)[0]]


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
def _known(keys: int, feature: int, column: int) -> int:
    """What the table `keys` says of a feature in a column."""
    return word_at(keys, feature * _COLUMNS + column)


@njit(inline="always")
def _has_key(keys: int, feature: int, size: int, first: int, second: int, last: int) -> bool:
    return (
        _known(keys, feature, _KEY_LENGTH) == size
        and _known(keys, feature, _FIRST) == first
        and _known(keys, feature, _LAST) == last
        and _known(keys, feature, _SECOND) == second
    )


@njit(**KERNEL_OPTIONS)
def _feature_of_key(at: int, size: int, keys: int, features: int, guess: int) -> int:
    """Which feature the key of `size` bytes at `at` names, trying `guess` first; -1 for an unknown one."""
    if size < 8 or size > 24:
        return -1
    first, last = load_word(at), load_word(at + size - 8)
    second = load_word(at + min(8, size - 8))
    if _has_key(keys, guess, size, first, second, last):
        return guess
    for feature in range(features):
        if _has_key(keys, feature, size, first, second, last):
            return feature
    return -1


@njit(**KERNEL_OPTIONS)
def _has_usual_head(at: int, end: int, keys: int, feature: int) -> bool:
    """Whether the map entry at `at` has the usual head of `feature`, and lies wholly before `end`."""
    size = _known(keys, feature, _HEAD_SIZE)
    if size == 0 or size + _known(keys, feature, _VALUES_SIZE) > end - at:
        return False
    different = load_word(at) ^ _known(keys, feature, _HEAD)
    different |= load_word(at + 8) ^ _known(keys, feature, _HEAD + 1)
    different |= load_word(at + min(16, size - 8)) ^ _known(keys, feature, _HEAD + 2)
    different |= load_word(at + min(24, size - 8)) ^ _known(keys, feature, _HEAD + 3)
    return different | (load_word(at + size - 8) ^ _known(keys, feature, _HEAD + 4)) == 0


@njit(**KERNEL_OPTIONS)
def _is_ascii(at: int, size: int) -> bool:
    seen = 0
    for number in range(size):
        seen |= load_u8(at + number)
    return seen < 128


@njit(**KERNEL_OPTIONS)
def _are_varints(at: int, end: int) -> bool:
    """Whether [at, end) is a sequence of whole varints of 64 bits."""
    size = 0
    while at < end:
        size = size + 1 if load_u8(at) >= 128 else 0
        if size == _LONGEST_VARINT:
            return False
        at += 1
    return size == 0


@njit(**KERNEL_OPTIONS)
def _are_strings(at: int, end: int) -> bool:
    """Whether [at, end) is a sequence of the values of a BytesList."""
    while at < end:
        if load_u8(at) != _MESSAGE:
            return False
        size, at = read_varint(at + 1, end)
        if size < 0 or size > end - at:
            return False
        at += size
    return True


@njit(**KERNEL_OPTIONS)
def _is_usual_value(at: int, end: int) -> bool:
    """Whether [at, end) is the value of a map entry as writers write it: one list of any kind, numbers packed."""
    at = enter_field(at, end, _VALUE)
    if at < 0 or at == end:
        return at == end
    kind = load_u8(at)
    at = enter_field(at, end, kind)
    if at < 0 or at == end:
        return at == end and kind in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST)
    if kind == _BYTES_LIST:
        return _are_strings(at, end)
    at = enter_field(at, end, _MESSAGE)
    if at < 0:
        return False
    return ((end - at) & 3) == 0 if kind == _FLOAT_LIST else (kind == _INT64_LIST and _are_varints(at, end))


@njit(**KERNEL_OPTIONS)
def _locate_entry(at: int, end: int, keys: int, features: int, guess: int, spans: int) -> tuple[int, int]:
    """Read one map entry: (its feature, or -1 for an unknown key; the address after it, or -1 where it is unusual)."""
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
    feature = _feature_of_key(at, key_size, keys, features, guess)
    if feature < 0:
        usual = _is_ascii(at, key_size) and _is_usual_value(at + key_size, entry_end)
        return -1, entry_end if usual else -1
    at = enter_field(at + key_size, entry_end, _VALUE)
    if at >= 0:
        at = enter_field(at, entry_end, _known(keys, feature, _KIND))
    if at >= 0:
        at = enter_field(at, entry_end, _MESSAGE)
    if at < 0:
        return -1, -1
    store_word(spans + 16 * feature, at)
    store_word(spans + 16 * feature + 8, entry_end - at)
    return feature, entry_end


@njit(**KERNEL_OPTIONS)
def locate_features(start: int, end: int, keys: int, features: int, spans: int) -> bool:
    """Find the packed values of all features in the record [start, end).

    Args:
        start, end: addresses of the record's payload.
        keys: address of the table from `feature_keys`.
        features: number of features in it.
        spans: address of a work space of 3 * features words (int64). The first 2 * features are set to the address and the
            size in bytes of each feature's values; in the others the order of the features in the last record is kept,
            because it speeds the next one up.

    Returns:
        Whether all are there, each once, each in the usual encoding.
    """
    order = spans + 16 * features
    found, entry = 0, 0
    at = enter_field(start, end, _MESSAGE)
    if at < 0:
        return False
    while at < end:
        guess = load_word(order + 8 * min(entry, features - 1))
        if _has_usual_head(at, end, keys, guess):
            feature = guess
            size = _known(keys, feature, _VALUES_SIZE)
            at += _known(keys, feature, _HEAD_SIZE)
            store_word(spans + 16 * feature, at)
            store_word(spans + 16 * feature + 8, size)
            at += size
        else:
            feature, at = _locate_entry(at, end, keys, features, guess, spans)
            if at < 0:
                return False
            if feature < 0:
                continue
        if (found >> feature) & 1:
            return False
        found |= 1 << feature
        store_word(order + 8 * min(entry, features - 1), feature)
        entry += 1
    return found == (1 << features) - 1
