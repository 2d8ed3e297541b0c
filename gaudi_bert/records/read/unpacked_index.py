"""The scan of unpacked records: framing, both CRCs, every value checked, and an index of what is where (numba
kernels).

One row of the index says all that packing and proving need, so no record is parsed twice. Offsets are
relative to the record's payload, sizes count the bytes of real values, without padding.
"""

from __future__ import annotations

from numba import njit

from gaudi_bert.records.schema import MAX_RECORD_BYTES
from gaudi_bert.records.wire.crc32c import append_crc, crc32c_kernel, crc_of_word, mask_crc
from gaudi_bert.records.wire.features import locate_features
from gaudi_bert.records.wire.memory import (
    KERNEL_OPTIONS,
    copy_bytes,
    load_u8,
    load_u32,
    load_word,
    prefetch,
    store_u32,
    store_word,
    word_at,
)
from gaudi_bert.records.wire.values import count_leading_ones, count_unit_floats, real_bytes, scan_positions

__all__ = [
    "BAD_BYTES",
    "BAD_LENGTH",
    "FULL",
    "GOOD",
    "IDS",
    "IDS_BYTES",
    "INDEX_COLUMNS",
    "LABEL",
    "LENGTH",
    "MASKED",
    "MASKED_IDS",
    "MASKED_IDS_BYTES",
    "MORE",
    "POSITIONS",
    "POSITIONS_BYTES",
    "SEGMENTS",
    "TOO_LONG",
    "UNUSUAL",
    "append_frames",
    "compact_rows",
    "next_record",
    "scan_unpacked",
]

# Columns of the index: length n, masked positions k, next-sentence label, then offsets and sizes in bytes.
INDEX_COLUMNS = 10
_ROW_BYTES = 4 * INDEX_COLUMNS
LENGTH, MASKED, LABEL, IDS, IDS_BYTES, SEGMENTS, POSITIONS, POSITIONS_BYTES, MASKED_IDS, MASKED_IDS_BYTES = range(
    INDEX_COLUMNS
)

# A sequence that was compacted holds its token ids, segments, masked ids and masked positions, one after the other.

# What a record is, and why a scan stopped: MORE of it must be read, the index is FULL, or the kernel refuses it.
MORE, GOOD, FULL, BAD_LENGTH, BAD_BYTES, TOO_LONG, UNUSUAL = range(7)

# The features in sorted order, as `UnpackedSchema.features` has them.
_FEATURES = 7
_IDS, _MASK, _MASKED_IDS, _POSITIONS, _WEIGHTS, _LABEL, _SEGMENTS = range(_FEATURES)


@njit(**KERNEL_OPTIONS)
def next_record(start: int, end: int) -> tuple[int, int]:
    """The record whose frame begins at address `start`, in bytes up to address `end`.

    Returns:
        (status, size of the payload); MORE: it is not wholly there; GOOD: it is, and its CRCs are right.
    """
    if end - start < 12:
        return MORE, 0
    size = load_word(start)
    if mask_crc(crc_of_word(size)) != load_u32(start + 8):
        return BAD_LENGTH, 0
    if size < 0 or size > MAX_RECORD_BYTES:
        return TOO_LONG, size
    if size + 16 > end - start:
        return MORE, size
    payload = start + 12
    for line in range(size, 2 * size, 64):  # the next record comes from memory while this one is looked at
        prefetch(payload + line)
    if mask_crc(crc32c_kernel(payload, size, 0)) != load_u32(payload + size):
        return BAD_BYTES, size
    return GOOD, size


@njit(**KERNEL_OPTIONS)
def append_frames(crc: int, start: int, end: int) -> int:
    """The CRC-32C of all bytes so far, from `crc` and the good records in [start, end).

    A payload's CRC is in its frame already and only joined to the others: its bytes are not read again.
    """
    while start < end:
        size = load_word(start)
        crc = crc32c_kernel(start, 12, crc)
        stored = (load_u32(start + 12 + size) - 0xA282EAD8) & 0xFFFFFFFF
        crc = append_crc(crc, size, ((stored >> 17) | (stored << 15)) & 0xFFFFFFFF)
        crc = crc32c_kernel(start + 12 + size, 4, crc)
        start += size + 16
    return crc


@njit(inline="always")
def _span(spans: int, feature: int) -> int:
    return word_at(spans, 2 * feature)


@njit(inline="always")
def _size(spans: int, feature: int) -> int:
    return word_at(spans, 2 * feature + 1)


