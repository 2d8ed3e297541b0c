"""The wire format of tf.train.Example: a general encoder and decoder in Python, and kernels that write framed records.

The message types are `Example{Features features=1}`, `Features{map<string, Feature> feature=1}` and `Feature{oneof
BytesList=1, FloatList=2, Int64List=3}`, and each list is `{repeated value=1}`. The encoder writes sorted keys and packed
lists, so that its output is equal to that of `SerializeToString(deterministic=True)`.

The decoder accepts and rejects the same bytes as protobuf's pure-Python parser. It accepts keys in any order, and both
packed and unpacked values. If a key is repeated, the last entry counts. Split messages are merged. Unknown fields and groups
are skipped, but must be well-formed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, ByteArray, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.crc32c import crc32c_at, crc_of_word, mask_crc
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.common.memory import address_of, as_word, fill_bytes, store_u8, store_u32, store_word
from gaudi_bert.tfrecords.wire.schema import (
    FRAME_BYTES,
    MAX_SEQUENCE_LENGTH,
    MAX_TOKEN_ID,
    FeatureSpec,
    RecordError,
    UnpackedSchema,
)

_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_MOST_GROUPS = 100  # nested groups, at which the decoder gives up, as in protobuf
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def encode_example(features: Mapping[str, Sequence[int] | Sequence[float] | AnyArray]) -> bytes:
    """Return a serialised Example with sorted keys and packed lists.

    Args:
        features: The features by name. Integers and booleans become an Int64List, and floating-point numbers become a
            FloatList of float32.

    Raises:
        TypeError: A feature has values of another type.
    """
    entries = []
    for name in sorted(features, key=lambda key: key.encode("utf-8")):
        values = np.asarray(features[name])
        if values.size == 0 or values.dtype.kind in "iub":
            out = np.empty(10 * values.size, np.uint8)
            size = _write_varints(np.ascontiguousarray(values, dtype=np.int64).reshape(-1), out)
            kind, data = _INT64_LIST, out[:size].tobytes()
        elif values.dtype.kind == "f":
            kind, data = _FLOAT_LIST, np.ascontiguousarray(values, dtype="<f4").tobytes()
        else:
            raise TypeError(f"feature `{name}` is of type {values.dtype}; integers or floating-point numbers are needed")
        values_list = _field(1, data) if data else b""
        entries.append(_field(1, _field(1, name.encode("utf-8")) + _field(2, _field(kind, values_list))))
    return _field(1, b"".join(entries)) if entries else b""


def decode_example(payload: bytes | memoryview) -> dict[str, AnyArray]:
    """Parse a serialised Example, and return its features by name.

    Integers become an int64 array, floating-point numbers a float32 array, and byte strings an object array. A feature
    without a list becomes an empty int64 array.

    Raises:
        RecordError: The bytes are not an Example.
    """
    features: dict[str, AnyArray] = {}
    for number, wire, value in _fields(memoryview(payload)):
        if number == 1 and wire == _BYTES:
            for entry_number, entry_wire, entry in _fields(value):
                if entry_number == 1 and entry_wire == _BYTES:
                    name, decoded = _decode_entry(entry)
                    features[name] = decoded
    return features


@borrowing_kernel
def _write_varints(values: IntArray, out: ByteArray) -> int:
    """Write values as varints to the front of `out`, and return the number of bytes written."""
    at = 0
    for value in values:
        rest = np.uint64(value)
        while rest > np.uint64(127):
            out[at] = np.uint8(rest & np.uint64(127)) | np.uint8(128)
            rest >>= np.uint64(7)
            at += 1
        out[at] = np.uint8(rest)
        at += 1
    return at


def encode_varint(value: int) -> bytes:
    """Return a non-negative number as a varint."""
    encoded = bytearray()
    while value > 127:
        encoded.append((value & 127) | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field with the given field number."""
    return bytes([number << 3 | _BYTES]) + encode_varint(len(data)) + data


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a varint, and return (value, next position). The value is reduced to 64 bits.

    Raises:
        RecordError: The varint is truncated or has more than ten bytes.
    """
    value = 0
    for count in range(10):
        if at >= len(data):
            raise RecordError("not a tf.train.Example: a number runs past its end")
        byte = data[at]
        at += 1
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value & (2**64 - 1), at
    raise RecordError("not a tf.train.Example: a number of more than ten bytes")


def _fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield the fields of a message as (field number, wire type, bytes of the value).

    The number is -1 if the tag has more than one byte. All known fields have tags of one byte. Protobuf's parser compares
    the bytes of a tag, so that a longer tag is an unknown field even if it encodes a known number.

    Raises:
        RecordError: The message is not well-formed.
    """
    at = 0
    while at < len(data):
        tag, after = _read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise RecordError("not a tf.train.Example: a field is numbered 0")
        start, end = (after, _end_of_group(data, after)) if wire == _START_GROUP else _value_span(data, after, wire)
        yield (number if after == at + 1 else -1), wire, data[start:end]
        at = end


