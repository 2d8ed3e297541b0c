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
from gaudi_bert.common.compiled import (
    address_of,
    as_word,
    fill_bytes,
    inlined_kernel,
    kernel_without_refcounts,
    store_u8,
    store_u32,
    store_word,
)
from gaudi_bert.common.crc32c import crc32c_at, crc_of_word, mask_crc
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.tfrecords.wire.schema import (
    FRAME_BYTES,
    MAX_SEQUENCE_LENGTH,
    MAX_TOKEN_ID,
    FeatureSpec,
    RecordError,
    UnpackedSchema,
)

_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_NESTED_GROUPS = 100  # protobuf's parser has the same limit
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class _Field(NamedTuple):
    """One field of a protobuf message.

    Attributes:
        number: The field number, or -1 if the tag has more than one byte. All known fields have tags of one byte. Protobuf's
            parser compares the bytes of a tag, so that a longer tag is an unknown field even if it encodes a known number.
        wire_type: The wire type.
        value: The bytes of the value, without the tag and the length.
    """

    number: int
    wire_type: int
    value: memoryview


class FramedRecords(NamedTuple):
    """TFRecords in memory.

    Attributes:
        frames: The records one after the other, uint8.
        sizes: int64 [records], the size of each record in bytes, including its frame.
    """

    frames: ByteArray
    sizes: IntArray


def encode_example(features: Mapping[str, Sequence[int] | Sequence[float] | AnyArray]) -> bytes:
    """Return the features as a serialised Example with sorted keys and packed lists.

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
            encoded = np.empty(10 * values.size, np.uint8)
            size = _write_varints(np.ascontiguousarray(values, dtype=np.int64).reshape(-1), encoded)
            kind, data = _INT64_LIST, encoded[:size].tobytes()
        elif values.dtype.kind == "f":
            kind, data = _FLOAT_LIST, np.ascontiguousarray(values, dtype="<f4").tobytes()
        else:
            raise TypeError(f"feature `{name}`: expected integers or floating-point numbers, found {values.dtype}")
        feature = _encode_field(kind, _encode_field(1, data) if data else b"")
        entries.append(_encode_field(1, _encode_field(1, name.encode("utf-8")) + _encode_field(2, feature)))
    return _encode_field(1, b"".join(entries)) if entries else b""


def decode_example(payload: bytes | memoryview) -> dict[str, AnyArray]:
    """Parse a serialised Example, and return the values of its features by name.

    Integers become an int64 array, floating-point numbers a float32 array, and byte strings an object array. A feature
    without a list becomes an empty int64 array.

    Raises:
        RecordError: The bytes are not an Example.
    """
    features: dict[str, AnyArray] = {}
    for number, wire, value in _parse_fields(memoryview(payload)):
        if number == 1 and wire == _BYTES:
            for entry_number, entry_wire, entry in _parse_fields(value):
                if entry_number == 1 and entry_wire == _BYTES:
                    name, decoded = _decode_map_entry(entry)
                    features[name] = decoded
    return features


@kernel_without_refcounts
def _write_varints(values: IntArray, output: ByteArray) -> int:
    """Write integers as varints to the beginning of `output`, and return the number of bytes written."""
    size = 0
    for value in values:
        rest = np.uint64(value)
        while rest > np.uint64(127):
            output[size] = np.uint8(rest & np.uint64(127)) | np.uint8(128)
            rest >>= np.uint64(7)
            size += 1
        output[size] = np.uint8(rest)
        size += 1
    return size


def encode_varint(value: int) -> bytes:
    """Encode a non-negative integer as a varint."""
    encoded = bytearray()
    while value > 127:
        encoded.append((value & 127) | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _encode_field(field_number: int, content: bytes) -> bytes:
    """Return a length-delimited protobuf field, which consists of a tag, the length of `content`, and `content` itself."""
    return bytes([field_number << 3 | _BYTES]) + encode_varint(len(content)) + content


def _decode_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Decode the varint that begins at `position` in `data`, and return (value, position after the varint).

    If the value is longer, only its lowest 64 bits are returned.

    Raises:
        RecordError: The varint is truncated or has more than ten bytes.
    """
    value = 0
    for count in range(10):
        if position >= len(data):
            raise RecordError("the record is not a tf.train.Example, because a varint in it is incomplete")
        byte = data[position]
        position += 1
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value & (2**64 - 1), position
    raise RecordError("the record is not a tf.train.Example, because a varint in it has more than ten bytes")


