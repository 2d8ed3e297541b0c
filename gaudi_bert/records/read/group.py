"""A group of files in memory: read once, from front to back, checked, indexed and stripped of its padding on the way."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.records.read.scan import RecordScan, UnpackedFormat
from gaudi_bert.records.read.threads import map_files
from gaudi_bert.records.read.unpacked_index import INDEX_COLUMNS, LENGTH
from gaudi_bert.records.schema import UnpackedSchema
from gaudi_bert.records.wire.framing import RecordStream

__all__ = ["GroupFile", "GroupIndex", "buffer_bytes", "group_buffer", "read_group"]


@dataclass(frozen=True)
class GroupFile:
    """A file of a group, and what the plan knows of it."""

    name: str
    path: Path
    bytes: int
    crc32c: int
    sequences: int


@dataclass(frozen=True)
class GroupIndex:
    """The sequences of a group, without padding.

    Attributes:
        buffer: uint8, the real values of all sequences.
        offsets: int64 [sequences], where each sequence starts in the buffer.
        index: int32 [sequences, INDEX_COLUMNS], see `unpacked_index`.
    """

    buffer: np.ndarray
    offsets: np.ndarray
    index: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int32 [sequences]."""
        return self.index[:, LENGTH]


def buffer_bytes(files: Sequence[GroupFile]) -> int:
    """A bound on the bytes of a buffer for these files; what is not needed of it is never touched, so it costs nothing."""
    return sum(uncompressed_bytes(file) for file in files)


def group_buffer(size: int) -> np.ndarray:
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
    buffer: np.ndarray,
    workers: int | None,
    progress: Callable[[int], None],
) -> GroupIndex:
    """Read the files of a group, index them, and keep their real values in `buffer`.

    Args:
        files: in the order in which they lie in the buffer.
        schema: the sizes of the records.
        buffer: uint8, at least `buffer_bytes(files)`.
        workers: threads, one a file at a time; None for all cores.
        progress: called with the bytes that were read.

    Raises:
        InputError: bad records, or a file is not the one that the plan was made for.
    """
    sequences = sum(file.sequences for file in files)
    offsets = np.empty(sequences, np.int64)
    index = np.empty((sequences, INDEX_COLUMNS), np.int32)
    tasks, start, row = [], 0, 0
    for file in files:
        size = uncompressed_bytes(file)
        tasks.append((file, (start, start + size), slice(row, row + file.sequences)))
        start, row = start + size, row + file.sequences

    def read(task: tuple[GroupFile, tuple[int, int], slice], pieces: np.ndarray) -> None:
        file, region, rows = task
        form = UnpackedFormat(schema, offsets[rows], index[rows], (buffer, *region))
        scan = RecordScan(file.path, form, pieces, progress)
        for _piece in scan.pieces():
            pass
        _check_same(file, scan, form)

    map_files(read, tasks, workers)
    return GroupIndex(buffer, offsets, index)


def _check_same(file: GroupFile, scan: RecordScan, form: UnpackedFormat) -> None:
    for what, found, planned in (
        ("bytes", scan.file_bytes, file.bytes),
        ("crc32c", scan.file_crc32c, file.crc32c),
        ("sequences", form.records, file.sequences),
    ):
        if found != planned:
            raise InputError(
                f"{file.path}: {what} {found}, the plan was made for {planned}; make the histogram and the plan again"
            )
