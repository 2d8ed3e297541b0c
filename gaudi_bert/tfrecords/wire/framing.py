"""Reading and writing TFRecord frames.

A frame consists of the payload's length (8 bytes), the masked CRC-32C of the length (4 bytes), the payload, and the masked
CRC-32C of the payload (4 bytes). Files may be plain or compressed with GZIP or ZLIB. The rows of an HDF5 file are read as if
they were TFRecords.

`RecordStream` reads the uncompressed bytes of a file in pieces. `read_records` is a simple reader on top of it, for a few
records or if speed does not matter. Inside kernels, `check_frame` checks one frame in a buffer.
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
from gaudi_bert.common.compiled import address_of, inlined_kernel, kernel_without_refcounts, load_u32, load_word, prefetch
from gaudi_bert.common.crc32c import append_crc, crc32c, crc32c_at, crc_of_word, mask_crc, masked_crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_regular_file, explain_os_errors, open_file
from gaudi_bert.tfrecords.wire.hdf5 import HDF5, HDF5_ENDINGS, Hdf5Rows, is_hdf5
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, MAX_RECORD_BYTES

NO_RECORD = "the file contains no records; remove it, or create it again"
_REMEDY = "copy the file again, or create it again"
_PIECE_BYTES = 1 << 20


class ScanStatus(IntEnum):
    """The state of a record, or the reason why a scan stopped at it.

    Attributes:
        INCOMPLETE: The record is not completely in the buffer, so more of the file must be read.
        GOOD: The record is complete and valid.
        INDEX_FULL: The index has no room for the record.
        BAD_LENGTH: The CRC of the length is wrong.
        BAD_BYTES: The CRC of the payload is wrong.
        TOO_LONG: The record is longer than a valid record can be.
        UNUSUAL: The kernel does not support the encoding of the record, so the general reader must check it.
    """

    INCOMPLETE = 0
    GOOD = 1
    INDEX_FULL = 2
    BAD_LENGTH = 3
    BAD_BYTES = 4
    TOO_LONG = 5
    UNUSUAL = 6


# The `ScanStatus` of a record and the size of its payload in bytes.
StatusAndSize = tuple[int, int]

# The error message for each status.
PROBLEMS = {
    ScanStatus.INCOMPLETE: f"the file ends within this record; {_REMEDY}",
    ScanStatus.INDEX_FULL: "the file contains more records than the plan states; create the histogram and the plan again",
    ScanStatus.BAD_LENGTH: f"the record is damaged, because the CRC of its length is wrong; {_REMEDY}",
    ScanStatus.BAD_BYTES: f"the record is damaged, because its CRC is wrong; {_REMEDY}",
    ScanStatus.TOO_LONG: f"the record is longer than {MAX_RECORD_BYTES} bytes, the maximum of a valid record; {_REMEDY}",
    ScanStatus.UNUSUAL: "the record has an encoding that is not supported; please report this error and attach the file",
}


def frame(payload: bytes) -> bytes:
    """Return `payload` as a TFRecord, with its length, the CRC of the length, and the CRC of the payload."""
    length = struct.pack("<Q", len(payload))
    return (
        length
        + struct.pack("<I", masked_crc32c(crc32c(length)))
        + payload
        + struct.pack("<I", masked_crc32c(crc32c(payload)))
    )


def format_record_location(path: Path, record: int, offset: int) -> str:
    """Return the file and number of a record as text for error messages, such as "a.tfrecord: record 3 at byte 960".

    Args:
        path: The file.
        record: The number of the record, from 0.
        offset: The position of its frame in the uncompressed file. It is not shown for an HDF5 file.
    """
    return f"{path}: row {record}" if path.suffix in HDF5_ENDINGS else f"{path}: record {record} at byte {offset}"


class RecordStream:
    """Reads the uncompressed bytes of one record file in order. It is a context manager that closes the file at the end.

    Attributes:
        path: The file.
        compression: "", "GZIP", "ZLIB" or "HDF5", detected from the first bytes.
        file_bytes: The number of bytes that were read from the disk so far.
        file_crc32c: The CRC-32C of these bytes if the file is compressed or HDF5, otherwise 0.

    Raises:
        InputError: The file cannot be opened, or is neither a TFRecord file nor an HDF5 file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file_bytes = 0
        self.file_crc32c = 0
        with explain_os_errors(path, "read"):
            self._handle = open(check_regular_file(path), "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
            self.compression = _detect_compression(path, self._handle.read(12))
            self._handle.seek(0)
        self._zlib_window = {"GZIP": zlib.MAX_WBITS + 16, "ZLIB": zlib.MAX_WBITS}.get(self.compression, 0)
        self._decompressor = zlib.decompressobj(self._zlib_window) if self._zlib_window else None
        self._pending_bytes: memoryview | bytes = b""
        self._unframed_payload = b""
        self._hdf5_rows = Hdf5Rows(path) if self.compression == HDF5 else None

    def __enter__(self) -> RecordStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.close()
        if self._hdf5_rows is not None:
            self._hdf5_rows.close()

    @property
    def max_uncompressed_bytes(self) -> int | None:
        """An upper bound on the uncompressed size in bytes, or None for GZIP and ZLIB. Their size is unknown until the whole
        file has been read.
        """
        if self._hdf5_rows is not None:
            return self._hdf5_rows.max_encoded_bytes
        return None if self.compression else os.fstat(self._handle.fileno()).st_size

    def read_into(self, buffer: memoryview) -> int:
        """Read the next uncompressed bytes into `buffer`, and return how many were read. The result is 0 only at the end of
        the file.

        The buffer may not be filled completely, even before the end of the file.

        Raises:
            InputError: The file cannot be read, or its compressed data are damaged or truncated.
        """
        with explain_os_errors(self.path, "read"):
            if not self.compression:
                count = self._handle.readinto(buffer)
                self._count_disk_bytes(buffer[:count])
                return count
            data = (
                self._decompress(len(buffer))
                if self._hdf5_rows is None
                else self._read_encoded_hdf5_rows(self._hdf5_rows, len(buffer))
            )
        buffer[: len(data)] = data
        return len(data)

    def _count_disk_bytes(self, data: memoryview | bytes) -> None:
        """Add the size of `data`, which was read from the disk, to `file_bytes`. If the file is compressed or HDF5, also
        update its CRC-32C.
        """
        self.file_bytes += len(data)
        if self.compression:
            self.file_crc32c = crc32c(data, self.file_crc32c)

    def _read_encoded_hdf5_rows(self, rows: Hdf5Rows, max_bytes: int) -> memoryview | bytes:
        """Return the next rows of an HDF5 file, encoded as TFRecords, at most `max_bytes` bytes at a time. At the end of the
        file, return b"".

        The HDF5 library does not return the bytes of the file. They are also read here, in proportion to the rows, to
        compute the CRC of the file and to report progress.
        """
        while not self._pending_bytes and (self._unframed_payload or rows.done < rows.count):
            if self._unframed_payload:
                self._pending_bytes, self._unframed_payload = frame(self._unframed_payload), b""
                continue
            self._pending_bytes, self._unframed_payload = rows.encode_next_rows()
            end = os.fstat(self._handle.fileno()).st_size * rows.done // rows.count
            while self.file_bytes < end and (data := self._handle.read(min(_PIECE_BYTES, end - self.file_bytes))):
                self._count_disk_bytes(data)
        data, self._pending_bytes = self._pending_bytes[:max_bytes], self._pending_bytes[max_bytes:]
        return data

    def _decompress(self, max_bytes: int) -> bytes:
        """Decompress the next bytes of the file, and return at most `max_bytes` of them. At the end of the file, return b"".

        A file may consist of several compressed members, which are read one after the other.

        Raises:
            InputError: The compressed data are damaged or truncated.
        """
        while True:
            if not self._pending_bytes:
                self._pending_bytes = self._handle.read(_PIECE_BYTES)
                self._count_disk_bytes(self._pending_bytes)
                if not self._pending_bytes:
                    if self._decompressor is not None and not self._decompressor.eof:
                        raise InputError(f"{self.path}: the {self.compression} data is incomplete; {_REMEDY}")
                    return b""
            if self._decompressor is None or self._decompressor.eof:
                self._decompressor = zlib.decompressobj(self._zlib_window)
            try:
                data = self._decompressor.decompress(self._pending_bytes, max_bytes)
            except zlib.error as error:
                raise InputError(f"{self.path}: the {self.compression} data is damaged ({error}); {_REMEDY}") from error
            self._pending_bytes = (
                self._decompressor.unused_data if self._decompressor.eof else self._decompressor.unconsumed_tail
            )
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
        while header := _read_exact_bytes(stream, 12, record, offset):
            location = format_record_location(path, record, offset)
            length, length_crc = struct.unpack("<QI", header)
            if masked_crc32c(crc32c(header[:8])) != length_crc:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.BAD_LENGTH]}")
            if length > MAX_RECORD_BYTES:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.TOO_LONG]}")
            body = _read_exact_bytes(stream, length + 4, record, offset)
            if len(body) < length + 4:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.INCOMPLETE]}")
            if masked_crc32c(crc32c(body[:length])) != struct.unpack("<I", body[length:])[0]:
                raise InputError(f"{location}: {PROBLEMS[ScanStatus.BAD_BYTES]}")
            yield body[:length]
            record, offset = record + 1, offset + length + FRAME_BYTES


