"""Reading and writing TFRecord frames.

A frame consists of the payload's length (8 bytes), the masked CRC-32C of the length (4 bytes), the payload, and the masked
CRC-32C of the payload (4 bytes). Files may be plain or compressed with GZIP or ZLIB. The rows of an HDF5 file are read as if
they were TFRecords.

`RecordStream` reads the uncompressed bytes of a file in pieces. `read_records` is a simple reader on top of it, for a few
records or if speed does not matter. Inside kernels, `next_record` checks one frame in a buffer.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.crc32c import append_crc, crc32c, crc32c_at, crc_of_word, mask_crc, masked_crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_regular_file, explain_os_errors, open_file
from gaudi_bert.common.memory import address_of, load_u32, load_word, prefetch
from gaudi_bert.tfrecords.wire.hdf5 import HDF5, HDF5_ENDINGS, Hdf5Rows, is_hdf5
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, MAX_RECORD_BYTES

NO_RECORD = "holds no record; remove it, or make it again"
_REMEDY = "copy or make the file again"
_PIECE_BYTES = 1 << 20


class ScanStatus(IntEnum):
    """The state of a record, or the reason why a scan stopped at it."""

    INCOMPLETE = 0
    """The record is not completely in the buffer, so more of the file must be read."""
    GOOD = 1
    INDEX_FULL = 2
    BAD_LENGTH = 3
    BAD_BYTES = 4
    TOO_LONG = 5
    UNUSUAL = 6
    """The kernel does not support the encoding of the record, so the general reader must check it."""


PROBLEMS = {
    ScanStatus.INCOMPLETE: f"the file is cut short; {_REMEDY}",
    ScanStatus.INDEX_FULL: "the file holds more records than the plan knows; make the histogram and the plan again",
    ScanStatus.BAD_LENGTH: f"its length is damaged (CRC); {_REMEDY}",
    ScanStatus.BAD_BYTES: f"its bytes are damaged (CRC); {_REMEDY}",
    ScanStatus.TOO_LONG: f"longer than any legal record ({MAX_RECORD_BYTES} bytes); {_REMEDY}",
    ScanStatus.UNUSUAL: "the record cannot be read; report it with this file",
}
"""The error message for each status."""


def frame(payload: bytes) -> bytes:
    """Return `payload` as a TFRecord, with its length and both CRCs."""
    length = struct.pack("<Q", len(payload))
    return (
        length
        + struct.pack("<I", masked_crc32c(crc32c(length)))
        + payload
        + struct.pack("<I", masked_crc32c(crc32c(payload)))
    )


def record_location(path: Path, record: int, offset: int) -> str:
    """Return the name of a record for error messages.

    Args:
        path: The file.
        record: The number of the record, from 0.
        offset: The position of its frame in the uncompressed file. It is not shown for an HDF5 file.
    """
    return f"{path}: row {record}" if path.suffix in HDF5_ENDINGS else f"{path}: record {record} at byte {offset}"


class RecordStream:
    """A stream of the uncompressed bytes of one file, which is read once from the front.

    It is a context manager that closes the file.

    Attributes:
        path: The file.
        compression: "", "GZIP", "ZLIB" or "HDF5", detected from the first bytes.
        file_bytes: The number of bytes that were read from the disk so far.
        file_crc32c: The CRC-32C of these bytes for a compressed or HDF5 file, otherwise 0.

    Raises:
        InputError: The file cannot be opened, or is neither a TFRecord file nor an HDF5 file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file_bytes = 0
        self.file_crc32c = 0
        with explain_os_errors(path, "read"):
            self._handle = open(check_regular_file(path), "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
            self.compression = _compression_of(path, self._handle.read(12))
            self._handle.seek(0)
        window = {"GZIP": zlib.MAX_WBITS + 16, "ZLIB": zlib.MAX_WBITS}
        self._window = window.get(self.compression, 0)
        self._inflater = zlib.decompressobj(self._window) if self._window else None
        self._input: memoryview | bytes = b""
        self._payload = b""
        self._rows = Hdf5Rows(path) if self.compression == HDF5 else None

    def __enter__(self) -> RecordStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.close()
        if self._rows is not None:
            self._rows.close()

    @property
    def most_bytes(self) -> int | None:
        """An upper bound on the uncompressed size in bytes, or None if the file must be read to know it (GZIP and ZLIB)."""
        if self._rows is not None:
            return self._rows.most_bytes
        return None if self.compression else os.fstat(self._handle.fileno()).st_size

    def read_into(self, view: memoryview) -> int:
        """Read uncompressed bytes into `view`, and return how many were read. At the end of the file, return 0.

        Fewer bytes than `view` has room for may be read before the end of the file.

        Raises:
            InputError: The file cannot be read, or its compressed data are damaged or truncated.
        """
        with explain_os_errors(self.path, "read"):
            if not self.compression:
                count = self._handle.readinto(view)
                self._account(view[:count])
                return count
            data = self._inflate(len(view)) if self._rows is None else self._encode_rows(self._rows, len(view))
        view[: len(data)] = data
        return len(data)

    def _account(self, data: memoryview | bytes) -> None:
        """Add bytes that were read from the disk to the size and, unless the file is plain, to the CRC."""
        self.file_bytes += len(data)
        if self.compression:
            self.file_crc32c = crc32c(data, self.file_crc32c)

    def _encode_rows(self, rows: Hdf5Rows, most: int) -> memoryview | bytes:
        """Return at most `most` bytes of the rows of an HDF5 file, encoded as TFRecords.

        The bytes of the file itself are also read, in proportion to the rows, to compute its CRC and the progress.
        """
        while not self._input and (self._payload or rows.done < rows.count):
            if self._payload:
                self._input, self._payload = frame(self._payload), b""
                continue
            self._input, self._payload = rows.next_records()
            end = os.fstat(self._handle.fileno()).st_size * rows.done // rows.count
            while self.file_bytes < end and (data := self._handle.read(min(_PIECE_BYTES, end - self.file_bytes))):
                self._account(data)
        data, self._input = self._input[:most], self._input[most:]
        return data

    def _inflate(self, most: int) -> bytes:
        """Return at most `most` decompressed bytes, or b"" at the end of the file.

        A file may consist of several compressed members, which are read one after the other.

        Raises:
            InputError: The compressed data are damaged or truncated.
        """
        while True:
            if not self._input:
                self._input = self._handle.read(_PIECE_BYTES)
                self._account(self._input)
                if not self._input:
                    if self._inflater is not None and not self._inflater.eof:
                        raise InputError(f"{self.path}: the {self.compression} data is cut short; {_REMEDY}")
                    return b""
            if self._inflater is None or self._inflater.eof:
                self._inflater = zlib.decompressobj(self._window)
            try:
                data = self._inflater.decompress(self._input, most)
            except zlib.error as error:
                raise InputError(f"{self.path}: damaged {self.compression} data ({error}); {_REMEDY}") from error
            self._input = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            if data:
                return data


def read_records(path: Path | str) -> Iterator[bytes]:
    """Yield the payload of each record of a file, after checking both of its CRCs.

    Raises:
        InputError: The file cannot be read, or a record is damaged, truncated or longer than `MAX_RECORD_BYTES`.
    """
    path = Path(path)
    with RecordStream(path) as stream:
        record, offset = 0, 0
        while header := _read_exactly(stream, 12, record, offset):
            location = record_location(path, record, offset)
            length, length_crc = struct.unpack("<QI", header)
            if masked_crc32c(crc32c(header[:8])) != length_crc:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.BAD_LENGTH]}")
            if length > MAX_RECORD_BYTES:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.TOO_LONG]}")
            body = _read_exactly(stream, length + 4, record, offset)
            if len(body) < length + 4:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.INCOMPLETE]}")
            if masked_crc32c(crc32c(body[:length])) != struct.unpack("<I", body[length:])[0]:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.BAD_BYTES]}")
            yield body[:length]
            record, offset = record + 1, offset + length + FRAME_BYTES


