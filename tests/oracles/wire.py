"""The naive twin of the record engine's bytes: TFRecord framing and tf.train.Example, one byte at a time, in plain Python.

It can also write what no sane writer writes (unpacked lists, split lists, repeated keys, overlong varints, lying checksums),
because readers must be held to that as well. Slow on purpose; nothing here is shared with the package.
"""

from __future__ import annotations

import random
import struct

UNPACKED_KEYS = (
    *("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "masked_lm_weights"),
    "next_sentence_labels",
)
FLOAT_KEYS = ("masked_lm_weights", "next_sentence_weights")


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), a byte at a time."""
    value = 0xFFFFFFFF
    for byte in data:
        value = CRC_TABLE[(value ^ byte) & 255] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> bytes:
    """The TFRecord form of the checksum: rotated right by 15, plus a constant; 4 bytes, little-endian."""
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(payload: bytes, claimed_length: int | None = None) -> bytes:
    """One TFRecord: length, its checksum, payload, its checksum. `claimed_length` lies about the length, checksum right."""
    header = struct.pack("<Q", len(payload) if claimed_length is None else claimed_length)
    return header + masked_crc(header) + payload + masked_crc(payload)


def flipped(data: bytes, place: int, bits: int = 4) -> bytes:
    """The bytes with some bits of one of them changed."""
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


def unframe(data: bytes) -> tuple[list[bytes], int | None]:
    """The payloads of a TFRecord file, and the offset of the first record that is not legal (None: all are)."""
    payloads, offset = [], 0
    while offset < len(data):
        header = data[offset : offset + 8]
        if len(data) - offset < 16 or masked_crc(header) != data[offset + 8 : offset + 12]:
            return payloads, offset
        (length,) = struct.unpack("<Q", header)
        if offset + 16 + length > len(data):
            return payloads, offset
        payload = data[offset + 12 : offset + 12 + length]
        if masked_crc(payload) != data[offset + 12 + length : offset + 16 + length]:
            return payloads, offset
        payloads.append(payload)
        offset += 16 + length
    return payloads, None


def varint(value: int, extra_bytes: int = 0) -> bytes:
    """`value` as a varint (two's complement of 64 bits when negative); `extra_bytes` makes it overlong, but legal."""
    value &= (1 << 64) - 1
    out = []
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    for _ in range(extra_bytes):
        out[-1] |= 128
        out.append(0)
    return bytes(out)


def field(number: int, body: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def packed_list(key: str, values: list) -> bytes:
    """The body of a FloatList or Int64List in packed encoding."""
    if key in FLOAT_KEYS:
        return field(1, struct.pack(f"<{len(values)}f", *values))
    return field(1, b"".join(varint(int(value)) for value in values))


def unpacked_list(key: str, values: list) -> bytes:
    """The same in unpacked encoding: one tag for each value."""
    if key in FLOAT_KEYS:
        return b"".join(b"\x0d" + struct.pack("<f", value) for value in values)
    return b"".join(b"\x08" + varint(int(value)) for value in values)


def split_list(key: str, values: list) -> bytes:
    """The same as packed pieces and single values, which a parser joins in order."""
    third = len(values) // 3
    middle = unpacked_list(key, values[third : 2 * third])
    return packed_list(key, values[:third]) + middle + packed_list(key, values[2 * third :])


def map_entry(key: str, values: list, encode=packed_list) -> bytes:
    """One entry of Features.feature."""
    return field(1, field(1, key.encode()) + field(2, field(2 if key in FLOAT_KEYS else 3, encode(key, values))))


def example(features: dict[str, list], order: list[str] | None = None, encode=packed_list, extra: bytes = b"") -> bytes:
    """A serialised tf.train.Example; `extra` is appended to the map entries as it is."""
    keys = sorted(features) if order is None else order
    return field(1, b"".join(map_entry(key, features[key], encode) for key in keys) + extra)


def random_sequence(rng: random.Random, max_sequence_length: int, max_predictions: int, vocabulary: int = 30522) -> dict:
    """The features of one unpacked example within the contract."""
    length = rng.randint(1, max_sequence_length)
    masked = rng.randint(0, min(max_predictions, length))
    padding, slots = max_sequence_length - length, max_predictions - masked
    boundary = rng.randint(0, length)
    return {
        "input_ids": [rng.randint(1, vocabulary - 1) for _ in range(length)] + [0] * padding,
        "input_mask": [1] * length + [0] * padding,
        "segment_ids": [0] * boundary + [1] * (length - boundary) + [0] * padding,
        "masked_lm_positions": sorted(rng.sample(range(length), masked)) + [0] * slots,
        "masked_lm_ids": [rng.randint(1, vocabulary - 1) for _ in range(masked)] + [0] * slots,
        "masked_lm_weights": [1.0] * masked + [0.0] * slots,
        "next_sentence_labels": [rng.randint(0, 1)],
    }
