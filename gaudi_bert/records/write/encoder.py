"""Packed records from the bytes of unpacked ones, without decoding what can be copied (numba kernels).

Token ids, segment ids and masked ids are copied as they lie (`unpacked_index` has checked them); positions
inside a sequence are a prefix of one constant table of varints; masks, weights and padding are fills. Only
masked positions are decoded and encoded again, because each moves by the offset of its sequence. All sizes
are known before the first byte is written, keys come in sorted order, so the result is byte-equal to
`SerializeToString(deterministic=True)` of the same Example.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gaudi_bert.records.read.unpacked_index import (
    IDS,
    IDS_BYTES,
    LABEL,
    LENGTH,
    MASKED,
    MASKED_IDS,
    MASKED_IDS_BYTES,
    POSITIONS,
    POSITIONS_BYTES,
    SEGMENTS,
)
from gaudi_bert.records.schema import PackedSchema
from gaudi_bert.records.wire.crc32c import crc32c_kernel, crc_of_word, mask_crc
from gaudi_bert.records.wire.encode import (
    entry_size,
    output_keys,
    position_bytes,
    position_table,
    store_entry_head,
    store_varint,
    varint_size,
)
from gaudi_bert.records.wire.memory import (
    KERNEL_OPTIONS,
    address_of,
    copy_bytes,
    fill_bytes,
    load_u8,
    prefetch,
    store_u8,
    store_u16,
    store_u32,
    store_word,
)

__all__ = [
    "DONE",
    "OUTPUT_FULL",
    "TOO_DEEP",
    "TOO_MANY_MASKED",
    "TOO_MANY_TOKENS",
    "PackEncoder",
    "largest_record",
]

DONE, OUTPUT_FULL, TOO_MANY_TOKENS, TOO_MANY_MASKED, TOO_DEEP = range(5)
_SLACK = 64  # words are stored whole, so up to 24 bytes after a key are touched before they get their value
_PREFETCH_PACKS = 8

_FEATURES = 10
_I, _MASK, _MASKED_I, _MASKED_P, _WEIGHTS, _LABELS, _STARTS, _REAL, _POSITIONS, _SEGMENTS = range(_FEATURES)
_ONE_FLOAT = np.int64(0x3F800000)


@njit(**KERNEL_OPTIONS)
def _move_positions(source: int, count: int, offset: int, target: int) -> int:
    """Write `count` masked positions, moved by `offset`; the address after the last."""
    for _ in range(count):
        value = load_u8(source)
        source += 1
        if value >= 128:
            value += (load_u8(source) - 1) << 7
            source += 1
        value += offset
        if value < 128:
            store_u8(target, value)
            target += 1
        else:
            store_u16(target, (value & 127) | 128 | ((value >> 7) << 8))
            target += 2
    return target


@njit(**KERNEL_OPTIONS)
def _fill_numbers(at: int, number: int, count: int) -> int:
    """Write the sequence number `count` times as varints (numbers are at most 8192: one or two bytes)."""
    if number < 128:
        fill_bytes(at, number, count)
        return at + count
    for _ in range(count):
        store_u16(at, (number & 127) | 128 | ((number >> 7) << 8))
        at += 2
    return at


@njit(inline="always")
def _zeros(at: int, count: int) -> int:
    fill_bytes(at, 0, count)
    return at + count


@njit(**KERNEL_OPTIONS)
def _measure(
    base: int,
    offsets: np.ndarray,
    index: np.ndarray,
    members: np.ndarray,
    sizes: np.ndarray,
    schema: np.ndarray,
    scratch: int,
) -> int:
    """Set `sizes` to the bytes of the values, put the moved masked positions into `scratch`; DONE or why not."""
    length, slots, depth = schema[0], schema[1], schema[2]
    tokens, masked = np.int64(0), np.int64(0)
    ids, masked_ids, positions, starts, numbers = 0, 0, 0, 0, 0
    target = scratch
    if members.size > depth:
        return TOO_DEEP
    for place in range(members.size):
        row = index[members[place]]
        real = np.int64(row[LENGTH])
        if tokens + real > length:
            return TOO_MANY_TOKENS
        if masked + row[MASKED] > slots:
            return TOO_MANY_MASKED
        target = _move_positions(base + offsets[members[place]] + row[POSITIONS], row[MASKED], tokens, target)
        ids += row[IDS_BYTES]
        masked_ids += row[MASKED_IDS_BYTES]
        positions += position_bytes(real)
        starts += varint_size(tokens)
        numbers += real * varint_size(place + 1)
        tokens += real
        masked += row[MASKED]
    padding, unused = length - tokens, slots - masked
    sizes[_I] = ids + padding
    sizes[_MASK] = numbers + padding
    sizes[_MASKED_I] = masked_ids + unused
    sizes[_MASKED_P] = target - scratch + unused
    sizes[_WEIGHTS] = 4 * slots
    sizes[_LABELS] = depth
    sizes[_STARTS] = starts + depth - members.size
    sizes[_REAL] = 4 * depth
    sizes[_POSITIONS] = positions + padding
    sizes[_SEGMENTS] = length
    return DONE


@njit(**KERNEL_OPTIONS)
def _store_tokens(
    at: int, base: int, offsets: np.ndarray, index: np.ndarray, members: np.ndarray, where: int, size: int, padding: int
) -> int:
    """Copy the bytes that columns `where` and `size` of the index name, sequence after sequence, and the
    padding after them."""
    for member in members:
        row = index[member]
        copy_bytes(at, base + offsets[member] + row[where], np.int64(row[size]))
        at += row[size]
    return _zeros(at, padding)


@njit(**KERNEL_OPTIONS)
def _store_masked(
    at: int, index: np.ndarray, members: np.ndarray, sizes: np.ndarray, keys: np.ndarray, scratch: int, unused: int
) -> int:
    """Write the entries of masked positions and their weights (the number of the sequence, as float32)."""
    at = store_entry_head(at, keys, _MASKED_P, sizes[_MASKED_P])
    copy_bytes(at, scratch, sizes[_MASKED_P] - unused)
    at = _zeros(at + sizes[_MASKED_P] - unused, unused)
    at = store_entry_head(at, keys, _WEIGHTS, sizes[_WEIGHTS])
    for place in range(members.size):
        bits = np.int64(np.float32(place + 1).view(np.int32))
        for _ in range(index[members[place], MASKED]):
            store_u32(at, bits)
            at += 4
    return _zeros(at, 4 * unused)


@njit(**KERNEL_OPTIONS)
def _store_next_sentence(
    at: int, index: np.ndarray, members: np.ndarray, sizes: np.ndarray, keys: np.ndarray, empty: int
) -> int:
    """Write the entries of next-sentence labels, positions (where each sequence starts) and weights."""
    at = store_entry_head(at, keys, _LABELS, sizes[_LABELS])
    for member in members:
        store_u8(at, np.int64(index[member, LABEL]))
        at += 1
    at = _zeros(at, empty)
    at = store_entry_head(at, keys, _STARTS, sizes[_STARTS])
    start = np.int64(0)
    for member in members:
        at = store_varint(at, start)
        start += index[member, LENGTH]
    at = _zeros(at, empty)
    at = store_entry_head(at, keys, _REAL, sizes[_REAL])
    for _ in range(members.size):
        store_u32(at, _ONE_FLOAT)
        at += 4
    return _zeros(at, 4 * empty)


@njit(**KERNEL_OPTIONS)
def _store_features(
    at: int,
    base: int,
    offsets: np.ndarray,
    index: np.ndarray,
    members: np.ndarray,
    sizes: np.ndarray,
    schema: np.ndarray,
    keys: np.ndarray,
    scratch: int,
    table: int,
) -> int:
    """Write the ten map entries in sorted order; the address after the last."""
    tokens, masked = np.int64(0), np.int64(0)
    for member in members:
        tokens += index[member, LENGTH]
        masked += index[member, MASKED]
    padding, unused, empty = schema[0] - tokens, schema[1] - masked, schema[2] - members.size

    at = store_entry_head(at, keys, _I, sizes[_I])
    at = _store_tokens(at, base, offsets, index, members, IDS, IDS_BYTES, padding)
    at = store_entry_head(at, keys, _MASK, sizes[_MASK])
    for place in range(members.size):
        at = _fill_numbers(at, place + 1, np.int64(index[members[place], LENGTH]))
    at = _zeros(at, padding)
    at = store_entry_head(at, keys, _MASKED_I, sizes[_MASKED_I])
    at = _store_tokens(at, base, offsets, index, members, MASKED_IDS, MASKED_IDS_BYTES, unused)
    at = _store_masked(at, index, members, sizes, keys, scratch, unused)
    at = _store_next_sentence(at, index, members, sizes, keys, empty)
    at = store_entry_head(at, keys, _POSITIONS, sizes[_POSITIONS])
    for member in members:
        size = position_bytes(np.int64(index[member, LENGTH]))
        copy_bytes(at, table, size)
        at += size
    at = _zeros(at, padding)
    at = store_entry_head(at, keys, _SEGMENTS, sizes[_SEGMENTS])
    return _store_tokens(at, base, offsets, index, members, SEGMENTS, LENGTH, padding)


@njit(**KERNEL_OPTIONS)
def _encode(
    base: int,
    offsets: np.ndarray,
    index: np.ndarray,
    starts: np.ndarray,
    members: np.ndarray,
    first: int,
    last: int,
    schema: np.ndarray,
    keys: np.ndarray,
    out: int,
    out_size: int,
    scratch: int,
    table: int,
) -> tuple[int, int, int]:
    """Write packs `first` .. `last` - 1 as TFRecords; (status, next pack, bytes written)."""
    sizes = np.empty(_FEATURES, np.int64)
    at, end = out, out + out_size
    for pack in range(first, last):
        if pack + _PREFETCH_PACKS < last:
            for ahead in members[starts[pack + _PREFETCH_PACKS] : starts[pack + _PREFETCH_PACKS + 1]]:
                payload = base + offsets[ahead]
                for line in range(0, index[ahead, POSITIONS] + index[ahead, POSITIONS_BYTES], 64):
                    prefetch(payload + line)
        mine = members[starts[pack] : starts[pack + 1]]
        status = _measure(base, offsets, index, mine, sizes, schema, scratch)
        if status != DONE:
            return status, pack, at - out
        content = 0
        for feature in range(_FEATURES):
            entry = entry_size(keys[feature, 0], sizes[feature])
            content += 1 + varint_size(entry) + entry
        payload_size = 1 + varint_size(content) + content
        if at + payload_size + 16 + _SLACK > end:
            return OUTPUT_FULL, pack, at - out
        store_word(at, payload_size)
        store_u32(at + 8, mask_crc(crc_of_word(payload_size)))
        payload = at + 12
        store_u8(payload, 0x0A)
        at = store_varint(payload + 1, content)
        at = _store_features(at, base, offsets, index, mine, sizes, schema, keys, scratch, table)
        store_u32(at, mask_crc(crc32c_kernel(payload, payload_size, 0)))
        at += 4
    return DONE, last, at - out


def largest_record(schema: PackedSchema) -> int:
    """A bound on the bytes of one packed record, frame and all."""
    per_slot = 3 + 2 + 2 + 1  # token id, number of its sequence, position, segment
    per_masked = 3 + 2 + 4
    per_sequence = 1 + 2 + 4
    heads = _FEATURES * 64
    return (
        schema.max_sequence_length * per_slot
        + schema.masked_slots * per_masked
        + schema.depth * per_sequence
        + heads
        + 16
        + _SLACK
    )


class PackEncoder:
    """Encodes packs of one group into buffers; one instance may be used by several threads, each with its own
    output.

    Args:
        schema: of the packed records.
        buffer: uint8, the group's bytes.
        offsets: int64 [sequences]: where each payload starts in the buffer.
        index: int32 [sequences, INDEX_COLUMNS].
        starts: int64 [packs + 1]: where each pack's members start.
        members: int32 [sequences]: the rows of the sequences of each pack.
    """

    def __init__(
        self,
        schema: PackedSchema,
        buffer: np.ndarray,
        offsets: np.ndarray,
        index: np.ndarray,
        starts: np.ndarray,
        members: np.ndarray,
    ) -> None:
        self._arrays = (address_of(buffer), offsets, index, starts, members)
        self._buffer = buffer  # keeps the memory alive
        self._sizes = np.array([schema.max_sequence_length, schema.masked_slots, schema.depth], dtype=np.int64)
        self._keys = output_keys(schema.features)
        self._table = position_table()
        self._scratch_bytes = 2 * schema.masked_slots + 8

    def encode(self, first: int, last: int, out: np.ndarray) -> tuple[int, int, int]:
        """Write packs `first` .. `last` - 1 to `out` as far as it has room: (status, next pack, bytes
        written)."""
        scratch = np.empty(self._scratch_bytes, np.uint8)
        return _encode(
            *self._arrays,
            first,
            last,
            self._sizes,
            self._keys,
            address_of(out),
            out.size,
            address_of(scratch),
            address_of(self._table),
        )