def _value_span(data: memoryview, at: int, wire: int) -> tuple[int, int]:
    """Return where a field's value begins and ends. `at` is the position after its tag.

    Raises:
        RecordError: The wire type is invalid, or the value does not end within `data`.
    """
    start = at
    if wire == _VARINT:
        _, end = _read_varint(data, at)
    elif wire == _BYTES:
        size, start = _read_varint(data, at)
        end = start + size
    elif wire in (_FIXED64, _FIXED32):
        end = start + (8 if wire == _FIXED64 else 4)
    else:
        raise RecordError(f"not a tf.train.Example: wire type {wire}")
    if end > len(data):
        raise RecordError("not a tf.train.Example: a field runs past its end")
    return start, end


def _end_of_group(data: memoryview, at: int) -> int:
    """Return the position after the end tag of a group. `at` is the position after its start tag.

    Raises:
        RecordError: The group is not well-formed, or 100 groups are nested in each other.
    """
    depth = 1
    while depth:
        tag, at = _read_varint(data, at)
        wire = tag & 7
        if wire == _END_GROUP:
            depth -= 1
        elif wire == _START_GROUP:
            depth += 1
            if depth >= _MOST_GROUPS:
                raise RecordError(f"not a tf.train.Example: {_MOST_GROUPS} groups one inside the other")
        else:
            _, at = _value_span(data, at, wire)
    return at


def _decode_entry(entry: memoryview) -> tuple[str, AnyArray]:
    """Decode a map entry, and return (feature name, values).

    Raises:
        RecordError: The entry is not well-formed, or the name is not UTF-8.
    """
    name, parts = "", []
    for number, wire, value in _fields(entry):
        if number == 1 and wire == _BYTES:
            try:
                name = bytes(value).decode("utf-8")
            except UnicodeDecodeError as error:
                raise RecordError("not a tf.train.Example: the name of a feature is not UTF-8") from error
        elif number == 2 and wire == _BYTES:
            parts.append(bytes(value))
    return name, _decode_feature(memoryview(b"".join(parts)))


def _decode_feature(feature: memoryview) -> AnyArray:
    """Decode a `Feature` message.

    If the message contains several lists, a list of the same kind as the previous list is appended to it, and a list of
    another kind replaces it. These are protobuf's rules for a oneof.

    Raises:
        RecordError: The message is not well-formed.
    """
    kind = 0
    lists: list[bytes] = []
    for number, wire, value in _fields(feature):
        if number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) and wire == _BYTES:
            if number != kind:
                kind, lists = number, []
            lists.append(bytes(value))
    values = [(wire, value) for number, wire, value in _fields(memoryview(b"".join(lists))) if number == 1]
    if kind == _BYTES_LIST:
        texts = [bytes(value) for wire, value in values if wire == _BYTES]
        return np.array([*texts, None], dtype=object)[:-1]
    if kind == _FLOAT_LIST:
        floats = [bytes(value) for wire, value in values if wire in (_BYTES, _FIXED32)]
        if any(len(part) % 4 for part in floats):
            raise RecordError("not a tf.train.Example: a list of floats that is not a multiple of four bytes")
        return np.frombuffer(b"".join(floats), dtype="<f4").astype(np.float32)
    integers: list[int] = []
    for wire, value in values:
        at = 0
        while wire in (_BYTES, _VARINT) and at < len(value):
            item, at = _read_varint(value, at)
            integers.append(item)
    return np.array(integers, dtype=np.uint64).astype(np.int64)