def _read_exact_bytes(stream: RecordStream, byte_count: int, record: int, offset: int) -> bytes:
    """Read exactly `byte_count` bytes of a stream and return them, or return b"" at the end of the stream.

    Args:
        stream: The stream to read.
        byte_count: The number of bytes.
        record: The number of the record that is being read, for the error message.
        offset: The position of this record's frame, for the error message.

    Raises:
        InputError: The file ends after some of the bytes.
    """
    data = bytearray(byte_count)
    filled = 0
    while filled < byte_count:
        got = stream.read_into(memoryview(data)[filled:])
        if not got:
            break
        filled += got
    if 0 < filled < byte_count:
        raise InputError(f"{format_record_location(stream.path, record, offset)}: {PROBLEMS[ScanStatus.INCOMPLETE]}")
    return bytes(data[:filled])


def _detect_compression(path: Path, first_bytes: bytes) -> str:
    """Detect the compression of a file from its first twelve bytes.

    Returns:
        "" for a plain TFRecord file, otherwise "GZIP", "ZLIB" or "HDF5".

    Raises:
        InputError: The file is empty, has another format, or its suffix and its content disagree on whether it is HDF5.
    """
    if not first_bytes:
        raise InputError(f"{path}: the file is empty; remove it, or create it again")
    is_hdf5_content, is_named_hdf5 = is_hdf5(path, first_bytes), path.suffix in HDF5_ENDINGS
    if is_hdf5_content != is_named_hdf5:
        if is_hdf5_content:
            raise InputError(f"{path}: the name of an HDF5 file must end in {' or '.join(HDF5_ENDINGS)}; rename the file")
        raise InputError(f"{path}: expected an HDF5 file because of its name; rename the file, or create it again")
    if is_hdf5_content:
        return HDF5
    if len(first_bytes) == 12 and masked_crc32c(crc32c(first_bytes[:8])) == struct.unpack("<I", first_bytes[8:])[0]:
        return ""
    foreign = _describe_foreign_format(path)
    if foreign is not None:
        raise InputError(f"{path}: expected a TFRecord file, found {foreign}")
    if first_bytes[:2] == b"\x1f\x8b":
        return "GZIP"
    if (
        len(first_bytes) >= 2
        and first_bytes[0] & 15 == 8
        and first_bytes[0] >> 4 <= 7
        and (first_bytes[0] << 8 | first_bytes[1]) % 31 == 0
    ):
        return "ZLIB"
    problem = "expected a TFRecord file, plain or compressed with GZIP or ZLIB, but the CRC of the first length is wrong"
    raise InputError(f"{path}: {problem}; check the path, or pass a pattern that selects only the record files")


