"""Fingerprints, which show in constant memory that two sets of sequences are equal in any order (numba kernels).

Each sequence gets a 64-bit hash of its tokens, segments, masked positions (relative to its start), masked ids, label and
length. The fingerprint of a multiset of sequences is the sum of its mixed hashes, modulo 2**64. It depends neither on the
order of the sequences nor on the file layout. Two different multisets have the same fingerprint with a probability of about
2**-64.

The hash is computed from the canonical bytes of the values, sixteen at a time, with the multiply-and-fold step of wyhash
(Wang Yi, 2019). A sequence has the same hash in an unpacked record and in a pack. When a pack is hashed, its layout is
checked completely: sequence numbers, positions, starts, weights and padding must be exactly as this package writes them.

The kernels work on addresses. Parameters named `at`, `start` and `end` are addresses of bytes, and `end` is exclusive.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.shards import IndexArray
from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.features import PackedFeature
from gaudi_bert.common.memory import add_words, address_of, as_word, count_bits, load_u8, load_u32, load_word, multiply_mix
from gaudi_bert.tfrecords.scan import IndexedSequences
from gaudi_bert.tfrecords.wire.example import position_bytes
from gaudi_bert.tfrecords.wire.features import FeatureTable, locate_features
from gaudi_bert.tfrecords.wire.framing import ScanStatus, next_record
from gaudi_bert.tfrecords.wire.values import all_bytes_are, is_zero, real_bytes

_FIRST_KEY = as_word(0x1F3D5B79A2C4E687)
_SECOND_KEY = as_word(0x6C8E944D1F123BB5)
_THIRD_KEY = as_word(0x2545F4914F6CDD1D)
# The initial states of the hash chains, one for each part of a sequence. If a state were equal to a key, swapping two words
# could leave the hash unchanged, or a product could be zero. Therefore the states are other numbers.
_IDS_SEED = as_word(0x5851F42D4C957F2D)
_SEGMENTS_SEED = as_word(0x14057B7EF767814F)
_MASKED_IDS_SEED = as_word(0x369DEA0F31A53F85)
_POSITIONS_SEED = as_word(0x4F1BBCDCBFA53E0B)
_OTHER_CHAIN = as_word(0x61C8864680B583EB)


@borrowing_kernel
def _hash_bytes(at: int, size: int, state: int) -> int:
    """Return `state` after `size` bytes from `at` on are mixed into it.

    At least eight bytes of the same record must precede `at`, because a word that ends at the last byte may begin earlier.
    """
    end = at + size
    other = state ^ _OTHER_CHAIN
    while at + 32 <= end:  # two independent chains, because one chain would wait for the latency of each multiplication
        state = multiply_mix(load_word(at) ^ _FIRST_KEY, load_word(at + 8) ^ state)
        other = multiply_mix(load_word(at + 16) ^ _SECOND_KEY, load_word(at + 24) ^ other)
        at += 32
    if size >= 32:
        state = multiply_mix(state ^ _THIRD_KEY, other ^ _SECOND_KEY)
    if at + 16 <= end:
        state = multiply_mix(load_word(at) ^ _FIRST_KEY, load_word(at + 8) ^ state)
        at += 16
    first, second = as_word(0), as_word(0)
    rest = end - at
    if rest >= 8:
        first, second = load_word(at), load_word(end - 8)
    elif rest > 0:
        first = load_word(end - 8) >> (8 * (8 - rest))
    return multiply_mix(first ^ _FIRST_KEY, second ^ state ^ (size + 1))


@inlined_kernel
def _hash_together(length: int, masked: int, label: int, ids: int, segments: int, masked_ids: int, positions: int) -> int:
    """Return the hash of a sequence.

    Args:
        length: The number of tokens.
        masked: The number of masked positions.
        label: The next-sentence label.
        ids: The hash of the token ids.
        segments: The hash of the segment ids.
        masked_ids: The hash of the masked ids.
        positions: The hash of the masked positions.
    """
    state = multiply_mix((length | (masked << 16) | (label << 32)) ^ _SECOND_KEY, ids ^ _THIRD_KEY)
    state = multiply_mix(state ^ _FIRST_KEY, segments ^ _SECOND_KEY)
    state = multiply_mix(state ^ _SECOND_KEY, masked_ids ^ _THIRD_KEY)
    return multiply_mix(state ^ _THIRD_KEY, positions ^ _FIRST_KEY)


@borrowing_kernel
def _hash_positions(at: int, count: int, offset: int, state: int) -> int:
    """Return `state` after `count` masked positions are mixed into it.

    The positions are varints of one or two bytes. `offset` is subtracted from each, so that it counts from the start of its
    sequence.
    """
    word = as_word(0)
    for number in range(count):
        value = load_u8(at)
        at += 1
        if value >= 128:
            value += (load_u8(at) - 1) << 7
            at += 1
        word = (word << 16) | (value - offset)
        if (number & 3) == 3:
            state = multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)
            word = as_word(0)
    return multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)


@borrowing_kernel
def hash_unpacked(sequences: IndexedSequences, count: int, hashes: IntArray) -> None:
    """Compute the hashes of the first `count` sequences of an index, and store them in `hashes` (int64)."""
    base = address_of(sequences.buffer)
    for number in range(count):
        row = sequences.rows[number]
        payload = base + sequences.offsets[number]
        length, masked = as_word(row.length), as_word(row.masked)
        ids = _hash_bytes(payload + row.ids, as_word(row.ids_bytes), _IDS_SEED)
        segments = _hash_bytes(payload + row.segments, length, _SEGMENTS_SEED)
        masked_ids = _hash_bytes(payload + row.masked_ids, as_word(row.masked_ids_bytes), _MASKED_IDS_SEED)
        positions = _hash_positions(payload + row.positions, masked, 0, _POSITIONS_SEED)
        hashes[number] = _hash_together(length, masked, as_word(row.label), ids, segments, masked_ids, positions)


@borrowing_kernel
def sum_hashes(hashes: IntArray) -> int:
    """Return the sum of the mixed hashes, modulo 2**64. The result is an int64, so it may be negative."""
    total = as_word(0)
    for value in hashes:
        total = add_words(total, multiply_mix(value ^ _FIRST_KEY, _THIRD_KEY))
    return total


# --- the scan of packed records: check the framing, both CRCs and the complete layout, and hash every sequence

_HIGH = as_word(-0x7F7F7F7F7F7F7F80)
_ONE_FLOAT = as_word(0x3F800000)


class PackSizes(NamedTuple):
    """The sizes of the packs.

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
    """The results of a scan so far. `scan_packed` appends to the arrays, and `done` counts the entries in use.

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


class _Cursor(NamedTuple):
    """The position at which the next sequence of a pack begins.

    All attributes but the last are addresses of the sequence's first value in a feature.

    Attributes:
        ids: In `input_ids`.
        segments: In `segment_ids`.
        numbers: In `input_mask`, which contains the number of the sequence for each token.
        positions: In `positions`.
        masked_ids: In `masked_lm_ids`.
        masked_positions: In `masked_lm_positions`.
        used: The number of masked slots that the sequences before this one use.
    """

    ids: int
    segments: int
    numbers: int
    positions: int
    masked_ids: int
    masked_positions: int
    used: int


@borrowing_kernel
def _skip_varints(at: int, end: int, count: int) -> int:
    """Return the address after `count` varints, or -1 if there are fewer in [at, end). Nothing is read beyond `end`."""
    while at + 8 <= end:
        ended = 8 - count_bits(load_word(at) & _HIGH)
        if ended >= count:
            break
        count -= ended
        at += 8
    while count > 0:
        if at >= end:
            return -1
        if load_u8(at) < 128:
            count -= 1
        at += 1
    return at


@borrowing_kernel
def _read_small(at: int, end: int) -> tuple[int, int]:
    """Read a canonical varint of one or two bytes.

    Returns:
        (value, next address). The value is -1 if there is no such varint at `at`.
    """
    if at >= end:
        return -1, at
    value = load_u8(at)
    at += 1
    if value < 128:
        return value, at
    if at >= end:
        return -1, at
    high = load_u8(at)
    if high == 0 or high >= 128:
        return -1, at
    return value + ((high - 1) << 7), at + 1


@borrowing_kernel
def _skip_numbers(at: int, end: int, number: int, count: int) -> int:
    """Return the address after `count` repetitions of the varint `number`, or -1 if there is any other value."""
    if number < 128:
        return at + count if count <= end - at and all_bytes_are(at, count, number) else -1
    for _ in range(count):
        value, at = _read_small(at, end)
        if value != number:
            return -1
    return at


@borrowing_kernel
def _same_bytes(first: int, second: int, size: int) -> bool:
    """Return whether the `size` bytes at the two addresses are equal."""
    different = as_word(0)
    end = first + size
    while first + 8 <= end:
        different |= load_word(first) ^ load_word(second)
        first += 8
        second += 8
    while first < end:
        different |= load_u8(first) ^ load_u8(second)
        first += 1
        second += 1
    return different == 0


@borrowing_kernel
def _count_masked(at: int, slots: int, number: int) -> int:
    """Count the leading float32 weights that are equal to `number`, among the `slots` weights from `at` on."""
    bits = as_word(np.float32(number).view(np.int32))
    count = 0
    while count < slots and load_u32(at + 4 * count) == bits:
        count += 1
    return count


@borrowing_kernel
def _count_real(spans: RowArray, depth: int) -> int:
    """Return the number of sequences in the pack, or -1 if its next-sentence weights are not ones followed by zeros."""
    at = spans[PackedFeature.NEXT_SENTENCE_WEIGHTS].start
    count = 0
    while count < depth and load_u32(at + 4 * count) == _ONE_FLOAT:
        count += 1
    return count if is_zero(at + 4 * count, 4 * (depth - count)) else -1


@borrowing_kernel
def _read_starts(spans: RowArray, depth: int, count: int, tokens: int, starts: IntArray) -> bool:
    """Fill `starts` [count + 1] with the start of each sequence and the end of the last one, in tokens.

    Returns:
        Whether the starts ascend from 0 and the unused entries are 0.
    """
    span = spans[PackedFeature.NEXT_SENTENCE_POSITIONS]
    at, end = span.start, span.start + span.bytes
    for index in range(count):
        starts[index], at = _read_small(at, end)
        if starts[index] < 0 or (index > 0 and starts[index] <= starts[index - 1]):
            return False
    starts[count] = tokens
    return starts[0] == 0 and tokens > starts[count - 1] and end - at == depth - count and is_zero(at, end - at)


@borrowing_kernel
def _real_tokens(spans: RowArray, length: int) -> int:
    """Return the number of non-padding tokens, or -1 if `input_mask` does not have `length` values.

    The zero bytes at the end of `input_mask` are counted as padding. Each of them is a value, because the last byte of a
    sequence number is never zero.
    """
    span = spans[PackedFeature.INPUT_MASK]
    at, size = span.start, span.bytes
    values = size
    for index in range(size):
        values -= load_u8(at + index) >> 7
    padding = 0
    while padding < size and load_u8(at + size - 1 - padding) == 0:
        padding += 1
    return length - padding if values == length else -1


@borrowing_kernel
def _is_padded(spans: RowArray, sizes: PackSizes, count: int, end: _Cursor) -> bool:
    """Return whether all features are zero after the last sequence of the pack.

    Args:
        spans: Where the features of the pack are.
        sizes: The sizes of the pack.
        count: The number of sequences.
        end: The position after the last sequence.
    """
    numbers, positions = spans[PackedFeature.INPUT_MASK], spans[PackedFeature.POSITIONS]
    masked_ids, masked_positions = spans[PackedFeature.MASKED_LM_IDS], spans[PackedFeature.MASKED_LM_POSITIONS]
    padding = positions.start + positions.bytes - end.positions
    unused = sizes.slots - end.used
    return (
        numbers.start + numbers.bytes - end.numbers == padding
        and is_zero(end.positions, padding)
        and masked_positions.start + masked_positions.bytes - end.masked_positions == unused
        and is_zero(end.masked_positions, unused)
        and is_zero(spans[PackedFeature.MASKED_LM_WEIGHTS].start + 4 * end.used, 4 * unused)
        and is_zero(spans[PackedFeature.NEXT_SENTENCE_LABELS].start + count, sizes.depth - count)
        and real_bytes(masked_ids.start, masked_ids.bytes, sizes.slots, end.used) >= 0
    )


@borrowing_kernel
def _skip_positions(at: int, end: int, count: int, first: int, last: int) -> int:
    """Return the address after `count` masked positions, or -1 unless each position is from `first` to `last` - 1."""
    for _ in range(count):
        value, at = _read_small(at, end)
        if value < first or value >= last:
            return -1
    return at


@borrowing_kernel
def _cursor_after(
    spans: RowArray, sizes: PackSizes, cursor: _Cursor, number: int, start: int, end: int, position_varints: int
) -> tuple[bool, _Cursor]:
    """Check one sequence of a pack and return the position after it.

    Args:
        spans: Where the features of the pack are.
        sizes: The sizes of the pack.
        cursor: The position of the sequence.
        number: The number of the sequence in its pack, from 1.
        start: The number of its first token in the row.
        end: The number of the token after its last one.
        position_varints: The address of the varints 0, 1, 2, ...

    Returns:
        (whether the sequence is encoded as this package writes it, the position after it).
    """
    real, positions_size = end - start, position_bytes(end - start)
    ids, numbers, positions = spans[PackedFeature.INPUT_IDS], spans[PackedFeature.INPUT_MASK], spans[PackedFeature.POSITIONS]
    masked_ids, masked_positions = spans[PackedFeature.MASKED_LM_IDS], spans[PackedFeature.MASKED_LM_POSITIONS]
    weights = spans[PackedFeature.MASKED_LM_WEIGHTS].start
    masked = _count_masked(weights + 4 * cursor.used, sizes.slots - cursor.used, number)
    after = _Cursor(
        _skip_varints(cursor.ids, ids.start + ids.bytes, real),
        cursor.segments + real,
        _skip_numbers(cursor.numbers, numbers.start + numbers.bytes, number, real),
        cursor.positions + positions_size,
        _skip_varints(cursor.masked_ids, masked_ids.start + masked_ids.bytes, masked),
        _skip_positions(cursor.masked_positions, masked_positions.start + masked_positions.bytes, masked, start, end),
        cursor.used + masked,
    )
    whole = (
        min(after.ids, after.numbers, after.masked_ids, after.masked_positions) >= 0
        and masked <= sizes.predictions
        and after.positions <= positions.start + positions.bytes
        and _same_bytes(cursor.positions, position_varints, positions_size)
    )
    return whole, after


@borrowing_kernel
def _hash_pack(spans: RowArray, sizes: PackSizes, position_varints: int, starts: IntArray, hashes: IntArray) -> int:
    """Check a pack and store the hash of each of its sequences in `hashes`.

    Args:
        spans: Where the features of the pack are.
        sizes: The sizes of the pack.
        position_varints: The address of the varints 0, 1, 2, ...
        starts: int64 [S + 1], set to the start of each sequence and the end of the last one.
        hashes: int64, set to the hashes.

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
    count, tokens = _count_real(spans, sizes.depth), _real_tokens(spans, sizes.length)
    if count < 1 or tokens < 1 or not _read_starts(spans, sizes.depth, count, tokens, starts):
        return -1
    ids = spans[PackedFeature.INPUT_IDS]
    cursor = _Cursor(
        ids.start,
        spans[PackedFeature.SEGMENT_IDS].start,
        spans[PackedFeature.INPUT_MASK].start,
        spans[PackedFeature.POSITIONS].start,
        spans[PackedFeature.MASKED_LM_IDS].start,
        spans[PackedFeature.MASKED_LM_POSITIONS].start,
        as_word(0),
    )
    if real_bytes(cursor.segments, sizes.length, sizes.length, tokens) < 0:
        return -1
    if real_bytes(ids.start, ids.bytes, sizes.length, tokens) < 0:
        return -1
    for sequence in range(count):
        start, end = starts[sequence], starts[sequence + 1]
        label = load_u8(spans[PackedFeature.NEXT_SENTENCE_LABELS].start + sequence)
        whole, after = _cursor_after(spans, sizes, cursor, sequence + 1, start, end, position_varints)
        if not whole or label > 1:
            return -1
        masked = after.used - cursor.used
        hashes[sequence] = _hash_together(
            end - start,
            masked,
            label,
            _hash_bytes(cursor.ids, after.ids - cursor.ids, _IDS_SEED),
            _hash_bytes(cursor.segments, end - start, _SEGMENTS_SEED),
            _hash_bytes(cursor.masked_ids, after.masked_ids - cursor.masked_ids, _MASKED_IDS_SEED),
            _hash_positions(cursor.masked_positions, masked, start, _POSITIONS_SEED),
        )
        cursor = after
    return count if _is_padded(spans, sizes, count, cursor) else -1


