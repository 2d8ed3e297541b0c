"""Encoding packed records directly from the bytes of unpacked records (numba kernels).

Token ids, segment ids and masked ids are copied without being decoded, because `scan` has already checked them. The
positions inside a sequence are copied from a constant table of varints. Masks, weights and padding are filled in. Only
masked positions are decoded and encoded again, because the start of the sequence in the pack is added to each.

All sizes are computed before the first byte of a record is written, and keys are written in sorted order. A record is
therefore byte-equal to `SerializeToString(deterministic=True)` of the same Example.

In the kernels, parameters named `at` are addresses at which bytes are written.
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
    encode_feature_keys,
    encode_position_varints,
    map_entries_size,
    message_size,
    position_varints_size,
    store_map_entry_head,
    store_payload_crc,
    store_record_head,
    store_varint,
    varint_size,
)
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, PackedSchema

_PREFETCHED_PACKS = 8
_ONE_FLOAT = as_word(0x3F800000)


class _EncodeStatus(IntEnum):
    """The reason why encoding stopped."""

    DONE = 0
    OUTPUT_FULL = 1
    TOO_MANY_MASKED = 2


class _Layout(NamedTuple):
    """The sizes of a pack and the constant bytes that the kernels write.

    Attributes:
        length: L, the number of tokens in a row, including padding.
        slots: Q, the number of masked slots of a pack.
        depth: S, the maximum number of sequences in a pack.
        keys: The keys of the features (`wire.example.encode_feature_keys`).
        position_varints: The varints 0, 1, 2, ... (`wire.example.encode_position_varints`).
    """

    length: int
    slots: int
    depth: int
    keys: RowArray
    position_varints: ByteArray


class _Measured(NamedTuple):
    """Data about a pack that are computed before its first byte is written. Each thread needs its own instance.

    Attributes:
        sizes: int64 [features], the encoded size of each feature's values, in bytes.
        positions: uint8, the encoded masked positions, counted from the start of the row.
    """

    sizes: IntArray
    positions: ByteArray


@borrowing_kernel
def _move_positions(source: int, count: int, offset: int, target: int) -> int:
    """Read `count` masked positions, add `offset` to each, and write them to `target`. Return the address after the last.

    `source` and `target` are addresses.
    """
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
    """Write a sequence number `count` times as a varint, and return the address after the last.

    A sequence number is at most 8192, so its varint has one or two bytes.
    """
    if number < 128:
        fill_bytes(at, number, count)
        return at + count
    for _ in range(count):
        store_u16(at, (number & 127) | 128 | ((number >> 7) << 8))
        at += 2
    return at


@inlined_kernel
def _zeros(at: int, count: int) -> int:
    """Write `count` zero bytes, and return the address after them."""
    fill_bytes(at, 0, count)
    return at + count


@borrowing_kernel
def _measure(group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured) -> bool:
    """Compute the sizes of a pack, and encode its masked positions.

    The plan ensures that the sequences fit into the row and that there are at most `depth` of them, so that only the number
    of masked positions is checked.

    Args:
        group: The sequences of the group.
        members: int32, the numbers of the pack's sequences in the group.
        layout: The sizes of a pack.
        measured: The output.

    Returns:
        False if the sequences have more masked positions than the pack has slots, otherwise True.
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
        positions += position_varints_size(real)
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
    """Write the entries `input_ids` and `input_mask`, and return the address after them.

    `input_mask` contains the sequence number of each token. `padding` is the number of padding tokens.
    """
    at = store_map_entry_head(at, layout.keys, PackedFeature.INPUT_IDS, measured.sizes[PackedFeature.INPUT_IDS])
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(at, base + group.offsets[member] + row.ids, as_word(row.ids_bytes))
        at += row.ids_bytes
    at = _zeros(at, padding)
    at = store_map_entry_head(at, layout.keys, PackedFeature.INPUT_MASK, measured.sizes[PackedFeature.INPUT_MASK])
    for index in range(members.size):
        at = _fill_numbers(at, index + 1, as_word(group.rows[members[index]].length))
    return _zeros(at, padding)


