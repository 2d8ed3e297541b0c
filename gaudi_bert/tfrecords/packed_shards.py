"""Encoding packed records directly from the bytes of unpacked records (numba kernels).

Token ids, segment ids and masked ids are copied without being decoded, because `scan` has already checked them. The
positions inside a sequence are copied from a constant table of varints. Masks, weights and padding are filled in. Only
masked positions are decoded and encoded again, because the start of the sequence in the pack is added to each.

All sizes are computed before the first byte of a record is written, and keys are written in sorted order. A record is
therefore byte-equal to `SerializeToString(deterministic=True)` of the same Example.

The parameter `address` of a kernel is the memory address at which it writes. Kernels that write return the address after the
last byte that they have written.
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
from gaudi_bert.common.compiled import (
    address_of,
    as_word,
    copy_bytes,
    fill_bytes,
    kernel_without_refcounts,
    load_u8,
    load_u32,
    prefetch,
    store_u8,
    store_u16,
    store_u32,
)
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackedFeature
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.tfrecords.scan import IndexedSequences
from gaudi_bert.tfrecords.wire.example import (
    ONE_FLOAT,
    SLACK_BYTES,
    Address,
    build_position_varint_table,
    encode_feature_keys,
    map_entries_size,
    message_size,
    position_varints_size,
    store_map_entry_prefix,
    store_payload_crc,
    store_record_prefix,
    store_varint,
    store_zeros,
    varint_size,
)
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, PackedSchema

_PREFETCHED_PACKS = 8


class _EncodeStatus(IntEnum):
    """The reason why `_encode_packs` stopped."""

    DONE = 0
    OUTPUT_FULL = 1
    TOO_MANY_MASKED = 2


class _Layout(NamedTuple):
    """The sizes of the packs, and constant bytes that are copied into every packed record.

    Attributes:
        length: L, the number of tokens in a row, including padding.
        slots: Q, the number of masked slots of a pack.
        depth: S, the maximum number of sequences in a pack.
        keys: The feature names (`wire.example.encode_feature_keys`).
        position_varints: The varints 0, 1, 2, ... (`wire.example.build_position_varint_table`).
    """

    length: int
    slots: int
    depth: int
    keys: RowArray
    position_varints: ByteArray


class _EncodedPackSizes(NamedTuple):
    """The encoded sizes of a pack's features, and the pack's encoded masked positions. Both are computed before the pack is
    written.

    Each thread needs its own instance.

    Attributes:
        sizes: int64 [features], the encoded size of each feature's values, in bytes.
        positions: uint8, the encoded masked positions, counted from the start of the row.
    """

    sizes: IntArray
    positions: ByteArray


@kernel_without_refcounts
def _copy_shifted_positions(source_address: Address, count: int, offset: int, target_address: Address) -> Address:
    """Copy the masked positions of a sequence to a pack, after adding `offset` to each.

    Args:
        source_address: The address of the first position, a varint of one or two bytes.
        count: The number of positions.
        offset: The position of the sequence's first token in the row.
        target_address: The address at which the positions are written.

    Returns:
        The address after the last written position.
    """
    for _ in range(count):
        value = load_u8(source_address)
        source_address += 1
        if value >= 128:
            value += (load_u8(source_address) - 1) << 7
            source_address += 1
        value += offset
        if value < 128:
            store_u8(target_address, value)
            target_address += 1
        else:
            store_u16(target_address, (value & 127) | 128 | ((value >> 7) << 8))
            target_address += 2
    return target_address


@kernel_without_refcounts
def _store_repeated_varint(address: Address, value: int, count: int) -> Address:
    """Write `value` as a varint `count` times, and return the address after the last varint.

    The value is a sequence number, which is at most 8192, so its varint has one or two bytes.
    """
    if value < 128:
        fill_bytes(address, value, count)
        return address + count
    for _ in range(count):
        store_u16(address, (value & 127) | 128 | ((value >> 7) << 8))
        address += 2
    return address


@kernel_without_refcounts
def _try_compute_pack_sizes(
    group: IndexedSequences, members: Int32Array, layout: _Layout, encoded_sizes: _EncodedPackSizes
) -> bool:
    """Compute the encoded size of each feature of a pack, and encode the masked positions.

    The plan ensures that the sequences fit into the row and that there are at most `depth` of them, so that only the number
    of masked positions is checked.

    Args:
        group: The sequences of the group.
        members: int32, the numbers of the pack's sequences in the group.
        layout: The sizes of a pack.
        encoded_sizes: Receives the sizes and the masked positions.

    Returns:
        False if the sequences have more masked positions than the pack has slots, otherwise True.
    """
    base, moved = address_of(group.buffer), address_of(encoded_sizes.positions)
    tokens, masked = as_word(0), as_word(0)
    ids, masked_ids, positions, starts, numbers = 0, 0, 0, 0, 0
    target = moved
    for index in range(members.size):
        row = group.rows[members[index]]
        token_count = as_word(row.length)
        if masked + row.masked > layout.slots:
            return False
        target = _copy_shifted_positions(base + group.offsets[members[index]] + row.positions, row.masked, tokens, target)
        ids += row.ids_bytes
        masked_ids += row.masked_ids_bytes
        positions += position_varints_size(token_count)
        starts += varint_size(tokens)
        numbers += token_count * varint_size(index + 1)
        tokens += token_count
        masked += row.masked
    padding, unused = layout.length - tokens, layout.slots - masked
    sizes = encoded_sizes.sizes
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


@kernel_without_refcounts
def _encode_id_and_mask_features(
    address: Address,
    group: IndexedSequences,
    members: Int32Array,
    layout: _Layout,
    encoded_sizes: _EncodedPackSizes,
    padding_count: int,
) -> Address:
    """Write the protobuf map entries `input_ids` and `input_mask` of a pack, and return the address after them.

    `input_mask` contains the sequence number of each token. `padding_count` is the number of padding tokens.
    """
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.INPUT_IDS, encoded_sizes.sizes[PackedFeature.INPUT_IDS]
    )
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(address, base + group.offsets[member] + row.ids, as_word(row.ids_bytes))
        address += row.ids_bytes
    address = store_zeros(address, padding_count)
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.INPUT_MASK, encoded_sizes.sizes[PackedFeature.INPUT_MASK]
    )
    for index in range(members.size):
        address = _store_repeated_varint(address, index + 1, as_word(group.rows[members[index]].length))
    return store_zeros(address, padding_count)


@kernel_without_refcounts
def _encode_masked_lm_features(
    address: Address,
    group: IndexedSequences,
    members: Int32Array,
    layout: _Layout,
    encoded_sizes: _EncodedPackSizes,
    unused_slots: int,
) -> Address:
    """Write the protobuf map entries `masked_lm_ids`, `masked_lm_positions` and `masked_lm_weights` of a pack.

    The weight of a masked position is the number of its sequence, as float32. `unused_slots` is the number of masked slots
    that the pack does not use. Return the address after the entries.
    """
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.MASKED_LM_IDS, encoded_sizes.sizes[PackedFeature.MASKED_LM_IDS]
    )
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(address, base + group.offsets[member] + row.masked_ids, as_word(row.masked_ids_bytes))
        address += row.masked_ids_bytes
    address = store_zeros(address, unused_slots)
    size = encoded_sizes.sizes[PackedFeature.MASKED_LM_POSITIONS]
    address = store_map_entry_prefix(address, layout.keys, PackedFeature.MASKED_LM_POSITIONS, size)
    copy_bytes(address, address_of(encoded_sizes.positions), size - unused_slots)
    address = store_zeros(address + size - unused_slots, unused_slots)
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.MASKED_LM_WEIGHTS, encoded_sizes.sizes[PackedFeature.MASKED_LM_WEIGHTS]
    )
    for index in range(members.size):
        bits = as_word(np.float32(index + 1).view(np.int32))
        for _ in range(group.rows[members[index]].masked):
            store_u32(address, bits)
            address += 4
    return store_zeros(address, 4 * unused_slots)


@kernel_without_refcounts
def _encode_next_sentence_features(
    address: Address,
    group: IndexedSequences,
    members: Int32Array,
    layout: _Layout,
    encoded_sizes: _EncodedPackSizes,
    unused_sequences: int,
) -> Address:
    """Write the protobuf map entries `next_sentence_labels`, `next_sentence_positions` and `next_sentence_weights` of a
    pack.

    The position of a sequence is the number of its first token in the row. `unused_sequences` is how many sequences fewer
    than `depth` the pack contains. Return the address after the entries.
    """
    sizes = encoded_sizes.sizes
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.NEXT_SENTENCE_LABELS, sizes[PackedFeature.NEXT_SENTENCE_LABELS]
    )
    for member in members:
        store_u8(address, as_word(group.rows[member].label))
        address += 1
    address = store_zeros(address, unused_sequences)
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.NEXT_SENTENCE_POSITIONS, sizes[PackedFeature.NEXT_SENTENCE_POSITIONS]
    )
    start = as_word(0)
    for member in members:
        address = store_varint(address, start)
        start += group.rows[member].length
    address = store_zeros(address, unused_sequences)
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.NEXT_SENTENCE_WEIGHTS, sizes[PackedFeature.NEXT_SENTENCE_WEIGHTS]
    )
    for _ in range(members.size):
        store_u32(address, ONE_FLOAT)
        address += 4
    return store_zeros(address, 4 * unused_sequences)


@kernel_without_refcounts
def _encode_position_and_segment_features(
    address: Address,
    group: IndexedSequences,
    members: Int32Array,
    layout: _Layout,
    encoded_sizes: _EncodedPackSizes,
    padding_count: int,
) -> Address:
    """Write the protobuf map entries `positions` and `segment_ids` of a pack, and return the address after them.

    Positions count from 0 in each sequence. `padding_count` is the number of padding tokens.
    """
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.POSITIONS, encoded_sizes.sizes[PackedFeature.POSITIONS]
    )
    table = address_of(layout.position_varints)
    for member in members:
        size = position_varints_size(as_word(group.rows[member].length))
        copy_bytes(address, table, size)
        address += size
    address = store_zeros(address, padding_count)
    address = store_map_entry_prefix(
        address, layout.keys, PackedFeature.SEGMENT_IDS, encoded_sizes.sizes[PackedFeature.SEGMENT_IDS]
    )
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        copy_bytes(address, base + group.offsets[member] + row.segments, as_word(row.length))
        address += row.length
    return store_zeros(address, padding_count)


@kernel_without_refcounts
def _encode_pack_features(
    address: Address, group: IndexedSequences, members: Int32Array, layout: _Layout, encoded_sizes: _EncodedPackSizes
) -> Address:
    """Write the ten protobuf map entries of a pack, sorted by name, and return the address after the last entry."""
    tokens, masked = as_word(0), as_word(0)
    for member in members:
        tokens += group.rows[member].length
        masked += group.rows[member].masked
    padding, unused, empty = layout.length - tokens, layout.slots - masked, layout.depth - members.size
    address = _encode_id_and_mask_features(address, group, members, layout, encoded_sizes, padding)
    address = _encode_masked_lm_features(address, group, members, layout, encoded_sizes, unused)
    address = _encode_next_sentence_features(address, group, members, layout, encoded_sizes, empty)
    return _encode_position_and_segment_features(address, group, members, layout, encoded_sizes, padding)


@kernel_without_refcounts
def _prefetch_pack(group: IndexedSequences, members: Int32Array) -> None:
    """Prefetch the bytes of a pack's sequences into the processor's cache."""
    base = address_of(group.buffer)
    for member in members:
        row = group.rows[member]
        payload = base + group.offsets[member]
        for line in range(0, row.positions + row.positions_bytes, 64):
            prefetch(payload + line)


@kernel_without_refcounts
def _encode_packs(
    group: IndexedSequences,
    packs: SampledPacks,
    first_pack: int,
    end_pack: int,
    layout: _Layout,
    encoded_sizes: _EncodedPackSizes,
    output: ByteArray,
    record_index: IndexArray,
) -> tuple[int, int, int]:
    """Encode the packs `first_pack` to `end_pack` - 1 as TFRecords. Stop early if the output is full or a pack has too many
    masked positions.

    Args:
        group: The sequences of the group.
        packs: The sequences of each pack.
        first_pack: The number of the first pack.
        end_pack: The number after the last pack.
        layout: The sizes of a pack.
        encoded_sizes: Scratch space.
        output: uint8, receives the records.
        record_index: uint32 [end_pack - first_pack, 2], is set to the size and the checksum of each record.

    Returns:
        (status, the next pack to encode, the number of bytes written).
    """
    members, starts = packs
    output_start = address_of(output)
    address, end = output_start, output_start + output.size
    for pack in range(first_pack, end_pack):
        prefetched_pack = pack + _PREFETCHED_PACKS
        if prefetched_pack < end_pack:
            _prefetch_pack(group, members[starts[prefetched_pack] : starts[prefetched_pack + 1]])
        pack_members = members[starts[pack] : starts[pack + 1]]
        if not _try_compute_pack_sizes(group, pack_members, layout, encoded_sizes):
            return _EncodeStatus.TOO_MANY_MASKED, pack, address - output_start
        content = map_entries_size(layout.keys, encoded_sizes.sizes)
        if address + message_size(content) + FRAME_BYTES + SLACK_BYTES > end:
            return _EncodeStatus.OUTPUT_FULL, pack, address - output_start
        after = store_payload_crc(
            address, _encode_pack_features(store_record_prefix(address, content), group, pack_members, layout, encoded_sizes)
        )
        record_index[pack - first_pack, 0] = after - address
        record_index[pack - first_pack, 1] = load_u32(after - 4)
        address = after
    return _EncodeStatus.DONE, end_pack, address - output_start


def max_packed_record_size(schema: PackedSchema) -> int:
    """Return an upper bound on the size of a packed record in bytes, with its frame and `SLACK_BYTES` of spare room."""
    per_slot = 3 + 2 + 2 + 1  # token id, sequence number, position, segment id
    per_masked = 3 + 2 + 4  # id, position, weight
    per_sequence = 1 + 2 + 4  # label, start, weight
    prefixes = len(PackedFeature) * 64
    return (
        schema.max_sequence_length * per_slot
        + schema.masked_slots * per_masked
        + schema.depth * per_sequence
        + prefixes
        + FRAME_BYTES
        + SLACK_BYTES
    )


_BUFFER_BYTES = 256 << 10  # larger writes make the kernel search for huge pages, which can take longer than the copy itself


class PackEncoder:
    """Encodes the packs of one group as TFRecords, and writes them to shard files.

    Several threads may use the same encoder if each has its own output buffer.

    Args:
        schema: The sizes of the packs.
        group: The sequences of the group.
        packs: The sequences of each pack.
    """

    def __init__(self, schema: PackedSchema, group: IndexedSequences, packs: SampledPacks) -> None:
        self._schema, self._group, self._packs = schema, group, packs
        self._layout = _Layout(
            schema.max_sequence_length,
            schema.masked_slots,
            schema.depth,
            encode_feature_keys(schema.features),
            build_position_varint_table(),
        )

    def count_shards(self, shard_multiple: int, shard_bytes: int) -> int:
        """Return the number of shards needed for the packs of this group.

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

    def allocate_output_buffer(self) -> ByteArray:
        """Return a new buffer for encoded packs. Each thread needs its own."""
        return np.zeros(max(_BUFFER_BYTES, 2 * max_packed_record_size(self._schema)), np.uint8)

    def encode_packs(
        self, first_pack: int, end_pack: int, output: ByteArray, record_index: IndexArray
    ) -> tuple[_EncodeStatus, int, int]:
        """Encode the packs `first_pack` to `end_pack` - 1 as TFRecords into a buffer. Stop early if the buffer is full or a
        pack has too many masked positions.

        Args:
            first_pack: The number of the first pack.
            end_pack: The number after the last pack.
            output: A buffer from `allocate_output_buffer`.
            record_index: uint32 [end_pack - first_pack, 2], is set to the size and the checksum of each record that was
                written.

        Returns:
            (status, the next pack to encode, the number of bytes written).
        """
        encoded_sizes = _EncodedPackSizes(
            np.zeros(len(PackedFeature), np.int64), np.empty(2 * self._layout.slots + 8, np.uint8)
        )
        status, pack, size = _encode_packs(
            self._group, self._packs, first_pack, end_pack, self._layout, encoded_sizes, output, record_index
        )
        return _EncodeStatus(status), pack, size

    def write_shard(
        self,
        path: Path,
        first_pack: int,
        end_pack: int,
        output: ByteArray,
        encoding_slots: threading.Semaphore,
        progress: Callable[[int], None],
    ) -> tuple[Shard, IndexArray]:
        """Write the packs `first_pack` to `end_pack` - 1 to a shard file. The file appears only when it is complete.

        The thread holds an encoding slot while it encodes and writes packs, but not while the file is flushed to the disk.
        With a few more threads than slots, the processor and the disk are both busy.

        Args:
            path: The shard file.
            first_pack: The number of the first pack.
            end_pack: The number after the last pack.
            output: A buffer from `allocate_output_buffer`.
            encoding_slots: Limits the number of threads that encode at the same time.
            progress: Called with the number of packs that were written.

        Returns:
            The entry of the shard for the group manifest, and its part of the index: uint32 [packs, 2], the size and the
            checksum of each record.

        Raises:
            InputError: A pack has more masked positions than masked slots, or the file cannot be written.
        """
        pack, size, crc = first_pack, 0, 0
        record_index = np.zeros((end_pack - first_pack, 2), np.uint32)
        with atomic_file(path) as handle, encoding_slots:
            while pack < end_pack:
                status, next_pack, count = self.encode_packs(pack, end_pack, output, record_index[pack - first_pack :])
                if status == _EncodeStatus.TOO_MANY_MASKED:
                    problem = "its sequences have more masked positions than the pack has masked slots"
                    raise InputError(f"{path.name}: pack {next_pack - first_pack}: {problem}; create the plan again")
                handle.write(output[:count].data)
                crc, size = crc32c(output[:count], crc), size + count
                progress(next_pack - pack)
                pack = next_pack
            handle.flush()
        return Shard(name=path.name, packs=end_pack - first_pack, bytes=size, crc32c=crc), record_index
