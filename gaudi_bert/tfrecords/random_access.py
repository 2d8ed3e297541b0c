"""Random access to the records of many TFRecord files. `RecordFiles.read` returns records by number, as dense arrays.

A file is memory-mapped when it is opened. If its group has an index, the index states where each record begins, and only the
pages of the requested records are read from the disk. Otherwise the file is read once from the front to find its records. A
compressed file is first decompressed to an unnamed temporary file. The checksums of a record are checked when the record is
read. The general reader decodes a record if the kernels do not support its encoding.

Files stay open until `close`, `close_except` or a `StreamReader` closes them. A `ShardCache` downloads the shards of an
object store to the local disk when they are prepared.
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

from gaudi_bert.artefacts.mirrored_folder import fetch_files, format_path, is_mirrored, remove_local_copies
from gaudi_bert.artefacts.packed import RecordManifest, RecordMetadata
from gaudi_bert.artefacts.shards import IndexedRecords, ShardTable, check_shard_sizes, index_path, read_index
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
# Linux limits each MADV_WILLNEED call to the read-ahead setting of the disk, whose default is 128 KiB. A longer range would
# be read ahead only in part, so it is requested in pieces of this size.
_READ_AHEAD_BYTES = 128 * 1024


_Pages = mmap.mmap | bytes
"""The content of a file as a memory map, or b"" for an empty file, which cannot be mapped."""


@dataclass(frozen=True)
class _Prepared:
    """The result of `RecordFiles.prepare`, from which a file is opened.

    Attributes:
        starts: int64 [records + 1], the position of each record's frame. The last entry is the end of the file.
        checksums: int64 [records], the checksums that the index states, or None if there was no index.
        pages: The decompressed content of a compressed file, otherwise None.
    """

    starts: IntArray
    checksums: IntArray | None
    pages: _Pages | None


class RecordFiles(ShardFiles["_Prepared"]):
    """Files of records that all have the same features. A `StreamReader` uses them as its shards.

    Args:
        paths: The files.
        schema: The features and sizes of every record.
        counts: The number of records in each file, or None if the numbers are unknown.
        shards: The shards of the packed folder, from which indexes and checksums are read. None for files that this package
            did not pack.
        cache: Downloads the files from an object store. None if they are on this machine.
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
        # The `_OpenFile.addresses` of each open file. They are zero for a closed file.
        self._addresses = np.zeros((len(paths), 4), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only. The other process opens the files itself."""
        return RecordFiles, (self.paths, self.schema, self._counts, self._shards, self._cache)

    @property
    def sizes(self) -> IntArray:
        """The number of records in each file, int64 [files]. Unknown numbers are counted, which reads all files."""
        if self._counts is None:
            self._counts = [len(self.prepare(number).starts) - 1 for number in range(len(self.paths))]
        return np.asarray(self._counts, np.int64)

    def prepare(self, number: int) -> _Prepared:
        """Find out where the records of a file begin. With a cache, download the file first.

        Raises:
            InputError: The file cannot be read, is damaged, has another number of records than expected, or differs from
                the manifest of its group.
        """
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
        """Open a file that was prepared.

        Raises:
            InputError: The file cannot be read, or its size has changed.
        """
        file = self._open[number] = _OpenFile(self.paths[number], prepared)
        self._addresses[number] = file.addresses

    def close(self, number: int) -> None:
        """Close an open file."""
        self._addresses[number] = 0
        del self._open[number]
        self.discard(number)

    def discard(self, number: int) -> None:
        """Release a prepared file that will not be opened."""
        if self._cache is not None:
            self._cache.release(number)

    def close_except(self, numbers: Iterable[int]) -> None:
        """Close all open files except those with the given numbers."""
        for number in self._open.keys() - set(numbers):
            self.close(number)

    def prefetch(self, number: int, first: int, last: int) -> None:
        """Start to read records `first` to `last` - 1 of an open file into the page cache, without waiting for the disk."""
        self._open[number].advise(mmap.MADV_WILLNEED, first, last)

    def drop_pages(self, number: int, first: int, last: int) -> None:
        """Unmap the pages of records `first` to `last` - 1 from this process. The page cache keeps them."""
        self._open[number].advise(mmap.MADV_DONTNEED, first, last)

    def read(self, files: IntArray, records: IntArray) -> dict[str, AnyArray]:
        """Read n records and return their features by name, int32 or float32 [n, size].

        Files that are not open yet are opened, and stay open.

        Args:
            files: int64 [n], the file number of each record.
            records: int64 [n], the number of each record in its file, from 0.

        Raises:
            IndexError: A file does not have the requested record.
            InputError: A record is damaged, is not the one that was packed, or has other features than the schema.
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
        except InputError:  # the kernels reject at least one record, so the general reader decodes them one by one
            rows = [
                self._decode(payloads[begin:end].tobytes(), int(file), int(record))
                for begin, end, file, record in zip(offsets, ends, files, records, strict=True)
            ]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def location(self, file: int, record: int) -> str:
        """Return the name of a record for error messages."""
        return f"{self.paths[file]}: record {record}"

    def _decode(self, payload: bytes, file: int, record: int) -> dict[str, AnyArray]:
        """Decode one record with the general reader.

        Integers beyond 32 bits are clipped. The clipped values are out of the range of every feature, so that the caller
        rejects them.

        Args:
            payload: The bytes of the record without its frame.
            file: The file number, for errors.
            record: The number of the record in its file, for errors.

        Raises:
            InputError: The record is not an example with the features of the schema.
        """
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
    """An open file: its mapped bytes and the positions of its records.

    Raises:
        InputError: The file cannot be read, or it has another size than when it was prepared.
    """

    def __init__(self, path: Path, prepared: _Prepared) -> None:
        self._path, self.starts, self._checksums = path, prepared.starts, prepared.checksums
        self._pages = _mapped_file(path) if prepared.pages is None else prepared.pages
        self._bytes = np.frombuffer(self._pages, np.uint8)
        if self._bytes.size != self.starts[-1]:
            raise InputError(f"{path}: has {self._bytes.size:,} bytes now, {self.starts[-1]:,} before; start again")
        self.advise(mmap.MADV_RANDOM, 0, len(self.starts) - 1)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """What the kernels need: (address of the bytes, address of the starts, number of records, address of the checksums).

        The address of the checksums is 0 if the file has no index.
        """
        checksums = 0 if self._checksums is None else self._checksums.ctypes.data
        return self._bytes.ctypes.data, self.starts.ctypes.data, len(self.starts) - 1, checksums

    def advise(self, advice: int, first: int, last: int) -> None:
        """Pass an `madvise` flag for the pages of records `first` to `last` - 1 to the operating system."""
        if isinstance(self._pages, mmap.mmap):
            begin, end = int(self.starts[first]) // mmap.PAGESIZE * mmap.PAGESIZE, int(self.starts[last])
            step = _READ_AHEAD_BYTES if advice == mmap.MADV_WILLNEED else max(1, end - begin)
            for piece in range(begin, end, step):
                self._pages.madvise(advice, piece, min(step, end - piece))

    def problem(self, record: int) -> str:
        """Return an error message for a record whose length or checksum is wrong."""
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
    """Map an open file of `size` bytes into memory."""
    return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _mapped_file(path: Path) -> _Pages:
    """Map a file into memory as it is on the disk."""
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return _mapped(handle, path.stat().st_size)


def _mapped_content(path: Path) -> tuple[_Pages, bool]:
    """Map the decompressed content of a file into memory, and return it with whether the file is compressed."""
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
    """Walk over the frames in a buffer and store the position of each in `starts`, as far as `starts` has room.

    Only the lengths and their checksums are checked, not the payloads.

    Returns:
        (status, records, position). The status is GOOD at the end of the buffer, otherwise the reason for the stop.
        `records` is the number of complete records before the stop, and `position` the frame at which the walk stopped.
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
    """Set `lengths` to the payload sizes in bytes, computed from the positions of the records.

    Args:
        addresses: int64 [files, 4], the `_OpenFile.addresses` of each file.
        files: int64 [n], the file number of each record.
        records: int64 [n], the number of each record in its file.
        lengths: int64 [n], the output.

    Returns:
        The index of the first record that does not exist or has a negative size, or -1 if there is none.
    """
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
    """Check the frames of records and copy their payloads into `target`.

    Args:
        addresses: int64 [files, 4], the `_OpenFile.addresses` of each file.
        files: int64 [n], the file number of each record.
        records: int64 [n], the number of each record in its file.
        lengths: int64 [n], the expected payload sizes.
        target: uint8, the output.
        offsets: int64 [n], the position in `target` of each payload.

    Returns:
        The index of the first record whose length or checksum is wrong, or -1 if there is none.
    """
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


# --- a cache of object-store shards on the local disk
#
# The threads that prepare shards (`reading/streams.py`) download them ahead of the reader. A shard in the cache is always
# complete. A reader keeps at most one shard of each stream open, prepares the next ones, and returns to the shards of the
# other sets. The disk space that it needs therefore depends on the largest shards and not on the size of the data. Shards
# that were read stay in the cache until their space is needed, and the least recently used shard is evicted first. If all
# shards fit into the cache, each is downloaded only once.


@dataclass
class _Copy:
    """A shard that is in the cache or is being downloaded.

    Attributes:
        users: How many calls of `bring` were not yet followed by `release`. A shard in use is not evicted.
        fetching: Held during the download, so that two readers of a shard download it once.
    """

    users: int = 0
    fetching: threading.Lock = field(default_factory=threading.Lock)


class ShardCache:
    """A cache for the shards of a mirrored folder. The least recently used shards are evicted if it is full.

    Args:
        folder: The mirrored folder (`artefacts.mirrored_folder`).
        table: The shards of the folder.
        room: The maximum size of the cached shards, in bytes. Shards in use are not evicted, even if this is exceeded.
        threads: How many shards are downloaded at the same time.
    """

    def __init__(self, folder: Path, table: ShardTable, room: int, threads: int) -> None:
        self.threads = threads
        self._folder, self._table, self._room = folder, table, room
        self._lock = threading.Lock()
        self._copies: dict[int, _Copy] = {}  # the least recently used first

    def check_room(self, streams: int, processes: int, sets: int = 1) -> None:
        """Check that the cache can hold the open shards of a process and the shards that it reads next.

        The sizes of the largest shards are used, so that the check holds for any order.

        Args:
            streams: The number of streams, each of which reads one shard at a time.
            processes: The number of processes.
            sets: The number of sets of streams that take turns.

        Raises:
            InputError: The cache is too small.
        """
        ahead = streams // math.gcd(streams, processes)
        needed = int(np.sort(self._table.bytes)[::-1][: streams * sets + ahead].sum())
        if needed > self._room:
            raise InputError(
                f"{self._folder}: a process needs {needed:,} bytes for the shards of {streams * sets} streams and the "
                f"next {ahead}, store.cache_bytes is {self._room:,}; raise it (on Kubernetes kubernetes.scratch, to twice "
                "as much)"
            )

    def bring(self, number: int) -> None:
        """Download a shard unless it is cached, and keep it until `release` was called once for each call of `bring`.

        Raises:
            InputError: The store does not have the shard, or the shard has another size than the metadata states.
        """
        path, size = self._folder / self._table.name(number), int(self._table.bytes[number])
        with self._lock:
            copy = self._copies[number] = self._copies.pop(number, _Copy())
            copy.users += 1
            self._make_room()
        with copy.fetching:  # otherwise two readers of a shard would both download it
            fetch_files(path)
        stored = path.stat().st_size if path.exists() else None
        if stored != size:
            problem = "no such object" if stored is None else f"has {stored:,} bytes, but {size:,} in the metadata"
            raise InputError(f"{format_path(path)}: {problem}; write the packed data again")

    def release(self, number: int) -> None:
        """Undo one call of `bring`. The shard may be evicted if no reader uses it any more."""
        with self._lock:
            copy = self._copies[number] = self._copies.pop(number)
            copy.users -= 1

    def _make_room(self) -> None:
        """Evict unused shards, the least recently used first, until the cache is within its limit."""
        here = int(self._table.bytes[list(self._copies)].sum())
        for number in [number for number, copy in self._copies.items() if not copy.users]:
            if here <= self._room:
                return
            del self._copies[number]
            here -= int(self._table.bytes[number])
            remove_local_copies(self._folder / self._table.name(number))


# --- the shards of a packed folder. There may be hundreds of thousands, so their paths are not kept in a list.


@dataclass(frozen=True)
class ShardPaths(Sequence[Path]):
    """The shard paths of a packed folder, as a sequence that creates each path when it is requested.

    Attributes:
        folder: The packed folder.
        table: The shards of the folder.
    """

    folder: Path
    table: ShardTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Path:  # type: ignore[override]  # nobody takes a slice
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self.folder / self.table.name(number % len(self))

    def read_index_of(self, shard: int) -> IndexedRecords | None:
        """Return the part of the group's index that describes a shard, or None if there is no index that fits the shard."""
        table, index = self.table, index_path(self.folder, self.table.group_and_number(shard)[0])
        return read_index(index, table.packs_before(shard), int(table.packs[shard]), int(table.bytes[shard]))

    def read_crc32c_of(self, shard: int) -> int | None:
        """Return the CRC-32C of a shard as its group's manifest states it, or None if there is no manifest."""
        return RecordManifest.read_shard_crc32c(self.folder, self.table, shard)


def open_shards(folder: Path, metadata: RecordMetadata, cache: ShardCache | None = None) -> RecordFiles:
    """Return the shards of a packed folder for random access to their packs.

    Args:
        folder: The packed folder.
        metadata: The metadata of the folder.
        cache: Downloads the shards from an object store. None if they are on this machine.
    """
    paths = ShardPaths(folder, metadata.shard_table)
    return RecordFiles(paths, PackedSchema.of(metadata), paths.table.packs, paths, cache)


def open_packs(folder: Path, metadata: RecordMetadata, cache: ShardCache | None = None) -> StoredPacks:
    """Return the packs of a folder with the settings for reading them in a global order.

    The order mixes packs from many shards and from all regions of the input. The parameters are those of `open_shards`.
    """
    files, streams = open_shards(folder, metadata, cache), choose_stream_count(metadata.shard_multiple)
    regions = regions_of_shards(metadata.shard_table.group_sizes, metadata.input_files, metadata.seed)
    return StoredPacks(files, streams, MAX_STREAM_SETS, regions)


# Looking up the sizes of more shards than this would take about a minute in each process if the disk's metadata is not
# cached.
_MOST_SIZES = 20_000


def check_before_reading(folder: Path, table: ShardTable) -> None:
    """Check before a run that all shards of a folder exist and have the sizes that the metadata state.

    If the folder has more than 20,000 shards, only their names are checked. The size of each is then checked when the shard
    is opened.

    Raises:
        InputError: A shard is missing or has another size.
    """
    if len(table) <= _MOST_SIZES or is_mirrored(folder):
        check_shard_sizes(folder, table)
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
