"""Reading record files fast: a file is read in pieces, a numba kernel processes each piece, and several files are read at
once.

A `RecordScan` connects a stream, a buffer and a *format*, which decides what happens to the records. The formats in this
module index unpacked records, and `verify` has a format that checks and hashes packed records. The scan reads a piece that
fits into the processor's cache, and then runs the kernel of the format over it.

If the kernel does not support the encoding of a record (`ScanStatus.UNUSUAL`), the scan encodes the record again in
canonical form, and writes it back so that it ends at the same position in the buffer. If the writer did not pack lists of
one value, the canonical record is up to four bytes longer, and overwrites the CRC of the previous record, which was already
checked.
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
# A row of the index contains everything that packing and verifying need, so that no record is parsed twice. Offsets are
# relative to the payload of the record. Sizes are those of the non-padding values in bytes.

_OF_A_SEQUENCE = (
    *("length", "masked", "label", "ids", "ids_bytes", "segments"),
    *("positions", "positions_bytes", "masked_ids", "masked_ids_bytes"),
)
_INDEX_ROW = np.dtype([(name, np.int32) for name in _OF_A_SEQUENCE])


class IndexedSequences(NamedTuple):
    """An index of the sequences in a buffer, which tells where the values of each sequence are.

    Attributes:
        buffer: uint8, the bytes of the records.
        offsets: int64 [sequences], the position of each sequence's payload in the buffer.
        rows: A structured array [sequences] with int32 fields. `length` is the number of tokens, `masked` the number of
            masked positions, and `label` the next-sentence label. `ids`, `segments`, `positions` (the masked positions) and
            `masked_ids` are offsets from the start of the payload. `ids_bytes`, `positions_bytes` and `masked_ids_bytes`
            are the sizes of the non-padding values. Segment ids take one byte for each token.
    """

    buffer: ByteArray
    offsets: IntArray
    rows: RowArray

    @classmethod
    def empty(cls, buffer: ByteArray, sequences: int) -> IndexedSequences:
        """Return an index with room for `sequences` sequences. The caller fills its rows."""
        return cls(buffer, np.empty(sequences, np.int64), np.empty(sequences, _INDEX_ROW))

    @property
    def lengths(self) -> Int32Array:
        """The number of tokens of each sequence, int32 [sequences]."""
        return self.rows["length"]


@inlined_kernel
def _index_record(
    start: int, end: int, length: int, predictions: int, table: FeatureTable, rows: RowArray, number: int
) -> bool:
    """Check an unpacked example, and fill one row of the index.

    Args:
        start: The address of the payload.
        end: The address after the payload.
        length: L, the number of tokens in a row.
        predictions: P, the number of masked slots.
        table: The feature table of unpacked records.
        rows: The rows of the index.
        number: The row to fill.

    Returns:
        False if the kernel does not support the encoding of the record or a value is invalid. The general reader then
        decides which of the two it is.
    """
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
    """Check and index the records in `index.buffer[position:filled]`.

    Args:
        index: The index, whose rows from `first` on are filled.
        first: The next free row.
        position: The position in the buffer at which a record begins.
        filled: The number of bytes in the buffer.
        length: L, the number of tokens in a row, which every record must have.
        predictions: P, the number of masked slots, which every record must have.
        table: The feature table of unpacked records.

    Returns:
        (why the scan stopped, the position of the record at which it stopped, the next free row).
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
    """Copy the non-padding values of sequences into an arena, and change their rows so that they refer to the arena.

    In the arena, a sequence consists of its token ids, segment ids, masked ids and masked positions, in this order and
    without gaps.

    Args:
        index: The index, whose rows and offsets are changed.
        first: The first row.
        last: The row after the last one.
        arena: uint8, must not overlap the buffer of the index.
        at: The position in the arena of the first sequence.

    Returns:
        The next free position in the arena.
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
    """Return the largest id among the token ids and masked ids of every `step`-th row before row `last`."""
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
    """Processes the records of one file for a `RecordScan`.

    Attributes:
        count: The number of records that were processed so far.
    """

    count: int

    @property
    def schema(self) -> UnpackedSchema | PackedSchema:
        """The sizes that every record must have."""
        ...

    def start_piece(self) -> None:
        """Prepare for the next piece of the file."""
        ...

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Process the records in `buffer[position:filled]`.

        Returns:
            Why processing stopped, and the position of the record at which it stopped.
        """
        ...


def scan_buffer() -> ByteArray:
    """Return a new buffer that is large enough for a `RecordScan` of any file. Each thread needs its own."""
    return np.zeros(FRONT_BYTES + MAX_RECORD_BYTES + FRAME_BYTES + PIECE_BYTES, np.uint8)


class UnpackedFormat:
    """Indexes unpacked records in constant memory. The index contains the records of the current piece only.

    Attributes:
        schema: The sizes that every record must have.
        index: The index. Its rows refer to the scan buffer.
        count: The number of records that were indexed so far.
        rows: The number of rows of the index that are in use.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences) -> None:
        self.schema, self.index = schema, index
        self.count = 0
        self.rows = 0
        self._table = feature_table(schema.features)

    @classmethod
    def for_pieces(cls, schema: UnpackedSchema, buffer: ByteArray) -> UnpackedFormat:
        """Create a format whose index has room for the records of one piece in `buffer`."""
        rows = (PIECE_BYTES + MAX_RECORD_BYTES) // (3 * schema.max_sequence_length + 16) + 1
        return cls(schema, IndexedSequences.empty(buffer, rows))

    def start_piece(self) -> None:
        """Discard the rows of the previous piece."""
        self.rows = 0

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Check and index the records in `buffer[position:filled]`.

        Returns:
            Why the scan stopped, and the position of the record at which it stopped.
        """
        first = self.rows
        length, predictions = self.schema.max_sequence_length, self.schema.max_predictions
        status, position, self.rows = _scan_unpacked(self.index, first, position, filled, length, predictions, self._table)
        self.count += self.rows - first
        return ScanStatus(status), position


