"""Packed records from the bytes of unpacked ones, without decoding what can be copied (numba kernels).

Token ids, segment ids and masked ids are copied as they lie (`scan` has checked them); positions inside a
sequence are a prefix of one constant table of varints; masks, weights and padding are fills. Only masked positions are
decoded and encoded again, because each moves by the offset of its sequence. All sizes are known before the first byte is
written, keys come in sorted order, so the result is byte-equal to `SerializeToString(deterministic=True)` of the same
Example.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.shards import IndexArray, Shard, count_shards
from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackedFeature
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.memory import (
    address_of,
    as_word,
    copy_bytes,
    fill_bytes,
    load_u8,
    load_u32,
    prefetch,
    store_u8,
    store_u16,
    store_u32,
)
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.tfrecords.scan import IndexedSequences
from gaudi_bert.tfrecords.wire.example import (
    SLACK_BYTES,
    content_size,
    finish_record,
    key_rows,
    message_size,
    position_bytes,
    position_table,
    start_record,
    store_entry_head,
    store_varint,
    varint_size,
)
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, PackedSchema

_PREFETCHED_PACKS = 8
_ONE_FLOAT = as_word(0x3F800000)


class _EncodeStatus(IntEnum):
    """Why encoding stopped."""

    DONE = 0
    OUTPUT_FULL = 1
    TOO_MANY_MASKED = 2


class _Layout(NamedTuple):
    """The form of a pack: L, Q and S, the rows of `key_rows`, and the varints 0, 1, 2, ..."""

    length: int
    slots: int
    depth: int
    keys: RowArray
    position_table: ByteArray


class _Measured(NamedTuple):
    """Sizes of a pack, measured before its first byte is written. One per thread."""

    sizes: IntArray  # int64 [features]: bytes of the values of each feature
    positions: ByteArray  # uint8: the masked positions, moved to their positions in the pack


@borrowing_kernel
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


@borrowing_kernel
def _fill_numbers(at: int, number: int, count: int) -> int:
    """Write the sequence number `count` times as varints (numbers are at most 8192: one or two bytes)."""
    if number < 128:
        fill_bytes(at, number, count)
        return at + count
    for _ in range(count):
        store_u16(at, (number & 127) | 128 | ((number >> 7) << 8))
        at += 2
    return at


@inlined_kernel
def _zeros(at: int, count: int) -> int:
    fill_bytes(at, 0, count)
    return at + count


@borrowing_kernel
def _measure(group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured) -> bool:
    """Fill `measured` for a pack of these members; False where they have more masked positions than the pack has slots.

    They fit its tokens and its depth, as the plan has them.
    """
    base, moved = address_of(group.buffer), address_of(measured.positions)
    tokens, masked = as_word(0), as_word(0)
    ids, masked_ids, positions, starts, numbers = 0, 0, 0, 0, 0
    target = moved
    for index in range(members.size):
        row = group.rows[members[index]]
        real = as_word(row.length)
        if masked + row.masked > layout.slots:
            return False
        target = _move_positions(base + group.offsets[members[index]] + row.positions, row.masked, tokens, target)
        ids += row.ids_bytes
        masked_ids += row.masked_ids_bytes
        positions += position_bytes(real)
        starts += varint_size(tokens)
        numbers += real * varint_size(index + 1)
        tokens += real
        masked += row.masked
    padding, unused = layout.length - tokens, layout.slots - masked
    sizes = measured.sizes
    sizes[PackedFeature.INPUT_IDS] = ids + padding
    sizes[PackedFeature.INPUT_MASK] = numbers + padding
    sizes[PackedFeature.MASKED_LM_IDS] = masked_ids + unused
    sizes[PackedFeature.MASKED_LM_POSITIONS] = target - moved + unused
    sizes[PackedFeature.MASKED_LM_WEIGHTS] = 4 * layout.slots
    sizes[PackedFeature.NEXT_SENTENCE_LABELS] = layout.depth
    sizes[PackedFeature.NEXT_SENTENCE_POSITIONS] = starts + layout.depth - members.size
    sizes[PackedFeature.NEXT_SENTENCE_WEIGHTS] = 4 * layout.depth
    sizes[PackedFeature.POSITIONS] = positions + padding
    sizes[PackedFeature.SEGMENT_IDS] = layout.length
    return True


@borrowing_kernel
def _store_ids_and_mask(
    at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured, padding: int
) -> int:
    """Write the entries of token ids and of the numbers of their sequences."""
    at = store_entry_head(at, layout.keys, PackedFeature.INPUT_IDS, measured.sizes[PackedFeature.INPUT_IDS])
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(at, base + group.offsets[member] + row.ids, as_word(row.ids_bytes))
        at += row.ids_bytes
    at = _zeros(at, padding)
    at = store_entry_head(at, layout.keys, PackedFeature.INPUT_MASK, measured.sizes[PackedFeature.INPUT_MASK])
    for index in range(members.size):
        at = _fill_numbers(at, index + 1, as_word(group.rows[members[index]].length))
    return _zeros(at, padding)


@borrowing_kernel
def _store_masked(
    at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured, unused: int
) -> int:
    """Write the entries of masked ids, masked positions and their weights (the number of the sequence, as float32)."""
    at = store_entry_head(at, layout.keys, PackedFeature.MASKED_LM_IDS, measured.sizes[PackedFeature.MASKED_LM_IDS])
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(at, base + group.offsets[member] + row.masked_ids, as_word(row.masked_ids_bytes))
        at += row.masked_ids_bytes
    at = _zeros(at, unused)
    size = measured.sizes[PackedFeature.MASKED_LM_POSITIONS]
    at = store_entry_head(at, layout.keys, PackedFeature.MASKED_LM_POSITIONS, size)
    copy_bytes(at, address_of(measured.positions), size - unused)
    at = _zeros(at + size - unused, unused)
    at = store_entry_head(at, layout.keys, PackedFeature.MASKED_LM_WEIGHTS, measured.sizes[PackedFeature.MASKED_LM_WEIGHTS])
    for index in range(members.size):
        bits = as_word(np.float32(index + 1).view(np.int32))
        for _ in range(group.rows[members[index]].masked):
            store_u32(at, bits)
            at += 4
    return _zeros(at, 4 * unused)


@borrowing_kernel
def _store_next_sentence(
    at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured, empty: int
) -> int:
    """Write the entries of next-sentence labels, positions (where each sequence starts) and weights."""
    sizes = measured.sizes
    at = store_entry_head(at, layout.keys, PackedFeature.NEXT_SENTENCE_LABELS, sizes[PackedFeature.NEXT_SENTENCE_LABELS])
    for member in members:
        store_u8(at, as_word(group.rows[member].label))
        at += 1
    at = _zeros(at, empty)
    at = store_entry_head(
        at, layout.keys, PackedFeature.NEXT_SENTENCE_POSITIONS, sizes[PackedFeature.NEXT_SENTENCE_POSITIONS]
    )
    start = as_word(0)
    for member in members:
        at = store_varint(at, start)
        start += group.rows[member].length
    at = _zeros(at, empty)
    at = store_entry_head(at, layout.keys, PackedFeature.NEXT_SENTENCE_WEIGHTS, sizes[PackedFeature.NEXT_SENTENCE_WEIGHTS])
    for _ in range(members.size):
        store_u32(at, _ONE_FLOAT)
        at += 4
    return _zeros(at, 4 * empty)


@borrowing_kernel
def _store_positions_and_segments(
    at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured, padding: int
) -> int:
    """Write the entries of positions, which restart with each sequence, and of segment ids."""
    at = store_entry_head(at, layout.keys, PackedFeature.POSITIONS, measured.sizes[PackedFeature.POSITIONS])
    table = address_of(layout.position_table)
    for member in members:
        size = position_bytes(as_word(group.rows[member].length))
        copy_bytes(at, table, size)
        at += size
    at = _zeros(at, padding)
    at = store_entry_head(at, layout.keys, PackedFeature.SEGMENT_IDS, measured.sizes[PackedFeature.SEGMENT_IDS])
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(at, base + group.offsets[member] + row.segments, as_word(row.length))
        at += row.length
    return _zeros(at, padding)


@borrowing_kernel
def _store_features(at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured) -> int:
    """Write the ten map entries in sorted order; the address after the last."""
    tokens, masked = as_word(0), as_word(0)
    for member in members:
        tokens += group.rows[member].length
        masked += group.rows[member].masked
    padding, unused, empty = layout.length - tokens, layout.slots - masked, layout.depth - members.size
    at = _store_ids_and_mask(at, group, members, layout, measured, padding)
    at = _store_masked(at, group, members, layout, measured, unused)
    at = _store_next_sentence(at, group, members, layout, measured, empty)
    return _store_positions_and_segments(at, group, members, layout, measured, padding)


@borrowing_kernel
def _prefetch_pack(group: IndexedSequences, members: Int32Array) -> None:
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        payload = base + group.offsets[member]
        for line in range(0, row.positions + row.positions_bytes, 64):
            prefetch(payload + line)


@borrowing_kernel
def _encode(
    group: IndexedSequences,
    packs: SampledPacks,
    first: int,
    last: int,
    layout: _Layout,
    measured: _Measured,
    out: ByteArray,
    record_index: IndexArray,
) -> tuple[int, int, int]:
    """Write packs `first` .. `last` - 1 as TFRecords, and their index; return (status, next pack, bytes written)."""
    members, starts = packs
    begin = address_of(out)
    at, end = begin, begin + out.size
    for pack in range(first, last):
        ahead = pack + _PREFETCHED_PACKS
        if ahead < last:
            _prefetch_pack(group, members[starts[ahead] : starts[ahead + 1]])
        of_pack = members[starts[pack] : starts[pack + 1]]
        if not _measure(group, of_pack, layout, measured):
            return _EncodeStatus.TOO_MANY_MASKED, pack, at - begin
        content = content_size(layout.keys, measured.sizes)
        if at + message_size(content) + FRAME_BYTES + SLACK_BYTES > end:
            return _EncodeStatus.OUTPUT_FULL, pack, at - begin
        after = finish_record(at, _store_features(start_record(at, content), group, of_pack, layout, measured))
        record_index[pack - first, 0] = after - at
        record_index[pack - first, 1] = load_u32(after - 4)
        at = after
    return _EncodeStatus.DONE, last, at - begin


def largest_record(schema: PackedSchema) -> int:
    """A bound on the bytes of one packed record, frame and all."""
    per_slot = 3 + 2 + 2 + 1  # token id, number of its sequence, position, segment
    per_masked = 3 + 2 + 4
    per_sequence = 1 + 2 + 4
    heads = len(PackedFeature) * 64
    return (
        schema.max_sequence_length * per_slot
        + schema.masked_slots * per_masked
        + schema.depth * per_sequence
        + heads
        + FRAME_BYTES
        + SLACK_BYTES
    )


_BUFFER_BYTES = 256 << 10  # larger writes make the kernel look for large pages, which can cost more than the copy


class PackEncoder:
    """Encodes packs of one group into buffers; several threads may use one instance, each with its own output."""

    def __init__(self, schema: PackedSchema, group: IndexedSequences, packs: SampledPacks) -> None:
        self._schema, self._group, self._packs = schema, group, packs
        keys = key_rows(schema.features)
        self._layout = _Layout(schema.max_sequence_length, schema.masked_slots, schema.depth, keys, position_table())

    def count_shards(self, shard_multiple: int, shard_bytes: int) -> int:
        """Return how many shards the group gets, by a bound on its packed bytes (two for each masked position)."""
        schema, rows, packs = self._schema, self._group.rows, len(self._packs)
        lengths, masked, ids, masked_ids = (
            int(rows[name].sum(dtype=np.int64)) for name in ("length", "masked", "ids_bytes", "masked_ids_bytes")
        )
        more_than_one_byte = (ids - lengths) + (masked_ids - masked) + masked + lengths + 2 * rows.size
        plain = 4 * schema.max_sequence_length + 6 * schema.masked_slots + 6 * schema.depth + 512
        more_than_one_byte += lengths if schema.depth > 127 else 0
        return count_shards(packs, packs * plain + more_than_one_byte, shard_multiple, shard_bytes)

    def output_buffer(self) -> ByteArray:
        """Return a buffer for encoded packs: one per thread."""
        return np.zeros(max(_BUFFER_BYTES, 2 * largest_record(self._schema)), np.uint8)

    def encode(self, first: int, last: int, out: ByteArray, record_index: IndexArray) -> tuple[_EncodeStatus, int, int]:
        """Write packs `first` .. `last` - 1 to `out` as far as it has room: (status, next pack, bytes written).

        `record_index`, uint32 [last - first, 2], gets the bytes of each record that was written, and its checksum.
        """
        measured = _Measured(np.zeros(len(PackedFeature), np.int64), np.empty(2 * self._layout.slots + 8, np.uint8))
        status, pack, size = _encode(self._group, self._packs, first, last, self._layout, measured, out, record_index)
        return _EncodeStatus(status), pack, size

    def write_shard(
        self,
        path: Path,
        first: int,
        last: int,
        out: ByteArray,
        slots: threading.Semaphore,
        progress: Callable[[int], None],
    ) -> tuple[Shard, IndexArray]:
        """Write packs `first` .. `last` - 1 to `path`, atomically; the shard, and its part of the index.

        A slot is held while there is something to compute, and not while the disk is waited for: so a few more threads than
        cores keep both busy. `out` is from `output_buffer`; `progress` is called with the packs that were written.
        """
        pack, size, crc = first, 0, 0
        record_index = np.zeros((last - first, 2), np.uint32)
        with atomic_file(path) as handle, slots:
            while pack < last:
                status, following, count = self.encode(pack, last, out, record_index[pack - first :])
                if status == _EncodeStatus.TOO_MANY_MASKED:
                    problem = "its sequences have more masked positions than masked_slots"
                    raise InputError(f"{path.name}: pack {following - first}: {problem}; plan again")
                handle.write(out[:count].data)
                crc, size = crc32c(out[:count], crc), size + count
                progress(following - pack)
                pack = following
            handle.flush()
        return Shard(name=path.name, packs=last - first, bytes=size, crc32c=crc), record_index
