"""Fingerprints of sets of sequences, which prove that packing has lost or changed nothing (numba kernels).

Each sequence gets a 64-bit hash of its tokens, segments, masked positions (relative to its start), masked ids, label and
length. The fingerprint of many sequences is the sum of their mixed hashes, modulo 2**64, so it is computed in constant
memory. It depends neither on the order of the sequences nor on the files that contain them. Two different collections of
sequences have the same fingerprint with a probability of about 2**-64.

The hash is computed from the canonical bytes of the values, sixteen at a time, with the multiply-and-fold step of wyhash
(Wang Yi, 2019). A sequence has the same hash in an unpacked record and in a pack. When a pack is hashed, its layout is
checked completely: sequence numbers, positions, starts, weights and padding must be exactly as this package writes them.

The parameters `address` and `end` are memory addresses, and `end` is exclusive.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.shards import IndexArray
from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray, RowArray
from gaudi_bert.common.compiled import (
    add_words,
    address_of,
    as_word,
    count_bits,
    inlined_kernel,
    kernel_without_refcounts,
    load_u8,
    load_u32,
    load_word,
    multiply_mix,
)
from gaudi_bert.common.features import PackedFeature
from gaudi_bert.tfrecords.scan import IndexedSequences
from gaudi_bert.tfrecords.wire.example import ONE_FLOAT, position_varints_size
from gaudi_bert.tfrecords.wire.features import FeatureTable, locate_features
from gaudi_bert.tfrecords.wire.framing import ScanStatus, check_frame
from gaudi_bert.tfrecords.wire.values import compute_unpadded_size, is_all_zero, is_repeated_byte

_FIRST_KEY = as_word(0x1F3D5B79A2C4E687)
_SECOND_KEY = as_word(0x6C8E944D1F123BB5)
_THIRD_KEY = as_word(0x2545F4914F6CDD1D)
# Each feature of a sequence is hashed from its own initial state. These states must differ from the three keys above.
# Otherwise, swapping two words could leave the hash unchanged, or a product in the hash could be zero.
_IDS_SEED = as_word(0x5851F42D4C957F2D)
_SEGMENTS_SEED = as_word(0x14057B7EF767814F)
_MASKED_IDS_SEED = as_word(0x369DEA0F31A53F85)
_POSITIONS_SEED = as_word(0x4F1BBCDCBFA53E0B)
_OTHER_CHAIN = as_word(0x61C8864680B583EB)


@kernel_without_refcounts
def _hash_bytes(address: int, size: int, state: int) -> int:
    """Update a hash with the `size` bytes at `address`, and return its new state.

    At least eight bytes of the same record must precede `address`, because the word that ends at the last byte may begin
    before `address`.
    """
    end = address + size
    other = state ^ _OTHER_CHAIN
    while address + 32 <= end:  # two independent chains, because one chain would wait for the latency of each multiplication
        state = multiply_mix(load_word(address) ^ _FIRST_KEY, load_word(address + 8) ^ state)
        other = multiply_mix(load_word(address + 16) ^ _SECOND_KEY, load_word(address + 24) ^ other)
        address += 32
    if size >= 32:
        state = multiply_mix(state ^ _THIRD_KEY, other ^ _SECOND_KEY)
    if address + 16 <= end:
        state = multiply_mix(load_word(address) ^ _FIRST_KEY, load_word(address + 8) ^ state)
        address += 16
    first, second = as_word(0), as_word(0)
    rest = end - address
    if rest >= 8:
        first, second = load_word(address), load_word(end - 8)
    elif rest > 0:
        first = load_word(end - 8) >> (8 * (8 - rest))
    return multiply_mix(first ^ _FIRST_KEY, second ^ state ^ (size + 1))


@inlined_kernel
def _combine_hashes(
    length: int, masked_count: int, label: int, ids_hash: int, segments_hash: int, masked_ids_hash: int, positions_hash: int
) -> int:
    """Return the hash of a sequence, combined from the hashes of its features.

    Args:
        length: The number of tokens.
        masked_count: The number of masked positions.
        label: The next-sentence label.
        ids_hash: The hash of the token ids.
        segments_hash: The hash of the segment ids.
        masked_ids_hash: The hash of the masked ids.
        positions_hash: The hash of the masked positions.
    """
    state = multiply_mix((length | (masked_count << 16) | (label << 32)) ^ _SECOND_KEY, ids_hash ^ _THIRD_KEY)
    state = multiply_mix(state ^ _FIRST_KEY, segments_hash ^ _SECOND_KEY)
    state = multiply_mix(state ^ _SECOND_KEY, masked_ids_hash ^ _THIRD_KEY)
    return multiply_mix(state ^ _THIRD_KEY, positions_hash ^ _FIRST_KEY)


@kernel_without_refcounts
def _hash_positions(address: int, position_count: int, offset: int, state: int) -> int:
    """Update a hash with the masked positions of a sequence, and return its new state.

    Args:
        address: The address of the first masked position. The positions are varints of one or two bytes.
        position_count: The number of masked positions.
        offset: Is subtracted from each position, so that positions in a pack count from the start of their sequence.
        state: The state of the hash.
    """
    word = as_word(0)
    for number in range(position_count):
        value = load_u8(address)
        address += 1
        if value >= 128:
            value += (load_u8(address) - 1) << 7
            address += 1
        word = (word << 16) | (value - offset)
        if (number & 3) == 3:
            state = multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)
            word = as_word(0)
    return multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)


@kernel_without_refcounts
def hash_unpacked_sequences(sequences: IndexedSequences, count: int, hashes: IntArray) -> None:
    """Hash the first `count` unpacked sequences, and store one int64 hash per sequence in `hashes`."""
    base = address_of(sequences.buffer)
    for number in range(count):
        row = sequences.rows[number]
        payload = base + sequences.offsets[number]
        length, masked = as_word(row.length), as_word(row.masked)
        ids = _hash_bytes(payload + row.ids, as_word(row.ids_bytes), _IDS_SEED)
        segments = _hash_bytes(payload + row.segments, length, _SEGMENTS_SEED)
        masked_ids = _hash_bytes(payload + row.masked_ids, as_word(row.masked_ids_bytes), _MASKED_IDS_SEED)
        positions = _hash_positions(payload + row.positions, masked, 0, _POSITIONS_SEED)
        hashes[number] = _combine_hashes(length, masked, as_word(row.label), ids, segments, masked_ids, positions)


@kernel_without_refcounts
def sum_hashes(hashes: IntArray) -> int:
    """Return the fingerprint of a collection of sequences. Each hash is mixed again, and the results are added modulo 2**64.

    The result is an int64, so it may be negative.
    """
    total = as_word(0)
    for value in hashes:
        total = add_words(total, multiply_mix(value ^ _FIRST_KEY, _THIRD_KEY))
    return total


# --- the scan of packed records: check the framing, both CRCs and the complete layout, and hash every sequence

_HIGH = as_word(-0x7F7F7F7F7F7F7F80)


class PackSizes(NamedTuple):
    """The dimensions that all packs of a folder share, such as the row length and the number of masked slots.

    Attributes:
        length: L, the number of tokens in a row, including padding.
        slots: Q, the number of masked slots of a pack.
        depth: S, the maximum number of sequences in a pack.
        predictions: P, the maximum number of masked positions in a sequence.
    """

    length: int
    slots: int
    depth: int
    predictions: int


class ScannedPacks(NamedTuple):
    """Arrays that collect the results of `check_and_hash_packs`. `done` contains the numbers of packs and sequences so far.

    Attributes:
        hashes: int64, the hash of each sequence.
        lengths: int32, the number of tokens of each sequence.
        sequences: int32, the number of sequences of each pack.
        record_index: uint32 [packs, 2], the size and checksum of each record, in the form that `write_index` expects.
        done: int64 [2], the number of packs and the number of sequences so far.
        starts: int64 [S + 1], scratch space for the starts of the sequences in the current pack.
    """

    hashes: IntArray
    lengths: Int32Array
    sequences: Int32Array
    record_index: IndexArray
    done: IntArray
    starts: IntArray


# The number of sequences in a pack, or -1 if the pack is not encoded as this package writes it.
_SequenceCountOrInvalid = int


class _PackPosition(NamedTuple):
    """A position between two sequences of a pack, as one memory address in each of the pack's features.

    All attributes except `used` are the addresses where the values of the next sequence begin.

    Attributes:
        ids: In `input_ids`.
        segments: In `segment_ids`.
        numbers: In `input_mask`, which contains the sequence number of each token.
        positions: In `positions`.
        masked_ids: In `masked_lm_ids`.
        masked_positions: In `masked_lm_positions`.
        used: The number of masked slots that the sequences before this position use.
    """

    ids: int
    segments: int
    numbers: int
    positions: int
    masked_ids: int
    masked_positions: int
    used: int


@kernel_without_refcounts
def _skip_varints(address: int, end: int, count: int) -> int:
    """Skip `count` varints, and return the address after them, or -1 if fewer varints end before `end`.

    Nothing is read at or after `end`.
    """
    while address + 8 <= end:
        ended = 8 - count_bits(load_word(address) & _HIGH)
        if ended >= count:
            break
        count -= ended
        address += 8
    while count > 0:
        if address >= end:
            return -1
        if load_u8(address) < 128:
            count -= 1
        address += 1
    return address


@kernel_without_refcounts
def _read_short_varint(address: int, end: int) -> tuple[int, int]:
    """Read a varint of one or two bytes, and return its value and the address after it.

    The value is -1 if the varint has more than two bytes, has more bytes than necessary, or does not end by `end`.
    """
    if address >= end:
        return -1, address
    value = load_u8(address)
    address += 1
    if value < 128:
        return value, address
    if address >= end:
        return -1, address
    high = load_u8(address)
    if high == 0 or high >= 128:
        return -1, address
    return value + ((high - 1) << 7), address + 1


@kernel_without_refcounts
def _skip_repeated_varint(address: int, end: int, expected_value: int, count: int) -> int:
    """Skip `count` varints that must all equal `expected_value`, and return the address after them. Return -1 if one differs
    or is missing.
    """
    if expected_value < 128:
        return address + count if count <= end - address and is_repeated_byte(address, count, expected_value) else -1
    for _ in range(count):
        value, address = _read_short_varint(address, end)
        if value != expected_value:
            return -1
    return address


@kernel_without_refcounts
def _has_equal_bytes(first_address: int, second_address: int, size: int) -> bool:
    """Return whether the `size` bytes at `first_address` equal those at `second_address`."""
    different = as_word(0)
    end = first_address + size
    while first_address + 8 <= end:
        different |= load_word(first_address) ^ load_word(second_address)
        first_address += 8
        second_address += 8
    while first_address < end:
        different |= load_u8(first_address) ^ load_u8(second_address)
        first_address += 1
        second_address += 1
    return different == 0


@kernel_without_refcounts
def _count_masked_slots_of_sequence(address: int, slots: int, sequence_number: int) -> int:
    """Return the number of masked positions that belong to one sequence of a pack.

    Args:
        address: The address of the sequence's first weight. The float32 weight of a slot is the number of its sequence.
        slots: The number of weights from `address` on.
        sequence_number: The number of the sequence in its pack, from 1.
    """
    bits = as_word(np.float32(sequence_number).view(np.int32))
    count = 0
    while count < slots and load_u32(address + 4 * count) == bits:
        count += 1
    return count


@kernel_without_refcounts
def _count_sequences_in_pack(spans: RowArray, depth: int) -> int:
    """Return the number of sequences in a pack, which is the number of ones in `next_sentence_weights`. Return -1 if the
    weights are not ones followed by zeros.
    """
    address = spans[PackedFeature.NEXT_SENTENCE_WEIGHTS].start
    count = 0
    while count < depth and load_u32(address + 4 * count) == ONE_FLOAT:
        count += 1
    return count if is_all_zero(address + 4 * count, 4 * (depth - count)) else -1


@kernel_without_refcounts
def _read_sequence_starts(spans: RowArray, depth: int, sequence_count: int, token_count: int, starts: IntArray) -> bool:
    """Read the position of each sequence's first token from `next_sentence_positions`, and store these positions in
    `starts`.

    The end of the last sequence, `token_count`, is stored after them.

    Returns:
        True if the starts ascend from 0 and all unused entries of `next_sentence_positions` are 0, otherwise False.
    """
    span = spans[PackedFeature.NEXT_SENTENCE_POSITIONS]
    address, end = span.start, span.start + span.bytes
    for index in range(sequence_count):
        starts[index], address = _read_short_varint(address, end)
        if starts[index] < 0 or (index > 0 and starts[index] <= starts[index - 1]):
            return False
    starts[sequence_count] = token_count
    return (
        starts[0] == 0
        and token_count > starts[sequence_count - 1]
        and end - address == depth - sequence_count
        and is_all_zero(address, end - address)
    )


@kernel_without_refcounts
def _count_non_padding_tokens(spans: RowArray, length: int) -> int:
    """Return the number of non-padding tokens in a pack, or -1 if its `input_mask` does not have `length` values.

    The zero bytes at the end of `input_mask` are counted as padding. Each of them is a value, because the last byte of a
    sequence number is never zero.
    """
    span = spans[PackedFeature.INPUT_MASK]
    address, size = span.start, span.bytes
    value_count = size
    for index in range(size):
        value_count -= load_u8(address + index) >> 7
    padding = 0
    while padding < size and load_u8(address + size - 1 - padding) == 0:
        padding += 1
    return length - padding if value_count == length else -1


@kernel_without_refcounts
def _has_zero_padding(spans: RowArray, sizes: PackSizes, sequence_count: int, end: _PackPosition) -> bool:
    """Return whether every feature of a pack contains only zeros after the last sequence.

    Args:
        spans: The addresses and sizes of the pack's features.
        sizes: The sizes of the pack.
        sequence_count: The number of sequences.
        end: The position after the last sequence.
    """
    numbers, positions = spans[PackedFeature.INPUT_MASK], spans[PackedFeature.POSITIONS]
    masked_ids, masked_positions = spans[PackedFeature.MASKED_LM_IDS], spans[PackedFeature.MASKED_LM_POSITIONS]
    padding = positions.start + positions.bytes - end.positions
    unused = sizes.slots - end.used
    return (
        numbers.start + numbers.bytes - end.numbers == padding
        and is_all_zero(end.positions, padding)
        and masked_positions.start + masked_positions.bytes - end.masked_positions == unused
        and is_all_zero(end.masked_positions, unused)
        and is_all_zero(spans[PackedFeature.MASKED_LM_WEIGHTS].start + 4 * end.used, 4 * unused)
        and is_all_zero(spans[PackedFeature.NEXT_SENTENCE_LABELS].start + sequence_count, sizes.depth - sequence_count)
        and compute_unpadded_size(masked_ids.start, masked_ids.bytes, sizes.slots, end.used) >= 0
    )


@kernel_without_refcounts
def _skip_masked_positions(address: int, end: int, count: int, first_token: int, end_token: int) -> int:
    """Skip the masked positions of a sequence, and return the address after them. Return -1 if a position is missing or
    outside the sequence.

    Args:
        address: The address of the first masked position.
        end: The end of the masked positions of the pack.
        count: The number of masked positions of the sequence.
        first_token: The number of the sequence's first token in the row.
        end_token: The number of the token after its last one.
    """
    for _ in range(count):
        value, address = _read_short_varint(address, end)
        if value < first_token or value >= end_token:
            return -1
    return address


@kernel_without_refcounts
def _check_sequence_and_find_end(
    spans: RowArray,
    sizes: PackSizes,
    position: _PackPosition,
    sequence_number: int,
    start_token: int,
    end_token: int,
    position_varints_address: int,
) -> tuple[bool, _PackPosition]:
    """Check the encoding of one sequence in a pack, and return where the next sequence begins.

    Args:
        spans: The addresses and sizes of the pack's features.
        sizes: The sizes of the pack.
        position: The position of the sequence.
        sequence_number: The number of the sequence in its pack, from 1.
        start_token: The number of the sequence's first token in the row.
        end_token: The number of the token after its last one.
        position_varints_address: The address of the varints 0, 1, 2, ...

    Returns:
        (whether the sequence is encoded as this package writes it, the position after it).
    """
    token_count, positions_size = end_token - start_token, position_varints_size(end_token - start_token)
    ids, numbers, positions = spans[PackedFeature.INPUT_IDS], spans[PackedFeature.INPUT_MASK], spans[PackedFeature.POSITIONS]
    masked_ids, masked_positions = spans[PackedFeature.MASKED_LM_IDS], spans[PackedFeature.MASKED_LM_POSITIONS]
    weights = spans[PackedFeature.MASKED_LM_WEIGHTS].start
    masked = _count_masked_slots_of_sequence(weights + 4 * position.used, sizes.slots - position.used, sequence_number)
    after = _PackPosition(
        _skip_varints(position.ids, ids.start + ids.bytes, token_count),
        position.segments + token_count,
        _skip_repeated_varint(position.numbers, numbers.start + numbers.bytes, sequence_number, token_count),
        position.positions + positions_size,
        _skip_varints(position.masked_ids, masked_ids.start + masked_ids.bytes, masked),
        _skip_masked_positions(
            position.masked_positions, masked_positions.start + masked_positions.bytes, masked, start_token, end_token
        ),
        position.used + masked,
    )
    is_valid = (
        min(after.ids, after.numbers, after.masked_ids, after.masked_positions) >= 0
        and masked <= sizes.predictions
        and after.positions <= positions.start + positions.bytes
        and _has_equal_bytes(position.positions, position_varints_address, positions_size)
    )
    return is_valid, after


@kernel_without_refcounts
def _check_and_hash_pack(
    spans: RowArray, sizes: PackSizes, position_varints_address: int, starts: IntArray, hashes: IntArray
) -> _SequenceCountOrInvalid:
    """Check the layout of one pack, and store the hash of each of its sequences in `hashes`.

    Args:
        spans: The addresses and sizes of the pack's features.
        sizes: The sizes that the pack must have.
        position_varints_address: The address of the varints 0, 1, 2, ...
        starts: int64 [S + 1], is set to the start of each sequence and the end of the last one.
        hashes: int64, receives the hashes.

    Returns:
        The number of sequences, or -1 if the pack is not encoded as this package writes it.
    """
    if (
        spans[PackedFeature.MASKED_LM_WEIGHTS].bytes != 4 * sizes.slots
        or spans[PackedFeature.NEXT_SENTENCE_WEIGHTS].bytes != 4 * sizes.depth
        or spans[PackedFeature.NEXT_SENTENCE_LABELS].bytes != sizes.depth
        or spans[PackedFeature.SEGMENT_IDS].bytes != sizes.length
    ):
        return -1
    sequence_count, token_count = (
        _count_sequences_in_pack(spans, sizes.depth),
        _count_non_padding_tokens(spans, sizes.length),
    )
    if (
        sequence_count < 1
        or token_count < 1
        or not _read_sequence_starts(spans, sizes.depth, sequence_count, token_count, starts)
    ):
        return -1
    ids = spans[PackedFeature.INPUT_IDS]
    position = _PackPosition(
        ids.start,
        spans[PackedFeature.SEGMENT_IDS].start,
        spans[PackedFeature.INPUT_MASK].start,
        spans[PackedFeature.POSITIONS].start,
        spans[PackedFeature.MASKED_LM_IDS].start,
        spans[PackedFeature.MASKED_LM_POSITIONS].start,
        as_word(0),
    )
    if compute_unpadded_size(position.segments, sizes.length, sizes.length, token_count) < 0:
        return -1
    if compute_unpadded_size(ids.start, ids.bytes, sizes.length, token_count) < 0:
        return -1
    for sequence in range(sequence_count):
        start, end = starts[sequence], starts[sequence + 1]
        label = load_u8(spans[PackedFeature.NEXT_SENTENCE_LABELS].start + sequence)
        is_valid, after = _check_sequence_and_find_end(
            spans, sizes, position, sequence + 1, start, end, position_varints_address
        )
        if not is_valid or label > 1:
            return -1
        masked = after.used - position.used
        hashes[sequence] = _combine_hashes(
            end - start,
            masked,
            label,
            _hash_bytes(position.ids, after.ids - position.ids, _IDS_SEED),
            _hash_bytes(position.segments, end - start, _SEGMENTS_SEED),
            _hash_bytes(position.masked_ids, after.masked_ids - position.masked_ids, _MASKED_IDS_SEED),
            _hash_positions(position.masked_positions, masked, start, _POSITIONS_SEED),
        )
        position = after
    return sequence_count if _has_zero_padding(spans, sizes, sequence_count, position) else -1


@kernel_without_refcounts
def check_and_hash_packs(
    buffer: ByteArray,
    position: int,
    buffer_end: int,
    sizes: PackSizes,
    table: FeatureTable,
    position_varints: ByteArray,
    scanned: ScannedPacks,
) -> tuple[int, int]:
    """Check the packed records in `buffer[position:buffer_end]`, hash their sequences, and append the results to `scanned`.

    Args:
        buffer: The bytes of the file, uint8.
        position: The position in the buffer at which a record begins.
        buffer_end: The end of the bytes in the buffer.
        sizes: The sizes that every pack must have.
        table: The feature table of packed records (`wire.features.make_feature_table`).
        position_varints: The varints 0, 1, 2, ... (`wire.example.build_position_varint_table`).
        scanned: The results, which must have room for all packs in the buffer.

    Returns:
        (the `ScanStatus` that tells why the scan stopped, the position of the record at which it stopped).
    """
    base, varints = address_of(buffer), address_of(position_varints)
    done, starts = scanned.done, scanned.starts
    while True:
        status, size = check_frame(base + position, base + buffer_end)
        if status != ScanStatus.GOOD:
            return status, position
        payload = base + position + 12
        if not locate_features(payload, payload + size, table):
            return ScanStatus.UNUSUAL, position
        count = _check_and_hash_pack(table.spans, sizes, varints, starts, scanned.hashes[done[1] :])
        if count < 0:
            return ScanStatus.UNUSUAL, position
        for sequence in range(count):
            scanned.lengths[done[1] + sequence] = starts[sequence + 1] - starts[sequence]
        scanned.sequences[done[0]] = count
        scanned.record_index[done[0], 0] = size + 16
        scanned.record_index[done[0], 1] = load_u32(payload + size)
        done[0] += 1
        done[1] += count
        position += size + 16
