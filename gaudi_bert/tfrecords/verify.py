"""The stage `verify` for packed TFRecords: what is read of a group (`packs.verify` has the flow).

The shards of a group must hold the sequences of the input files that its manifest names. At the speed of a scan and in
constant memory, every file is read, checked (both CRCs of every record, every value) and summed into fingerprints (see
`scanning.fingerprint`): two groups of other sequences have the same sums with probability 2**-64. Only where the sums
differ, a second pass compares the sequences one by one and names them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import METADATA_NAME, InputFile, VocabularyInfo
from gaudi_bert.artefacts.completion import first_difference, read_signature, settings_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, Verification, of_counts
from gaudi_bert.artefacts.results import PlainResult, StageOutput
from gaudi_bert.artefacts.shards import Shard, SizeArray, index_path
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, read_ahead, release, shown_path
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError, shown
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Task, count_of
from gaudi_bert.common.threads import each_in_threads, worker_count
from gaudi_bert.packs import verify as packs
from gaudi_bert.packs.folder import PackedFolder, check_inputs
from gaudi_bert.tfrecords.files import RecordInputs, bad_file, open_inputs
from gaudi_bert.tfrecords.histogram import why_bad
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.scanning.file_contents import (
    Pieces,
    SequenceSums,
    describe_difference,
    packed_pieces,
    sum_pieces,
    unpacked_pieces,
)
from gaudi_bert.tfrecords.scanning.scan import scan_buffer
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, PackedSchema

_NAMED = 3
# Their files are listed together: a list of all would grow with the data.
_GROUPS_AT_ONCE = 256


def verify(records: str | Path, packed: Path, run: StageRun) -> StageOutput[Verification] | PlainResult:
    """Verify a packed folder against its records."""
    with mirrored(packed, run.store) as here, open_inputs(records, run.store) as inputs:
        fetch(here / METADATA_NAME)
        return packs.verify(_RecordsReader(inputs, here, read_metadata(here), run), run)


class _FileToRead(NamedTuple):
    """A file of a group: an input file, or a shard."""

    path: Path
    group: int
    is_input: bool


@dataclass(frozen=True)
class _RecordsReader:
    """Reads the records and the shards of groups; a `GroupReader`."""

    inputs: RecordInputs
    packed: Path
    packed_metadata: Metadata
    run: StageRun

    @property
    def folder(self) -> PackedFolder:
        """The packed folder."""
        return PackedFolder(self.packed, self.packed_metadata)

    @cached_property
    def _paths(self) -> Mapping[str, Path]:
        return {path.name: path for path in self.inputs.sizes}

    def read(self, manifests: Iterable[GroupManifest]) -> Iterator[packs.ReadGroup]:
        """Read the files of groups ahead of the group that is compared, some groups at a time."""
        plan_sha256 = self._plan_sha256()
        rest = iter(manifests)
        total = int(self.packed_metadata.shard_table.bytes.sum()) + sum(self.inputs.sizes.values())
        total //= 1 if self.run.part is None else self.run.part[1]
        with self.run.reporter.task("verify", total, "bytes") as task:
            while some := list(itertools.islice(rest, _GROUPS_AT_ONCE)):
                files = [file for manifest in some for file in self._files_of(manifest)]
                results = self._read_files(files, task)
                for manifest in some:
                    of_group = list(itertools.islice(results, len(manifest.inputs) + len(manifest.shards)))
                    yield self._compare(manifest, plan_sha256, of_group)

    def _files_of(self, manifest: GroupManifest) -> Iterator[_FileToRead]:
        names = [file.name for file in manifest.inputs]
        missing = [name for name in names if name not in self._paths]
        if missing:
            raise FailedError(
                f"{self.packed}: {len(missing):,} of {len(names):,} input files of group {manifest.group} are missing from"
                f" the records: {', '.join(missing[:_NAMED])}; verify with the files that were packed"
            )
        shards = self.folder.shards_of(manifest.group)
        if [path.name for path in shards] != [shard.name for shard in manifest.shards]:
            raise FailedError(
                f"{self.packed}: the manifest of group {manifest.group} names other shards than metadata.json;"
                f" {manifest.remedy}"
            )
        yield from (_FileToRead(self._paths[name], manifest.group, True) for name in names)
        yield from (_FileToRead(path, manifest.group, False) for path in shards)

    def _read_files(self, files: Sequence[_FileToRead], task: Task) -> Iterator[tuple[_FileToRead, SequenceSums, SizeArray]]:
        """Read files, each with the sizes of its records; those of a store are fetched shortly before."""
        ahead, schema = worker_count(self.run.workers, len(files)), PackedSchema.of(self.packed_metadata)
        with read_ahead([file.path for file in files], ahead) as batches:

            def read(number: int, buffer: ByteArray) -> tuple[_FileToRead, SequenceSums, SizeArray]:
                file = files[number]
                with batches.batch(number):
                    is_empty = not file.path.stat().st_size
                    sums = sum_pieces(iter(()) if is_empty else _pieces(file, schema, task, buffer))
                    sizes = sums.record_sizes
                    if not file.is_input and int(sizes.sum(dtype=np.int64)) != sums.file_bytes:
                        # The scan knows the canonical size of records that another program encoded.
                        sizes = np.array([len(payload) + FRAME_BYTES for payload in read_records(file.path)], np.uint32)
                    return file, sums, sizes

            yield from each_in_threads(read, range(len(files)), self.run.workers, scan_buffer)

    def _compare(
        self, stored: GroupManifest, plan_sha256: str, files: Sequence[tuple[_FileToRead, SequenceSums, SizeArray]]
    ) -> packs.ReadGroup:
        """Compare the shards of a group with its input files, and compute its manifest again."""
        metadata, unpacked, repacked = self.packed_metadata, SequenceSums(), SequenceSums()
        inputs, shards, record_sizes = [], [], []
        for file, sums, sizes in files:
            name, known = file.path.name, {"bytes": sums.file_bytes, "crc32c": sums.file_crc32c}
            if file.is_input:
                unpacked.add(sums)
                inputs.append(InputFile(name=name, **known))
            else:
                repacked.add(sums)
                record_sizes.append(sizes)
                shards.append(Shard(name=name, packs=sums.record_sizes.size, **known))
        if not unpacked.is_same(repacked):
            records, packed = ([each.path for each, *_ in files if each.is_input == side] for side in (True, False))
            difference = describe_difference(records, packed, PackedSchema.of(metadata), self.run.workers)
            raise FailedError(f"{self.packed}: group {stored.group}: {difference}")
        for one, other in zip(stored.shards, shards, strict=True):
            if one.crc32c != other.crc32c:
                raise FailedError(
                    f"{self.packed / one.name}: its CRC-32C differs from the manifest of its group; {metadata.remedy}"
                )
        check_inputs(self.packed, stored.inputs, inputs, metadata.remedy)
        right = GroupManifest(
            format_version=2,
            source_sha256=plan_sha256,
            group=stored.group,
            packs=sum(shard.packs for shard in shards),
            **of_counts(repacked.lengths[1 : metadata.max_sequence_length + 1].tolist()),
            inputs=tuple(inputs),
            index_crc32c=_check_index(index_path(self.packed, stored.group), record_sizes, stored.remedy),
            shards=tuple(shards),
        )
        bound = packs.group_bound(self.folder, right.counts, right.packs)
        return packs.ReadGroup(stored, right, bound, repacked.fingerprint)

    def metadata(self, sums: PackedSums) -> Metadata:
        """Check that each file of the records is that of one manifest; return what metadata.json must state."""
        names, metadata = sums.input_names, self.packed_metadata
        if len(set(names)) != len(names):
            raise FailedError(f"{self.packed}: two manifests name the same input file; {metadata.remedy}")
        known = {*names, *(file.name for file in metadata.bad_files)}
        for name in self._paths:
            if name not in known:
                raise FailedError(f"{self.packed}: input file {name} is not among those that were packed; {metadata.remedy}")
        self._check_bad_files(names)
        vocabulary = self.inputs.vocabulary
        return Metadata(
            # The sizes are those of every record that was read, the others those of the settings.
            **{key: getattr(metadata, key) for key in Metadata.planned},
            **sums.stored(metadata.max_sequence_length, metadata.lower_bound),
            tool_version=metadata.tool_version,
            vocabulary=metadata.vocabulary if vocabulary is None else VocabularyInfo.of(vocabulary),
            input_files=len(names),
            bad_files=metadata.bad_files,
        )

    def _check_bad_files(self, names: Sequence[str]) -> None:
        """Check that files that were skipped as bad are in no manifest, are there as they were, and cannot be read."""
        bad_files, remedy = self.packed_metadata.bad_files, self.packed_metadata.remedy
        for bad in bad_files:
            path = self._paths.get(bad.name)
            if path is None or bad.name in names:
                problem = "is missing now" if path is None else "is in a manifest"
                raise FailedError(f"{self.packed}: input file {bad.name} was skipped as bad, and {problem}; {remedy}")
            with read_ahead([path]) as files, files.batch(0):
                if bad_file(path) != bad:
                    raise FailedError(f"{path}: was skipped as bad, and has changed since; {remedy}")
                if why_bad(path) is None:
                    raise FailedError(f"{path}: was skipped as bad, but can be read; {remedy}")
        if bad_files:
            named = ", ".join(file.name for file in bad_files[:_NAMED])
            count = count_of(len(bad_files), "bad file")
            self.run.reporter.say(f"{shown_path(self.packed)}: {count} of the records skipped: {named}")

    def _plan_sha256(self) -> str:
        """Return the plan by which all groups were written: of the folder's settings, or of the first group without them.

        The settings have the keys of the plan, which metadata.json must repeat.
        """
        path, metadata = settings_path(self.packed, self.packed / METADATA_NAME), self.packed_metadata
        fetch(path)
        if not path.exists():
            return self.folder.manifest(0).source_sha256
        signature = read_signature(path)
        planned = {key: getattr(metadata, key) for key in Metadata.planned}
        difference = first_difference(dict(signature.settings), planned, "in metadata.json")
        sha256 = signature.inputs.get("plan_sha256")
        if difference is None and not (isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)):
            difference = f"inputs.plan_sha256 is {shown(sha256)}, it must be 64 hexadecimal digits"
        if difference is not None:
            raise FailedError(f"{path}: {difference}; {metadata.remedy}")
        return str(sha256)


def _pieces(file: _FileToRead, schema: PackedSchema, task: Task, buffer: ByteArray) -> Pieces:
    """Yield the pieces of a file; a damaged input file is an InputError, a damaged shard a FailedError."""
    if file.is_input:
        yield from unpacked_pieces(file.path, schema.unpacked, buffer, task.advance)
        return
    try:
        yield from packed_pieces(file.path, schema, buffer, task.advance)
    except InputError as error:
        raise FailedError(str(error)) from error


def _check_index(path: Path, record_sizes: Sequence[SizeArray], remedy: str) -> int:
    """Check that the index of a group holds the size of every record; its CRC-32C."""
    fetch(path)
    right = np.concatenate(record_sizes).astype("<u4").tobytes()
    stored = read_file(path) if path.exists() else None
    release(path)
    if stored is None:
        raise FailedError(f"{path}: the index is missing; {remedy}")
    if stored != right:
        raise FailedError(f"{path}: does not say the sizes of the records; {remedy}")
    return crc32c(right)