def _parse_fields(message: memoryview) -> Iterator[_Field]:
    """Yield the fields of a serialised protobuf message in order.

    Raises:
        RecordError: The message is not well-formed.
    """
    position = 0
    while position < len(message):
        tag, after = _decode_varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise RecordError("the record is not a tf.train.Example, because one of its fields has the number 0")
        start, end = (
            (after, _find_group_end(message, after))
            if wire_type == _START_GROUP
            else _find_value_span(message, after, wire_type)
        )
        yield _Field(number if after == position + 1 else -1, wire_type, message[start:end])
        position = end


def _find_value_span(data: memoryview, position: int, wire_type: int) -> tuple[int, int]:
    """Find the value of a protobuf field, and return its (start, end) in `data`. `position` is the position after the
    field's tag.

    Raises:
        RecordError: The wire type is invalid, or the value does not end within `data`.
    """
    start = position
    if wire_type == _VARINT:
        _, end = _decode_varint(data, position)
    elif wire_type == _BYTES:
        size, start = _decode_varint(data, position)
        end = start + size
    elif wire_type in (_FIXED64, _FIXED32):
        end = start + (8 if wire_type == _FIXED64 else 4)
    else:
        raise RecordError(f"the record is not a tf.train.Example, because wire type {wire_type} is not valid")
    if end > len(data):
        raise RecordError("the record is not a tf.train.Example, because a field is longer than its message")
    return start, end


def _find_group_end(data: memoryview, position: int) -> int:
    """Find the end of a protobuf group, and return the position after its end tag. `position` is the position after its
    start tag.

    Raises:
        RecordError: The group is not well-formed, or 100 groups are nested in each other.
    """
    depth = 1
    while depth:
        tag, position = _decode_varint(data, position)
        wire_type = tag & 7
        if wire_type == _END_GROUP:
            depth -= 1
        elif wire_type == _START_GROUP:
            depth += 1
            if depth >= _MAX_NESTED_GROUPS:
                raise RecordError(
                    f"the record is not a tf.train.Example, because it contains {_MAX_NESTED_GROUPS} nested groups"
                )
        else:
            _, position = _find_value_span(data, position, wire_type)
    return position


def _decode_map_entry(entry: memoryview) -> tuple[str, AnyArray]:
    """Decode an entry of the map `Features.feature`, and return (feature name, values).

    Raises:
        RecordError: The entry is not well-formed, or the name is not UTF-8.
    """
    name, parts = "", []
    for number, wire, value in _parse_fields(entry):
        if number == 1 and wire == _BYTES:
            try:
                name = bytes(value).decode("utf-8")
            except UnicodeDecodeError as error:
                raise RecordError("the record is not a tf.train.Example, because a feature name is not UTF-8") from error
        elif number == 2 and wire == _BYTES:
            parts.append(bytes(value))
    return name, _decode_feature(memoryview(b"".join(parts)))


def _decode_feature(feature: memoryview) -> AnyArray:
    """Decode a serialised `Feature` message, and return its values.

    If the message contains several lists, a list of the same kind as the previous list is appended to it, and a list of
    another kind replaces it. These are protobuf's rules for a oneof.

    Raises:
        RecordError: The message is not well-formed.
    """
    kind = 0
    lists: list[bytes] = []
    for number, wire, value in _parse_fields(feature):
        if number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) and wire == _BYTES:
            if number != kind:
                kind, lists = number, []
            lists.append(bytes(value))
    values = [(wire, value) for number, wire, value in _parse_fields(memoryview(b"".join(lists))) if number == 1]
    if kind == _BYTES_LIST:
        texts = [bytes(value) for wire, value in values if wire == _BYTES]
        return np.array([*texts, None], dtype=object)[:-1]
    if kind == _FLOAT_LIST:
        floats = [bytes(value) for wire, value in values if wire in (_BYTES, _FIXED32)]
        if any(len(part) % 4 for part in floats):
            raise RecordError("the record is not a tf.train.Example, because the size of a FloatList is not a multiple of 4")
        return np.frombuffer(b"".join(floats), dtype="<f4").astype(np.float32)
    integers: list[int] = []
    for wire, value in values:
        position = 0
        while wire in (_BYTES, _VARINT) and position < len(value):
            item, position = _decode_varint(value, position)
            integers.append(item)
    return np.array(integers, dtype=np.uint64).astype(np.int64)