@borrowing_kernel
def _store_masked(
    at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured, unused: int
) -> int:
    """Write the entries `masked_lm_ids`, `masked_lm_positions` and `masked_lm_weights`, and return the address after them.

    The weight of a masked position is the number of its sequence, as float32. `unused` is the number of unused masked slots.
    """
    at = store_map_entry_head(at, layout.keys, PackedFeature.MASKED_LM_IDS, measured.sizes[PackedFeature.MASKED_LM_IDS])
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(at, base + group.offsets[member] + row.masked_ids, as_word(row.masked_ids_bytes))
        at += row.masked_ids_bytes
    at = _zeros(at, unused)
    size = measured.sizes[PackedFeature.MASKED_LM_POSITIONS]
    at = store_map_entry_head(at, layout.keys, PackedFeature.MASKED_LM_POSITIONS, size)
    copy_bytes(at, address_of(measured.positions), size - unused)
    at = _zeros(at + size - unused, unused)
    at = store_map_entry_head(
        at, layout.keys, PackedFeature.MASKED_LM_WEIGHTS, measured.sizes[PackedFeature.MASKED_LM_WEIGHTS]
    )
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
    """Write the next-sentence entries (labels, positions and weights), and return the address after them.

    The position of a sequence is the number of its first token in the row. `empty` is how many sequences fewer than `depth`
    the pack contains.
    """
    sizes = measured.sizes
    at = store_map_entry_head(at, layout.keys, PackedFeature.NEXT_SENTENCE_LABELS, sizes[PackedFeature.NEXT_SENTENCE_LABELS])
    for member in members:
        store_u8(at, as_word(group.rows[member].label))
        at += 1
    at = _zeros(at, empty)
    at = store_map_entry_head(
        at, layout.keys, PackedFeature.NEXT_SENTENCE_POSITIONS, sizes[PackedFeature.NEXT_SENTENCE_POSITIONS]
    )
    start = as_word(0)
    for member in members:
        at = store_varint(at, start)
        start += group.rows[member].length
    at = _zeros(at, empty)
    at = store_map_entry_head(
        at, layout.keys, PackedFeature.NEXT_SENTENCE_WEIGHTS, sizes[PackedFeature.NEXT_SENTENCE_WEIGHTS]
    )
    for _ in range(members.size):
        store_u32(at, _ONE_FLOAT)
        at += 4
    return _zeros(at, 4 * empty)


@borrowing_kernel
def _store_positions_and_segments(
    at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured, padding: int
) -> int:
    """Write the entries `positions` and `segment_ids`, and return the address after them.

    Positions count from 0 in each sequence. `padding` is the number of padding tokens.
    """
    at = store_map_entry_head(at, layout.keys, PackedFeature.POSITIONS, measured.sizes[PackedFeature.POSITIONS])
    table = address_of(layout.position_varints)
    for member in members:
        size = position_varints_size(as_word(group.rows[member].length))
        copy_bytes(at, table, size)
        at += size
    at = _zeros(at, padding)
    at = store_map_entry_head(at, layout.keys, PackedFeature.SEGMENT_IDS, measured.sizes[PackedFeature.SEGMENT_IDS])
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(at, base + group.offsets[member] + row.segments, as_word(row.length))
        at += row.length
    return _zeros(at, padding)


@borrowing_kernel
def _store_features(at: int, group: IndexedSequences, members: Int32Array, layout: _Layout, measured: _Measured) -> int:
    """Write the ten map entries of a pack in sorted order, and return the address after the last."""
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
    """Prefetch the bytes of a pack's sequences into the processor's cache."""
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
    """Encode packs `first` to `last` - 1 as TFRecords, until all are encoded or the output is full.

    Args:
        group: The sequences of the group.
        packs: The sequences of each pack.
        first: The number of the first pack.
        last: The number after the last pack.
        layout: The sizes of a pack.
        measured: Scratch space.
        out: uint8, the output.
        record_index: uint32 [last - first, 2], set to the size and the checksum of each record.

    Returns:
        (status, the next pack to encode, the number of bytes written).
    """
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
        content = map_entries_size(layout.keys, measured.sizes)
        if at + message_size(content) + FRAME_BYTES + SLACK_BYTES > end:
            return _EncodeStatus.OUTPUT_FULL, pack, at - begin
        after = store_payload_crc(at, _store_features(store_record_head(at, content), group, of_pack, layout, measured))
        record_index[pack - first, 0] = after - at
        record_index[pack - first, 1] = load_u32(after - 4)
        at = after
    return _EncodeStatus.DONE, last, at - begin


