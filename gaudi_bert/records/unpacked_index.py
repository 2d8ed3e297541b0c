"""The scan of unpacked records: framing, both CRCs, every value checked, and an index of what is where (numba
kernels).

One row of the index says all that packing and proving need, so no record is parsed twice. Offsets are
relative to the record's payload, sizes count the bytes of real values, without padding.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gaudi_bert.records.crc32c import crc32c_kernel, crc_of_word, mask_crc
from gaudi_bert.records.memory import KERNEL_OPTIONS, load_u8, load_u32, load_word
from gaudi_bert.records.schema import MAX_RECORD_BYTES
from gaudi_bert.records.values import count_leading_ones, count_unit_floats, real_bytes, scan_positions
from gaudi_bert.records.wire import locate_features

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
    "next_record",
    "scan_unpacked",
]

# Columns of the index: length n, masked positions k, next-sentence label, then offsets and sizes in bytes.
INDEX_COLUMNS = 10
LENGTH, MASKED, LABEL, IDS, IDS_BYTES, SEGMENTS, POSITIONS, POSITIONS_BYTES, MASKED_IDS, MASKED_IDS_BYTES = range(10)

# What a record is, and why a scan stopped: MORE of it must be read, the index is FULL, or the kernel refuses it.
MORE, GOOD, FULL, BAD_LENGTH, BAD_BYTES, TOO_LONG, UNUSUAL = range(7)

# The features in sorted order, as `UnpackedSchema.features` has them.
_IDS, _MASK, _MASKED_IDS, _POSITIONS, _WEIGHTS, _LABEL, _SEGMENTS = range(7)


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
    if mask_crc(crc32c_kernel(payload, size, 0)) != load_u32(payload + size):
        return BAD_BYTES, size
    return GOOD, size


@njit(**KERNEL_OPTIONS)
def index_record(
    start: int,
    end: int,
    length: int,
    predictions: int,
    keys: np.ndarray,
    order: np.ndarray,
    spans: np.ndarray,
    row: np.ndarray,
) -> bool:
    """Fill the index `row` of the unpacked example in [start, end); False where it is not one in the usual
    encoding."""
    if not locate_features(start, end, keys, order, spans):
        return False
    if spans[_MASK, 1] != length or spans[_SEGMENTS, 1] != length or spans[_WEIGHTS, 1] != 4 * predictions:
        return False
    real = count_leading_ones(spans[_MASK, 0], length)
    masked = count_unit_floats(spans[_WEIGHTS, 0], 4 * predictions)
    if real <= 0 or masked < 0 or spans[_LABEL, 1] != 1 or load_u8(spans[_LABEL, 0]) > 1:
        return False
    ids_bytes = real_bytes(spans[_IDS, 0], spans[_IDS, 1], length, real)
    masked_ids_bytes = real_bytes(spans[_MASKED_IDS, 0], spans[_MASKED_IDS, 1], predictions, masked)
    segments_bytes = real_bytes(spans[_SEGMENTS, 0], length, length, real)
    positions_bytes = scan_positions(spans[_POSITIONS, 0], spans[_POSITIONS, 1], predictions, masked, real)
    if ids_bytes < 0 or masked_ids_bytes < 0 or segments_bytes < 0 or positions_bytes < 0:
        return False
    row[LENGTH], row[MASKED], row[LABEL] = real, masked, load_u8(spans[_LABEL, 0])
    row[IDS], row[IDS_BYTES] = spans[_IDS, 0] - start, ids_bytes
    row[SEGMENTS] = spans[_SEGMENTS, 0] - start
    row[POSITIONS], row[POSITIONS_BYTES] = spans[_POSITIONS, 0] - start, positions_bytes
    row[MASKED_IDS], row[MASKED_IDS_BYTES] = spans[_MASKED_IDS, 0] - start, masked_ids_bytes
    return True


@njit(**KERNEL_OPTIONS)
def scan_unpacked(
    base: int,
    position: int,
    filled: int,
    first: int,
    length: int,
    predictions: int,
    keys: np.ndarray,
    order: np.ndarray,
    offsets: np.ndarray,
    index: np.ndarray,
) -> tuple[int, int, int]:
    """Index the records in a buffer.

    Args:
        base: address of the buffer.
        position: where in the buffer the first record's frame begins.
        filled: how many bytes of the buffer hold data.
        first: the row of the index that the first record takes.
        length, predictions: L and P of the schema.
        keys, order: as in `locate_features`.
        offsets: int64 [rows]: set to the positions of the payloads in the buffer.
        index: int32 [rows, INDEX_COLUMNS].

    Returns:
        Why it stopped, the position of the record at which it stopped, and the next free row.
    """
    spans = np.empty((7, 2), np.int64)
    row = first
    while True:
        status, size = next_record(base + position, base + filled)
        if status != GOOD:
            return status, position, row
        if row == offsets.size:
            return FULL, position, row
        payload = base + position + 12
        if not index_record(payload, payload + size, length, predictions, keys, order, spans, index[row]):
            return UNUSUAL, position, row
        offsets[row] = position + 12
        position += size + 16
        row += 1
