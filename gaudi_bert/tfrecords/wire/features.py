"""Finding the features of a serialised tf.train.Example without decoding it (numba kernels).

A payload has the form `0A n (0A n (0A n key) (12 n (kind n (0A n values))))*`, in which every n is the length of the
following message. The part in the outer parentheses is a map entry: the key is the name of a feature, and the values are
its list of numbers or strings. Each message must end exactly at the end of its parent. An entry with an unknown key is
skipped if its key is ASCII and its value is one well-formed list. The kernels do not support anything else that protobuf
permits. They report such a record as unusual, and the general reader (`scan`) then decides whether it is valid.

A key is compared by its length and by three words of eight bytes. Together the words cover a key of 8 to 24 bytes, and they
read nothing outside the key. Functions that take arrays and run for every entry are inlined, because passing an array takes
as long as comparing a key.

The parameters `address`, `start` and `end` are memory addresses, and `end` is exclusive.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray, RowArray
from gaudi_bert.common.compiled import inlined_kernel, kernel_without_refcounts, load_u8, load_word
from gaudi_bert.tfrecords.wire.example import encode_varint
from gaudi_bert.tfrecords.wire.schema import FeatureSpec

_MESSAGE, _VALUE, _BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 0x0A, 0x12, 0x0A, 0x12, 0x1A
_LONGEST_VARINT = 10
_SMALL_VALUES = ("input_mask", "segment_ids", "next_sentence_labels")  # one byte per value, nearly always

_PREFIX_WORDS = ("prefix_0", "prefix_8", "prefix_16", "prefix_24", "prefix_last")
_KEY_WORDS = ("key_bytes", "key_first", "key_second", "key_last", "list_tag", "prefix_bytes", "values_bytes", *_PREFIX_WORDS)
_KEY_DTYPE = np.dtype([(name, np.int64) for name in _KEY_WORDS])
_SPAN_DTYPE = np.dtype([("start", np.int64), ("bytes", np.int64)])


# A decoded value and the address after its bytes.
ValueAndAddress = tuple[int, int]
# The index of a feature and the address after its map entry.
_FeatureAndAddress = tuple[int, int]


class FeatureTable(NamedTuple):
    """The features that `locate_features` searches for, and where it found their values in the last record.

    Each thread needs its own table.

    Attributes:
        keys: A structured array [features] of constants. `key_bytes`, `key_first`, `key_second` and `key_last` are the
            length and the three words of the key, and `list_tag` is the tag of the list that the feature must contain. The
            other fields describe the expected prefix of the feature's map entry, which is everything before the values. It
            is constant if the values (nearly) always have the same size. Then `prefix_bytes` is the size of the prefix,
            `values_bytes` the size of the values, and `prefix_0` to `prefix_last` are words of the prefix. Otherwise these
            fields are 0.
        spans: A structured array [features] with the address (`start`) and the size in bytes (`bytes`) of the values in the
            last record.
        order: int64 [features], the features in the order of the last record. The next record probably has the same order,
            so that its keys are found at the first comparison.
    """

    keys: RowArray
    spans: RowArray
    order: IntArray


def make_feature_table(features: Sequence[FeatureSpec]) -> FeatureTable:
    """Create the table that `locate_features` needs to find the given features in records."""
    keys = np.array([_encode_feature_key(spec) for spec in features], _KEY_DTYPE)
    return FeatureTable(keys, np.zeros(keys.size, _SPAN_DTYPE), np.zeros(keys.size, np.int64))


@functools.cache
def _encode_feature_key(spec: FeatureSpec) -> tuple[int, ...]:
    """Return the row of `FeatureTable.keys` that describes one feature.

    Raises:
        ValueError: The name of the feature does not have 8 to 24 bytes, which is an error of the caller.
    """
    key = spec.key_bytes
    if not 8 <= len(key) <= 24:
        raise ValueError(f"feature `{spec.name}`: the name must have 8 to 24 bytes, but has {len(key)}")
    starts = (0, min(8, len(key) - 8), len(key) - 8)
    words = [struct.unpack_from("<q", key, start)[0] for start in starts]
    tag = _FLOAT_LIST if spec.kind == "float32" else _INT64_LIST
    return len(key), *words, tag, *_encode_expected_entry_prefix(spec, tag)


def _encode_expected_entry_prefix(spec: FeatureSpec, list_tag: int) -> list[int]:
    """Encode the tags, lengths and name that precede the values of a feature in a record, if these bytes are the same in
    (nearly) all records.

    They are the same if the values (nearly) always have the same size, which holds for floats and for integers that take one
    byte each. `_has_expected_entry_prefix` compares them with a record at once, which is faster than parsing them.

    Returns:
        The fields of `FeatureTable.keys` from `prefix_bytes` on: the size of these bytes, the size of the values, and five
        words of the bytes. All are 0 if the size of the values varies.
    """
    if spec.kind != "float32" and spec.name not in _SMALL_VALUES:
        return [0] * (2 + len(_PREFIX_WORDS))
    key, size = spec.key_bytes, spec.length * (4 if spec.kind == "float32" else 1)
    values = bytes([_MESSAGE]) + encode_varint(size)
    inner = bytes([list_tag]) + encode_varint(len(values) + size) + values
    entry = bytes([_MESSAGE, len(key)]) + key + bytes([_VALUE]) + encode_varint(len(inner) + size) + inner
    prefix = bytes([_MESSAGE]) + encode_varint(len(entry) + size) + entry
    starts = [min(start, len(prefix) - 8) for start in (0, 8, 16, 24, len(prefix) - 8)]
    return [len(prefix), size, *(struct.unpack_from("<q", prefix, start)[0] for start in starts)]


@inlined_kernel
def read_varint(address: int, end: int) -> ValueAndAddress:
    """Read a varint of at most five bytes from [address, end), and return its value and the address after it.

    The value is -1 if the varint is incomplete or longer than five bytes.
    """
    value = 0
    shift = 0
    while address < end and shift < 35:
        byte = load_u8(address)
        address += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, address
        shift += 7
    return -1, address


@inlined_kernel
def _find_field_content(address: int, end: int, tag: int) -> int:
    """Return the address of a field's content, or -1 if [address, end) is not exactly one length-delimited field with the
    tag `tag`.
    """
    if address >= end or load_u8(address) != tag:
        return -1
    size, address = read_varint(address + 1, end)
    return address if size == end - address else -1


@inlined_kernel
def _is_key_of_feature(
    keys: RowArray, feature: int, key_size: int, first_word: int, second_word: int, last_word: int
) -> bool:
    """Return whether a key in a record is the name of `feature`, by comparing its size and three words of eight bytes."""
    key = keys[feature]
    return (  # type: ignore[no-any-return]
        key.key_bytes == key_size
        and key.key_first == first_word
        and key.key_last == last_word
        and key.key_second == second_word
    )


@inlined_kernel
def _find_feature_by_key(address: int, key_size: int, keys: RowArray, guessed_feature: int) -> int:
    """Find the feature with the name at `address`, and return its index, or -1 if the name is unknown.

    The name of `guessed_feature` is compared first, because it is probably the right one.
    """
    if key_size < 8 or key_size > 24:
        return -1
    first_word, last_word = load_word(address), load_word(address + key_size - 8)
    second_word = load_word(address + min(8, key_size - 8))
    if _is_key_of_feature(keys, guessed_feature, key_size, first_word, second_word, last_word):
        return guessed_feature
    for feature in range(keys.size):
        if _is_key_of_feature(keys, feature, key_size, first_word, second_word, last_word):
            return feature
    return -1


@inlined_kernel
def _has_expected_entry_prefix(address: int, end: int, keys: RowArray, feature: int) -> bool:
    """Return whether the map entry at `address` ends before `end` and begins with the bytes that (nearly) always precede the
    values of `feature` (`_encode_expected_entry_prefix`).
    """
    expected = keys[feature]
    prefix_size = expected.prefix_bytes
    if prefix_size == 0 or prefix_size + expected.values_bytes > end - address:
        return False
    different: int = load_word(address) ^ expected.prefix_0
    different |= load_word(address + 8) ^ expected.prefix_8
    different |= load_word(address + min(16, prefix_size - 8)) ^ expected.prefix_16
    different |= load_word(address + min(24, prefix_size - 8)) ^ expected.prefix_24
    different |= load_word(address + prefix_size - 8) ^ expected.prefix_last
    return different == 0


@kernel_without_refcounts
def _is_ascii(address: int, size: int) -> bool:
    """Return whether all `size` bytes at `address` are ASCII."""
    combined = 0
    for number in range(size):
        combined |= load_u8(address + number)
    return combined < 128


@kernel_without_refcounts
def _is_varint_sequence(address: int, end: int) -> bool:
    """Return whether [address, end) consists of complete varints of at most ten bytes each."""
    size = 0
    while address < end:
        size = size + 1 if load_u8(address) >= 128 else 0
        if size == _LONGEST_VARINT:
            return False
        address += 1
    return size == 0


@kernel_without_refcounts
def _is_string_sequence(address: int, end: int) -> bool:
    """Return whether [address, end) consists of the values of a BytesList, each with its tag and length."""
    while address < end:
        if load_u8(address) != _MESSAGE:
            return False
        size, address = read_varint(address + 1, end)
        if size < 0 or size > end - address:
            return False
        address += size
    return True


@kernel_without_refcounts
def _is_well_formed_map_value(address: int, end: int) -> bool:
    """Return whether [address, end) is a well-formed protobuf `Feature`, the value of an entry in the map
    `Features.feature`.

    The `Feature` may contain at most one list, and numbers in it must be packed. Protobuf also permits other encodings, but
    the kernels do not support them, and leave such records to the general reader.
    """
    address = _find_field_content(address, end, _VALUE)
    if address < 0 or address == end:
        return address == end
    kind = load_u8(address)
    address = _find_field_content(address, end, kind)
    if address < 0 or address == end:
        return address == end and kind in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST)
    if kind == _BYTES_LIST:
        return _is_string_sequence(address, end)
    address = _find_field_content(address, end, _MESSAGE)
    if address < 0:
        return False
    return ((end - address) & 3) == 0 if kind == _FLOAT_LIST else (kind == _INT64_LIST and _is_varint_sequence(address, end))


@inlined_kernel
def _locate_map_entry(address: int, end: int, table: FeatureTable, guessed_feature: int) -> _FeatureAndAddress:
    """Read one protobuf map entry, and store the address and size of its values in `table.spans`.

    Args:
        address: The address of the entry.
        end: The address after the last entry.
        table: The feature table.
        guessed_feature: The feature whose name is compared first.

    Returns:
        (feature, address after the entry). The feature is -1 if the key is unknown. The address is -1 if the entry has an
        encoding that the kernel does not support.
    """
    if load_u8(address) != _MESSAGE:
        return -1, -1
    size, address = read_varint(address + 1, end)
    if size < 2 or size > end - address:
        return -1, -1
    entry_end = address + size
    if load_u8(address) != _MESSAGE:
        return -1, -1
    key_size, address = read_varint(address + 1, entry_end)
    if key_size < 0 or key_size > entry_end - address:
        return -1, -1
    feature = _find_feature_by_key(address, key_size, table.keys, guessed_feature)
    if feature < 0:
        usual = _is_ascii(address, key_size) and _is_well_formed_map_value(address + key_size, entry_end)
        return -1, entry_end if usual else -1
    address = _find_field_content(address + key_size, entry_end, _VALUE)
    if address >= 0:
        address = _find_field_content(address, entry_end, table.keys[feature].list_tag)
    if address >= 0:
        address = _find_field_content(address, entry_end, _MESSAGE)
    if address < 0:
        return -1, -1
    span = table.spans[feature]
    span.start = address
    span.bytes = entry_end - address
    return feature, entry_end


@kernel_without_refcounts
def locate_features(payload_start: int, payload_end: int, table: FeatureTable) -> bool:
    """Find the values of all features in a payload, and store their addresses and sizes in `table.spans`.

    Returns:
        True if the payload contains every feature of the table exactly once, in an encoding that the kernel supports.
    """
    keys, spans, order = table
    found_features, entry_number, last = 0, 0, keys.size - 1
    address = _find_field_content(payload_start, payload_end, _MESSAGE)
    if address < 0:
        return False
    while address < payload_end:
        guessed_feature = order[min(entry_number, last)]
        if _has_expected_entry_prefix(address, payload_end, keys, guessed_feature):
            feature = guessed_feature
            span = spans[feature]
            address += keys[feature].prefix_bytes
            span.start = address
            span.bytes = keys[feature].values_bytes
            address += span.bytes
        else:
            feature, address = _locate_map_entry(address, payload_end, table, guessed_feature)
            if address < 0:
                return False
            if feature < 0:
                continue
        if (found_features >> feature) & 1:
            return False
        found_features |= 1 << feature
        order[min(entry_number, last)] = feature
        entry_number += 1
    return found_features == (1 << keys.size) - 1
