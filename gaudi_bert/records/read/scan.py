"""Reading record files at full speed: pieces into a buffer, kernels over the buffer, errors with file, record
and offset.

`RecordScan` joins a stream, a buffer and a *format* (what to do with records: index unpacked ones here, check and hash
packed ones in `proof.file_contents`). It reads a piece that fits the processor's cache, runs the format's kernel over it,
and moves what is left of the last record to the front of the buffer. A record that the kernel calls unusual is handed to
the general reader and put back in canonical encoding, so that it ends where it ended. Where a writer leaves lists of one
value unpacked, that is up to four bytes longer than what it replaces; they take the place of the CRC before it, which has
been checked (or of the bytes that are kept free at the front).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from gaudi_bert.common.arrays import AnyArray, ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.read.general import canonical_example
from gaudi_bert.records.read.unpacked_index import (
    IndexedSequences,
    RecordSizes,
    compact_rows,
    empty_index,
    scan_unpacked,
)
from gaudi_bert.records.schema import MAX_RECORD_BYTES, RecordError, UnpackedSchema, check_features, unpacked_schema_of
from gaudi_bert.records.wire.example import decode_example
from gaudi_bert.records.wire.features import feature_table
from gaudi_bert.records.wire.frame_scan import ScanStatus, append_frames
from gaudi_bert.records.wire.framing import (
    CUT_SHORT,
    FRAME_BYTES,
    NO_RECORD,
    REMEDY,
    RecordStream,
    frame,
    read_records,
    record_place,
)

__all__ = [
    "FRONT_BYTES",
    "PIECE_BYTES",
    "CompactedFormat",
    "RecordFormat",
    "RecordScan",
    "UnpackedFormat",
    "first_record",
    "scan_buffer",
    "unpacked_schema",
]

PIECE_BYTES = 1 << 20
FRONT_BYTES = 16
_MOST_GROWTH = 4
_REFUSALS = {
    ScanStatus.BAD_LENGTH: f"its length is damaged (CRC); {REMEDY}",
    ScanStatus.BAD_BYTES: f"its bytes are damaged (CRC); {REMEDY}",
    ScanStatus.TOO_LONG: f"longer than any legal record ({MAX_RECORD_BYTES} bytes); {REMEDY}",
    ScanStatus.INDEX_FULL: "the file holds more records than the plan knows; make the histogram and the plan again",
    ScanStatus.UNUSUAL: "the record cannot be read; report it with this file",
}


class RecordFormat(Protocol):
    """What a scan does with the records of one file."""

    records: int
    """Records of the file that were taken so far."""

    def start_piece(self) -> None:
        """Another piece of the file is about to be read."""
        ...

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """Run the kernel over the buffer from `position`; (why it stopped, position of the record at which it stopped)."""
        ...

    def canonical(self, payload: bytes) -> bytes:
        """The same record in the encoding that the kernel takes, or a `RecordError` with the reason for
        refusing it."""
        ...


def scan_buffer() -> ByteArray:
    """A buffer for scans in constant memory: one per thread."""
    return np.zeros(FRONT_BYTES + MAX_RECORD_BYTES + FRAME_BYTES + PIECE_BYTES, np.uint8)


class UnpackedFormat:
    """Indexes unpacked records, in constant memory: the rows are those of the last piece, and point into its buffer.

    Args:
        schema: the sizes that every record must have.
        index: filled from the front; its buffer is the one that is scanned.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences) -> None:
        self.schema, self.index = schema, index
        self.records = 0
        self.rows = 0
        self._sizes = RecordSizes(schema.max_sequence_length, schema.max_predictions)
        self._table = feature_table(schema.features)

    @classmethod
    def for_pieces(cls, schema: UnpackedSchema, buffer: ByteArray) -> UnpackedFormat:
        """With room for the records of one piece in `buffer`."""
        rows = (PIECE_BYTES + MAX_RECORD_BYTES) // (3 * schema.max_sequence_length + 16) + 1
        return cls(schema, empty_index(buffer, rows))

    def start_piece(self) -> None:
        """As `RecordFormat.start_piece`: forget the rows of the last piece."""
        self.rows = 0

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """As `RecordFormat.take`."""
        first = self.rows
        status, position, self.rows = scan_unpacked(self.index, first, position, filled, self._sizes, self._table)
        self.records += self.rows - first
        return ScanStatus(status), position

    def canonical(self, payload: bytes) -> bytes:
        """As `RecordFormat.canonical`."""
        return canonical_example(payload, self.schema)