# --- writing framed records into a buffer (numba kernels)
#
# A map entry has the form `0A n (0A n key) (12 n (kind n (0A n values)))`. If the size of the values is known, all lengths n
# can be computed first, and the bytes are written in order. A key is always stored as three complete words, which
# temporarily overwrites up to 24 bytes after the key. An output buffer must therefore be `SLACK_BYTES` larger than its
# records.
#
# Parameters named `at` are addresses at which bytes are written.

SLACK_BYTES = 64

_KEY_ROW = np.dtype([(name, np.int64) for name in ("key_bytes", "word_0", "word_8", "word_16", "list_tag")])


def position_table() -> ByteArray:
    """Return the varints 0, 1, ..., 8191 one after the other, uint8."""
    values = np.arange(MAX_SEQUENCE_LENGTH)
    long = values[128:]
    pairs = np.stack([(long & 127) | 128, long >> 7], axis=1)
    table: ByteArray = np.concatenate([values[:128], pairs.reshape(-1)]).astype(np.uint8)
    return table


def key_rows(features: Sequence[FeatureSpec]) -> RowArray:
    """Return the keys of features in the form that `store_entry_head` expects.

    Returns:
        A structured array [features] with the size of the key, its bytes as three words, and the tag of its list.

    Raises:
        ValueError: A key has more than 24 bytes, which is an error of the caller.
    """
    rows = []
    for spec in features:
        if len(spec.key_bytes) > 24:
            raise ValueError(f"feature `{spec.name}` has a name of {len(spec.key_bytes)} bytes; at most 24 are written")
        words = struct.unpack("<3q", spec.key_bytes.ljust(24, b"\0"))
        rows.append((len(spec.key_bytes), *words, 0x12 if spec.kind == "float32" else 0x1A))
    return np.array(rows, _KEY_ROW)


@inlined_kernel
def position_bytes(length: int) -> int:
    """Return the total size of the varints 0, 1, ..., `length` - 1, in bytes."""
    return length if length <= 128 else 2 * length - 128


@inlined_kernel
def varint_size(value: int) -> int:
    """Return the size of a varint in bytes. The value must be less than 2**21."""
    return 1 if value < 128 else (2 if value < 16384 else 3)


@inlined_kernel
def store_varint(at: int, value: int) -> int:
    """Write a varint at address `at`, and return the address after it."""
    while value > 127:
        store_u8(at, (value & 127) | 128)
        at += 1
        value >>= 7
    store_u8(at, value)
    return at + 1


@inlined_kernel
def message_size(content: int) -> int:
    """Return the size of a length-delimited field with `content` bytes of content, including its tag and length."""
    return 1 + varint_size(content) + content


@inlined_kernel
def _entry_size(key_size: int, values_size: int) -> int:
    """Return the size of a map entry without its tag and length, for packed values of `values_size` bytes."""
    return 2 + key_size + message_size(message_size(message_size(values_size)))


@borrowing_kernel
def content_size(keys: RowArray, sizes: IntArray) -> int:
    """Return the total size of all map entries of an example, in bytes.

    Args:
        keys: The keys from `key_rows`.
        sizes: int64 [features], the size of each feature's values in bytes.
    """
    content = 0
    for feature in range(keys.size):
        content += message_size(_entry_size(keys[feature].key_bytes, sizes[feature]))
    return content


