"""Reading record files at full speed: pieces into a buffer, kernels over the buffer, files in threads.

`RecordScan` joins a stream, a buffer and a *format* (what to do with records: index unpacked ones here, check and hash
packed ones in `verify`): it reads a piece that fits the processor's cache, and runs the format's kernel over it. A record
that the kernel calls unusual is put back in canonical encoding, so that it ends where it ended. Where a writer leaves lists
of one value unpacked, that is up to four bytes longer; they overwrite the CRC before it, which has been checked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from gaudi_bert.common.arrays import ByteArray, Int32Array, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.common.memory import address_of, as_word, copy_bytes, load_u8
from gaudi_bert.common.threads import map_in_threads
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.features import FeatureTable, feature_table, locate_features
from gaudi_bert.tfrecords.wire.framing import (
    NO_RECORD,
    PROBLEMS,
    RecordStream,
    ScanStatus,
    append_frames,
    frame,
    next_record,
    read_records,
    record_location,
)
from gaudi_bert.tfrecords.wire.schema import (
    FRAME_BYTES,
    MAX_RECORD_BYTES,
    PackedSchema,
    RecordError,
    UnpackedSchema,
    check_features,
    check_values,
    unpacked_schema_of,
)
from gaudi_bert.tfrecords.wire.values import count_leading_ones, count_unit_floats, real_bytes, scan_positions

# --- the index of unpacked records (numba kernels): framing, both CRCs and every value are checked
#
# One row of the index holds all that packing and proving need, so no record is parsed twice. Offsets are relative to the
# record's payload, sizes count the bytes of real values, without padding.

_OF_A_SEQUENCE = (
    *("length", "masked", "label", "ids", "ids_bytes", "segments"),
    *("positions", "positions_bytes", "masked_ids", "masked_ids_bytes"),
)
_INDEX_ROW = np.dtype([(name, np.int32) for name in _OF_A_SEQUENCE])


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

    @classmethod
    def empty(cls, buffer: ByteArray, sequences: int) -> IndexedSequences:
        """Room for the index of `sequences` sequences of `buffer`."""
        return cls(buffer, np.empty(sequences, np.int64), np.empty(sequences, _INDEX_ROW))

    @property
    def lengths(self) -> Int32Array:
        """int32 [sequences]."""
        return self.rows["length"]


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
def _scan_unpacked(
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
def _compact_rows(index: IndexedSequences, first: int, last: int, arena: ByteArray, at: int) -> int:
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


@borrowing_kernel
def largest_id(index: IndexedSequences, last: int, step: int) -> int:
    """Return the largest token id, masked or not, of every `step`-th row before `last`."""
    base, largest = address_of(index.buffer), as_word(0)
    for number in range(0, last, step):
        row = index.rows[number]
        for start, size in ((row.ids, row.ids_bytes), (row.masked_ids, row.masked_ids_bytes)):
            at = base + index.offsets[number] + start
            end = at + size
            while at < end:
                value, shift, byte = as_word(0), as_word(0), as_word(128)
                while byte >= 128:
                    byte = load_u8(at)
                    value |= (byte & 127) << shift
                    shift += 7
                    at += 1
                largest = max(largest, value)
    return largest


# --- one pass over a file

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

PIECE_BYTES = 1 << 20
FRONT_BYTES = 16
_MOST_GROWTH = 4


class _RecordFormat(Protocol):
    """Takes the records of one file, of which `count` were taken so far."""

    count: int

    @property
    def schema(self) -> UnpackedSchema | PackedSchema:
        """The sizes that every record must have."""
        ...

    def start_piece(self) -> None:
        """Another piece of the file is about to be read."""
        ...

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Run the kernel over the buffer from `position`; (why it stopped, position of the record at which it stopped)."""
        ...


def scan_buffer() -> ByteArray:
    """A buffer for scans in constant memory: one per thread."""
    return np.zeros(FRONT_BYTES + MAX_RECORD_BYTES + FRAME_BYTES + PIECE_BYTES, np.uint8)


