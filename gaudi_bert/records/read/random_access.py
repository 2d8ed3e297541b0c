"""Records of many files by their numbers, as dense arrays: an index of offsets, the bytes left to the page cache.

A file is mapped into memory, and walked once, from length to length, when its first record is requested; the checksum of a
record's bytes is looked at when it is read. A compressed file is first written out to a temporary file without a name. A
record in an encoding that the kernels do not take is decoded by the general reader.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import AnyArray, ByteArray, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, open_file
from gaudi_bert.records.read.arrays import decode_columns
from gaudi_bert.records.schema import MAX_RECORD_BYTES, PackedSchema, RecordError, UnpackedSchema, check_features
from gaudi_bert.records.wire.crc32c import crc32c_at, crc_of_word, mask_crc
from gaudi_bert.records.wire.example import decode_example
from gaudi_bert.records.wire.framing import FRAME_BYTES, PROBLEMS, RecordStream, ScanStatus, record_place
from gaudi_bert.records.wire.memory import address_of, copy_bytes, load_u32, load_word

_LARGEST = 2**31 - 1


class RecordFiles:
    """Files of records with the same features.

    Args:
        paths: the files, numbered in this order.
        schema: of every record.
        counts: records of each file, None where nothing says it.
        bring: fetches files before they are read, and says which ones were removed for them; None where all are local.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        schema: PackedSchema | UnpackedSchema,
        counts: Sequence[int | None] | None = None,
        bring: Callable[[Sequence[Path]], Sequence[Path]] | None = None,
    ) -> None:
        self.paths, self.schema, self._bring = tuple(paths), schema, bring
        self._counts = tuple(counts) if counts is not None else (None,) * len(self.paths)
        self._files: dict[int, _IndexedFile] = {}
        self._places = np.zeros((0, 3), np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which maps the files itself."""
        return {**self.__dict__, "_files": {}, "_places": self._places[:0]}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Records of each file, counted where nothing says it."""
        return tuple(count if count is not None else self._file(number).records for number, count in enumerate(self._counts))

    def read(self, files: IntArray, records: IntArray) -> dict[str, AnyArray]:
        """Each feature of some records by its name, int32 or float32 [n, size].

        `files`, int64 [n], are the numbers of their files, and `records` their numbers in these.
        """
        if self._bring is not None:
            gone = set(self._bring([self.paths[file] for file in np.unique(files)]))
            self._files = {number: file for number, file in self._files.items() if file.path not in gone}
            self._places = self._places[:0]
        places = self._places_of(files)
        lengths = np.empty(len(files), np.int64)
        absent = _find_lengths(places, files, records, lengths)
        if absent >= 0:
            raise IndexError(
                f"{self.place(int(files[absent]), int(records[absent]))} is requested, but the file does not have it"
            )
        ends = np.cumsum(lengths)
        offsets, payloads = ends - lengths, np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        bad = _copy_payloads(places, files, records, lengths, payloads, offsets)
        if bad >= 0:
            raise InputError(self._file(int(files[bad])).problem(int(records[bad])))
        try:
            return decode_columns(payloads, offsets, lengths, self.schema.features, "records")
        except InputError:  # which, and whether the general reader takes it, is found out one by one
            rows = [
                self._decode(payloads[begin:end].tobytes(), int(file), int(record))
                for begin, end, file, record in zip(offsets, ends, files, records, strict=True)
            ]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _places_of(self, files: IntArray) -> IntArray:
        """int64 [all files, 3]: where the bytes and the index of each of `files` lie, and its records; they are opened."""
        if not len(self._places):
            self._places = np.zeros((len(self.paths), 3), np.int64)
            for number, file in self._files.items():
                self._places[number] = file.place
        if not self._places[files, 1].all():
            for number in np.unique(files).tolist():
                self._places[number] = self._file(number).place
        return self._places

    def place(self, file: int, record: int) -> str:
        """What to call a record in an error."""
        return f"{self.paths[file]}: record {record}"

    def _file(self, number: int) -> _IndexedFile:
        if number not in self._files:
            file = self._files[number] = _IndexedFile(self.paths[number])
            count = self._counts[number]
            if count is not None and count != file.records:
                raise InputError(
                    f"{file.path}: holds {file.records:,} records, the metadata says {count:,}; write the data again"
                )
        return self._files[number]

    def _decode(self, payload: bytes, file: int, record: int) -> dict[str, AnyArray]:
        """One record by the general reader; numbers beyond 32 bits become the nearest ones, for the caller to refuse."""
        try:
            features = decode_example(payload)
            check_features(features, self.schema)
        except RecordError as error:
            raise InputError(f"{self.place(file, record)}: {error}; write the records again") from error
        return {
            spec.name: features[spec.name].astype(np.float32)
            if spec.kind == "float32"
            else np.clip(features[spec.name], -_LARGEST, _LARGEST).astype(np.int32)
            for spec in self.schema.features
        }


class _IndexedFile:
    """A file's bytes, and where its records' frames start, int64 [records + 1]; the last is the end of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = _map_bytes(path)
        self.records = self._walk(np.empty(0, np.int64))
        self.starts = np.full(self.records + 1, self.bytes.size, np.int64)
        self._walk(self.starts)

    def _walk(self, starts: IntArray) -> int:
        """Fill `starts`; the number of records."""
        status, records, position = _walk_frames(self.bytes, starts)
        if status != ScanStatus.GOOD:
            raise InputError(f"{record_place(self.path, records, position)}: {PROBLEMS[ScanStatus(status)]}")
        return int(records)

    @property
    def place(self) -> tuple[int, int, int]:
        """The addresses of the bytes and of the index, and how many records there are."""
        return self.bytes.ctypes.data, self.starts.ctypes.data, self.records

    def problem(self, record: int) -> str:
        """What to say of a record whose checksum is wrong."""
        return f"{record_place(self.path, record, int(self.starts[record]))}: {PROBLEMS[ScanStatus.BAD_BYTES]}"


def _map_bytes(path: Path) -> ByteArray:
    """The uncompressed bytes of a file; an empty one has none."""
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    with RecordStream(path) as stream, explained_os_errors(path, "read"):
        if not stream.compression:
            with open_file(path) as handle:
                return _mapped(handle)
        with tempfile.TemporaryFile() as plain:
            piece = memoryview(bytearray(1 << 20))
            while count := stream.read_into(piece):
                plain.write(piece[:count])
            plain.flush()
            return _mapped(plain) if plain.tell() else np.empty(0, np.uint8)


def _mapped(handle: Any) -> ByteArray:
    return np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


@borrowing_kernel
def _walk_frames(buffer: ByteArray, starts: IntArray) -> tuple[int, int, int]:
    """Go from frame to frame and note where each starts, as far as `starts` has room.

    Returns:
        GOOD, or why it stopped; how many records there are before; the position of the frame at which it stopped.
    """
    base, position, records = address_of(buffer), 0, 0
    while position < buffer.size:
        remaining = buffer.size - position
        if remaining < 12:
            return ScanStatus.INCOMPLETE, records, position
        size = load_word(base + position)
        if mask_crc(crc_of_word(size)) != load_u32(base + position + 8):
            return ScanStatus.BAD_LENGTH, records, position
        if size < 0 or size > MAX_RECORD_BYTES:
            return ScanStatus.TOO_LONG, records, position
        if size + 16 > remaining:
            return ScanStatus.INCOMPLETE, records, position
        if records < starts.size:
            starts[records] = position
        position += size + 16
        records += 1
    return ScanStatus.GOOD, records, position


@borrowing_kernel
def _find_lengths(places: IntArray, files: IntArray, records: IntArray, lengths: IntArray) -> int:
    """Set `lengths` to the bytes of the payloads, which the indices of the files tell; which record is none, or -1."""
    for number in range(records.size):
        file, record = files[number], records[number]
        if record < 0 or record >= places[file, 2]:
            return number
        index = places[file, 1] + 8 * record
        lengths[number] = load_word(index + 8) - load_word(index) - FRAME_BYTES
    return -1


@borrowing_kernel
def _copy_payloads(
    places: IntArray, files: IntArray, records: IntArray, lengths: IntArray, target: ByteArray, offsets: IntArray
) -> int:
    """Copy payloads of these lengths into `target`, each to its offset; which one has a wrong checksum, or -1."""
    for number in range(records.size):
        file, size = files[number], lengths[number]
        payload = places[file, 0] + load_word(places[file, 1] + 8 * records[number]) + 12
        if mask_crc(crc32c_at(payload, size, 0)) != load_u32(payload + size):
            return number
        copy_bytes(address_of(target) + offsets[number], payload, size)
    return -1