@borrowing_kernel
def scan_packed(
    buffer: ByteArray,
    position: int,
    filled: int,
    sizes: PackSizes,
    table: FeatureTable,
    position_varints: ByteArray,
    scanned: ScannedPacks,
) -> tuple[int, int]:
    """Check and hash the packs in buffer[position:filled], and append the results to `scanned`.

    Args:
        buffer: The bytes of the file, uint8.
        position: The position in the buffer at which a record begins.
        filled: The number of bytes in the buffer.
        sizes: The sizes that every pack must have.
        table: The feature table of the packs (`wire.features.feature_table`).
        position_varints: The varints 0, 1, 2, ... (`wire.example.position_table`).
        scanned: The results, which must have room for all packs in the buffer.

    Returns:
        (a `ScanStatus` that tells why the scan stopped, the position of the record at which it stopped).
    """
    base, varints = address_of(buffer), address_of(position_varints)
    done, starts = scanned.done, scanned.starts
    while True:
        status, size = next_record(base + position, base + filled)
        if status != ScanStatus.GOOD:
            return status, position
        payload = base + position + 12
        if not locate_features(payload, payload + size, table):
            return ScanStatus.UNUSUAL, position
        count = _hash_pack(table.spans, sizes, varints, starts, scanned.hashes[done[1] :])
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