def _read_exactly(stream: RecordStream, count: int, record: int, offset: int) -> bytes:
    """Read `count` bytes, or return b"" if the file ends here.

    Args:
        stream: The stream to read.
        count: The number of bytes.
        record: The number of the record, for the error.
        offset: The position of its frame, for the error.

    Raises:
        InputError: The file ends after some of the bytes.
    """
    data = bytearray(count)
    filled = 0
    while filled < count:
        got = stream.read_into(memoryview(data)[filled:])
        if not got:
            break
        filled += got
    if 0 < filled < count:
        raise InputError(f"{record_location(stream.path, record, offset)}: {PROBLEMS[ScanStatus.INCOMPLETE]}")
    return bytes(data[:filled])


def _compression_of(path: Path, head: bytes) -> str:
    """Detect the compression of a file from its first twelve bytes.

    Returns:
        "" for a plain TFRecord file, otherwise "GZIP", "ZLIB" or "HDF5".

    Raises:
        InputError: The file is empty, has another format, or its suffix and its content disagree on whether it is HDF5.
    """
    if not head:
        raise InputError(f"{path}: the file is empty; remove it, or make it again")
    is_rows, named_so = is_hdf5(path, head), path.suffix in HDF5_ENDINGS
    if is_rows != named_so:
        problem = "is an HDF5 file" if is_rows else "does not begin as HDF5 does"
        rule = f"HDF5 files, and no others, end in {' or '.join(HDF5_ENDINGS)}"
        raise InputError(f"{path}: {problem}; {rule}: make the file again, or rename it")
    if is_rows:
        return HDF5
    if len(head) == 12 and masked_crc32c(crc32c(head[:8])) == struct.unpack("<I", head[8:])[0]:
        return ""
    foreign = _foreign_format(path)
    if foreign is not None:
        raise InputError(f"{path}: not a TFRecord file but {foreign}")
    if head[:2] == b"\x1f\x8b":
        return "GZIP"
    if len(head) >= 2 and head[0] & 15 == 8 and head[0] >> 4 <= 7 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    problem = "not a TFRecord file (the first length has a wrong CRC), nor GZIP or ZLIB"
    raise InputError(f"{path}: {problem}; check the path, or give the records by a pattern")