# --- walking over the frames in a buffer (numba kernels)


@inlined_kernel
def check_frame_length(frame_start: int, buffer_end: int) -> StatusAndSize:
    """Check the length of one TFRecord in memory and the CRC of the length. The payload is not read.

    Returns:
        (status, size of the payload in bytes), as in `check_frame`.
    """
    if buffer_end - frame_start < 12:
        return ScanStatus.INCOMPLETE, 0
    size = load_word(frame_start)
    if mask_crc(crc_of_word(size)) != load_u32(frame_start + 8):
        return ScanStatus.BAD_LENGTH, 0
    if size < 0 or size > MAX_RECORD_BYTES:
        return ScanStatus.TOO_LONG, size
    if size + 16 > buffer_end - frame_start:
        return ScanStatus.INCOMPLETE, size
    return ScanStatus.GOOD, size


@kernel_without_refcounts
def check_frame(frame_start: int, buffer_end: int) -> StatusAndSize:
    """Check the length and both CRCs of one TFRecord in memory.

    Args:
        frame_start: The address of the record's frame.
        buffer_end: The address after the last byte in the buffer.

    Returns:
        (status, size of the payload in bytes). The status is GOOD if the record is complete and both CRCs are correct,
        INCOMPLETE if the buffer ends before the end of the record, and otherwise an error. The size is 0 if the length of
        the record is missing or damaged.
    """
    status, size = check_frame_length(frame_start, buffer_end)
    if status != ScanStatus.GOOD:
        return status, size
    payload = frame_start + 12
    for line in range(size, 2 * size, 64):  # load the next record into the cache while this one is checked
        prefetch(payload + line)
    if mask_crc(crc32c_at(payload, size, 0)) != load_u32(payload + size):
        return ScanStatus.BAD_BYTES, size
    return ScanStatus.GOOD, size


