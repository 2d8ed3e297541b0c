"""Random access to the records of many TFRecord files. `RecordFiles.read_records` returns records by file and number, as
dense arrays.

A file is memory-mapped when it is opened. If its group has an index, the index states where each record begins, and only the
pages of the requested records are read from the disk. Otherwise the file is read once from its beginning to find the
records. A compressed file is first decompressed to an unnamed temporary file. The checksums of a record are checked when the
record is read. The general reader decodes a record if the kernels do not support its encoding.

Files stay open until `close_shard`, `close_shards_except` or a `StreamReader` closes them. A `ShardCache` downloads the
shards of an object store to the local disk when they are prepared.
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
from typing import Any, BinaryIO

import numpy as np

from gaudi_bert.artefacts.mirrored_folder import download_missing_files, format_path, is_mirrored, remove_local_copies
from gaudi_bert.artefacts.packed import RecordManifest, RecordMetadata
from gaudi_bert.artefacts.shards import IndexedRecords, ShardTable, check_shard_sizes, index_path, read_index
from gaudi_bert.common.arrays import AnyArray, ByteArray, IntArray
from gaudi_bert.common.compiled import address_of, copy_bytes, kernel_without_refcounts, load_u32, load_word
from gaudi_bert.common.crc32c import crc32c, crc32c_at, crc_of_word, mask_crc, masked_crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explain_os_errors, open_file
from gaudi_bert.reading.global_order import MAX_STREAM_SETS, choose_shard_stream_count, find_input_region_of_shards
from gaudi_bert.reading.streams import ShardFiles, StoredPacks
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import PROBLEMS, RecordStream, ScanStatus, check_frame_length, format_record_location
from gaudi_bert.tfrecords.wire.schema import (
    FRAME_BYTES,
    PackedSchema,
    RecordError,
    UnpackedSchema,
    check_features,
)
from gaudi_bert.tfrecords.wire.values import decode_examples_to_arrays

_MAX_INT32 = 2**31 - 1
# Linux limits each MADV_WILLNEED call to the read-ahead setting of the disk, which is 128 KiB by default. A longer range
# would be read only in part, so request it in pieces of this size.
_READ_AHEAD_BYTES = 128 * 1024


# The content of a file as a memory map. An empty file cannot be mapped, so its content is b"".
_Pages = mmap.mmap | bytes


# What `_find_record_starts` returns: the `ScanStatus` that tells why the search stopped, the number of complete records, and
# the position of the frame where it stopped.
_StatusAndCountAndPosition = tuple[int, int, int]


@dataclass(frozen=True)
class _RecordPositions:
    """The positions and checksums of the records in one file. `RecordFiles.prepare_shard_for_opening` finds them in advance,
    so that the file opens quickly.

    Attributes:
        starts: int64 [records + 1], the position of each record's frame. The last entry is the end of the file.
        checksums: int64 [records], the checksums that the index states, or None if there is no index.
        pages: The decompressed content of a compressed file, otherwise None.
    """

    starts: IntArray
    checksums: IntArray | None
    pages: _Pages | None


class RecordFiles(ShardFiles["_RecordPositions"]):
    """Reads records from many files in any order. All records must have the same features.

    A `StreamReader` can read the files as its shards.

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
        # For each file, the `addresses` of its `_OpenFile`, or zeros if the file is closed.
        self._addresses = np.zeros((len(paths), 4), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the constructor arguments, so that the other process opens the files itself."""
        return RecordFiles, (self.paths, self.schema, self._counts, self._shards, self._cache)

    @property
    def record_counts(self) -> IntArray:
        """The number of records in each file, int64 [files]. If the counts were not given, all files are read to count their
        records.
        """
        if self._counts is None:
            self._counts = [len(self.prepare_shard_for_opening(file).starts) - 1 for file in range(len(self.paths))]
        return np.asarray(self._counts, np.int64)

    def prepare_shard_for_opening(self, shard: int) -> _RecordPositions:
        """Find the positions of the records in a file, so that the file can be opened. If there is a cache, download the
        file first.

        Raises:
            InputError: The file cannot be read, is damaged, has another number of records than expected, or differs from the
                manifest of its group.
        """
        path = self.paths[shard]
        if self._cache is not None:
            self._cache.download(shard)
        indexed = None if self._shards is None else self._shards.read_shard_index(shard)
        if indexed is not None:
            return _RecordPositions(*indexed, None)
        pages, is_compressed = _map_uncompressed_content(path)
        content = np.frombuffer(pages, np.uint8)
        count = _find_record_starts(content, np.empty(0, np.int64))[1] if self._counts is None else int(self._counts[shard])
        starts_of_records = np.empty(count, np.int64)
        status, records, position = _find_record_starts(content, starts_of_records)
        if status != ScanStatus.GOOD:
            raise InputError(f"{format_record_location(path, records, position)}: {PROBLEMS[ScanStatus(status)]}")
        if records != count:
            raise InputError(f"{path}: expected {count:,} records, found {records:,}; write the packed data again")
        if self._shards is not None and self._shards.read_crc32c_from_manifest(shard) not in (None, crc32c(content)):
            raise InputError(
                f"{path}: the CRC-32C of the shard differs from the manifest of its group; write the packed data again"
            )
        return _RecordPositions(np.append(starts_of_records, content.size), None, pages if is_compressed else None)

    def open_shard(self, shard: int, positions: _RecordPositions) -> None:
        """Open a file that `prepare_shard_for_opening` has prepared, so that its records can be read.

        Raises:
            InputError: The file cannot be read, or its size has changed.
        """
        opened = self._open[shard] = _OpenFile(self.paths[shard], positions)
        self._addresses[shard] = opened.addresses

    def close_shard(self, shard: int) -> None:
        """Close an open file."""
        self._addresses[shard] = 0
        del self._open[shard]
        self.discard_shard(shard)

    def discard_shard(self, shard: int) -> None:
        """Release a file that `prepare_shard_for_opening` has prepared, so that the cache may evict it."""
        if self._cache is not None:
            self._cache.release(shard)

    def close_shards_except(self, numbers: Iterable[int]) -> None:
        """Close all open files except the given ones."""
        for file in self._open.keys() - set(numbers):
            self.close_shard(file)

    def prefetch_records(self, shard: int, first: int, last: int) -> None:
        """Start reading the records `first` to `last` - 1 of an open file into the page cache, without waiting."""
        self._open[shard].advise(mmap.MADV_WILLNEED, first, last)

    def drop_pages(self, shard: int, first: int, last: int) -> None:
        """Remove the records `first` to `last` - 1 of an open file from the memory of this process. The records stay in the
        page cache of the system.
        """
        self._open[shard].advise(mmap.MADV_DONTNEED, first, last)

    def read_records(self, files: IntArray, records: IntArray) -> dict[str, AnyArray]:
        """Read n records from any of the files, and return one int32 or float32 array [n, size] per feature, by name.

        Files that are not open yet are opened, and stay open.

        Args:
            files: int64 [n], the file of each record.
            records: int64 [n], the number of each record in its file, from 0.

        Raises:
            IndexError: A file does not contain the requested record.
            InputError: A record is damaged, is not the one that was packed, or has other features than the schema.
        """
        if not self._addresses[files, 1].all():
            for file in np.unique(files[self._addresses[files, 1] == 0]).tolist():
                self.open_shard(file, self.prepare_shard_for_opening(file))
        lengths = np.empty(len(files), np.int64)
        absent = _find_payload_lengths(self._addresses, files, records, lengths)
        if absent >= 0:
            file, record = int(files[absent]), int(records[absent])
            if 0 <= record < self._addresses[file, 2]:
                raise InputError(self._open[file].describe_record_problem(record))
            raise IndexError(f"{self.format_location(file, record)}: the file does not contain this record")
        ends = np.cumsum(lengths)
        offsets, payloads = ends - lengths, np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        bad = _copy_record_payloads(self._addresses, files, records, lengths, payloads, offsets)
        if bad >= 0:
            raise InputError(self._open[int(files[bad])].describe_record_problem(int(records[bad])))
        try:
            return decode_examples_to_arrays(payloads, offsets, lengths, self.schema.features, "records")
        except InputError:  # the kernels reject at least one record, so the general reader decodes them one by one
            rows = [
                self._decode_with_general_reader(payloads[begin:end].tobytes(), int(file), int(record))
                for begin, end, file, record in zip(offsets, ends, files, records, strict=True)
            ]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def format_location(self, file: int, record: int) -> str:
        """Return the path and number of a record as text for error messages."""
        return f"{self.paths[file]}: record {record}"

    def _decode_with_general_reader(self, payload: bytes, file: int, record: int) -> dict[str, AnyArray]:
        """Decode one record with the general reader, which supports every encoding but is slow.

        Integers beyond 32 bits are clipped. The clipped values are out of the range of every feature, so that the caller
        rejects them.

        Args:
            payload: The bytes of the record without its frame.
            file: The number of the file, for error messages.
            record: The number of the record in its file, for error messages.

        Raises:
            InputError: The record is not an example with the features of the schema.
        """
        try:
            features = decode_example(payload)
            check_features(features, self.schema)
        except RecordError as error:
            raise InputError(f"{self.format_location(file, record)}: {error}; write the records again") from error
        return {
            spec.name: features[spec.name].astype(np.float32)
            if spec.kind == "float32"
            else np.clip(features[spec.name], -_MAX_INT32, _MAX_INT32).astype(np.int32)
            for spec in self.schema.features
        }


class _OpenFile:
    """An open file, mapped into memory, with the positions of its records.

    Raises:
        InputError: The file cannot be read, or it has another size than when it was prepared.
    """

    def __init__(self, path: Path, positions: _RecordPositions) -> None:
        self._path, self.starts, self._checksums = path, positions.starts, positions.checksums
        self._pages = _map_file(path) if positions.pages is None else positions.pages
        self._bytes = np.frombuffer(self._pages, np.uint8)
        if self._bytes.size != self.starts[-1]:
            raise InputError(
                f"{path}: the size has changed from {self.starts[-1]:,} to {self._bytes.size:,} bytes; run the command again"
            )
        self.advise(mmap.MADV_RANDOM, 0, len(self.starts) - 1)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """The memory addresses through which compiled code reads this file.

        The tuple contains the address of the bytes, the address of the record positions, the number of records, and the
        address of the checksums, which is 0 if there is no index.
        """
        checksums = 0 if self._checksums is None else self._checksums.ctypes.data
        return self._bytes.ctypes.data, self.starts.ctypes.data, len(self.starts) - 1, checksums

    def advise(self, advice: int, first: int, last: int) -> None:
        """Apply an `madvise` flag to the memory pages of the records `first` to `last` - 1."""
        if isinstance(self._pages, mmap.mmap):
            begin, end = int(self.starts[first]) // mmap.PAGESIZE * mmap.PAGESIZE, int(self.starts[last])
            step = _READ_AHEAD_BYTES if advice == mmap.MADV_WILLNEED else max(1, end - begin)
            for piece in range(begin, end, step):
                self._pages.madvise(advice, piece, min(step, end - piece))

    def describe_record_problem(self, record: int) -> str:
        """Return the error message for a record with a wrong length or checksum."""
        start, end = int(self.starts[record]), int(self.starts[record + 1])
        location = format_record_location(self._path, record, start)
        status, records, _ = _find_record_starts(self._bytes[start:end], np.empty(0, np.int64))
        if self._checksums is None or (status == ScanStatus.GOOD and records == 1):
            checksum = masked_crc32c(crc32c(self._bytes[start + 12 : end - 4]))
            if self._checksums is None or checksum != int(self._bytes[end - 4 : end].view("<u4")[0]):
                return f"{location}: {PROBLEMS[ScanStatus.BAD_BYTES]}"
            return f"{location}: the checksum differs from the index of the group; write the packed data again"
        return (
            f"{location}: the index of the group states a wrong record size of {end - start:,} bytes; remove this"
            " group-*.index file, or write the packed data again"
        )


def _map_open_file(handle: BinaryIO, size: int) -> _Pages:
    """Map an open file of `size` bytes into memory, and return its content."""
    return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _map_file(path: Path) -> _Pages:
    """Map a file into memory without decompressing it, and return the stored bytes."""
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return _map_open_file(handle, path.stat().st_size)


def _map_uncompressed_content(path: Path) -> tuple[_Pages, bool]:
    """Map the uncompressed content of a file into memory. If the file is compressed, decompress it to a temporary file
    first.

    Returns:
        (the uncompressed content, whether the file is compressed).
    """
    if path.stat().st_size == 0:
        return b"", False
    with RecordStream(path) as stream, explain_os_errors(path, "read"):
        if not stream.compression:
            return _map_file(path), False
        with tempfile.TemporaryFile() as plain:
            piece = memoryview(bytearray(1 << 20))
            while count := stream.read_into(piece):
                plain.write(piece[:count])
            plain.flush()
            return _map_open_file(plain, plain.tell()), True


@kernel_without_refcounts
def _find_record_starts(buffer: ByteArray, starts: IntArray) -> _StatusAndCountAndPosition:
    """Find the TFRecords in a buffer, and store the position of each frame in `starts`.

    If there are more records than `starts` has elements, the remaining records are only counted. The lengths and their
    checksums are checked, but not the payloads.

    Returns:
        (status, records, position). The status is GOOD at the end of the buffer, otherwise the reason for the stop.
        `records` is the number of complete records before the stop, and `position` is the position of the frame at which the
        search stopped.
    """
    base, position, records = address_of(buffer), 0, 0
    while position < buffer.size:
        status, size = check_frame_length(base + position, base + buffer.size)
        if status != ScanStatus.GOOD:
            return status, records, position
        if records < starts.size:
            starts[records] = position
        position += size + 16
        records += 1
    return ScanStatus.GOOD, records, position


# The index of the first record in the arguments that cannot be read, or -1 if all can be read.
_IndexOfFirstBadRecord = int


@kernel_without_refcounts
def _find_payload_lengths(
    file_addresses: IntArray, files: IntArray, records: IntArray, lengths: IntArray
) -> _IndexOfFirstBadRecord:
    """Compute the payload sizes of n records in bytes from their positions, and store the sizes in `lengths`.

    Args:
        file_addresses: int64 [files, 4], the `_OpenFile.addresses` of each file.
        files: int64 [n], the file of each record.
        records: int64 [n], the number of each record in its file.
        lengths: int64 [n], the output.

    Returns:
        The index of the first record that does not exist or has a negative size, or -1 if all records exist.
    """
    for index in range(records.size):
        file, record = files[index], records[index]
        if record < 0 or record >= file_addresses[file, 2]:
            return index
        start = file_addresses[file, 1] + 8 * record
        lengths[index] = load_word(start + 8) - load_word(start) - FRAME_BYTES
        if lengths[index] < 0:
            return index
    return -1


@kernel_without_refcounts
def _copy_record_payloads(
    file_addresses: IntArray, files: IntArray, records: IntArray, lengths: IntArray, target: ByteArray, offsets: IntArray
) -> _IndexOfFirstBadRecord:
    """Check the lengths and checksums of n records, and copy their payloads to `target`.

    Args:
        file_addresses: int64 [files, 4], the `_OpenFile.addresses` of each file.
        files: int64 [n], the file of each record.
        records: int64 [n], the number of each record in its file.
        lengths: int64 [n], the expected payload sizes.
        target: uint8, the output.
        offsets: int64 [n], the position in `target` of each payload.

    Returns:
        The index of the first record whose length or checksum is wrong, or -1 if all are correct.
    """
    for index in range(records.size):
        file, size = files[index], lengths[index]
        frame = file_addresses[file, 0] + load_word(file_addresses[file, 1] + 8 * records[index])
        if load_word(frame) != size or mask_crc(crc_of_word(size)) != load_u32(frame + 8):
            return index
        payload = frame + 12
        checksum = load_u32(payload + size)
        if mask_crc(crc32c_at(payload, size, 0)) != checksum:
            return index
        if file_addresses[file, 3] != 0 and load_word(file_addresses[file, 3] + 8 * records[index]) != checksum:
            return index
        copy_bytes(address_of(target) + offsets[index], payload, size)
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
    """The cached copy of a shard. It is either complete or still being downloaded.

    Attributes:
        users: How many calls of `download` were not yet followed by `release`. A shard in use is not evicted.
        fetching: Held during the download, so that two readers of a shard download it only once.
    """

    users: int = 0
    fetching: threading.Lock = field(default_factory=threading.Lock)


class ShardCache:
    """Downloads shards from an object store to the local disk, and evicts the least recently used shards when the cache is
    full.

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

    def check_capacity_for_open_shards(self, streams: int, processes: int, stream_sets: int = 1) -> None:
        """Check that the cache can hold the shards that a process keeps open and those that it downloads ahead.

        The check assumes that these are the largest shards, so that it holds for every order of reading.

        Args:
            streams: The number of streams, each of which reads one shard at a time.
            processes: The number of processes.
            stream_sets: The number of sets of streams that take turns.

        Raises:
            InputError: The cache is too small.
        """
        ahead = streams // math.gcd(streams, processes)
        needed = int(np.sort(self._table.bytes)[::-1][: streams * stream_sets + ahead].sum())
        if needed > self._room:
            raise InputError(
                f"{self._folder}: store.cache_bytes = {self._room:,} is too small, because each process keeps"
                f" {streams * stream_sets + ahead} shards in its cache; set it to at least {needed:,} bytes (on Kubernetes,"
                " also set kubernetes.scratch to twice as much)"
            )

    def download(self, shard: int) -> None:
        """Download a shard unless it is already cached, and protect it from eviction until `release` is called.

        If `download` is called several times, `release` must be called as often.

        Raises:
            InputError: The store does not contain the shard, or the shard has another size than the metadata states.
        """
        path, size = self._folder / self._table.file_name(shard), int(self._table.bytes[shard])
        with self._lock:
            copy = self._copies[shard] = self._copies.pop(shard, _Copy())
            copy.users += 1
            self._evict_unused_shards()
        with copy.fetching:  # otherwise two readers of a shard would both download it
            download_missing_files(path)
        stored = path.stat().st_size if path.exists() else None
        if stored != size:
            problem = "the shard is missing" if stored is None else f"the shard must have {size:,} bytes, but has {stored:,}"
            raise InputError(f"{format_path(path)}: {problem}; write the packed data again")

    def release(self, shard: int) -> None:
        """Undo one call of `download`. A shard that is no longer in use may be evicted."""
        with self._lock:
            copy = self._copies[shard] = self._copies.pop(shard)
            copy.users -= 1

    def _evict_unused_shards(self) -> None:
        """Evict unused shards, starting with the least recently used one, until the cache fits its maximum size."""
        cached_bytes = int(self._table.bytes[list(self._copies)].sum())
        for shard in [shard for shard, copy in self._copies.items() if not copy.users]:
            if cached_bytes <= self._room:
                return
            del self._copies[shard]
            cached_bytes -= int(self._table.bytes[shard])
            remove_local_copies(self._folder / self._table.file_name(shard))


# --- the shards of a packed folder. There may be hundreds of thousands, so their paths are not kept in a list.


@dataclass(frozen=True)
class ShardPaths(Sequence[Path]):
    """The paths of all shards of a packed folder. Each path is created only when it is requested.

    Attributes:
        folder: The packed folder.
        table: The shards of the folder.
    """

    folder: Path
    table: ShardTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, shard: int) -> Path:  # type: ignore[override]  # nobody takes a slice
        if not -len(self) <= shard < len(self):
            raise IndexError(shard)
        return self.folder / self.table.file_name(shard % len(self))

    def read_shard_index(self, shard: int) -> IndexedRecords | None:
        """Read the positions and checksums of a shard's records from the index of its group. Return None if the index is
        missing or does not match the size of the shard.
        """
        table, index = self.table, index_path(self.folder, self.table.locate_shard(shard)[0])
        return read_index(index, table.packs_before(shard), int(table.packs[shard]), int(table.bytes[shard]))

    def read_crc32c_from_manifest(self, shard: int) -> int | None:
        """Return the CRC-32C of a shard from the manifest of its group, or None if there is no manifest."""
        return RecordManifest.read_shard_crc32c(self.folder, self.table, shard)


