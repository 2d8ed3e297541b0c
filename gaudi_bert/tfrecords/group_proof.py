"""The groups of a packed folder while they are read, and how each is held to its manifest and its index then.

The manifest is rebuilt from what was read, and the stored one must be the same.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
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
from gaudi_bert.tfrecords import packed_proof as proof
from gaudi_bert.tfrecords.scanning.file_contents import (
    Pieces,
    SequenceSums,
    packed_pieces,
    sum_pieces,
    unpacked_pieces,
)
from gaudi_bert.tfrecords.scanning.scan import map_files, worker_count
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
    """What was read of a group so far; `missing` counts the files that are still to be read.

    Attributes:
        inputs: the input files as they are.
        shards: each shard and the sizes of its records, by its number.
        unpacked, repacked: sums of the input files and of the shards.
    """

    missing: int = 0
    inputs: list[InputFile] = field(default_factory=list)
    shards: dict[int, tuple[Shard, SizeArray]] = field(default_factory=dict)
    unpacked: SequenceSums = field(default_factory=SequenceSums)
    repacked: SequenceSums = field(default_factory=SequenceSums)

    def add(self, file: FileToRead, sums: SequenceSums) -> None:
        """Add one of its files."""
        self.missing -= 1
        name = file.path.name
        if file.shard is None:
            self.unpacked.add(sums)
            self.inputs.append(InputFile(name=name, bytes=sums.file_bytes, crc32c=sums.file_crc32c))
        else:
            self.repacked.add(sums)
            shard = Shard(name=name, packs=sums.record_sizes.size, bytes=sums.file_bytes, crc32c=sums.file_crc32c)
            self.shards[file.shard] = shard, _sizes_on_disk(file.path, sums)


def _sizes_on_disk(path: Path, sums: SequenceSums) -> SizeArray:
    """Of each record; the scan knows the canonical size of those that another program encoded."""
    if int(sums.record_sizes.sum(dtype=np.int64)) == sums.file_bytes:
        return sums.record_sizes
    return np.array([len(payload) + FRAME_BYTES for payload in read_records(path)], np.uint32)


class GroupReader:
    """Reads the files of groups, group after group; `take` gets each group whose shards hold the sequences of its inputs.

    Attributes:
        problems: of groups that are wrong, or that `take` refused with a FailedError, by their numbers.
        differing: of groups whose shards do not hold the sequences of their inputs, the first, and what was read of it.
    """

    def __init__(self, schema: PackedSchema, take: Callable[[int, ReadGroup], None]) -> None:
        self.problems: dict[int, str] = {}
        self.differing: tuple[int, ReadGroup] | None = None
        self._schema, self._take = schema, take
        self._sizes: Counter[int] = Counter()
        self._open: dict[int, ReadGroup] = {}

    def read(self, files: Sequence[FileToRead], task: Task, workers: int | None) -> None:
        """Read the files of complete groups; those of a store are fetched shortly before."""
        self._sizes = Counter(file.group for file in files)
        lock, ahead = threading.Lock(), worker_count(workers, len(files))
        sides = [[file.path for file in files if (file.shard is None) == is_input] for is_input in (False, True)]
        # Of each file, which one it is of its side.
        of_side = np.cumsum([file.shard is None for file in files], dtype=np.int64)
        with read_ahead(sides[0], ahead) as shards, read_ahead(sides[1], ahead) as inputs:

            def read_file(number: int, buffer: ByteArray) -> None:
                file, before = files[number], int(of_side[number])
                batches, batch = (inputs, before - 1) if file.shard is None else (shards, number - before)
                with batches.batch(batch):
                    sums = sum_pieces(self._pieces(file, task, buffer) if file.path.stat().st_size else iter(()))
                    with lock:
                        self._add(file, sums)

            map_files(read_file, range(len(files)), workers)

    def _pieces(self, file: FileToRead, task: Task, buffer: ByteArray) -> Pieces:
        if file.shard is None:
            yield from unpacked_pieces(file.path, self._schema.unpacked, buffer, task.advance)
            return
        try:
            yield from packed_pieces(file.path, self._schema, buffer, task.advance)
        except InputError as error:
            raise FailedError(str(error)) from error

    def _add(self, file: FileToRead, sums: SequenceSums) -> None:
        number = file.group
        group = self._open.setdefault(number, ReadGroup(self._sizes[number]))
        group.add(file, sums)
        if group.missing:
            return
        del self._open[number]
        if not group.unpacked.is_same(group.repacked):
            self.problems[number] = "the shards do not hold the sequences of the input files"
            if self.differing is None or number < self.differing[0]:
                self.differing = number, group
            return
        try:
            self._take(number, group)
        except FailedError as error:
            self.problems[number] = str(error)


def hold_group(packed: Path, metadata: Metadata, plan_sha256: str, number: int, read: ReadGroup) -> GroupManifest:
    """The manifest of a group that was read, which is the stored one; else an error."""
    stored, _ = proof.read_manifest(GroupManifest, packed, number)
    shards, record_sizes = zip(*(read.shards[shard] for shard in sorted(read.shards)), strict=True)
    proof.check_crc32c(packed, stored.shards, shards, metadata.remedy)
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
    proof.check_same(manifest_path(packed, number), stored, right)
    proof.check_inputs(packed, right.inputs, read.inputs, metadata.remedy)
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
        return proof.read_manifest(GroupManifest, packed, 0)[0].plan_sha256
    signature = read_signature(path)
    planned = {key: getattr(metadata, key) for key in Metadata.planned}
    difference = first_difference(dict(signature.settings), planned, "in metadata.json")
    sha256 = signature.inputs.get("plan_sha256")
    if difference is None and not (isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)):
        difference = f"inputs.plan_sha256 is {shown(sha256)}, it must be 64 hexadecimal digits"
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {metadata.remedy}")
    return str(sha256)