class CompactedFormat(UnpackedFormat):
    """Indexes a complete file, and copies the non-padding values of its sequences to an arena.

    The index keeps the rows of all pieces, and its offsets are positions in the arena. The files of a group share an arena.

    Args:
        schema: The sizes that every record must have.
        index: The index, with room for all records of the file.
        arena: uint8, must not overlap the scan buffer.
        start: The position in the arena of the first sequence.
        end: The end of the part of the arena that this file may fill.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences, arena: ByteArray, start: int, end: int) -> None:
        super().__init__(schema, index)
        self._arena, self._position, self._end = arena, start, end

    def start_piece(self) -> None:
        """Do nothing, so that the rows of all pieces are kept."""

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Check and index the records in `buffer[position:filled]`, and copy their values to the arena.

        Returns:
            Why the scan stopped, and the position of the record at which it stopped.

        Raises:
            ValueError: The arena is too small, which is an error of the caller.
        """
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
    """Reads one file once, from the front, and passes its records to a format.

    Args:
        path: The file.
        record_format: Processes the records.
        buffer: uint8, the buffer that `record_format` reads (see `scan_buffer`).
        progress: Called with the number of bytes that were read from the disk.

    Attributes:
        file_bytes: The number of bytes that were read from the disk so far.
        file_crc32c: The CRC-32C of these bytes. It is complete after the last piece.
    """

    def __init__(
        self, path: Path, record_format: _RecordFormat, buffer: ByteArray, progress: Callable[[int], None] | None = None
    ) -> None:
        self.path, self.format, self.buffer = path, record_format, buffer
        self._progress = progress
        self.file_bytes = 0
        self.file_crc32c = 0
        self._records_crc32c = 0

    def pieces(self) -> Iterator[None]:
        """Read the file piece by piece. After each piece, yield so that the caller can use the results in the format.

        Raises:
            InputError: The file cannot be read, is truncated, or contains a record that is damaged or violates the contract.
        """
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
        """Process all complete records in `buffer[position:filled]`, and return the position of the first incomplete one.

        Args:
            position: The position in the buffer at which a record begins.
            filled: The end of the bytes in the buffer.
            before: The difference between a position in the stream and the position in the buffer, for error messages.

        Raises:
            InputError: A record is damaged or violates the contract.
        """
        rewritten, counted = -1, position
        while True:
            status, position = self.format.take(position, filled)
            counted = self._count_bytes(counted, position)
            if status == ScanStatus.INCOMPLETE:
                return position
            if status != ScanStatus.UNUSUAL or position == rewritten:
                raise InputError(f"{self._location(position + before)}: {PROBLEMS[status]}")
            # Encode the record again in canonical form, and write it back so that it ends at the same position.
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
        """Update the CRC of the file with the records in buffer[start:end], and return the larger of the two positions.

        The records must be in their original form, because the CRC is that of the file on the disk. If `start` is not before
        `end`, nothing is added.
        """
        if start < end:
            self._records_crc32c = append_frames(self._records_crc32c, self.buffer, start, end)
        return max(start, end)

    def _location(self, offset: int) -> str:
        """Return the name of the current record for error messages. `offset` is its position in the stream."""
        return record_location(self.path, self.format.count, offset)


def unpacked_schema(path: Path) -> tuple[UnpackedSchema, list[str]]:
    """Read the first record of a file, and return its sizes and the features that packed records do not contain.

    Raises:
        InputError: The file cannot be read or contains no record, or its first record is not an unpacked example.
    """
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


# --- the slow but general reader for records that the kernels do not support
#
# Writers encode the same example differently. Lists may be unpacked (with a tag for each value) or split, map entries may be
# repeated (the last one counts), messages may be merged, other features may be present, and varints may be longer than
# necessary. `decode_example` resolves all of this by the rules of protobuf. Then the values are checked against the
# contract, and the record is encoded in the form that the kernels support: exactly the features of the schema, with sorted
# keys and packed lists. The kernels therefore process every record, and the result does not depend on the writer.


def _canonical_example(payload: bytes | memoryview, schema: UnpackedSchema | PackedSchema) -> bytes:
    """Return an example encoded in canonical form: the features of `schema` only, with sorted keys and packed lists.

    Raises:
        RecordError: `payload` is not an example, has other sizes than `schema`, or has a value that violates the contract.
            The message names the first such value.
    """
    features = decode_example(payload)
    check_features(features, schema)
    check_values(features, schema)
    if isinstance(schema, UnpackedSchema):
        features["masked_lm_weights"] = features["masked_lm_weights"] + np.float32(0)  # -0.0 becomes 0.0
    return encode_example({spec.name: features[spec.name] for spec in schema.features})


def map_files(function: Callable[[_Item, ByteArray], _Result], files: Sequence[_Item], workers: int | None) -> list[_Result]:
    """Call `function(file, buffer)` for every file in several threads, and return the results in the order of the files.

    Args:
        function: The function. Its second argument is the scan buffer of its thread.
        files: The files, or other values that describe them.
        workers: The number of threads, or None for the default.
    """
    return list(map_in_threads(function, files, workers, scan_buffer))
