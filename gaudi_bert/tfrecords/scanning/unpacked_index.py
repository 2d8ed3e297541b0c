"""The scan of unpacked records: framing, both CRCs, every value checked, and an index of what is where (numba kernels).

One row of the index holds all that packing and proving need, so no record is parsed twice. Offsets are relative to the
record's payload, sizes count the bytes of real values, without padding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.common.memory import address_of, as_word, copy_bytes, load_u8
from gaudi_bert.tfrecords.wire.features import FeatureTable, locate_features
from gaudi_bert.tfrecords.wire.framing import ScanStatus, next_record
from gaudi_bert.tfrecords.wire.values import count_leading_ones, count_unit_floats, real_bytes, scan_positions

_INDEX_ROW = np.dtype(
    [
        (name, np.int32)
        for name in (
            "length",
            "masked",
            "label",
            "ids",
            "ids_bytes",
            "segments",
            "positions",
            "positions_bytes",
            "masked_ids",
            "masked_ids_bytes",
        )
    ]
)


class IndexedSequences(NamedTuple):
    """Sequences in a buffer, and where each one's values lie.

    Attributes:
        buffer: uint8.
        offsets: int64 [sequences]: where each sequence's payload starts in the buffer.
        rows: [sequences] rows of int32: the `length` n, the number of `masked` positions k, the next-sentence `label`, and
            from the payload's start the offsets of `ids`, `segments`, `positions` (masked ones) and `masked_ids` with the
            sizes of their real values in bytes (segments take n).
    """

    buffer: ByteArray
    offsets: IntArray
    rows: RowArray

    @property
    def lengths(self) -> Int32Array:
        """int32 [sequences]."""
        return self.rows["length"]


def empty_index(buffer: ByteArray, sequences: int) -> IndexedSequences:
    """Room for the index of `sequences` sequences of `buffer`."""
    return IndexedSequences(buffer, np.empty(sequences, np.int64), np.empty(sequences, _INDEX_ROW))


@inlined_kernel
def _index_record(
    start: int, end: int, length: int, predictions: int, table: FeatureTable, rows: RowArray, number: int
) -> bool:
    """Fill a row for the unpacked example in [start, end); False where it is not a usual one."""
    if not locate_features(start, end, table):
        return False
    ids, mask = table.spans[UnpackedFeature.INPUT_IDS], table.spans[UnpackedFeature.INPUT_MASK]
    masked_ids, positions = table.spans[UnpackedFeature.MASKED_LM_IDS], table.spans[UnpackedFeature.MASKED_LM_POSITIONS]
    weights, label = table.spans[UnpackedFeature.MASKED_LM_WEIGHTS], table.spans[UnpackedFeature.NEXT_SENTENCE_LABELS]
    segments = table.spans[UnpackedFeature.SEGMENT_IDS]
    if mask.bytes != length or segments.bytes != length or weights.bytes != 4 * predictions:
        return False
    real = count_leading_ones(mask.start, length)
    masked = count_unit_floats(weights.start, 4 * predictions)
    if real <= 0 or masked < 0 or label.bytes != 1 or load_u8(label.start) > 1:
        return False
    ids_bytes = real_bytes(ids.start, ids.bytes, length, real)
    masked_ids_bytes = real_bytes(masked_ids.start, masked_ids.bytes, predictions, masked)
    segments_bytes = real_bytes(segments.start, length, length, real)
    positions_bytes = scan_positions(positions.start, positions.bytes, predictions, masked, real)
    if ids_bytes < 0 or masked_ids_bytes < 0 or segments_bytes < 0 or positions_bytes < 0:
        return False
    row = rows[number]
    row.length = real
    row.masked = masked
    row.label = load_u8(label.start)
    row.ids = ids.start - start
    row.ids_bytes = ids_bytes
    row.segments = segments.start - start
    row.positions = positions.start - start
    row.positions_bytes = positions_bytes
    row.masked_ids = masked_ids.start - start
    row.masked_ids_bytes = masked_ids_bytes
    return True


@borrowing_kernel
def scan_unpacked(
    index: IndexedSequences, first: int, position: int, filled: int, length: int, predictions: int, table: FeatureTable
) -> tuple[int, int, int]:
    """Index the records in index.buffer[position:filled], in the rows from `first` on; each must have L and P.

    Why it stopped, the position of the record at which it stopped, and the next free row.
    """
    base = address_of(index.buffer)
    number = first
    while True:
        status, size = next_record(base + position, base + filled)
        if status != ScanStatus.GOOD:
            return status, position, number
        if number == index.offsets.size:
            return ScanStatus.INDEX_FULL, position, number
        payload = base + position + 12
        if not _index_record(payload, payload + size, length, predictions, table, index.rows, number):
            return ScanStatus.UNUSUAL, position, number
        index.offsets[number] = position + 12
        position += size + 16
        number += 1


@borrowing_kernel
def compact_rows(index: IndexedSequences, first: int, last: int, arena: ByteArray, at: int) -> int:
    """Copy the real values of rows `first` .. `last` - 1 into an arena, from position `at` on, and let the rows point there.

    The arena does not overlap the buffer. A sequence holds its token ids, segments, masked ids and masked positions there,
    one after the other. The next free position is returned.
    """
    base = address_of(index.buffer)
    for number in range(first, last):
        row = index.rows[number]
        payload = base + index.offsets[number]
        target = address_of(arena) + at
        segments = as_word(row.ids_bytes)
        masked_ids = segments + row.length
        positions = masked_ids + row.masked_ids_bytes
        copy_bytes(target, payload + row.ids, segments)
        copy_bytes(target + segments, payload + row.segments, as_word(row.length))
        copy_bytes(target + masked_ids, payload + row.masked_ids, as_word(row.masked_ids_bytes))
        copy_bytes(target + positions, payload + row.positions, as_word(row.positions_bytes))
        row.ids = 0
        row.segments = segments
        row.masked_ids = masked_ids
        row.positions = positions
        index.offsets[number] = at
        at += positions + row.positions_bytes
    return at
