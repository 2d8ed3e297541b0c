"""TFRecord framing: length (8 bytes), its masked CRC-32C (4), payload, its masked CRC-32C (4); plain, or
whole in GZIP or ZLIB.

`RecordStream` hands out the uncompressed bytes of a file in pieces and keeps the CRC-32C of the file as it
lies on the disk; `read_records` is the simple reader on top of it, for few records or where speed does not
matter.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors
from gaudi_bert.records.schema import MAX_RECORD_BYTES
from gaudi_bert.records.wire.crc32c import crc32c, masked
from gaudi_bert.records.wire.foreign import foreign_format

__all__ = [
    "CUT_SHORT",
    "FRAME_BYTES",
    "NO_RECORD",
    "REMEDY",
    "RecordStream",
    "frame",
    "read_records",
    "record_place",
    "write_record",
]

FRAME_BYTES = 16
REMEDY = "copy or make the file again"
NO_RECORD = "holds no record; remove it, or make it again"
CUT_SHORT = "the file is cut short; copy or make it again"
_PIECE_BYTES = 1 << 20


def frame(payload: bytes) -> bytes:
    """`payload` as a TFRecord."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked(crc32c(length))) + payload + struct.pack("<I", masked(crc32c(payload)))


def write_record(handle: BinaryIO, payload: bytes) -> None:
    """Write `payload` to `handle` as a TFRecord."""
    handle.write(frame(payload))


def record_place(path: Path, record: int, offset: int) -> str:
    """How errors name a place: the record's number counts from 0, the offset is of its first uncompressed byte."""
    return f"{path}: record {record} at byte {offset}"


class RecordStream:
    """The uncompressed bytes of one file, read once from the front.

    Attributes:
        compression: "", "GZIP" or "ZLIB", seen from the first bytes.
        file_bytes, file_crc32c: of what has been read from the disk so far; the CRC only with `checksum`, or if compressed.

    Raises:
        InputError: the first bytes are neither a TFRecord nor compressed.
        FailedError: the file cannot be read.
    """

    def __init__(self, path: Path, checksum: bool = False) -> None:
        self.path = path
        self.file_bytes = 0
        self.file_crc32c = 0
        with explained_os_errors(path, "read"):
            self._handle = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
            self.compression = _compression_of(path, self._handle.read(12))
            self._handle.seek(0)
        self._checksum = checksum or bool(self.compression)
        window = {"GZIP": zlib.MAX_WBITS + 16, "ZLIB": zlib.MAX_WBITS}
        self._window = window.get(self.compression, 0)
        self._inflater = zlib.decompressobj(self._window) if self._window else None
        self._input = b""

    def __enter__(self) -> RecordStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.close()

    def read_into(self, view: memoryview) -> int:
        """Fill `view` from its front; the number of bytes, 0 at the end of the file."""
        with explained_os_errors(self.path, "read"):
            if self._inflater is None:
                count = self._handle.readinto(view)
                self._account(view[:count])
                return count
            data = self._inflate(len(view))
        view[: len(data)] = data
        return len(data)

    def _account(self, data: memoryview | bytes) -> None:
        self.file_bytes += len(data)
        if self._checksum:
            self.file_crc32c = crc32c(data, self.file_crc32c)

    def _inflate(self, most: int) -> bytes:
        """At most `most` uncompressed bytes; several GZIP members in one file follow each other."""
        while True:
            if not self._input:
                self._input = self._handle.read(_PIECE_BYTES)
                self._account(self._input)
                if not self._input:
                    if self._inflater is not None and not self._inflater.eof:
                        raise InputError(f"{self.path}: the {self.compression} data is cut short; {REMEDY}")
                    return b""
            if self._inflater is None or self._inflater.eof:
                self._inflater = zlib.decompressobj(self._window)
            try:
                data = self._inflater.decompress(self._input, most)
            except zlib.error as error:
                raise InputError(f"{self.path}: damaged {self.compression} data ({error}); {REMEDY}") from error
            self._input = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            if data:
                return data


def read_records(path: Path | str) -> Iterator[bytes]:
    """The payloads of a file, both CRCs checked.

    Raises:
        InputError: the file is not a TFRecord, is cut short, or a CRC does not match; file, record and offset are named.
    """
    path = Path(path)
    with RecordStream(path) as stream:
        record, offset = 0, 0
        while header := _read_exactly(stream, 12, record, offset):
            place = record_place(path, record, offset)
            length, length_crc = struct.unpack("<QI", header)
            if masked(crc32c(header[:8])) != length_crc:
                raise InputError(f"{place}: its length is damaged (CRC); {REMEDY}")
            if length > MAX_RECORD_BYTES:
                raise InputError(f"{place}: {length} bytes long, at most {MAX_RECORD_BYTES} is allowed; {REMEDY}")
            body = _read_exactly(stream, length + 4, record, offset)
            if len(body) < length + 4:
                raise InputError(f"{place}: {CUT_SHORT}")
            if masked(crc32c(body[:length])) != struct.unpack("<I", body[length:])[0]:
                raise InputError(f"{place}: its bytes are damaged (CRC); {REMEDY}")
            yield body[:length]
            record, offset = record + 1, offset + length + FRAME_BYTES


def _read_exactly(stream: RecordStream, count: int, record: int, offset: int) -> bytes:
    """`count` bytes; empty only at a clean end of the file."""
    data = bytearray(count)
    filled = 0
    while filled < count:
        got = stream.read_into(memoryview(data)[filled:])
        if not got:
            break
        filled += got
    if 0 < filled < count:
        raise InputError(f"{record_place(stream.path, record, offset)}: {CUT_SHORT}")
    return bytes(data[:filled])


def _compression_of(path: Path, head: bytes) -> str:
    if not head:
        raise InputError(f"{path}: the file is empty; remove it, or make it again")
    if len(head) == 12 and masked(crc32c(head[:8])) == struct.unpack("<I", head[8:])[0]:
        return ""
    foreign = foreign_format(path)
    if foreign is not None:
        raise InputError(f"{path}: not a TFRecord file but {foreign}")
    if head[:2] == b"\x1f\x8b":
        return "GZIP"
    if len(head) >= 2 and head[0] & 15 == 8 and head[0] >> 4 <= 7 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    raise InputError(f"{path}: not a TFRecord file (the first length has a wrong CRC), nor GZIP or ZLIB; check the path")