class UnpackedFormat:
    """Indexes unpacked records, in constant memory: the rows are those of the last piece, and point into its buffer."""

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences) -> None:
        self.schema, self.index = schema, index
        self.count = 0
        self.rows = 0
        self._table = feature_table(schema.features)

    @classmethod
    def for_pieces(cls, schema: UnpackedSchema, buffer: ByteArray) -> UnpackedFormat:
        """With room for the records of one piece in `buffer`."""
        rows = (PIECE_BYTES + MAX_RECORD_BYTES) // (3 * schema.max_sequence_length + 16) + 1
        return cls(schema, IndexedSequences.empty(buffer, rows))

    def start_piece(self) -> None:
        """Forget the rows of the last piece."""
        self.rows = 0

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Index the records from `position` on."""
        first = self.rows
        length, predictions = self.schema.max_sequence_length, self.schema.max_predictions
        status, position, self.rows = _scan_unpacked(self.index, first, position, filled, length, predictions, self._table)
        self.count += self.rows - first
        return ScanStatus(status), position


class CompactedFormat(UnpackedFormat):
    """Indexes a complete file, and copies the real values of its sequences to an arena, where they stay (a group).

    The arena, uint8, does not overlap the buffer; offsets are positions in it. This file may fill `start` to `end`.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences, arena: ByteArray, start: int, end: int) -> None:
        super().__init__(schema, index)
        self._arena, self._position, self._end = arena, start, end

    def start_piece(self) -> None:
        """Keep the rows."""

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Index the records from `position` on, and copy their values to the arena."""
        first = self.rows
        status, position = super().take(position, filled)
        rows = self.index.rows[first : self.rows]
        sizes = (rows[name].sum(dtype=np.int64) for name in ("ids_bytes", "length", "masked_ids_bytes", "positions_bytes"))
        needed = int(sum(sizes))
        if self._position + needed > self._end:
            raise ValueError(f"an arena of {self._end} bytes is too small for {needed} more")
        self._position = _compact_rows(self.index, first, self.rows, self._arena, self._position)
        return status, position


class RecordScan:
    """One pass over one file; the buffer, uint8, is the one that `record_format` reads (see `scan_buffer`)."""

    def __init__(
        self, path: Path, record_format: _RecordFormat, buffer: ByteArray, progress: Callable[[int], None] | None = None
    ) -> None:
        self.path, self.format, self.buffer = path, record_format, buffer
        self._progress = progress
        self.file_bytes = 0
        self.file_crc32c = 0
        self._records_crc32c = 0

    def pieces(self) -> Iterator[None]:
        """Read and take piece after piece; the format holds the result when control comes back."""
        start = position = filled = FRONT_BYTES
        before = -start  # position in the stream = position in the buffer + before
        view = self.buffer.data
        with RecordStream(self.path) as stream:
            while True:
                self.format.start_piece()
                if filled > start:
                    rest = filled - position
                    self.buffer[start : start + rest] = self.buffer[position:filled].copy()
                    before += position - start
                    position, filled = start, start + rest
                count = stream.read_into(view[filled : filled + PIECE_BYTES])
                if self._progress is not None:
                    self._progress(stream.file_bytes - self.file_bytes)
                self.file_bytes = stream.file_bytes
                if count == 0:
                    break
                filled += count
                position = self._take(position, filled, before)
                self.file_crc32c = stream.file_crc32c if stream.compression else self._records_crc32c
                yield
        if position < filled:
            raise InputError(f"{self._location(position + before)}: {PROBLEMS[ScanStatus.INCOMPLETE]}")

    def _take(self, position: int, filled: int, before: int) -> int:
        """Take all complete records up to `filled`; the position of the first incomplete one."""
        rewritten, counted = -1, position
        while True:
            status, position = self.format.take(position, filled)
            counted = self._count_bytes(counted, position)
            if status == ScanStatus.INCOMPLETE:
                return position
            if status != ScanStatus.UNUSUAL or position == rewritten:
                raise InputError(f"{self._location(position + before)}: {PROBLEMS[status]}")
            # Into canonical encoding, so that it ends where it ended.
            end = position + int(struct.unpack_from("<Q", self.buffer.data, position)[0]) + FRAME_BYTES
            counted = self._count_bytes(position, end)
            try:
                canonical = frame(_canonical_example(self.buffer[position + 12 : end - 4].tobytes(), self.format.schema))
            except RecordError as error:
                raise InputError(f"{self._location(position + before)}: {error}") from error
            if len(canonical) > end - position + _MOST_GROWTH:
                raise InputError(f"{self._location(position + before)}: {PROBLEMS[ScanStatus.UNUSUAL]}")
            self.buffer[end - len(canonical) : end] = np.frombuffer(canonical, np.uint8)
            position = rewritten = end - len(canonical)

    def _count_bytes(self, start: int, end: int) -> int:
        """Add the good records in buffer[start:end], as they lie on the disk, to the file's CRC; the later of the two."""
        if start < end:
            self._records_crc32c = append_frames(self._records_crc32c, self.buffer, start, end)
        return max(start, end)

    def _location(self, offset: int) -> str:
        return record_location(self.path, self.format.count, offset)


def unpacked_schema(path: Path) -> tuple[UnpackedSchema, list[str]]:
    """The sizes of the first record of a file, and its features that packs do not carry."""
    payload = next(read_records(path), None)
    if payload is None:
        raise InputError(f"{path}: {NO_RECORD}")
    try:
        features = decode_example(payload)
        schema = unpacked_schema_of(features)
        check_features(features, schema)
    except (RecordError, InputError) as error:
        raise InputError(f"{record_location(path, 0, 0)}: {error}") from error
    known = {spec.name for spec in schema.features}
    return schema, sorted(set(features) - known)


# --- the slow but general reader of records that the kernels do not take, which gives reasons
#
# Writers differ: lists may be unpacked (a tag for each value) or split, map entries repeated (the last wins), messages
# merged, further features present, varints longer than need be. `decode_example` resolves all that by protobuf's rules;
# the values are held to the contract, and the record is encoded again in the one form that the kernels read: exactly
# the features of the schema, keys sorted, lists packed. So there is one engine, and its result does not depend on the
# writer.


def _canonical_example(payload: bytes | memoryview, schema: UnpackedSchema | PackedSchema) -> bytes:
    """`payload` encoded again: the features of `schema`, keys sorted, lists packed.

    Raises:
        RecordError: it is not an example of these sizes, or the first value that breaks the contract.
    """
    features = decode_example(payload)
    check_features(features, schema)
    check_values(features, schema)
    if isinstance(schema, UnpackedSchema):
        features["masked_lm_weights"] = features["masked_lm_weights"] + np.float32(0)  # -0.0 becomes 0.0
    return encode_example({spec.name: features[spec.name] for spec in schema.features})


def map_files(function: Callable[[_Item, ByteArray], _Result], files: Sequence[_Item], workers: int | None) -> list[_Result]:
    """Return `function(file, buffer)` for every file, with a buffer for scans in constant memory."""
    return list(map_in_threads(function, files, workers, scan_buffer))