def open_shards(folder: Path, metadata: RecordMetadata, cache: ShardCache | None = None) -> RecordFiles:
    """Return a `RecordFiles` that reads the packs of a packed folder in any order.

    Args:
        folder: The packed folder.
        metadata: The metadata of the folder.
        cache: Downloads the shards from an object store. None if they are on this machine.
    """
    paths = ShardPaths(folder, metadata.shard_table)
    return RecordFiles(paths, PackedSchema.from_sizes(metadata), paths.table.packs, paths, cache)


def open_packs(folder: Path, metadata: RecordMetadata, cache: ShardCache | None = None) -> StoredPacks:
    """Return a `StoredPacks`, which reads the packs of a folder by their numbers or in a shuffled order.

    The shuffled order mixes the packs of many shards and of all regions of the input. The arguments are the same as in
    `open_shards`.
    """
    files, streams = open_shards(folder, metadata, cache), choose_shard_stream_count(metadata.shard_multiple)
    regions = find_input_region_of_shards(metadata.shard_table.shards_per_group, metadata.input_files, metadata.seed)
    return StoredPacks(files, streams, MAX_STREAM_SETS, regions)


# If a local folder has more shards than this, only their names are checked, and not their sizes. Looking up the sizes would
# take about a minute in each process if the disk's metadata is not cached.
_MAX_CHECKED_SIZES = 20_000


def check_shards_exist(folder: Path, table: ShardTable) -> None:
    """Check before a run that every shard of a packed folder exists and has the size that metadata.json states.

    If a local folder has more than 20,000 shards, only their names are checked. The size of a shard is then checked when it
    is opened.

    Raises:
        InputError: A shard is missing or has another size.
    """
    if len(table) <= _MAX_CHECKED_SIZES or is_mirrored(folder):
        check_shard_sizes(folder, table)
        return
    exists = np.zeros(len(table), bool)
    with os.scandir(folder) as entries:
        for entry in entries:
            shard = table.find_shard(entry.name)
            if shard is not None:
                exists[shard] = True
    if not exists.all():
        path = folder / table.file_name(int(np.argmin(exists)))
        raise InputError(f"{path}: the shard is missing, although the metadata lists it; write the packed data again")