# --- writing framed records into a buffer (numba kernels)
#
# A map entry has the form `0A n (0A n key) (12 n (kind n (0A n values)))`. If the size of the values is known, all lengths n
# can be computed first, and the bytes are written in order. A key is always stored as three complete words, which
# temporarily overwrites up to 24 bytes after the key. An output buffer must therefore be `SLACK_BYTES` larger than its
# records.
#
# The parameter `address` is the memory address at which a function writes. Functions that write return the address after
# the last byte that they have written.

# A memory address.
Address = int

ONE_FLOAT = as_word(0x3F800000)  # 1.0 as float32

SLACK_BYTES = 64

_KEY_DTYPE = np.dtype([(name, np.int64) for name in ("key_bytes", "word_0", "word_8", "word_16", "list_tag")])


def build_position_varint_table() -> ByteArray:
    """Encode the numbers 0, 1, ..., 8191 as varints, and return their bytes as one uint8 array.

    The feature `positions` of a packed record contains the beginning of this sequence for each of its sequences.
    """
    values = np.arange(MAX_SEQUENCE_LENGTH)
    long = values[128:]
    pairs = np.stack([(long & 127) | 128, long >> 7], axis=1)
    table: ByteArray = np.concatenate([values[:128], pairs.reshape(-1)]).astype(np.uint8)
    return table


def encode_feature_keys(features: Sequence[FeatureSpec]) -> RowArray:
    """Encode feature names as the structured array that `store_map_entry_prefix` requires.

    Returns:
        A structured array [features] with the size of the name, its bytes as three words, and the tag of the list that
        contains the values.

    Raises:
        ValueError: A name has more than 24 bytes, which is an error of the caller.
    """
    rows = []
    for spec in features:
        if len(spec.key_bytes) > 24:
            raise ValueError(f"feature `{spec.name}`: the name must have at most 24 bytes, but has {len(spec.key_bytes)}")
        words = struct.unpack("<3q", spec.key_bytes.ljust(24, b"\0"))
        rows.append((len(spec.key_bytes), *words, 0x12 if spec.kind == "float32" else 0x1A))
    return np.array(rows, _KEY_DTYPE)


@inlined_kernel
def position_varints_size(length: int) -> int:
    """Return the total size in bytes of the varints 0, 1, ..., `length` - 1."""
    return length if length <= 128 else 2 * length - 128


@inlined_kernel
def varint_size(value: int) -> int:
    """Return the size in bytes of `value` as a varint. The value must be less than 2**21."""
    return 1 if value < 128 else (2 if value < 16384 else 3)


@inlined_kernel
def store_varint(address: Address, value: int) -> Address:
    """Write `value` as a varint, and return the address after it."""
    while value > 127:
        store_u8(address, (value & 127) | 128)
        address += 1
        value >>= 7
    store_u8(address, value)
    return address + 1


@inlined_kernel
def store_zeros(address: Address, count: int) -> Address:
    """Write `count` zero bytes, and return the address after them."""
    fill_bytes(address, 0, count)
    return address + count


@inlined_kernel
def message_size(content_size: int) -> int:
    """Return the size in bytes of a length-delimited field, including its tag, length and content."""
    return 1 + varint_size(content_size) + content_size


@inlined_kernel
def _map_entry_size(key_size: int, values_size: int) -> int:
    """Return the size in bytes of a protobuf map entry with a key and packed values, without the tag and length of the entry
    itself.
    """
    return 2 + key_size + message_size(message_size(message_size(values_size)))


@kernel_without_refcounts
def map_entries_size(feature_keys: RowArray, values_sizes: IntArray) -> int:
    """Return the total size in bytes of all protobuf map entries of an example, including their tags and lengths.

    Args:
        feature_keys: The feature names from `encode_feature_keys`.
        values_sizes: int64 [features], the size of each feature's values in bytes.
    """
    total = 0
    for feature in range(feature_keys.size):
        total += message_size(_map_entry_size(feature_keys[feature].key_bytes, values_sizes[feature]))
    return total


