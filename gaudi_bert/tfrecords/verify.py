"""The stage `verify` for packed TFRecords: what is read of a group (`packs.verify` has the flow).

The shards of a group must hold the sequences of the input files that its manifest names. At the speed of a scan and in
constant memory, every file is read, checked (both CRCs of every record, every value) and summed into fingerprints (see
`fingerprint`): two groups of other sequences have the same sums with probability 2**-64. Only where the sums
differ, a second pass compares the sequences one by one and names them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.base import METADATA_NAME, InputFile, VocabularyInfo
from gaudi_bert.artefacts.completion import Signature, read_signature, settings_path
from gaudi_bert.artefacts.mirrored_folder import fetch, mirrored, read_ahead, release, shown_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, Verification, of_counts
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun
from gaudi_bert.artefacts.shards import Shard, SizeArray, index_path
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Task, count_of
from gaudi_bert.common.threads import each_in_threads, worker_count
from gaudi_bert.packs import verify as packs
from gaudi_bert.packs.verify import PackedFolder, check_inputs, check_same
from gaudi_bert.tfrecords.file_contents import SequenceSums, describe_difference, pieces_of, sum_pieces
from gaudi_bert.tfrecords.files import RecordInputs, bad_file, open_inputs
from gaudi_bert.tfrecords.histogram import why_bad
from gaudi_bert.tfrecords.scan import scan_buffer
from gaudi_bert.tfrecords.wire.schema import PackedSchema

_NAMED = 3
# Their files are listed together: a list of all would grow with the data.
_GROUPS_AT_ONCE = 256


def verify(records: str | Path, packed: Path, run: StageRun) -> StageOutput[Verification] | PlainResult:
    """Verify a packed folder against its records."""
    with mirrored(packed, run.store) as here, open_inputs(records, run.store) as inputs:
        fetch(here / METADATA_NAME)
        return packs.verify(_RecordsReader(inputs, PackedFolder(here, Metadata.read(here)), run), run)


_ReadFile = tuple[Path, bool, SequenceSums]
"""A file, whether it is an input file of a group or else a shard, and what it holds."""


@dataclass(frozen=True)
class _RecordsReader:
    """Reads the records and the shards of groups; a `GroupReader`."""

    inputs: RecordInputs
    folder: PackedFolder[Metadata]
    run: StageRun

    @cached_property
    def _paths(self) -> Mapping[str, Path]:
        return {path.name: path for path in self.inputs.sizes}

    def read(self, manifests: Iterable[GroupManifest]) -> Iterator[packs.ReadGroup]:
        """Read the files of groups ahead of the group that is compared, some groups at a time."""
        metadata, plan_sha256 = self.folder.metadata, self.folder.manifest(0).source_sha256
        # The settings must have the plan by which the first group was written, and the keys of metadata.json.
        path = settings_path(self.folder.path, self.folder.path / METADATA_NAME)
        fetch(path)
        right = Signature("write", {key: getattr(metadata, key) for key in Metadata.planned}, {"plan_sha256": plan_sha256})
        check_same(path, read_signature(path), right, metadata.remedy, "metadata.json and its manifests")
        rest = iter(manifests)
        total = int(metadata.shard_table.bytes.sum()) + sum(self.inputs.sizes.values())
        total //= 1 if self.run.part is None else self.run.part[1]
        with self.run.reporter.task("verify", total, "bytes") as task:
            while some := list(itertools.islice(rest, _GROUPS_AT_ONCE)):
                files = [self._files_of(manifest) for manifest in some]
                results = self._read_files([file for of_group in files for file in of_group], task)
                for manifest, of_group in zip(some, files, strict=True):
                    yield self._compare(manifest, plan_sha256, list(itertools.islice(results, len(of_group))))

    def _files_of(self, manifest: GroupManifest) -> list[tuple[Path, bool]]:
        """Return the input files of a group, and then its shards; and of each whether it is an input file."""
        names = [file.name for file in manifest.inputs]
        missing = [name for name in names if name not in self._paths]
        if missing:
            raise FailedError(
                f"{self.folder.path}: {len(missing):,} of {len(names):,} input files of group {manifest.group} are missing"
                f" from the records: {', '.join(missing[:_NAMED])}; verify with the files that were packed"
            )
        shards = self.folder.shards_of(manifest.group)
        return [*((self._paths[name], True) for name in names), *((path, False) for path in shards)]

    def _read_files(self, files: Sequence[tuple[Path, bool]], task: Task) -> Iterator[_ReadFile]:
        """Read files; those of a store are fetched shortly before."""
        ahead, schema = worker_count(self.run.workers, len(files)), PackedSchema.of(self.folder.metadata)
        with read_ahead([path for path, _ in files], ahead) as batches:

            def read(number: int, buffer: ByteArray) -> _ReadFile:
                path, is_input = files[number]
                with batches.batch(number):
                    try:
                        pieces = pieces_of(path, schema.unpacked if is_input else schema, buffer, task.advance)
                        return path, is_input, sum_pieces(pieces)
                    except InputError as error:
                        if is_input:
                            raise
                        raise FailedError(str(error)) from error

            yield from each_in_threads(read, range(len(files)), self.run.workers, scan_buffer)

    def _compare(self, stored: GroupManifest, plan_sha256: str, files: Sequence[_ReadFile]) -> packs.ReadGroup:
        """Compare the shards of a group with its input files, and compute its manifest again."""
        packed, metadata, unpacked, repacked = self.folder.path, self.folder.metadata, SequenceSums(), SequenceSums()
        inputs, shards = [], []
        for path, is_input, sums in files:
            (unpacked if is_input else repacked).add(sums)
            identity = InputFile(name=path.name, bytes=sums.file_bytes, crc32c=sums.file_crc32c)
            if is_input:
                inputs.append(identity)
            else:
                shards.append(Shard(name=path.name, packs=sums.record_sizes.size, **identity.identity))
        if not unpacked.is_same(repacked):
            records, written = ([path for path, is_input, _ in files if is_input == side] for side in (True, False))
            difference = describe_difference(records, written, PackedSchema.of(metadata), self.run.workers)
            raise FailedError(f"{packed}: group {stored.group}: {difference}")
        for one, other in zip(stored.shards, shards, strict=False):
            if one.crc32c != other.crc32c:
                raise FailedError(f"{packed / one.name}: its CRC-32C differs from its group's manifest; {metadata.remedy}")
        check_inputs(packed, stored.inputs, inputs, metadata.remedy)
        sizes = [sums.record_sizes for _, is_input, sums in files if not is_input]
        right = GroupManifest(
            format_version=2,
            source_sha256=plan_sha256,
            group=stored.group,
            packs=sum(shard.packs for shard in shards),
            **of_counts(repacked.lengths[1 : metadata.max_sequence_length + 1].tolist()),
            inputs=tuple(inputs),
            index_crc32c=_check_index(index_path(packed, stored.group), sizes, stored.remedy),
            shards=tuple(shards),
        )
        bound = packs.group_bound(self.folder, right.counts, right.packs)
        return packs.ReadGroup(stored, right, bound, repacked.fingerprint)

    def metadata(self, sums: PackedSums) -> Metadata:
        """Check that each file of the records is that of one manifest; return what metadata.json must state."""
        names, metadata, packed = sums.input_names, self.folder.metadata, self.folder.path
        if len(set(names)) != len(names):
            raise FailedError(f"{packed}: two manifests name the same input file; {metadata.remedy}")
        known = {*names, *(file.name for file in metadata.bad_files)}
        for name in self._paths:
            if name not in known:
                raise FailedError(f"{packed}: input file {name} is not among those that were packed; {metadata.remedy}")
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
        bad_files, remedy = self.folder.metadata.bad_files, self.folder.metadata.remedy
        for bad in bad_files:
            path = self._paths.get(bad.name)
            if path is None or bad.name in names:
                problem = "is missing now" if path is None else "is in a manifest"
                raise FailedError(f"{self.folder.path}: input file {bad.name} was skipped as bad, and {problem}; {remedy}")
            with read_ahead([path]) as files, files.batch(0):
                if bad_file(path) != bad:
                    raise FailedError(f"{path}: was skipped as bad, and has changed since; {remedy}")
                if why_bad(path) is None:
                    raise FailedError(f"{path}: was skipped as bad, but can be read; {remedy}")
        if bad_files:
            named = ", ".join(file.name for file in bad_files[:_NAMED])
            count = count_of(len(bad_files), "bad file")
            self.run.reporter.say(f"{shown_path(self.folder.path)}: {count} of the records skipped: {named}")


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