@njit(**KERNEL_OPTIONS)
def index_record(start: int, end: int, length: int, predictions: int, keys: int, spans: int, row: int) -> bool:
    """Fill the index row at address `row` for the unpacked example in [start, end); False where it is not a usual one."""
    if not locate_features(start, end, keys, _FEATURES, spans):
        return False
    mask, weights, label, segments = (
        _span(spans, _MASK),
        _span(spans, _WEIGHTS),
        _span(spans, _LABEL),
        _span(spans, _SEGMENTS),
    )
    if _size(spans, _MASK) != length or _size(spans, _SEGMENTS) != length or _size(spans, _WEIGHTS) != 4 * predictions:
        return False
    real = count_leading_ones(mask, length)
    masked = count_unit_floats(weights, 4 * predictions)
    if real <= 0 or masked < 0 or _size(spans, _LABEL) != 1 or load_u8(label) > 1:
        return False
    ids, masked_ids, positions = _span(spans, _IDS), _span(spans, _MASKED_IDS), _span(spans, _POSITIONS)
    ids_bytes = real_bytes(ids, _size(spans, _IDS), length, real)
    masked_ids_bytes = real_bytes(masked_ids, _size(spans, _MASKED_IDS), predictions, masked)
    segments_bytes = real_bytes(segments, length, length, real)
    positions_bytes = scan_positions(positions, _size(spans, _POSITIONS), predictions, masked, real)
    if ids_bytes < 0 or masked_ids_bytes < 0 or segments_bytes < 0 or positions_bytes < 0:
        return False
    store_u32(row + 4 * LENGTH, real)
    store_u32(row + 4 * MASKED, masked)
    store_u32(row + 4 * LABEL, load_u8(label))
    store_u32(row + 4 * IDS, ids - start)
    store_u32(row + 4 * IDS_BYTES, ids_bytes)
    store_u32(row + 4 * SEGMENTS, segments - start)
    store_u32(row + 4 * POSITIONS, positions - start)
    store_u32(row + 4 * POSITIONS_BYTES, positions_bytes)
    store_u32(row + 4 * MASKED_IDS, masked_ids - start)
    store_u32(row + 4 * MASKED_IDS_BYTES, masked_ids_bytes)
    return True


@njit(**KERNEL_OPTIONS)
def scan_unpacked(
    base: int,
    position: int,
    filled: int,
    first: int,
    rows: int,
    length: int,
    predictions: int,
    keys: int,
    spans: int,
    offsets: int,
    index: int,
) -> tuple[int, int, int]:
    """Index the records in a buffer.

    Args:
        base: address of the buffer.
        position: where in the buffer the first record's frame begins.
        filled: how many bytes of the buffer hold data.
        first: the row of the index that the first record takes.
        rows: how many rows the index has.
        length, predictions: L and P of the schema.
        keys, spans: as in `locate_features`.
        offsets: address of int64 [rows]: set to the positions of the payloads in the buffer.
        index: address of int32 [rows, INDEX_COLUMNS].

    Returns:
        Why it stopped, the position of the record at which it stopped, and the next free row.
    """
    row = first
    while True:
        status, size = next_record(base + position, base + filled)
        if status != GOOD:
            return status, position, row
        if row == rows:
            return FULL, position, row
        payload = base + position + 12
        if not index_record(payload, payload + size, length, predictions, keys, spans, index + _ROW_BYTES * row):
            return UNUSUAL, position, row
        store_word(offsets + 8 * row, position + 12)
        position += size + 16
        row += 1


@njit(**KERNEL_OPTIONS)
def compact_rows(base: int, first: int, last: int, offsets: int, index: int, arena: int, at: int) -> int:
    """Copy the real values of some index rows into an arena, from position `at` on, and let the rows point there.

    Args:
        base: address of the buffer that the rows point into.
        first, last: which rows.
        offsets, index: as in `scan_unpacked`.
        arena: address of the arena; it does not overlap the buffer.
        at: the first free position in it.

    Returns:
        The next free position.
    """
    for number in range(first, last):
        row = index + _ROW_BYTES * number
        payload = base + load_word(offsets + 8 * number)
        target = arena + at
        length, ids_size = load_u32(row + 4 * LENGTH), load_u32(row + 4 * IDS_BYTES)
        masked_size, positions_size = load_u32(row + 4 * MASKED_IDS_BYTES), load_u32(row + 4 * POSITIONS_BYTES)
        copy_bytes(target, payload + load_u32(row + 4 * IDS), ids_size)
        copy_bytes(target + ids_size, payload + load_u32(row + 4 * SEGMENTS), length)
        masked_at = ids_size + length
        copy_bytes(target + masked_at, payload + load_u32(row + 4 * MASKED_IDS), masked_size)
        positions_at = masked_at + masked_size
        copy_bytes(target + positions_at, payload + load_u32(row + 4 * POSITIONS), positions_size)
        store_u32(row + 4 * IDS, 0)
        store_u32(row + 4 * SEGMENTS, ids_size)
        store_u32(row + 4 * MASKED_IDS, masked_at)
        store_u32(row + 4 * POSITIONS, positions_at)
        store_word(offsets + 8 * number, at)
        at += positions_at + positions_size
    return at
