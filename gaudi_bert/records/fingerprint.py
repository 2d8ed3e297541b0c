"""Fingerprints: that two sets of sequences are the same, in any order and in constant memory (numba kernels).

Each sequence has a 64-bit hash of all that it is: tokens, segments, masked positions (relative to its start),
masked ids, label, length. A multiset of sequences has, for each of 4096 classes of hashes, the count and the
sum (modulo 2**64) of its hashes, which depend neither on the order nor on the file layout. Two different
multisets have the same sums with probability about 2**-64; where the sums differ, the classes that differ say
which sequences to look at in a second pass.

The hash runs over the canonical bytes of the values, sixteen at a time, with the multiply-and-fold step of
wyhash (Wang Yi, 2019).
It is computed alike from an unpacked record (by its index row) and from a packed one, whose whole layout is
checked on the way:
numbers, positions, starts, weights and padding must be exactly what packing makes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gaudi_bert.records.memory import KERNEL_OPTIONS, add_words, count_bits, load_u8, load_u32, load_word, multiply_mix
from gaudi_bert.records.pack import position_bytes
from gaudi_bert.records.unpacked_index import (
    GOOD,
    IDS,
    IDS_BYTES,
    LABEL,
    LENGTH,
    MASKED,
    MASKED_IDS,
    MASKED_IDS_BYTES,
    POSITIONS,
    SEGMENTS,
    UNUSUAL,
    next_record,
)
from gaudi_bert.records.values import all_bytes_are, is_zero, real_bytes
from gaudi_bert.records.wire import locate_features

__all__ = ["CLASSES", "add_hashes", "class_of", "hash_unpacked", "scan_packed"]

CLASSES = 4096

_FIRST_KEY = np.int64(0x1F3D5B79A2C4E687)
_SECOND_KEY = np.int64(0x6C8E944D1F123BB5)
_THIRD_KEY = np.int64(0x2545F4914F6CDD1D)
# Where the chains of the parts start: never one of the keys, with which a product would be symmetric in its two words, or 0.
_IDS_SEED = np.int64(0x5851F42D4C957F2D)
_SEGMENTS_SEED = np.int64(0x14057B7EF767814F)
_MASKED_IDS_SEED = np.int64(0x369DEA0F31A53F85)
_POSITIONS_SEED = np.int64(0x4F1BBCDCBFA53E0B)
_OTHER_CHAIN = np.int64(0x61C8864680B583EB)
_HIGH = np.int64(-0x7F7F7F7F7F7F7F80)
_ONE_FLOAT = np.int64(0x3F800000)

_I, _MASK, _MASKED_I, _MASKED_P, _WEIGHTS, _LABELS, _STARTS, _REAL, _POSITIONS, _SEGMENTS = range(10)


@njit(**KERNEL_OPTIONS)
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
    first, second = np.int64(0), np.int64(0)
    rest = end - at
    if rest >= 8:
        first, second = load_word(at), load_word(end - 8)
    elif rest > 0:
        first = load_word(end - 8) >> (8 * (8 - rest))
    return multiply_mix(first ^ _FIRST_KEY, second ^ state ^ (size + 1))


@njit(inline="always")
def _hash_together(length: int, masked: int, label: int, ids: int, segments: int, masked_ids: int, positions: int) -> int:
    """The hash of a sequence from those of its parts, each of which has its own place in the chain."""
    state = multiply_mix((length | (masked << 16) | (label << 32)) ^ _SECOND_KEY, ids ^ _THIRD_KEY)
    state = multiply_mix(state ^ _FIRST_KEY, segments ^ _SECOND_KEY)
    state = multiply_mix(state ^ _SECOND_KEY, masked_ids ^ _THIRD_KEY)
    return multiply_mix(state ^ _THIRD_KEY, positions ^ _FIRST_KEY)


@njit(**KERNEL_OPTIONS)
def _hash_positions(at: int, count: int, offset: int, state: int) -> int:
    """Mix `count` masked positions, less `offset`, into `state`; they are varints of one or two bytes."""
    word = np.int64(0)
    for number in range(count):
        value = load_u8(at)
        at += 1
        if value >= 128:
            value += (load_u8(at) - 1) << 7
            at += 1
        word = (word << 16) | (value - offset)
        if (number & 3) == 3:
            state = multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)
            word = np.int64(0)
    return multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)


@njit(**KERNEL_OPTIONS)
def hash_unpacked(base: int, offsets: np.ndarray, index: np.ndarray, rows: int, hashes: np.ndarray) -> None:
    """Set `hashes` (int64) to the hashes of the first `rows` sequences of an index."""
    for number in range(rows):
        row = index[number]
        payload = base + offsets[number]
        length, masked = np.int64(row[LENGTH]), np.int64(row[MASKED])
        ids = _hash_bytes(payload + row[IDS], np.int64(row[IDS_BYTES]), _IDS_SEED)
        segments = _hash_bytes(payload + row[SEGMENTS], length, _SEGMENTS_SEED)
        masked_ids = _hash_bytes(payload + row[MASKED_IDS], np.int64(row[MASKED_IDS_BYTES]), _MASKED_IDS_SEED)
        positions = _hash_positions(payload + row[POSITIONS], masked, 0, _POSITIONS_SEED)
        hashes[number] = _hash_together(length, masked, np.int64(row[LABEL]), ids, segments, masked_ids, positions)


@njit(inline="always")
def class_of(value: int) -> int:
    """The class of a hash: twelve of its bits."""
    return (value >> 20) & 4095


@njit(**KERNEL_OPTIONS)
def add_hashes(hashes: np.ndarray, count: int, sums: np.ndarray) -> None:
    """Add the first `count` hashes to `sums`, int64 [CLASSES, 2]: count and sum of each class."""
    for number in range(count):
        value = hashes[number]
        sums[class_of(value), 0] += 1
        mixed = multiply_mix(value ^ _FIRST_KEY, _THIRD_KEY)
        sums[class_of(value), 1] = add_words(sums[class_of(value), 1], mixed)


@njit(**KERNEL_OPTIONS)
def _skip_varints(at: int, end: int, count: int) -> int:
    """The address after `count` varints; -1 where [at, end) holds fewer. Reads words that end at or before
    `end` only."""
    while at + 8 <= end:
        here = 8 - count_bits(load_word(at) & _HIGH)
        if here >= count:
            break
        count -= here
        at += 8
    while count > 0:
        if at >= end:
            return -1
        if load_u8(at) < 128:
            count -= 1
        at += 1
    return at


@njit(**KERNEL_OPTIONS)
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


@njit(**KERNEL_OPTIONS)
def _are_numbers(at: int, end: int, number: int, count: int) -> int:
    """The address after `count` times the varint `number`; -1 where it is something else."""
    if number < 128:
        return at + count if count <= end - at and all_bytes_are(at, count, number) else -1
    for _ in range(count):
        value, at = _read_small(at, end)
        if value != number:
            return -1
    return at


@njit(**KERNEL_OPTIONS)
def _same_bytes(left: int, right: int, size: int) -> bool:
    different = np.int64(0)
    end = left + size
    while left + 8 <= end:
        different |= load_word(left) ^ load_word(right)
        left += 8
        right += 8
    while left < end:
        different |= load_u8(left) ^ load_u8(right)
        left += 1
        right += 1
    return different == 0


@njit(**KERNEL_OPTIONS)
def _count_masked(at: int, slots: int, number: int) -> int:
    """How many of up to `slots` float32 weights from `at` on equal `number`."""
    bits = np.int64(np.float32(number).view(np.int32))
    count = 0
    while count < slots and load_u32(at + 4 * count) == bits:
        count += 1
    return count


@njit(**KERNEL_OPTIONS)
def _count_real(spans: np.ndarray, depth: int) -> int:
    """How many sequences the pack has by its next-sentence weights, 1..1 0..0; -1 for another form."""
    at = spans[_REAL, 0]
    count = 0
    while count < depth and load_u32(at + 4 * count) == _ONE_FLOAT:
        count += 1
    return count if is_zero(at + 4 * count, 4 * (depth - count)) else -1


@njit(**KERNEL_OPTIONS)
def _read_starts(spans: np.ndarray, depth: int, count: int, tokens: int, starts: np.ndarray) -> bool:
    """Fill `starts` [count + 1] with where the sequences start, and the end; False unless they ascend from
    0."""
    at = spans[_STARTS, 0]
    end = at + spans[_STARTS, 1]
    for place in range(count):
        starts[place], at = _read_small(at, end)
        if starts[place] < 0 or (place > 0 and starts[place] <= starts[place - 1]):
            return False
    starts[count] = tokens
    return starts[0] == 0 and tokens > starts[count - 1] and end - at == depth - count and is_zero(at, end - at)


@njit(**KERNEL_OPTIONS)
def _real_tokens(spans: np.ndarray, length: int) -> int:
    """The number of tokens: numbers of sequences are varints of one byte below 128, so it is found from the back."""
    at, size = spans[_MASK, 0], spans[_MASK, 1]
    values = size
    for place in range(size):
        values -= load_u8(at + place) >> 7
    padding = 0
    while padding < size and load_u8(at + size - 1 - padding) == 0:
        padding += 1
    return length - padding if values == length else -1


@njit(**KERNEL_OPTIONS)
def _hash_pack(
    spans: np.ndarray,
    length: int,
    slots: int,
    depth: int,
    predictions: int,
    table: int,
    starts: np.ndarray,
    hashes: np.ndarray,
) -> int:
    """Check one pack and set `hashes` to those of its sequences; their number, or -1 where it is not a pack
    as we write it."""
    if spans[_WEIGHTS, 1] != 4 * slots or spans[_REAL, 1] != 4 * depth or spans[_LABELS, 1] != depth:
        return -1
    if spans[_SEGMENTS, 1] != length:
        return -1
    count = _count_real(spans, depth)
    tokens = _real_tokens(spans, length)
    if count < 1 or tokens < 1 or not _read_starts(spans, depth, count, tokens, starts):
        return -1
    ids, masked_ids = spans[_I, 0], spans[_MASKED_I, 0]
    ids_end, masked_ids_end = ids + spans[_I, 1], masked_ids + spans[_MASKED_I, 1]
    mask, mask_end = spans[_MASK, 0], spans[_MASK, 0] + spans[_MASK, 1]
    where, where_end = spans[_POSITIONS, 0], spans[_POSITIONS, 0] + spans[_POSITIONS, 1]
    masked, masked_end = spans[_MASKED_P, 0], spans[_MASKED_P, 0] + spans[_MASKED_P, 1]
    segments, used = spans[_SEGMENTS, 0], np.int64(0)
    if real_bytes(segments, length, length, tokens) < 0 or real_bytes(ids, ids_end - ids, length, tokens) < 0:
        return -1
    for place in range(count):
        real = starts[place + 1] - starts[place]
        label = load_u8(spans[_LABELS, 0] + place)
        mask = _are_numbers(mask, mask_end, place + 1, real)
        ids_next = _skip_varints(ids, ids_end, real)
        here = _count_masked(spans[_WEIGHTS, 0] + 4 * used, slots - used, place + 1)
        masked_ids_next = _skip_varints(masked_ids, masked_ids_end, here)
        if mask < 0 or ids_next < 0 or masked_ids_next < 0 or label > 1 or here > predictions:
            return -1
        if position_bytes(real) > where_end - where or not _same_bytes(where, table, position_bytes(real)):
            return -1
        masked_next = masked
        for _ in range(here):
            value, masked_next = _read_small(masked_next, masked_end)
            if value < starts[place] or value >= starts[place + 1]:
                return -1
        hashes[place] = _hash_together(
            real,
            here,
            label,
            _hash_bytes(ids, ids_next - ids, _IDS_SEED),
            _hash_bytes(segments, real, _SEGMENTS_SEED),
            _hash_bytes(masked_ids, masked_ids_next - masked_ids, _MASKED_IDS_SEED),
            _hash_positions(masked, here, starts[place], _POSITIONS_SEED),
        )
        ids, masked_ids, masked = ids_next, masked_ids_next, masked_next
        segments, where, used = segments + real, where + position_bytes(real), used + here
    padding, unused = length - tokens, slots - used
    padded = mask_end - mask == padding and where_end - where == padding and is_zero(where, padding)
    padded = padded and masked_end - masked == unused and is_zero(masked, unused)
    padded = padded and is_zero(spans[_WEIGHTS, 0] + 4 * used, 4 * unused)
    padded = padded and is_zero(spans[_LABELS, 0] + count, depth - count)
    padded = padded and real_bytes(spans[_MASKED_I, 0], spans[_MASKED_I, 1], slots, used) >= 0
    return count if padded else -1


@njit(**KERNEL_OPTIONS)
def scan_packed(
    base: int,
    position: int,
    filled: int,
    schema: np.ndarray,
    keys: int,
    spans: np.ndarray,
    table: int,
    hashes: np.ndarray,
    sizes: np.ndarray,
    done: np.ndarray,
) -> tuple[int, int]:
    """Check and hash the packs in a buffer.

    Args:
        base, position, filled: the buffer, as in `scan_unpacked`.
        schema: int64: L, Q, S, P.
        keys: address, as in `locate_features`.
        spans: int64 [15, 2], its work space.
        table: address of the varints 0, 1, 2, ...
        hashes: int64: those of the sequences are appended from done[1] on.
        sizes: int32: the number of sequences of each pack, appended from done[0] on.
        done: int64 [3]: packs, sequences, tokens so far.

    Returns:
        Why it stopped, and the position of the record at which it stopped.
    """
    length, slots, depth, predictions = schema[0], schema[1], schema[2], schema[3]
    starts = np.empty(depth + 1, np.int64)
    while True:
        status, size = next_record(base + position, base + filled)
        if status != GOOD:
            return status, position
        payload = base + position + 12
        if not locate_features(payload, payload + size, keys, 10, np.int64(spans.ctypes.data)):
            return UNUSUAL, position
        count = _hash_pack(spans, length, slots, depth, predictions, table, starts, hashes[done[1] :])
        if count < 0:
            return UNUSUAL, position
        sizes[done[0]] = count
        done[0] += 1
        done[1] += count
        done[2] += starts[count]
        position += size + 16
