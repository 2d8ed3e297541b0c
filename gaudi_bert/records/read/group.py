"""A group of files in memory: read once, from front to back, checked, indexed and stripped of its padding on the way."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.read.scan import CompactedFormat, RecordScan
from gaudi_bert.records.read.threads import map_files
from gaudi_bert.records.read.unpacked_index import IndexedSequences, empty_index
from gaudi_bert.records.schema import UnpackedSchema
from gaudi_bert.records.wire.framing import RecordStream

__all__ = ["GroupFile", "buffer_bytes", "group_buffer", "read_group"]


@dataclass(frozen=True)
class GroupFile:
    """A file of a group, and what the plan knows of it."""

    name: str
    path: Path
    bytes: int
    crc32c: int
    sequences: int


def buffer_bytes(files: Sequence[GroupFile]) -> int:
    """A bound on the bytes of a buffer for these files; what is not needed of it is never touched, so it costs nothing."""
    return sum(uncompressed_bytes(file) for file in files)


def group_buffer(size: int) -> ByteArray:
    """Memory for a group, of ordinary pages.

    numpy asks for huge pages, and where memory is fragmented the kernel then spends longer on making them than the whole
    reading takes.
    """
    return np.frombuffer(mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def uncompressed_bytes(file: GroupFile) -> int:
    """The size of a file without its compression; a compressed one is read to its end to know it."""
    with RecordStream(file.path) as stream:
        if not stream.compression:
            return file.bytes
        piece, total = memoryview(bytearray(1 << 20)), 0
        while count := stream.read_into(piece):
            total += count
        return total


def read_group(
    files: Sequence[GroupFile],
    schema: UnpackedSchema,
    buffer: ByteArray,
    workers: int | None,
    progress: Callable[[int], None],
) -> IndexedSequences:
    """Read the files of a group, index them, and keep their real values in `buffer`.

    Args:
        files: in the order in which they lie in the buffer.
        schema: the sizes of the records.
        buffer: uint8, at least `buffer_bytes(files)`.
        workers: threads, each with one file at a time; None for all cores.
        progress: called with the bytes that were read.

    Raises:
        InputError: bad records, or a file is not the one that the plan was made for.
    """
    group = empty_index(buffer, sum(file.sequences for file in files))
    tasks, start, row = [], 0, 0
    for file in files:
        size = uncompressed_bytes(file)
        tasks.append((file, (start, start + size), slice(row, row + file.sequences)))
        start, row = start + size, row + file.sequences

    def read(task: tuple[GroupFile, tuple[int, int], slice], pieces: ByteArray) -> None:
        file, region, rows = task
        records = CompactedFormat(schema, IndexedSequences(pieces, group.offsets[rows], group.rows[rows]), buffer, *region)
        scan = RecordScan(file.path, records, pieces, progress)
        for _piece in scan.pieces():
            pass
        _check_same(file, scan)

    map_files(read, tasks, workers)
    return group


def _check_same(file: GroupFile, scan: RecordScan) -> None:
    for what, found, planned in (
        ("bytes", scan.file_bytes, file.bytes),
        ("crc32c", scan.file_crc32c, file.crc32c),
        ("sequences", scan.records.records, file.sequences),
    ):
        if found != planned:
            raise InputError(
                f"{file.path}: {what} {found}, the plan was made for {planned}; make the histogram and the plan again"
            )
