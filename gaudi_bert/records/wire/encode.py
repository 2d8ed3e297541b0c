"""Writing framed records of tf.train.Example in place: sizes of nested messages, heads, varints (numba kernels).

A map entry is `0A n (0A n key) (12 n (kind n (0A n values)))`: with the size of the values known, all lengths
are, so each byte is written once and in order. Words are stored whole, so up to 24 bytes after a key are touched before
they get their value: an output buffer needs `SLACK_BYTES` more than its records.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from gaudi_bert.common.arrays import ByteArray, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.records.schema import MAX_SEQUENCE_LENGTH, FeatureSpec
from gaudi_bert.records.wire.crc32c import crc32c_at, crc_of_word, mask_crc
from gaudi_bert.records.wire.memory import store_u8, store_u32, store_word

__all__ = [
    "SLACK_BYTES",
    "content_size",
    "finish_record",
    "key_rows",
    "message_size",
    "position_bytes",
    "position_table",
    "start_record",
    "store_entry_head",
    "store_varint",
    "varint_size",
]

SLACK_BYTES = 64

_KEY_ROW = np.dtype([(name, np.int64) for name in ("key_bytes", "word_0", "word_8", "word_16", "list_tag")])


def position_table() -> ByteArray:
    """The varints 0 .. 8191, one after the other."""
    values = np.arange(MAX_SEQUENCE_LENGTH)
    long = values[128:]
    pairs = np.stack([(long & 127) | 128, long >> 7], axis=1)
    table: ByteArray = np.concatenate([values[:128], pairs.reshape(-1)]).astype(np.uint8)
    return table


def key_rows(features: Sequence[FeatureSpec]) -> RowArray:
    """[features] rows: length of the key, the key as three words, the tag of its list."""
    rows = []
    for spec in features:
        if len(spec.key_bytes) > 24:
            raise ValueError(f"feature `{spec.name}` has a name of {len(spec.key_bytes)} bytes; at most 24 are written")
        words = struct.unpack("<3q", spec.key_bytes.ljust(24, b"\0"))
        rows.append((len(spec.key_bytes), *words, 0x12 if spec.kind == "float32" else 0x1A))
    return np.array(rows, _KEY_ROW)


@inlined_kernel
def position_bytes(length: int) -> int:
    """Size of the varints 0 .. length - 1."""
    return length if length <= 128 else 2 * length - 128


@inlined_kernel
def varint_size(value: int) -> int:
    """Bytes of a varint below 2**21."""
    return 1 if value < 128 else (2 if value < 16384 else 3)


@inlined_kernel
def store_varint(at: int, value: int) -> int:
    """Write a varint; the address after it."""
    while value > 127:
        store_u8(at, (value & 127) | 128)
        at += 1
        value >>= 7
    store_u8(at, value)
    return at + 1


@inlined_kernel
def message_size(content: int) -> int:
    """Size of a length-delimited field with so many bytes of content."""
    return 1 + varint_size(content) + content


@inlined_kernel
def _entry_size(key_size: int, values_size: int) -> int:
    """Size of a map entry without its tag and length, for packed values of `values_size` bytes."""
    return 2 + key_size + message_size(message_size(message_size(values_size)))


@borrowing_kernel
def content_size(keys: RowArray, sizes: IntArray) -> int:
    """Bytes of all map entries, for values of `sizes` bytes, int64 [features]."""
    content = 0
    for feature in range(keys.size):
        content += message_size(_entry_size(keys[feature].key_bytes, sizes[feature]))
    return content


@borrowing_kernel
def start_record(at: int, content: int) -> int:
    """Write the frame's length and the head of the Example around `content` bytes; the address of the first map entry."""
    size = message_size(content)
    store_word(at, size)
    store_u32(at + 8, mask_crc(crc_of_word(size)))
    store_u8(at + 12, 0x0A)
    return store_varint(at + 13, content)


@borrowing_kernel
def finish_record(at: int, end: int) -> int:
    """Write the CRC of the record whose frame begins at `at` and whose payload ends at `end`; the address after it."""
    store_u32(end, mask_crc(crc32c_at(at + 12, end - at - 12, 0)))
    return end + 4


@borrowing_kernel
def store_entry_head(at: int, keys: RowArray, feature: int, values_size: int) -> int:
    """Write the head of a map entry, up to its values; the address of the first value."""
    key = keys[feature]
    packed = message_size(values_size)
    message = message_size(packed)
    store_u8(at, 0x0A)
    at = store_varint(at + 1, _entry_size(key.key_bytes, values_size))
    store_u8(at, 0x0A)
    store_u8(at + 1, key.key_bytes)
    store_word(at + 2, key.word_0)
    store_word(at + 10, key.word_8)
    store_word(at + 18, key.word_16)
    at += 2 + key.key_bytes
    store_u8(at, 0x12)
    at = store_varint(at + 1, message)
    store_u8(at, key.list_tag)
    at = store_varint(at + 1, packed)
    store_u8(at, 0x0A)
    return store_varint(at + 1, values_size)
