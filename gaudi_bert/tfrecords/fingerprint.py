"""Fingerprints: that two sets of sequences are the same, in any order and in constant memory (numba kernels).

Each sequence has a 64-bit hash of all that it is: tokens, segments, masked positions (relative to its start),
masked ids, label, length. A multiset of sequences has the sum (modulo 2**64) of its mixed hashes, which depends neither on
the order nor on the file layout. Two different multisets have the same sum with probability about 2**-64.

The hash runs over the canonical bytes of the values, sixteen at a time, with the multiply-and-fold step of wyhash (Wang
Yi, 2019). It is computed alike from an unpacked record (by its index row) and from a packed one, whose complete layout is
checked on the way: numbers, positions, starts, weights and padding must be exactly what packing makes.
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
# Where the chains of the parts start: never one of the keys, with which a product would be symmetric in its two words, or 0.
_IDS_SEED = as_word(0x5851F42D4C957F2D)
_SEGMENTS_SEED = as_word(0x14057B7EF767814F)
_MASKED_IDS_SEED = as_word(0x369DEA0F31A53F85)
_POSITIONS_SEED = as_word(0x4F1BBCDCBFA53E0B)
_OTHER_CHAIN = as_word(0x61C8864680B583EB)


@borrowing_kernel
def _hash_bytes(at: int, size: int, state: int) -> int:
    """Mix `size` bytes into `state`; at least eight bytes of the same record lie before `at`."""
    end = at + size
    other = state ^ _OTHER_CHAIN
    while at + 32 <= end:  # two chains side by side, because a multiplication takes longer than it occupies the processor
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
    """The hash of a sequence from those of its parts, each of which has its own position in the chain."""
    state = multiply_mix((length | (masked << 16) | (label << 32)) ^ _SECOND_KEY, ids ^ _THIRD_KEY)
    state = multiply_mix(state ^ _FIRST_KEY, segments ^ _SECOND_KEY)
    state = multiply_mix(state ^ _SECOND_KEY, masked_ids ^ _THIRD_KEY)
    return multiply_mix(state ^ _THIRD_KEY, positions ^ _FIRST_KEY)


@borrowing_kernel
def _hash_positions(at: int, count: int, offset: int, state: int) -> int:
    """Mix `count` masked positions, less `offset`, into `state`; they are varints of one or two bytes."""
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
    """Set `hashes` (int64) to the hashes of the first `count` sequences of an index."""
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
    """Return the sum of mixed hashes, modulo 2**64."""
    total = as_word(0)
    for value in hashes:
        total = add_words(total, multiply_mix(value ^ _FIRST_KEY, _THIRD_KEY))
    return total


# --- the scan of packed records: framing, both CRCs, the complete layout, and a hash of every sequence

_HIGH = as_word(-0x7F7F7F7F7F7F7F80)
_ONE_FLOAT = as_word(0x3F800000)


class PackSizes(NamedTuple):
    """L, Q, S and P of the packs."""

    length: int
    slots: int
    depth: int
    predictions: int


class ScannedPacks(NamedTuple):
    """The results of a scan so far; all arrays are appended to."""

    hashes: IntArray  # int64, of each sequence
    lengths: Int32Array  # int32, tokens of each sequence
    sequences: Int32Array  # int32, how many each pack holds
    record_index: IndexArray  # uint32 [packs, 2], as `write_index` takes it
    done: IntArray  # int64 [2]: packs and sequences
    starts: IntArray  # int64 [S + 1], work space: where the sequences of the last pack start


class _Cursor(NamedTuple):
    """Start of the next sequence of a pack: addresses of its values, and the masked slots used before it."""

    ids: int
    segments: int
    numbers: int
    positions: int
    masked_ids: int
    masked_positions: int
    used: int


@borrowing_kernel
def _skip_varints(at: int, end: int, count: int) -> int:
    """The address after `count` varints; -1 where [at, end) holds fewer. Reads words that end at or before `end` only."""
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
    """A canonical varint of one or two bytes: (value, next address), or (-1, at)."""
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
    """The address after `count` times the varint `number`; -1 where it is something else."""
    if number < 128:
        return at + count if count <= end - at and all_bytes_are(at, count, number) else -1
    for _ in range(count):
        value, at = _read_small(at, end)
        if value != number:
            return -1
    return at


@borrowing_kernel
def _same_bytes(first: int, second: int, size: int) -> bool:
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
    """Count those of up to `slots` float32 weights from `at` on equal `number`."""
    bits = as_word(np.float32(number).view(np.int32))
    count = 0
    while count < slots and load_u32(at + 4 * count) == bits:
        count += 1
    return count


@borrowing_kernel
def _count_real(spans: RowArray, depth: int) -> int:
    """Count the sequences of the pack by its next-sentence weights, 1..1 0..0; -1 for anything else."""
    at = spans[PackedFeature.NEXT_SENTENCE_WEIGHTS].start
    count = 0
    while count < depth and load_u32(at + 4 * count) == _ONE_FLOAT:
        count += 1
    return count if is_zero(at + 4 * count, 4 * (depth - count)) else -1


@borrowing_kernel
def _read_starts(spans: RowArray, depth: int, count: int, tokens: int, starts: IntArray) -> bool:
    """Fill `starts` [count + 1] with where the sequences start, and the end; False unless they ascend from 0."""
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
    """The number of tokens: numbers of sequences are varints of one byte below 128, so it is counted from the back."""
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
    """Whether all is zero behind the last of `count` sequences, which is where `end` is."""
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
    """The address after `count` masked positions; -1 unless each is in first .. last - 1."""
    for _ in range(count):
        value, at = _read_small(at, end)
        if value < first or value >= last:
            return -1
    return at


@borrowing_kernel
def _cursor_after(
    spans: RowArray, sizes: PackSizes, cursor: _Cursor, number: int, start: int, end: int, position_varints: int
) -> tuple[bool, _Cursor]:
    """Check sequence `number`, which takes tokens start .. end - 1: (whether it is as we write it, where it ends).

    `position_varints` is the address of the varints 0, 1, 2, ...
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
    """Check a pack and set `hashes` to those of its sequences; their number, or -1 where it is not as we write it."""
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

    Why it stopped, and the position of the record at which it stopped.
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
