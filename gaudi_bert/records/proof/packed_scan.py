"""The scan of packed records: framing, both CRCs, the whole layout checked, and a hash of every sequence
(numba kernels).

The layout must be exactly what packing makes: numbers of sequences, positions that start again with each,
starts, weights, masked positions within their sequence, and zeros behind. The hashes are those that the
unpacked sequences have (`fingerprint`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gaudi_bert.records.proof.fingerprint import (
    IDS_SEED,
    MASKED_IDS_SEED,
    POSITIONS_SEED,
    SEGMENTS_SEED,
    hash_bytes,
    hash_positions,
    hash_together,
)
from gaudi_bert.records.read.unpacked_index import GOOD, UNUSUAL, next_record
from gaudi_bert.records.wire.encode import position_bytes
from gaudi_bert.records.wire.features import locate_features
from gaudi_bert.records.wire.memory import KERNEL_OPTIONS, count_bits, load_u8, load_u32, load_word
from gaudi_bert.records.wire.values import all_bytes_are, is_zero, real_bytes

__all__ = ["scan_packed"]

_HIGH = np.int64(-0x7F7F7F7F7F7F7F80)
_ONE_FLOAT = np.int64(0x3F800000)

# The features in sorted order, as `PackedSchema.features` has them.
_I, _MASK, _MASKED_I, _MASKED_P, _WEIGHTS, _LABELS, _STARTS, _REAL, _POSITIONS, _SEGMENTS = range(10)


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
def _skip_numbers(at: int, end: int, number: int, count: int) -> int:
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
    """The number of tokens: numbers of sequences are varints of one byte below 128, so it is found from the
    back."""
    at, size = spans[_MASK, 0], spans[_MASK, 1]
    values = size
    for place in range(size):
        values -= load_u8(at + place) >> 7
    padding = 0
    while padding < size and load_u8(at + size - 1 - padding) == 0:
        padding += 1
    return length - padding if values == length else -1


@njit(**KERNEL_OPTIONS)
def _has_sizes(spans: np.ndarray, length: int, slots: int, depth: int) -> bool:
    """Whether the features whose values take a fixed number of bytes have it."""
    return (
        spans[_WEIGHTS, 1] == 4 * slots
        and spans[_REAL, 1] == 4 * depth
        and spans[_LABELS, 1] == depth
        and spans[_SEGMENTS, 1] == length
    )


@njit(**KERNEL_OPTIONS)
def _is_padded(
    spans: np.ndarray, length: int, slots: int, depth: int, count: int, used: int, mask: int, where: int, masked: int
) -> bool:
    """Whether all is zero behind the last sequence; `mask`, `where` and `masked` point behind its values."""
    tokens_padding = spans[_MASK, 0] + spans[_MASK, 1] - mask
    where_padding = spans[_POSITIONS, 0] + spans[_POSITIONS, 1] - where
    unused = slots - used
    return (
        tokens_padding == where_padding
        and is_zero(where, where_padding)
        and spans[_MASKED_P, 0] + spans[_MASKED_P, 1] - masked == unused
        and is_zero(masked, unused)
        and is_zero(spans[_WEIGHTS, 0] + 4 * used, 4 * unused)
        and is_zero(spans[_LABELS, 0] + count, depth - count)
        and real_bytes(spans[_MASKED_I, 0], spans[_MASKED_I, 1], slots, used) >= 0
    )


@njit(**KERNEL_OPTIONS)
def _skip_positions(at: int, end: int, count: int, first: int, last: int) -> int:
    """The address after `count` masked positions; -1 unless each lies in first .. last - 1."""
    for _ in range(count):
        value, at = _read_small(at, end)
        if value < first or value >= last:
            return -1
    return at


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
    """Check a pack and set `hashes` to those of its sequences; their number, or -1 where it is not as we
    write it."""
    if not _has_sizes(spans, length, slots, depth):
        return -1
    count, tokens = _count_real(spans, depth), _real_tokens(spans, length)
    if count < 1 or tokens < 1 or not _read_starts(spans, depth, count, tokens, starts):
        return -1
    ids, segments, masked_ids = spans[_I, 0], spans[_SEGMENTS, 0], spans[_MASKED_I, 0]
    mask, where, masked = spans[_MASK, 0], spans[_POSITIONS, 0], spans[_MASKED_P, 0]
    used = 0
    if real_bytes(segments, length, length, tokens) < 0 or real_bytes(ids, spans[_I, 1], length, tokens) < 0:
        return -1
    for place in range(count):
        real = starts[place + 1] - starts[place]
        label = load_u8(spans[_LABELS, 0] + place)
        here = _count_masked(spans[_WEIGHTS, 0] + 4 * used, slots - used, place + 1)
        mask = _skip_numbers(mask, spans[_MASK, 0] + spans[_MASK, 1], place + 1, real)
        ids_next = _skip_varints(ids, spans[_I, 0] + spans[_I, 1], real)
        masked_ids_next = _skip_varints(masked_ids, spans[_MASKED_I, 0] + spans[_MASKED_I, 1], here)
        if mask < 0 or ids_next < 0 or masked_ids_next < 0 or label > 1 or here > predictions:
            return -1
        if position_bytes(real) > spans[_POSITIONS, 0] + spans[_POSITIONS, 1] - where:
            return -1
        masked_end = spans[_MASKED_P, 0] + spans[_MASKED_P, 1]
        masked_next = _skip_positions(masked, masked_end, here, starts[place], starts[place + 1])
        if masked_next < 0 or not _same_bytes(where, table, position_bytes(real)):
            return -1
        hashes[place] = hash_together(
            real,
            here,
            label,
            hash_bytes(ids, ids_next - ids, IDS_SEED),
            hash_bytes(segments, real, SEGMENTS_SEED),
            hash_bytes(masked_ids, masked_ids_next - masked_ids, MASKED_IDS_SEED),
            hash_positions(masked, here, starts[place], POSITIONS_SEED),
        )
        ids, masked_ids, masked = ids_next, masked_ids_next, masked_next
        segments, where, used = segments + real, where + position_bytes(real), used + here
    return count if _is_padded(spans, length, slots, depth, count, used, mask, where, masked) else -1


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