def largest_record(schema: PackedSchema) -> int:
    """Return an upper bound on the size of a packed record in bytes, with its frame and the slack after it."""
    per_slot = 3 + 2 + 2 + 1  # token id, sequence number, position, segment id
    per_masked = 3 + 2 + 4  # id, position, weight
    per_sequence = 1 + 2 + 4  # label, start, weight
    heads = len(PackedFeature) * 64
    return (
        schema.max_sequence_length * per_slot
        + schema.masked_slots * per_masked
        + schema.depth * per_sequence
        + heads
        + FRAME_BYTES
        + SLACK_BYTES
    )


_BUFFER_BYTES = 256 << 10  # larger writes make the kernel search for huge pages, which can take longer than the copy itself


class PackEncoder:
    """Encodes the packs of one group.

    Several threads may use the same encoder if each has its own output buffer.

    Args:
        schema: The sizes of the packs.
        group: The sequences of the group.
        packs: The sequences of each pack.
    """

    def __init__(self, schema: PackedSchema, group: IndexedSequences, packs: SampledPacks) -> None:
        self._schema, self._group, self._packs = schema, group, packs
        keys = encode_feature_keys(schema.features)
        self._layout = _Layout(
            schema.max_sequence_length, schema.masked_slots, schema.depth, keys, encode_position_varints()
        )

    def count_shards(self, shard_multiple: int, shard_bytes: int) -> int:
        """Return the number of shards of the group.

        The number is computed from an upper bound on the size of the encoded packs, which allows two bytes for each masked
        position.

        Args:
            shard_multiple: The number of shards is a multiple of this.
            shard_bytes: The maximum size of a shard in bytes. A shard that contains a single pack may be larger.
        """
        schema, rows, packs = self._schema, self._group.rows, len(self._packs)
        lengths, masked, ids, masked_ids = (
            int(rows[name].sum(dtype=np.int64)) for name in ("length", "masked", "ids_bytes", "masked_ids_bytes")
        )
        more_than_one_byte = (ids - lengths) + (masked_ids - masked) + masked + lengths + 2 * rows.size
        plain = 4 * schema.max_sequence_length + 6 * schema.masked_slots + 6 * schema.depth + 512
        more_than_one_byte += lengths if schema.depth > 127 else 0
        return count_shards(packs, packs * plain + more_than_one_byte, shard_multiple, shard_bytes)

    def output_buffer(self) -> ByteArray:
        """Return a new buffer for encoded packs. Each thread needs its own."""
        return np.zeros(max(_BUFFER_BYTES, 2 * largest_record(self._schema)), np.uint8)

    def encode(self, first: int, last: int, out: ByteArray, record_index: IndexArray) -> tuple[_EncodeStatus, int, int]:
        """Encode packs `first` to `last` - 1 into a buffer, until all are encoded or the buffer is full.

        Args:
            first: The number of the first pack.
            last: The number after the last pack.
            out: A buffer from `output_buffer`.
            record_index: uint32 [last - first, 2], set to the size and the checksum of each record that was written.

        Returns:
            (status, the next pack to encode, the number of bytes written).
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
        """Write packs `first` to `last` - 1 to a shard file, atomically.

        A slot is held while packs are encoded and written, but not while the file is flushed to the disk. With a few more
        threads than slots, the processor and the disk are both busy.

        Args:
            path: The shard file.
            first: The number of the first pack.
            last: The number after the last pack.
            out: A buffer from `output_buffer`.
            slots: Limits the number of threads that encode at the same time.
            progress: Called with the number of packs that were written.

        Returns:
            The entry of the shard for the group manifest, and its part of the index: uint32 [packs, 2], the size and the
            checksum of each record.

        Raises:
            InputError: A pack has more masked positions than masked slots, or the file cannot be written.
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