@kernel_without_refcounts
def store_record_prefix(address: Address, entries_size: int) -> Address:
    """Write the beginning of a record up to its first map entry, and return the address of this entry.

    These bytes are the payload's length, the CRC of the length, and the tag and length of the field `features`.

    Args:
        address: The address of the frame.
        entries_size: The total size of the map entries, from the function `map_entries_size`.
    """
    size = message_size(entries_size)
    store_word(address, size)
    store_u32(address + 8, mask_crc(crc_of_word(size)))
    store_u8(address + 12, 0x0A)
    return store_varint(address + 13, entries_size)


@kernel_without_refcounts
def store_payload_crc(record_address: Address, payload_end: Address) -> Address:
    """Append the CRC of a record's payload to the record, and return the address after the CRC.

    Args:
        record_address: The address of the record's frame.
        payload_end: The address after the payload.
    """
    store_u32(payload_end, mask_crc(crc32c_at(record_address + 12, payload_end - record_address - 12, 0)))
    return payload_end + 4


@kernel_without_refcounts
def store_map_entry_prefix(address: Address, feature_keys: RowArray, feature: int, values_size: int) -> Address:
    """Write a map entry of an example up to its first value, and return the address of this value.

    Args:
        address: The address of the map entry.
        feature_keys: The feature names from `encode_feature_keys`.
        feature: The index of the feature in `feature_keys`.
        values_size: The size of the feature's values in bytes.
    """
    key = feature_keys[feature]
    packed = message_size(values_size)
    store_u8(address, 0x0A)
    address = store_varint(address + 1, _map_entry_size(key.key_bytes, values_size))
    store_u8(address, 0x0A)
    store_u8(address + 1, key.key_bytes)
    store_word(address + 2, key.word_0)
    store_word(address + 10, key.word_8)
    store_word(address + 18, key.word_16)
    address += 2 + key.key_bytes
    store_u8(address, 0x12)
    address = store_varint(address + 1, message_size(packed))
    store_u8(address, key.list_tag)
    address = store_varint(address + 1, packed)
    store_u8(address, 0x0A)
    return store_varint(address + 1, values_size)


# --- encoding rows of arrays as unpacked records (numba kernels). The payloads are equal to the output of `encode_example`.


