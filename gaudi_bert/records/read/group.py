"""A group of the plan: its files, read into memory.

A group is read once, from front to back, checked, indexed and stripped of its padding on the way.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.plan import WritablePlan, files_sha256
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.files import RecordFile
from gaudi_bert.records.read.scan import CompactedFormat, RecordScan, map_files
from gaudi_bert.records.read.unpacked_index import IndexedSequences, empty_index
from gaudi_bert.records.schema import UnpackedSchema
from gaudi_bert.records.wire.framing import RecordStream


def match_files(records: str | Path, listed: Sequence[RecordFile], plan: WritablePlan) -> dict[str, RecordFile]:
    """The files of the plan, by name, where they are now; each must be in both, with the same size."""
    files = {file.name: file for file in listed}
    if plan.files_sha256 == files_sha256(listed):
        return files
    for name in sorted(set(files) - {planned.name for planned in plan.each_file()}):
        raise InputError(f"{files[name].path}: is not in the plan; make the histogram and the plan again")
    for planned in plan.each_file():
        file = files.get(planned.name)
        if file is None:
            raise InputError(f"{records}: file {planned.name} of the plan is missing; bring it back, or plan again")
        if file.bytes != planned.bytes:
            raise InputError(
                f"{file.path}: {file.bytes} bytes, the plan was made for {planned.bytes};"
                " make the histogram and the plan again"
            )
    if plan.files_sha256 is not None:
        raise InputError(f"{records}: these are the files of the plan, but files_sha256 is of others; make the plan again")
    return files


def planned_files(files: Mapping[str, RecordFile], plan: WritablePlan, group: int) -> list[RecordFile]:
    """The files of a group, of those that `match_files` found, with what the plan says of them."""
    return [
        replace(files[planned.name], crc32c=planned.crc32c, sequences=planned.sequences)
        for planned in plan.group_files(group)
    ]


def buffer_bytes(files: Sequence[RecordFile]) -> int:
    """A bound on the bytes of a buffer for these files; what is not needed of it is never touched, so it costs nothing."""
    return sum(uncompressed_bytes(file) for file in files)


def group_buffer(size: int) -> ByteArray:
    """Memory for a group, of ordinary pages.

    numpy asks for huge pages, and where memory is fragmented the kernel then spends longer on making them than the whole
    reading takes.
    """
    return np.frombuffer(mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def uncompressed_bytes(file: RecordFile) -> int:
    """The size of a file without its compression; a compressed one is read to its end to know it."""
    with RecordStream(file.path) as stream:
        if not stream.compression:
            return file.bytes
        piece, total = memoryview(bytearray(1 << 20)), 0
        while count := stream.read_into(piece):
            total += count
        return total


def read_group(
    files: Sequence[RecordFile],
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
    """
    group = empty_index(buffer, sum(file.sequences for file in files))
    tasks, start, row = [], 0, 0
    for file in files:
        size = uncompressed_bytes(file)
        tasks.append((file, (start, start + size), slice(row, row + file.sequences)))
        start, row = start + size, row + file.sequences

    def read(task: tuple[RecordFile, tuple[int, int], slice], pieces: ByteArray) -> None:
        file, region, rows = task
        records = CompactedFormat(schema, IndexedSequences(pieces, group.offsets[rows], group.rows[rows]), buffer, *region)
        scan = RecordScan(file.path, records, pieces, progress)
        for _piece in scan.pieces():
            pass
        _check_same(file, scan)

    map_files(read, tasks, workers)
    return group


def _check_same(file: RecordFile, scan: RecordScan) -> None:
    for what, actual, planned in (
        ("bytes", scan.file_bytes, file.bytes),
        ("crc32c", scan.file_crc32c, file.crc32c),
        ("sequences", scan.records.records, file.sequences),
    ):
        if actual != planned:
            raise InputError(
                f"{file.path}: {what} {actual}, the plan was made for {planned}; make the histogram and the plan again"
            )
