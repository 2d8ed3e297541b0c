"""A group of the plan: its files, read into memory.

A group is read once, from front to back, checked, indexed and stripped of its padding on the way.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.plan import WritablePlan, files_sha256
from gaudi_bert.artefacts.references import InputFile
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.scanning.scan import CompactedFormat, RecordScan, map_files
from gaudi_bert.tfrecords.scanning.unpacked_index import IndexedSequences, empty_index
from gaudi_bert.tfrecords.wire.framing import RecordStream
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema


def match_files(records: str | Path, sizes: Mapping[Path, int], plan: WritablePlan) -> dict[str, Path]:
    """Where each file of the plan is now, by its name; `sizes` are the files of RECORDS, which must be the same."""
    paths = {path.name: path for path in sizes}
    if plan.files_sha256 == files_sha256((path.name, size) for path, size in sizes.items()):
        return paths
    for name in sorted(set(paths) - {planned.name for planned in plan.each_file()}):
        raise InputError(f"{paths[name]}: is not in the plan; make the histogram and the plan again")
    for planned in plan.each_file():
        path = paths.get(planned.name)
        if path is None:
            raise InputError(f"{records}: file {planned.name} of the plan is missing; bring it back, or plan again")
        if sizes[path] != planned.bytes:
            raise InputError(
                f"{path}: {sizes[path]} bytes, {planned.bytes} in the plan; make the histogram and the plan again"
            )
    raise InputError(f"{records}: these are the files of the plan, but files_sha256 is of others; make the plan again")


def buffer_bytes(paths: Iterable[Path]) -> int:
    """A bound on the bytes of a buffer for these files; what is not needed of it is never touched, so it costs nothing."""
    return sum(map(uncompressed_bytes, paths))


def group_buffer(size: int) -> ByteArray:
    """Memory for a group, of ordinary pages.

    numpy asks for huge pages, and where memory is fragmented the kernel then spends longer on making them than the
    reading itself takes.
    """
    return np.frombuffer(mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def uncompressed_bytes(path: Path) -> int:
    """A bound on the bytes of a file without its compression; a compressed one is read to its end to know them."""
    with RecordStream(path) as stream:
        if stream.most_bytes is not None:
            return stream.most_bytes
        piece, total = memoryview(bytearray(1 << 20)), 0
        while count := stream.read_into(piece):
            total += count
        return total


def read_group(
    paths: Sequence[Path],
    files: Sequence[InputFile],
    schema: UnpackedSchema,
    buffer: ByteArray,
    workers: int | None,
    progress: Callable[[int], None],
) -> IndexedSequences:
    """Read the files of a group, index them, and keep their real values in `buffer`.

    Args:
        paths: of the files, in the order of the buffer.
        files: what the plan states of each.
        buffer: uint8, at least `buffer_bytes(paths)`.
        workers: threads, each with one file at a time; None for all cores.
        progress: called with the bytes that were read.
    """
    group = empty_index(buffer, sum(file.sequences for file in files))
    tasks, start, row = [], 0, 0
    for path, file in zip(paths, files, strict=True):
        size = uncompressed_bytes(path)
        tasks.append((path, file, (start, start + size), slice(row, row + file.sequences)))
        start, row = start + size, row + file.sequences

    def read(task: tuple[Path, InputFile, tuple[int, int], slice], pieces: ByteArray) -> None:
        path, file, region, rows = task
        records = CompactedFormat(schema, IndexedSequences(pieces, group.offsets[rows], group.rows[rows]), buffer, *region)
        scan = RecordScan(path, records, pieces, progress)
        for _piece in scan.pieces():
            pass
        _check_same(path, file, scan)

    map_files(read, tasks, workers)
    return group


def _check_same(path: Path, file: InputFile, scan: RecordScan) -> None:
    for what, actual, planned in (
        ("bytes", scan.file_bytes, file.bytes),
        ("crc32c", scan.file_crc32c, file.crc32c),
        ("sequences", scan.records.records, file.sequences),
    ):
        if actual != planned:
            raise InputError(f"{path}: {what} {actual}, {planned} in the plan; make the histogram and the plan again")