class UnpackedRows(NamedTuple):
    """The features of N unpacked examples, as int64 arrays. Values in the padding are not read, and all others must be
    valid.

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


def encode_unpacked_rows(rows: UnpackedRows) -> FramedRecords:
    """Encode unpacked examples as TFRecords, and return their bytes and sizes.

    Raises:
        ValueError: A token id or masked id is not from 0 to `MAX_TOKEN_ID`.
    """
    for name, ids in (("input_ids", rows.input_ids), ("masked_lm_ids", rows.masked_lm_ids)):
        if ids.size and not 0 <= ids.min() <= ids.max() <= MAX_TOKEN_ID:
            raise ValueError(f"feature `{name}`: ids must be from 0 to {MAX_TOKEN_ID}, found {ids.min()} to {ids.max()}")
    schema = UnpackedSchema(rows.input_ids.shape[1], rows.masked_lm_ids.shape[1])
    record_bytes = np.empty(len(rows.lengths), np.int64)
    output = np.empty(len(rows.lengths) * max_unpacked_record_size(schema), np.uint8)
    sizes = np.zeros(len(UnpackedFeature), np.int64)
    size = _write_records_and_count_bytes(
        UnpackedRows(*map(np.ascontiguousarray, rows)), encode_feature_keys(schema.features), sizes, record_bytes, output
    )
    return FramedRecords(output[:size].copy(), record_bytes)


def max_unpacked_record_size(schema: UnpackedSchema) -> int:
    """Return an upper bound on the size of an unpacked record in bytes, with its frame and `SLACK_BYTES` of spare room."""
    prefixes = 64 * len(UnpackedFeature)
    return 5 * schema.max_sequence_length + 9 * schema.max_predictions + prefixes + FRAME_BYTES + SLACK_BYTES


@kernel_without_refcounts
def _total_varint_size(values: IntArray) -> int:
    """Return the total size in bytes of `values` when they are encoded as varints."""
    size = as_word(0)
    for value in values:
        size += varint_size(value)
    return size


@kernel_without_refcounts
def _store_padded_varints(address: Address, values: IntArray, padding_count: int) -> Address:
    """Write `values` as varints, followed by `padding_count` zero bytes, and return the address after them."""
    for value in values:
        address = store_varint(address, value)
    return store_zeros(address, padding_count)


@kernel_without_refcounts
def _store_unpacked_features(
    address: Address, rows: UnpackedRows, row: int, feature_keys: RowArray, values_sizes: IntArray
) -> Address:
    """Write the seven protobuf map entries of one unpacked example, sorted by name, and return the address after the last
    entry.

    Args:
        address: The address of the first map entry.
        rows: The examples.
        row: The index of the example in `rows`.
        feature_keys: The feature names from `encode_feature_keys`.
        values_sizes: int64 [features], the size of each feature's values in bytes.
    """
    tokens, masked = rows.lengths[row], rows.masked[row]
    length, predictions = as_word(rows.input_ids.shape[1]), as_word(rows.masked_lm_ids.shape[1])
    padding, unused = length - tokens, predictions - masked
    address = store_map_entry_prefix(
        address, feature_keys, UnpackedFeature.INPUT_IDS, values_sizes[UnpackedFeature.INPUT_IDS]
    )
    address = _store_padded_varints(address, rows.input_ids[row, :tokens], padding)
    address = store_map_entry_prefix(address, feature_keys, UnpackedFeature.INPUT_MASK, length)
    fill_bytes(address, 1, tokens)
    fill_bytes(address + tokens, 0, padding)
    address = store_map_entry_prefix(
        address + length, feature_keys, UnpackedFeature.MASKED_LM_IDS, values_sizes[UnpackedFeature.MASKED_LM_IDS]
    )
    address = _store_padded_varints(address, rows.masked_lm_ids[row, :masked], unused)
    address = store_map_entry_prefix(
        address, feature_keys, UnpackedFeature.MASKED_LM_POSITIONS, values_sizes[UnpackedFeature.MASKED_LM_POSITIONS]
    )
    address = _store_padded_varints(address, rows.masked_lm_positions[row, :masked], unused)
    address = store_map_entry_prefix(address, feature_keys, UnpackedFeature.MASKED_LM_WEIGHTS, 4 * predictions)
    for _ in range(masked):
        store_u32(address, ONE_FLOAT)
        address += 4
    fill_bytes(address, 0, 4 * unused)
    address = store_map_entry_prefix(address + 4 * unused, feature_keys, UnpackedFeature.NEXT_SENTENCE_LABELS, 1)
    store_u8(address, rows.next_sentence_labels[row])
    address = store_map_entry_prefix(address + 1, feature_keys, UnpackedFeature.SEGMENT_IDS, length)
    return _store_padded_varints(address, rows.segment_ids[row, :tokens], padding)


@kernel_without_refcounts
def _write_records_and_count_bytes(
    rows: UnpackedRows, feature_keys: RowArray, values_sizes: IntArray, record_sizes: IntArray, output: ByteArray
) -> int:
    """Write unpacked examples to `output` as TFRecords, and return their total size in bytes.

    Args:
        rows: The examples.
        feature_keys: The feature names from `encode_feature_keys`.
        values_sizes: int64 [features], scratch space.
        record_sizes: int64 [N], is set to the size of each record in bytes.
        output: uint8, receives the records one after the other.
    """
    begin = address_of(output)
    address = begin
    values_sizes[UnpackedFeature.INPUT_MASK] = rows.input_ids.shape[1]
    values_sizes[UnpackedFeature.MASKED_LM_WEIGHTS] = 4 * rows.masked_lm_ids.shape[1]
    values_sizes[UnpackedFeature.NEXT_SENTENCE_LABELS] = 1
    values_sizes[UnpackedFeature.SEGMENT_IDS] = rows.input_ids.shape[1]
    for row in range(rows.lengths.size):
        tokens, masked = rows.lengths[row], rows.masked[row]
        padding, unused = rows.input_ids.shape[1] - tokens, rows.masked_lm_ids.shape[1] - masked
        values_sizes[UnpackedFeature.INPUT_IDS] = _total_varint_size(rows.input_ids[row, :tokens]) + padding
        values_sizes[UnpackedFeature.MASKED_LM_IDS] = _total_varint_size(rows.masked_lm_ids[row, :masked]) + unused
        values_sizes[UnpackedFeature.MASKED_LM_POSITIONS] = (
            _total_varint_size(rows.masked_lm_positions[row, :masked]) + unused
        )
        after = _store_unpacked_features(
            store_record_prefix(address, map_entries_size(feature_keys, values_sizes)), rows, row, feature_keys, values_sizes
        )
        after = store_payload_crc(address, after)
        record_sizes[row] = after - address
        address = after
    return address - begin