# --- walking over the frames in a buffer (numba kernels)


@borrowing_kernel
def next_record(start: int, end: int) -> tuple[int, int]:
    """Check the frame that begins at address `start`.

    Args:
        start: The address of the frame.
        end: The address after the last byte in the buffer.

    Returns:
        (status, size of the payload in bytes). The status is GOOD if the record is complete and both CRCs are correct,
        INCOMPLETE if the buffer ends before the record, and otherwise an error. The size is 0 if it could not be read.
    """
    if end - start < 12:
        return ScanStatus.INCOMPLETE, 0
    size = load_word(start)
    if mask_crc(crc_of_word(size)) != load_u32(start + 8):
        return ScanStatus.BAD_LENGTH, 0
    if size < 0 or size > MAX_RECORD_BYTES:
        return ScanStatus.TOO_LONG, size
    if size + 16 > end - start:
        return ScanStatus.INCOMPLETE, size
    payload = start + 12
    for line in range(size, 2 * size, 64):  # load the next record into the cache while this one is checked
        prefetch(payload + line)
    if mask_crc(crc32c_at(payload, size, 0)) != load_u32(payload + size):
        return ScanStatus.BAD_BYTES, size
    return ScanStatus.GOOD, size


@borrowing_kernel
def append_frames(crc: int, buffer: ByteArray, position: int, end: int) -> int:
    """Return a CRC-32C extended by the records in buffer[position:end].

    The CRC of each payload is taken from its frame and combined arithmetically, so that the payloads are not read again.

    Args:
        crc: The CRC-32C of all bytes before these.
        buffer: The bytes of the file, uint8.
        position: The position of the first frame.
        end: The end of the last frame. All frames must have been checked.
    """
    base = address_of(buffer)
    while position < end:
        frame = base + position
        size = load_word(frame)
        crc = crc32c_at(frame, 12, crc)
        stored = (load_u32(frame + 12 + size) - 0xA282EAD8) & 0xFFFFFFFF
        crc = append_crc(crc, size, ((stored >> 17) | (stored << 15)) & 0xFFFFFFFF)
        crc = crc32c_at(frame + 12 + size, 4, crc)
        position += size + 16
    return crc


# --- files of other tools that users pass as RECORDS by mistake

_TAR_MAGIC = slice(257, 262)
_MEGATRON_INDEX = b"MMIDIDX"
_TABLES = {b"PAR1": "a Parquet table", b"ARROW1": "an Arrow table"}
_AS_A_TABLE = "write its token ids as a Parquet table with a list column `input_ids` and run `gaudi-bert pack` on that"


def _foreign_format(path: Path) -> str | None:
    """Return the format of a file that is not a TFRecord file, and what to do with the file, as text for an error message.

    Return None if the format is unknown.
    """
    head = _head(path, 512)
    if head[_TAR_MAGIC] == b"ustar" or path.name.endswith((".tar.gz", ".tgz")):
        return f"a tar archive, as WebDataset writes them; {_AS_A_TABLE}"
    index = path.with_suffix(".idx") if path.suffix == ".bin" else path
    if _head(index, len(_MEGATRON_INDEX)) == _MEGATRON_INDEX:
        return f"one of the two files of a Megatron data set (.bin and .idx); {_AS_A_TABLE}"
    for magic, name in _TABLES.items():
        if head.startswith(magic):
            return f"{name}; give it to `gaudi-bert pack` alone, as a table"
    return None


def _head(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file, or b"" if there is no such file."""
    if not path.is_file():
        return b""
    with open_file(path) as handle:
        return handle.read(count)
