"""Serialised examples to dense arrays: one matrix a feature, a row a record.

Used where numbers are wanted instead of bytes: packing on the fly, and tables for other trainers. The kernel
reads examples in packed encoding (what this package and TensorFlow write), map entries in any order, other
features skipped. Every read is checked against the end of its field, so that it never leaves the record; a
record that does not have exactly the asked features, with exactly the asked sizes and 32-bit values, is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numba
import numpy as np

from gaudi_bert.common.errors import InputError

__all__ = ["decode_columns"]

LONGEST_KEY = 32
LENGTH_DELIMITED_1 = 0x0A
MAP_VALUE = 0x12
FLOAT_LIST, INT64_LIST = 0x12, 0x1A


def decode_columns(
    buffer: np.ndarray,
    offsets: np.ndarray,
    lengths: np.ndarray,
    shapes: Mapping[str, int],
    float_features: Sequence[str],
    source: str,
) -> dict[str, np.ndarray]:
    """The features of many examples.

    Args:
        buffer: uint8, holds the payloads.
        offsets: int64 [n], where each payload starts.
        lengths: int64 [n], how long it is.
        shapes: the number of values of each feature that is wanted.
        float_features: those of them that are floats.
        source: what to call the buffer in an error.

    Returns:
        For each feature a matrix [n, size], int32 or float32.

    Raises:
        InputError: a record lacks a feature, has it in another size or encoding, or a value does not fit into
            32 bits.
    """
    names = list(shapes)
    keys = np.zeros((len(names), LONGEST_KEY), np.uint8)
    for row, name in enumerate(names):
        encoded = name.encode("ascii")
        keys[row, : len(encoded)] = np.frombuffer(encoded, np.uint8)
    key_lengths = np.array([len(name) for name in names], np.int64)
    is_float = np.array([name in float_features for name in names], np.bool_)
    columns = tuple(np.zeros((len(offsets), shapes[name]), np.int32) for name in names)
    bad = _decode(buffer, offsets.astype(np.int64), lengths.astype(np.int64), keys, key_lengths, is_float, columns)
    if bad >= 0:
        wanted = ", ".join(f"{name}[{size}]" for name, size in shapes.items())
        raise InputError(
            f"{source}: record {bad}: is not an example of {wanted} in packed encoding; "
            "check that the sizes belong to this data"
        )
    return {
        name: column.view(np.float32) if name in float_features else column
        for name, column in zip(names, columns, strict=True)
    }


@numba.njit(nogil=True, cache=True)
def _varint(buffer: np.ndarray, place: int, end: int) -> tuple[int, int]:
    """The value at `place` and the place after it; (0, -1) when it does not end before `end` or has more than
    64 bits."""
    value = np.uint64(0)
    shift = 0
    while place < end and shift < 64:
        byte = buffer[place]
        place += 1
        value |= np.uint64(byte & 127) << np.uint64(shift)
        if byte < 128:
            return np.int64(value), place  # type: ignore[return-value]
        shift += 7
    return np.int64(0), -1  # type: ignore[return-value]


@numba.njit(nogil=True, cache=True)
def _enter(buffer: np.ndarray, place: int, end: int, tag: int) -> tuple[int, int]:
    """Start and end of the length-delimited field `tag` at `place`; (-1, -1) when there is none within
    `end`."""
    if place < 0 or place >= end or buffer[place] != tag:
        return -1, -1
    length, start = _varint(buffer, place + 1, end)
    if start < 0 or length < 0 or length > end - start:
        return -1, -1
    return start, start + length


@numba.njit(nogil=True, cache=True)
def _which(buffer: np.ndarray, start: int, end: int, keys: np.ndarray, key_lengths: np.ndarray) -> int:
    """The number of the key at start .. end - 1, or -1."""
    for row in range(key_lengths.size):
        if key_lengths[row] == end - start:
            same = True
            for index in range(end - start):
                if buffer[start + index] != keys[row, index]:
                    same = False
                    break
            if same:
                return row
    return -1


@numba.njit(nogil=True, cache=True)
def _fill_ints(buffer: np.ndarray, start: int, end: int, row: np.ndarray) -> bool:
    """Decode exactly row.size varints that fit into 31 bits."""
    place = start
    for index in range(row.size):
        if place < end and buffer[place] < 128:
            row[index] = buffer[place]
            place += 1
            continue
        value, place = _varint(buffer, place, end)
        if place < 0 or value < 0 or value > 2147483647:
            return False
        row[index] = value
    return place == end


@numba.njit(nogil=True, cache=True)
def _fill_floats(buffer: np.ndarray, start: int, end: int, row: np.ndarray) -> bool:
    """Copy exactly row.size little-endian floats, as bits."""
    if end - start != 4 * row.size:
        return False
    for index in range(row.size):
        place = start + 4 * index
        bits = np.uint32(buffer[place]) | np.uint32(buffer[place + 1]) << np.uint32(8)
        bits |= np.uint32(buffer[place + 2]) << np.uint32(16) | np.uint32(buffer[place + 3]) << np.uint32(24)
        row[index] = np.int32(bits)
    return True


@numba.njit(nogil=True, cache=True)
def _decode_one(
    buffer: np.ndarray,
    start: int,
    end: int,
    record: int,
    keys: np.ndarray,
    key_lengths: np.ndarray,
    is_float: np.ndarray,
    columns: tuple[np.ndarray, ...],
    seen: np.ndarray,
) -> bool:
    """Fill row `record` of the columns from the payload at start .. end - 1."""
    seen[:] = 0
    place, stop = _enter(buffer, start, end, LENGTH_DELIMITED_1)
    if stop != end:
        return False
    while place < stop:
        entry, entry_end = _enter(buffer, place, stop, LENGTH_DELIMITED_1)
        key, key_end = _enter(buffer, entry, entry_end, LENGTH_DELIMITED_1)
        if key < 0:
            return False
        which = _which(buffer, key, key_end, keys, key_lengths)
        place = entry_end
        if which < 0:
            continue
        value, value_end = _enter(buffer, key_end, entry_end, MAP_VALUE)
        items, items_end = _enter(buffer, value, value_end, FLOAT_LIST if is_float[which] else INT64_LIST)
        body, body_end = _enter(buffer, items, items_end, LENGTH_DELIMITED_1)
        if body < 0 or value_end != entry_end or items_end != value_end or body_end != items_end:
            return False
        row = columns[which][record]
        if is_float[which]:
            filled = _fill_floats(buffer, body, body_end, row)
        else:
            filled = _fill_ints(buffer, body, body_end, row)
        if not filled:
            return False
        seen[which] += 1
    return bool(np.all(seen == 1))


@numba.njit(nogil=True, cache=True)
def _decode(
    buffer: np.ndarray,
    offsets: np.ndarray,
    lengths: np.ndarray,
    keys: np.ndarray,
    key_lengths: np.ndarray,
    is_float: np.ndarray,
    columns: tuple[np.ndarray, ...],
) -> int:
    """Decode all records; -1, or the number of the first that is refused."""
    seen = np.zeros(key_lengths.size, np.int64)
    for record in range(offsets.size):
        start, end = offsets[record], offsets[record] + lengths[record]
        if start < 0 or lengths[record] < 0 or end > buffer.size:
            return record
        if not _decode_one(buffer, start, end, record, keys, key_lengths, is_float, columns, seen):
            return record
    return -1