class CompactedFormat(UnpackedFormat):
    """Indexes a whole file, and copies the real values of its sequences to an arena, where they stay (a group).

    Args:
        schema: as in `UnpackedFormat`.
        index: with a row for each record of the file; its buffer is the one that is scanned.
        arena: uint8, does not overlap that buffer; offsets are positions in it.
        start, end: the part of the arena that this file may fill.
    """

    def __init__(self, schema: UnpackedSchema, index: IndexedSequences, arena: ByteArray, start: int, end: int) -> None:
        super().__init__(schema, index)
        self._arena, self._position, self._end = arena, start, end

    def start_piece(self) -> None:
        """As `RecordFormat.start_piece`; the rows stay."""

    def take(self, position: int, filled: int) -> tuple[ScanStatus, int]:
        """As `RecordFormat.take`."""
        first = self.rows
        status, position = super().take(position, filled)
        rows = self.index.rows[first : self.rows]
        sizes = (rows[name].sum(dtype=np.int64) for name in ("ids_bytes", "length", "masked_ids_bytes", "positions_bytes"))
        needed = int(sum(sizes))
        if self._position + needed > self._end:
            raise ValueError(f"an arena of {self._end} bytes is too small for {needed} more")
        self._position = compact_rows(self.index, first, self.rows, self._arena, self._position)
        return status, position


class RecordScan:
    """One pass over one file.

    Args:
        path: the file.
        records: what to do with its records.
        buffer: uint8, from `scan_buffer` (a smaller one will do for a file that fits into it); the one that `records` reads.
        progress: called with the bytes of the file that were read.
    """

    def __init__(
        self,
        path: Path,
        records: RecordFormat,
        buffer: ByteArray,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.path, self.records, self.buffer = path, records, buffer
        self._progress = progress
        self.file_bytes = 0
        self.file_crc32c = 0
        self._records_crc32c = 0

    def pieces(self) -> Iterator[None]:
        """Read and take piece after piece; the format holds the result when control comes back.

        Raises:
            InputError: file, record, offset and reason of what is refused.
            FailedError: the file cannot be read.
        """
        start = position = filled = FRONT_BYTES
        before = -start  # position in the stream = position in the buffer + before
        view = self.buffer.data
        with RecordStream(self.path) as stream:
            while True:
                self.records.start_piece()
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
            raise InputError(f"{self._place(position + before)}: {CUT_SHORT}")

    def _take(self, position: int, filled: int, before: int) -> int:
        """Take all whole records up to `filled`; the position of the first that is not whole."""
        made_usual, counted = -1, position
        while True:
            status, position = self.records.take(position, filled)
            counted = self._count_bytes(counted, position)
            if status == ScanStatus.INCOMPLETE:
                return position
            if status != ScanStatus.UNUSUAL or position == made_usual:
                raise InputError(f"{self._place(position + before)}: {_REFUSALS[status]}")
            counted = self._count_bytes(position, position + self._frame_bytes(position))
            position = made_usual = self._make_usual(position, before)

    def _count_bytes(self, start: int, end: int) -> int:
        """Add the good records in buffer[start:end], as they lie on the disk, to the file's CRC; the later of the two."""
        if start < end:
            self._records_crc32c = append_frames(self._records_crc32c, self.buffer, start, end)
        return max(start, end)

    def _frame_bytes(self, position: int) -> int:
        return int(struct.unpack_from("<Q", self.buffer.data, position)[0]) + FRAME_BYTES

    def _make_usual(self, position: int, before: int) -> int:
        """Put the record at `position` into canonical encoding, so that it ends where it ended; its new
        position."""
        end = position + self._frame_bytes(position)
        try:
            canonical = frame(self.records.canonical(self.buffer[position + 12 : end - 4].tobytes()))
        except RecordError as error:
            raise InputError(f"{self._place(position + before)}: {error}") from error
        if len(canonical) > end - position + _MOST_GROWTH:
            raise InputError(f"{self._place(position + before)}: {_REFUSALS[ScanStatus.UNUSUAL]}")
        self.buffer[end - len(canonical) : end] = np.frombuffer(canonical, np.uint8)
        return end - len(canonical)

    def _place(self, offset: int) -> str:
        return record_place(self.path, self.records.records, offset)


def first_record(path: Path) -> dict[str, AnyArray]:
    """The features of the first record of a file.

    Raises:
        InputError: the file holds no TFRecord, or its first record is not a tf.train.Example.
    """
    try:
        payload = next(read_records(path), None)
        if payload is None:
            raise InputError(f"{path}: {NO_RECORD}")
        return decode_example(payload)
    except RecordError as error:
        raise InputError(f"{record_place(path, 0, 0)}: {error}") from error


def unpacked_schema(path: Path) -> tuple[UnpackedSchema, list[str]]:
    """The sizes of the first record of a file, and its features that are none of ours (they are left out of
    packs).

    Raises:
        InputError: it is not an unpacked example.
    """
    features = first_record(path)
    try:
        schema = unpacked_schema_of(features)
        check_features(features, schema)
    except (RecordError, InputError) as error:
        raise InputError(f"{record_place(path, 0, 0)}: {error}") from error
    known = {spec.name for spec in schema.features}
    return schema, sorted(set(features) - known)