@borrowing_kernel
def start_record(at: int, content: int) -> int:
    """Write the length of a frame and the head of its Example, and return the address of the first map entry.

    Args:
        at: The address of the frame.
        content: The total size of the map entries (`content_size`).
    """
    size = message_size(content)
    store_word(at, size)
    store_u32(at + 8, mask_crc(crc_of_word(size)))
    store_u8(at + 12, 0x0A)
    return store_varint(at + 13, content)


@borrowing_kernel
def finish_record(at: int, end: int) -> int:
    """Write the CRC of a record, and return the address after it.

    Args:
        at: The address of the frame.
        end: The address after the payload.
    """
    store_u32(end, mask_crc(crc32c_at(at + 12, end - at - 12, 0)))
    return end + 4


@borrowing_kernel
def store_entry_head(at: int, keys: RowArray, feature: int, values_size: int) -> int:
    """Write the head of a map entry, and return the address of its first value.

    Args:
        at: The address of the map entry.
        keys: The keys from `key_rows`.
        feature: The number of the feature.
        values_size: The size of its values in bytes.
    """
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


# --- encoding rows of arrays as unpacked records (numba kernels). The payloads are equal to the output of `encode_example`.

_ONE_FLOAT = as_word(0x3F800000)


class UnpackedRows(NamedTuple):
    """N unpacked examples with valid values, as int64 arrays. Values in the padding are not read.

    Attributes:
        lengths: [N], the number of tokens of each example.
        masked: [N], the number of masked positions of each example.
        input_ids: [N, L].
        segment_ids: [N, L].
        masked_lm_positions: [N, P].
        masked_lm_ids: [N, P].
        next_sentence_labels: [N].
    """

    lengths: IntArray
    masked: IntArray
    input_ids: IntArray
    segment_ids: IntArray
    masked_lm_positions: IntArray
    masked_lm_ids: IntArray
    next_sentence_labels: IntArray


def encode_rows(rows: UnpackedRows) -> tuple[ByteArray, IntArray]:
    """Encode N examples as framed records.

    Returns:
        (the records one after the other, uint8, and the size of each record in bytes, int64 [N]).

    Raises:
        ValueError: A token id or masked id is not from 0 to `MAX_TOKEN_ID`.
    """
    for name, ids in (("input_ids", rows.input_ids), ("masked_lm_ids", rows.masked_lm_ids)):
        if ids.size and not 0 <= ids.min() <= ids.max() <= MAX_TOKEN_ID:
            raise ValueError(f"feature `{name}` holds {ids.min()} .. {ids.max()}; at most {MAX_TOKEN_ID} is allowed")
    schema = UnpackedSchema(rows.input_ids.shape[1], rows.masked_lm_ids.shape[1])
    record_bytes = np.empty(len(rows.lengths), np.int64)
    out = np.empty(len(rows.lengths) * largest_record(schema), np.uint8)
    sizes = np.zeros(len(UnpackedFeature), np.int64)
    size = _encode(UnpackedRows(*map(np.ascontiguousarray, rows)), key_rows(schema.features), sizes, record_bytes, out)
    return out[:size].copy(), record_bytes


def largest_record(schema: UnpackedSchema) -> int:
    """Return an upper bound on the size of an unpacked record in bytes, including its frame and `SLACK_BYTES`."""
    heads = 64 * len(UnpackedFeature)
    return 5 * schema.max_sequence_length + 9 * schema.max_predictions + heads + FRAME_BYTES + SLACK_BYTES


@borrowing_kernel
def _varint_sizes(values: IntArray) -> int:
    """Return the total size of values as varints, in bytes."""
    size = as_word(0)
    for value in values:
        size += varint_size(value)
    return size


@borrowing_kernel
def _store_values(at: int, values: IntArray, padding: int) -> int:
    """Write values as varints, followed by `padding` zero bytes, and return the address after them."""
    for value in values:
        at = store_varint(at, value)
    fill_bytes(at, 0, padding)
    return at + padding


