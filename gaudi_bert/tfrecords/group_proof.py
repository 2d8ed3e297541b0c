"""The groups of a packed folder while they are read, and how each is held to its manifest and its index then.

The manifest is rebuilt from what was read, and the stored one must be the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.completion import first_difference, read_signature, settings_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, of_counts
from gaudi_bert.artefacts.references import InputFile, manifest_path
from gaudi_bert.artefacts.shards import Shard, SizeArray, index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, read_ahead, release
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError, shown
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Task
from gaudi_bert.proof.checks import check_crc32c, check_inputs, check_same, read_manifest
from gaudi_bert.tfrecords.scanning.file_contents import (
    Pieces,
    SequenceSums,
    packed_pieces,
    sum_pieces,
    unpacked_pieces,
)
from gaudi_bert.tfrecords.scanning.scan import each_in_threads, scan_buffer, worker_count
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, PackedSchema


class FileToRead(NamedTuple):
    """A file of a group: an input file, or the shard of this number."""

    path: Path
    bytes: int
    group: int
    shard: int | None


@dataclass
class ReadGroup:
    """What was read of a group.

    Attributes:
        inputs: the input files as they are.
        shards: each shard and the sizes of its records, by its number.
        unpacked, repacked: sums of the input files and of the shards.
    """

    inputs: list[InputFile] = field(default_factory=list)
    shards: dict[int, tuple[Shard, SizeArray]] = field(default_factory=dict)
    unpacked: SequenceSums = field(default_factory=SequenceSums)
    repacked: SequenceSums = field(default_factory=SequenceSums)

    def add(self, file: FileToRead, sums: SequenceSums, sizes: SizeArray) -> None:
        """Add one of its files; `sizes` are those of its records."""
        name = file.path.name
        if file.shard is None:
            self.unpacked.add(sums)
            self.inputs.append(InputFile(name=name, bytes=sums.file_bytes, crc32c=sums.file_crc32c))
        else:
            self.repacked.add(sums)
            shard = Shard(name=name, packs=sums.record_sizes.size, bytes=sums.file_bytes, crc32c=sums.file_crc32c)
            self.shards[file.shard] = shard, sizes


def read_groups(
    files: Sequence[FileToRead], schema: PackedSchema, task: Task, workers: int | None
) -> Iterator[tuple[int, ReadGroup]]:
    """Read the files of groups, which are given group after group, ahead of the group that is held to its manifest.

    Files of a store are fetched shortly before. Damaged input files are an InputError, damaged shards a FailedError.
    """
    ahead = worker_count(workers, len(files))
    sides = [[file.path for file in files if (file.shard is None) == is_input] for is_input in (False, True)]
    # Of each file, which one it is of its side.
    of_side = np.cumsum([file.shard is None for file in files], dtype=np.int64)
    with read_ahead(sides[0], ahead) as shards, read_ahead(sides[1], ahead) as inputs:

        def read(number: int, buffer: ByteArray) -> tuple[SequenceSums, SizeArray]:
            file, before = files[number], int(of_side[number])
            batches, batch = (inputs, before - 1) if file.shard is None else (shards, number - before)
            with batches.batch(batch):
                is_empty = not file.path.stat().st_size
                sums = sum_pieces(iter(()) if is_empty else _pieces(file, schema, task, buffer))
                return sums, sums.record_sizes if file.shard is None else _sizes_on_disk(file.path, sums)

        results = zip(files, each_in_threads(read, range(len(files)), workers, scan_buffer), strict=True)
        for number, of_group in itertools.groupby(results, key=lambda result: result[0].group):
            group = ReadGroup()
            for file, (sums, sizes) in of_group:
                group.add(file, sums, sizes)
            yield number, group


def _pieces(file: FileToRead, schema: PackedSchema, task: Task, buffer: ByteArray) -> Pieces:
    if file.shard is None:
        yield from unpacked_pieces(file.path, schema.unpacked, buffer, task.advance)
        return
    try:
        yield from packed_pieces(file.path, schema, buffer, task.advance)
    except InputError as error:
        raise FailedError(str(error)) from error


def _sizes_on_disk(path: Path, sums: SequenceSums) -> SizeArray:
    """Of each record; the scan knows the canonical size of those that another program encoded."""
    if int(sums.record_sizes.sum(dtype=np.int64)) == sums.file_bytes:
        return sums.record_sizes
    return np.array([len(payload) + FRAME_BYTES for payload in read_records(path)], np.uint32)


def hold_group(packed: Path, metadata: Metadata, plan_sha256: str, number: int, read: ReadGroup) -> GroupManifest:
    """The manifest of a group that was read, which is the stored one; else an error."""
    stored, _ = read_manifest(GroupManifest, packed, number)
    shards, record_sizes = zip(*(read.shards[shard] for shard in sorted(read.shards)), strict=True)
    check_crc32c(packed, stored.shards, shards, metadata.remedy)
    counts = read.repacked.lengths[1 : metadata.max_sequence_length + 1]
    right = GroupManifest(
        format_version=2,
        plan_sha256=plan_sha256,
        group=number,
        packs=sum(shard.packs for shard in shards),
        **of_counts(counts.tolist()),
        inputs=stored.inputs,
        index_crc32c=_check_index(index_path(packed, number), record_sizes, stored.remedy),
        shards=shards,
    )
    check_same(manifest_path(packed, number), stored, right)
    check_inputs(packed, right.inputs, read.inputs, metadata.remedy)
    return right


def _check_index(path: Path, record_sizes: Sequence[SizeArray], remedy: str) -> int:
    """The index of a group holds the size of every record; its CRC-32C."""
    fetch(path)
    right = np.concatenate(record_sizes).astype("<u4").tobytes()
    stored = read_file(path) if path.exists() else None
    release(path)
    if stored is None:
        raise FailedError(f"{path}: the index is missing; {remedy}")
    if stored != right:
        raise FailedError(f"{path}: does not say the sizes of the records; {remedy}")
    return crc32c(right)


def plan_sha256_of(packed: Path, metadata: Metadata) -> str:
    """The plan by which all groups were written: of the folder's settings, or of the first group where there are none.

    The settings have the keys of the plan, which metadata.json must repeat.
    """
    path = settings_path(packed)
    fetch(path)
    if not path.exists():
        return read_manifest(GroupManifest, packed, 0)[0].plan_sha256
    signature = read_signature(path)
    planned = {key: getattr(metadata, key) for key in Metadata.planned}
    difference = first_difference(dict(signature.settings), planned, "in metadata.json")
    sha256 = signature.inputs.get("plan_sha256")
    if difference is None and not (isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)):
        difference = f"inputs.plan_sha256 is {shown(sha256)}, it must be 64 hexadecimal digits"
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {metadata.remedy}")
    return str(sha256)
