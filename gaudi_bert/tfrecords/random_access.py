"""Records of many files by their numbers, as dense arrays: where they begin, the bytes in the page cache.

A file is mapped into memory when it is opened. The index of its group states where its records begin, and then only the
pages of the records that are read are touched; a file without one is walked. The checksums of a record are checked when it
is read. A compressed file is first written out to a temporary file without a name; a record in an encoding that the kernels
do not take is decoded by the general reader. Files are open until `close_except` or `StreamReader` closes them; those of an
object store are brought to the local disk by a `ShardCache` when they are prepared.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.mirrored_folder import fetch, is_mirrored, release, shown_path
from gaudi_bert.artefacts.packed import Metadata, read_shard_crc32c
from gaudi_bert.artefacts.shards import IndexedRecords, ShardTable, check_shards, index_path, read_index
from gaudi_bert.common.arrays import AnyArray, ByteArray, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.crc32c import crc32c, crc32c_at, crc_of_word, mask_crc, masked_crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explain_os_errors, open_file
from gaudi_bert.common.memory import address_of, copy_bytes, load_u32, load_word
from gaudi_bert.reading.global_order import MAX_STREAM_SETS, choose_stream_count, regions_of_shards
from gaudi_bert.reading.streams import ShardFiles, StoredPacks
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import PROBLEMS, RecordStream, ScanStatus, record_location
from gaudi_bert.tfrecords.wire.schema import (
    FRAME_BYTES,
    MAX_RECORD_BYTES,
    PackedSchema,
    RecordError,
    UnpackedSchema,
    check_features,
)
from gaudi_bert.tfrecords.wire.values import decode_columns

_LARGEST = 2**31 - 1
# Linux reads no more ahead at a time than the disk's own read-ahead, which is this much unless it was changed.
_READ_AHEAD_BYTES = 128 * 1024


_Pages = mmap.mmap | bytes
"""The content of a file, in memory page by page as it is read; of an empty file there are no pages, but b""."""


@dataclass(frozen=True)
class _Prepared:
    """Facts of a file before it is opened."""

    starts: IntArray  # int64 [records + 1], where the frames of its records begin; the last is the end of the file
    checksums: IntArray | None  # int64 [records], those of the index; None if the file itself was walked
    pages: _Pages | None  # of a compressed file, its bytes, uncompressed


class RecordFiles(ShardFiles["_Prepared"]):
    """Files of records with the same features, the shards of a `StreamReader`.

    `counts` are the records of each file, None where unknown; `shards` knows their index and their checksums, None for files
    that were not packed here; `cache` brings the files here, None where they are here.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        schema: PackedSchema | UnpackedSchema,
        counts: Sequence[int] | IntArray | None = None,
        shards: ShardPaths | None = None,
        cache: ShardCache | None = None,
    ) -> None:
        self.paths, self.schema, self._counts, self._shards, self._cache = paths, schema, counts, shards, cache
        self.threads = 1 if cache is None else cache.threads
        self._open: dict[int, _OpenFile] = {}
        # The `addresses` of each file that is open.
        self._addresses = np.zeros((len(paths), 4), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which maps the files itself."""
        return RecordFiles, (self.paths, self.schema, self._counts, self._shards, self._cache)

    @property
    def sizes(self) -> IntArray:
        """Records of each file, int64, counted where unknown."""
        if self._counts is None:
            self._counts = [len(self.prepare(number).starts) - 1 for number in range(len(self.paths))]
        return np.asarray(self._counts, np.int64)

    def prepare(self, number: int) -> _Prepared:
        """Find out where the records of a file begin."""
        path = self.paths[number]
        if self._cache is not None:
            self._cache.bring(number)
        indexed = None if self._shards is None else self._shards.read_index_of(number)
        if indexed is not None:
            return _Prepared(*indexed, None)
        pages, is_compressed = _mapped_content(path)
        content = np.frombuffer(pages, np.uint8)
        count = _walk_frames(content, np.empty(0, np.int64))[1] if self._counts is None else int(self._counts[number])
        room = np.empty(count, np.int64)
        status, records, position = _walk_frames(content, room)
        if status != ScanStatus.GOOD:
            raise InputError(f"{record_location(path, records, position)}: {PROBLEMS[ScanStatus(status)]}")
        if records != count:
            raise InputError(f"{path}: holds {records:,} records, {count:,} in the metadata; write the data again")
        if self._shards is not None and self._shards.read_crc32c_of(number) not in (None, crc32c(content)):
            raise InputError(f"{path}: its CRC-32C differs from the manifest of its group; write the packed data again")
        return _Prepared(np.append(room, content.size), None, pages if is_compressed else None)

    def open(self, number: int, prepared: _Prepared) -> None:
        """Open a file that was prepared."""
        file = self._open[number] = _OpenFile(self.paths[number], prepared)
        self._addresses[number] = file.addresses

    def close(self, number: int) -> None:
        """Close an open file."""
        self._addresses[number] = 0
        del self._open[number]
        self.discard(number)

    def discard(self, number: int) -> None:
        """Release a file that was prepared and is not opened after all."""
        if self._cache is not None:
            self._cache.release(number)

    def close_except(self, numbers: Iterable[int]) -> None:
        """Close all files but these."""
        for number in self._open.keys() - set(numbers):
            self.close(number)

    def prefetch(self, number: int, first: int, last: int) -> None:
        """Have the disk read records `first` up to below `last` of an open file meanwhile."""
        self._open[number].advise(mmap.MADV_WILLNEED, first, last)

    def drop_pages(self, number: int, first: int, last: int) -> None:
        """Remove the pages of these records, which are not read again, from this process; the page cache keeps them."""
        self._open[number].advise(mmap.MADV_DONTNEED, first, last)

    def read(self, files: IntArray, records: IntArray) -> dict[str, AnyArray]:
        """Each feature of some records by its name, int32 or float32 [n, size].

        `files`, int64 [n], are the numbers of their files, and `records` their numbers in these.
        """
        if not self._addresses[files, 1].all():
            for number in np.unique(files[self._addresses[files, 1] == 0]).tolist():
                self.open(number, self.prepare(number))
        lengths = np.empty(len(files), np.int64)
        absent = _find_lengths(self._addresses, files, records, lengths)
        if absent >= 0:
            file, record = int(files[absent]), int(records[absent])
            if 0 <= record < self._addresses[file, 2]:
                raise InputError(self._open[file].problem(record))
            raise IndexError(f"{self.location(file, record)} is requested, but the file does not have it")
        ends = np.cumsum(lengths)
        offsets, payloads = ends - lengths, np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        bad = _copy_payloads(self._addresses, files, records, lengths, payloads, offsets)
        if bad >= 0:
            raise InputError(self._open[int(files[bad])].problem(int(records[bad])))
        try:
            return decode_columns(payloads, offsets, lengths, self.schema.features, "records")
        except InputError:  # which, and whether the general reader takes it, is tested one by one
            rows = [
                self._decode(payloads[begin:end].tobytes(), int(file), int(record))
                for begin, end, file, record in zip(offsets, ends, files, records, strict=True)
            ]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def location(self, file: int, record: int) -> str:
        """Return what to call a record in an error."""
        return f"{self.paths[file]}: record {record}"

    def _decode(self, payload: bytes, file: int, record: int) -> dict[str, AnyArray]:
        """One record by the general reader; numbers beyond 32 bits become the nearest ones, for the caller to refuse."""
        try:
            features = decode_example(payload)
            check_features(features, self.schema)
        except RecordError as error:
            raise InputError(f"{self.location(file, record)}: {error}; write the records again") from error
        return {
            spec.name: features[spec.name].astype(np.float32)
            if spec.kind == "float32"
            else np.clip(features[spec.name], -_LARGEST, _LARGEST).astype(np.int32)
            for spec in self.schema.features
        }


class _OpenFile:
    """A file's bytes, and where its records' frames begin."""

    def __init__(self, path: Path, prepared: _Prepared) -> None:
        self._path, self.starts, self._checksums = path, prepared.starts, prepared.checksums
        self._pages = _mapped_file(path) if prepared.pages is None else prepared.pages
        self._bytes = np.frombuffer(self._pages, np.uint8)
        if self._bytes.size != self.starts[-1]:
            raise InputError(f"{path}: has {self._bytes.size:,} bytes now, {self.starts[-1]:,} before; start again")
        self.advise(mmap.MADV_RANDOM, 0, len(self.starts) - 1)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """The addresses of the bytes and of the starts, how many records there are, and the address of their checksums.

        The last is 0 if the file has no index.
        """
        checksums = 0 if self._checksums is None else self._checksums.ctypes.data
        return self._bytes.ctypes.data, self.starts.ctypes.data, len(self.starts) - 1, checksums

    def advise(self, advice: int, first: int, last: int) -> None:
        """Tell the operating system how records `first` up to below `last` are read."""
        if isinstance(self._pages, mmap.mmap):
            begin, end = int(self.starts[first]) // mmap.PAGESIZE * mmap.PAGESIZE, int(self.starts[last])
            step = _READ_AHEAD_BYTES if advice == mmap.MADV_WILLNEED else max(1, end - begin)
            for piece in range(begin, end, step):
                self._pages.madvise(advice, piece, min(step, end - piece))

    def problem(self, record: int) -> str:
        """Return what to say of a record whose length or checksum is wrong."""
        start, end = int(self.starts[record]), int(self.starts[record + 1])
        location = record_location(self._path, record, start)
        status, records, _ = _walk_frames(self._bytes[start:end], np.empty(0, np.int64))
        if self._checksums is None or (status == ScanStatus.GOOD and records == 1):
            checksum = masked_crc32c(crc32c(self._bytes[start + 12 : end - 4]))
            if self._checksums is None or checksum != int(self._bytes[end - 4 : end].view("<u4")[0]):
                return f"{location}: {PROBLEMS[ScanStatus.BAD_BYTES]}"
            return f"{location}: is not the record that was packed here; write the packed data again"
        return (
            f"{location}: does not match the index of its group ({end - start:,} bytes); remove that group-*.index, or "
            "write the packed data again"
        )


def _mapped(handle: Any, size: int) -> _Pages:
    return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _mapped_file(path: Path) -> _Pages:
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return _mapped(handle, path.stat().st_size)


def _mapped_content(path: Path) -> tuple[_Pages, bool]:
    """The uncompressed content of a file, and whether it is a compressed one."""
    if path.stat().st_size == 0:
        return b"", False
    with RecordStream(path) as stream, explain_os_errors(path, "read"):
        if not stream.compression:
            return _mapped_file(path), False
        with tempfile.TemporaryFile() as plain:
            piece = memoryview(bytearray(1 << 20))
            while count := stream.read_into(piece):
                plain.write(piece[:count])
            plain.flush()
            return _mapped(plain, plain.tell()), True


@borrowing_kernel
def _walk_frames(buffer: ByteArray, starts: IntArray) -> tuple[int, int, int]:
    """Go from frame to frame and note where each starts, as far as `starts` has room.

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
def _find_lengths(addresses: IntArray, files: IntArray, records: IntArray, lengths: IntArray) -> int:
    """Set `lengths` to the bytes of the payloads, by where the records begin; which record is none, or -1."""
    for number in range(records.size):
        file, record = files[number], records[number]
        if record < 0 or record >= addresses[file, 2]:
            return number
        start = addresses[file, 1] + 8 * record
        lengths[number] = load_word(start + 8) - load_word(start) - FRAME_BYTES
        if lengths[number] < 0:
            return number
    return -1


@borrowing_kernel
def _copy_payloads(
    addresses: IntArray, files: IntArray, records: IntArray, lengths: IntArray, target: ByteArray, offsets: IntArray
) -> int:
    """Copy payloads of these lengths into `target`, each to its offset; which one has a wrong length or checksum, or -1."""
    for number in range(records.size):
        file, size = files[number], lengths[number]
        frame = addresses[file, 0] + load_word(addresses[file, 1] + 8 * records[number])
        if load_word(frame) != size or mask_crc(crc_of_word(size)) != load_u32(frame + 8):
            return number
        payload = frame + 12
        checksum = load_u32(payload + size)
        if mask_crc(crc32c_at(payload, size, 0)) != checksum:
            return number
        if addresses[file, 3] != 0 and load_word(addresses[file, 3] + 8 * records[number]) != checksum:
            return number
        copy_bytes(address_of(target) + offsets[number], payload, size)
    return -1


# --- shards of an object store on the local disk: complete, and within a bound
#
# Shards are fetched ahead of the reader, by the threads that prepare them (`reading/streams.py`), from front to back. One
# that is here is complete. A reader has at most a shard of each stream open, has the next ones prepared, and returns to
# those of the other sets, so its space follows from the largest shards, whatever the size of the data. Shards that were read
# stay until their room is needed, and the least recently used goes first: data that fits is fetched once.


@dataclass
class _Copy:
    """A shard that is here, or comes; `users` counts how often it was brought and not released."""

    users: int = 0
    fetching: threading.Lock = field(default_factory=threading.Lock)


class ShardCache:
    """The shards of a mirrored folder that are here: at most `room` bytes; `threads` are fetched at once."""

    def __init__(self, folder: Path, table: ShardTable, room: int, threads: int) -> None:
        self.threads = threads
        self._folder, self._table, self._room = folder, table, room
        self._lock = threading.Lock()
        self._copies: dict[int, _Copy] = {}  # the least recently used first

    def check_room(self, streams: int, processes: int, sets: int = 1) -> None:
        """Refuse shards of which those of all sets of streams and those that a process reads next may not fit."""
        ahead = streams // math.gcd(streams, processes)
        needed = int(np.sort(self._table.bytes)[::-1][: streams * sets + ahead].sum())
        if needed > self._room:
            raise InputError(
                f"{self._folder}: a process needs {needed:,} bytes for the shards of {streams * sets} streams and the "
                f"next {ahead}, store.cache_bytes is {self._room:,}; raise it (on Kubernetes kubernetes.scratch, to twice "
                "as much)"
            )

    def bring(self, number: int) -> None:
        """Have a complete shard here until it is released as often as it was brought."""
        path, size = self._folder / self._table.name(number), int(self._table.bytes[number])
        with self._lock:
            copy = self._copies[number] = self._copies.pop(number, _Copy())
            copy.users += 1
            self._make_room()
        with copy.fetching:  # two readers of one shard fetch it once
            fetch(path)
        stored = path.stat().st_size if path.exists() else None
        if stored != size:
            problem = "no such object" if stored is None else f"has {stored:,} bytes, but {size:,} in the metadata"
            raise InputError(f"{shown_path(path)}: {problem}; write the packed data again")

    def release(self, number: int) -> None:
        """Let go of a shard that was brought."""
        with self._lock:
            copy = self._copies[number] = self._copies.pop(number)
            copy.users -= 1

    def _make_room(self) -> None:
        """Remove shards that nobody reads, as long as there are more bytes than there is room."""
        here = int(self._table.bytes[list(self._copies)].sum())
        for number in [number for number, copy in self._copies.items() if not copy.users]:
            if here <= self._room:
                return
            del self._copies[number]
            here -= int(self._table.bytes[number])
            release(self._folder / self._table.name(number))


# --- the shards of a packed folder, of which there may be hundreds of thousands


@dataclass(frozen=True)
class ShardPaths(Sequence[Path]):
    """The paths of the shards of a folder, created when they are requested."""

    folder: Path
    table: ShardTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Path:  # type: ignore[override]  # nobody takes a slice
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self.folder / self.table.name(number % len(self))

    def read_index_of(self, shard: int) -> IndexedRecords | None:
        """Return what the index of its group states about a shard; None without an index that fits the shard."""
        table, index = self.table, index_path(self.folder, self.table.group_and_number(shard)[0])
        return read_index(index, table.packs_before(shard), int(table.packs[shard]), int(table.bytes[shard]))

    def read_crc32c_of(self, shard: int) -> int | None:
        """Return the CRC-32C that the manifest of its group states for a shard; None without a manifest."""
        return read_shard_crc32c(self.folder, self.table, shard)


def open_shards(folder: Path, metadata: Metadata, cache: ShardCache | None = None) -> RecordFiles:
    """The packs of a folder by their shards and numbers, located by the index of their group where there is one."""
    paths = ShardPaths(folder, metadata.shard_table)
    return RecordFiles(paths, PackedSchema.of(metadata), paths.table.packs, paths, cache)


def open_packs(folder: Path, metadata: Metadata, cache: ShardCache | None = None) -> StoredPacks:
    """The packs of a folder as they are read: from more shards, and from all parts of the input, where there is an index."""
    files, streams = open_shards(folder, metadata, cache), choose_stream_count(metadata.shard_multiple)
    regions = regions_of_shards(metadata.shard_table.group_sizes, metadata.input_files, metadata.seed)
    return StoredPacks(files, streams, MAX_STREAM_SETS, regions)


# Sizes of more shards are not looked up before a run: that takes a minute on a cold disk, for each process.
_MOST_SIZES = 20_000


def check_before_reading(folder: Path, table: ShardTable) -> None:
    """`check_shards` before a run: of very many shards, the names alone; each is measured when it is opened."""
    if len(table) <= _MOST_SIZES or is_mirrored(folder):
        check_shards(folder, table)
        return
    is_there = np.zeros(len(table), bool)
    with os.scandir(folder) as entries:
        for entry in entries:
            number = table.number(entry.name)
            if number is not None:
                is_there[number] = True
    if not is_there.all():
        path = folder / table.name(int(np.argmin(is_there)))
        raise InputError(f"{path}: the shard is missing, the metadata names it; write the packed data again")