@borrowing_kernel
def _store_features(at: int, rows: UnpackedRows, row: int, keys: RowArray, sizes: IntArray) -> int:
    """Write the seven map entries of an unpacked example in sorted order, and return the address after the last.

    Args:
        at: The address of the first map entry.
        rows: The examples.
        row: The number of the example.
        keys: The keys from `key_rows`.
        sizes: int64 [features], the size of each feature's values in bytes.
    """
    tokens, masked = rows.lengths[row], rows.masked[row]
    length, predictions = as_word(rows.input_ids.shape[1]), as_word(rows.masked_lm_ids.shape[1])
    padding, unused = length - tokens, predictions - masked
    at = store_entry_head(at, keys, UnpackedFeature.INPUT_IDS, sizes[UnpackedFeature.INPUT_IDS])
    at = _store_values(at, rows.input_ids[row, :tokens], padding)
    at = store_entry_head(at, keys, UnpackedFeature.INPUT_MASK, length)
    fill_bytes(at, 1, tokens)
    fill_bytes(at + tokens, 0, padding)
    at = store_entry_head(at + length, keys, UnpackedFeature.MASKED_LM_IDS, sizes[UnpackedFeature.MASKED_LM_IDS])
    at = _store_values(at, rows.masked_lm_ids[row, :masked], unused)
    at = store_entry_head(at, keys, UnpackedFeature.MASKED_LM_POSITIONS, sizes[UnpackedFeature.MASKED_LM_POSITIONS])
    at = _store_values(at, rows.masked_lm_positions[row, :masked], unused)
    at = store_entry_head(at, keys, UnpackedFeature.MASKED_LM_WEIGHTS, 4 * predictions)
    for _ in range(masked):
        store_u32(at, _ONE_FLOAT)
        at += 4
    fill_bytes(at, 0, 4 * unused)
    at = store_entry_head(at + 4 * unused, keys, UnpackedFeature.NEXT_SENTENCE_LABELS, 1)
    store_u8(at, rows.next_sentence_labels[row])
    at = store_entry_head(at + 1, keys, UnpackedFeature.SEGMENT_IDS, length)
    return _store_values(at, rows.segment_ids[row, :tokens], padding)


@borrowing_kernel
def _encode(rows: UnpackedRows, keys: RowArray, sizes: IntArray, record_bytes: IntArray, out: ByteArray) -> int:
    """Write all examples to `out` as framed records, and return the total size in bytes.

    Args:
        rows: The examples.
        keys: The keys from `key_rows`.
        sizes: int64 [features], scratch space.
        record_bytes: int64 [N], set to the size of each record in bytes.
        out: uint8, the output.
    """
    begin = address_of(out)
    at = begin
    sizes[UnpackedFeature.INPUT_MASK] = rows.input_ids.shape[1]
    sizes[UnpackedFeature.MASKED_LM_WEIGHTS] = 4 * rows.masked_lm_ids.shape[1]
    sizes[UnpackedFeature.NEXT_SENTENCE_LABELS] = 1
    sizes[UnpackedFeature.SEGMENT_IDS] = rows.input_ids.shape[1]
    for row in range(rows.lengths.size):
        tokens, masked = rows.lengths[row], rows.masked[row]
        padding, unused = rows.input_ids.shape[1] - tokens, rows.masked_lm_ids.shape[1] - masked
        sizes[UnpackedFeature.INPUT_IDS] = _varint_sizes(rows.input_ids[row, :tokens]) + padding
        sizes[UnpackedFeature.MASKED_LM_IDS] = _varint_sizes(rows.masked_lm_ids[row, :masked]) + unused
        sizes[UnpackedFeature.MASKED_LM_POSITIONS] = _varint_sizes(rows.masked_lm_positions[row, :masked]) + unused
        after = _store_features(start_record(at, content_size(keys, sizes)), rows, row, keys, sizes)
        after = finish_record(at, after)
        record_bytes[row] = after - at
        at = after
    return at - begin