@kernel_without_refcounts
def extend_crc_by_frames(crc: int, buffer: ByteArray, position: int, end: int) -> int:
    """Update the CRC-32C of a file with the TFRecords in `buffer[position:end]`, and return the result.

    The CRC of each payload is taken from its frame and combined arithmetically, so that the payloads are not read again.

    Args:
        crc: The CRC-32C of all bytes of the file before these records.
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
_TABLE_FORMATS = {b"PAR1": "a Parquet table", b"ARROW1": "an Arrow table"}
_WRITE_AS_TABLE = (
    "write its token ids to a Parquet table with a list column `input_ids`, and pack this table with `gaudi-bert pack`"
)


def _describe_foreign_format(path: Path) -> str | None:
    """Identify the format of a file that is not a TFRecord file. Return its description for an error message, including what
    the user can do.

    Return None if the format is unknown.
    """
    first_bytes = _read_first_bytes(path, 512)
    if first_bytes[_TAR_MAGIC] == b"ustar" or path.name.endswith((".tar.gz", ".tgz")):
        return f"a tar archive, probably of WebDataset; {_WRITE_AS_TABLE}"
    index = path.with_suffix(".idx") if path.suffix == ".bin" else path
    if _read_first_bytes(index, len(_MEGATRON_INDEX)) == _MEGATRON_INDEX:
        return f"a file of a Megatron data set (.bin or .idx); {_WRITE_AS_TABLE}"
    for magic, name in _TABLE_FORMATS.items():
        if first_bytes.startswith(magic):
            return f"{name}; pass the table itself to `gaudi-bert pack`, without other files"
    return None


def _read_first_bytes(path: Path, byte_count: int) -> bytes:
    """Return the first `byte_count` bytes of a file, or b"" if the file does not exist."""
    if not path.is_file():
        return b""
    with open_file(path) as handle:
        return handle.read(byte_count)
