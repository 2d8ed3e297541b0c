"""The stage `verify`: proof that the packed folder holds every sequence of RECORDS exactly once, byte for byte.

Each group is proven by itself: its shards must hold the sequences of the input files that its manifest names. At the speed
of a scan and in constant memory, every file is read, checked (both CRCs of every record, every value) and summed into
fingerprints (see `scanning.fingerprint`). Then the sums of the group are compared and its manifest and index are held to
what was read; at last metadata.json is held to all groups (`proof.folder`). So parts of the work
(`--shard K/N`) share nothing, and files that no manifest names are noticed by the last step.

Only where the sums of a group differ, a second pass compares its sequences one by one and names them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import METADATA_NAME, InputFile, VocabularyInfo, manifest_path
from gaudi_bert.artefacts.completion import first_difference, read_signature, settings_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, Verification, of_counts
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.shards import Shard, SizeArray, index_path
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, read_ahead, release, shown_path
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError, shown
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Task, count_of
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.proof.folder import (
    Proof,
    ProvenGroup,
    VerifiedFolder,
    check_bound,
    check_crc32c,
    check_inputs,
    check_numbers,
    check_same,
    check_shards,
    counts_of_groups,
    read_manifest,
)
from gaudi_bert.proof.parts import verify_packs
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
from gaudi_bert.tfrecords.scanning.scan import each_in_threads, scan_buffer, worker_count
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, PackedSchema

# --- the groups while they are read; then manifest and index are rebuilt, and the stored ones must be the same


class _FileToRead(NamedTuple):
    """A file of a group: an input file, or the shard of this number."""

    path: Path
    bytes: int
    group: int
    shard: int | None


@dataclass
class _ReadGroup:
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

    def add(self, file: _FileToRead, sums: SequenceSums, sizes: SizeArray) -> None:
        """Add one of its files; `sizes` are those of its records."""
        name = file.path.name
        if file.shard is None:
            self.unpacked.add(sums)
            self.inputs.append(InputFile(name=name, bytes=sums.file_bytes, crc32c=sums.file_crc32c))
        else:
            self.repacked.add(sums)
            shard = Shard(name=name, packs=sums.record_sizes.size, bytes=sums.file_bytes, crc32c=sums.file_crc32c)
            self.shards[file.shard] = shard, sizes


def _read_groups(
    files: Sequence[_FileToRead], schema: PackedSchema, task: Task, workers: int | None
) -> Iterator[tuple[int, _ReadGroup]]:
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
            group = _ReadGroup()
            for file, (sums, sizes) in of_group:
                group.add(file, sums, sizes)
            yield number, group


def _pieces(file: _FileToRead, schema: PackedSchema, task: Task, buffer: ByteArray) -> Pieces:
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


def _hold_group(packed: Path, metadata: Metadata, plan_sha256: str, number: int, read: _ReadGroup) -> GroupManifest:
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


def _plan_sha256_of(packed: Path, metadata: Metadata) -> str:
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


# --- the stage

_NAMED = 3
# Their files are listed together: a list of all would grow with the data.
_GROUPS_AT_ONCE = 256


def verify(records: str | Path, packed: Path, run: StageRun) -> StageOutput[Verification] | GroupsResult:
    """Verify a packed folder against its records."""
    with mirrored(packed, run.store) as here, open_inputs(records, run.store) as inputs:
        fetch(here / METADATA_NAME)
        metadata = read_metadata(here)
        check_shards(here, metadata)
        check_numbers(here, metadata)
        folder = _Folder(inputs, here, metadata, run)
        return verify_packs(folder, run)


@dataclass(frozen=True)
class _Folder:
    """A packed folder and its records."""

    inputs: RecordInputs
    packed: Path
    metadata: Metadata
    run: StageRun

    @cached_property
    def verified(self) -> VerifiedFolder[Verification]:
        """Where the result is stored."""
        return VerifiedFolder(self.packed, self.metadata, self.inputs.sizes, Verification, self.run.reporter)

    def prove(self, groups: Sequence[int], in_parts: bool = False) -> Iterator[ProvenGroup]:
        """Read groups and hold each to its manifest; where some are wrong, the first is reported when all are read."""
        first_wrong: tuple[int, _ReadGroup, str] | None = None
        wrong = 0
        for number, group in self._read(groups):
            try:
                manifest = self._hold(number, group)
            except FailedError as error:
                first_wrong, wrong = first_wrong or (number, group, str(error)), wrong + 1
                continue
            figures = manifest.sequences, manifest.packs, manifest.tokens
            yield ProvenGroup(number, *figures, self._bound(manifest, in_parts), group.repacked.fingerprint)
        if first_wrong is not None:
            number, group, problem = first_wrong
            if not group.unpacked.is_same(group.repacked):
                problem = f"{self.packed}: group {number}: {self._difference(number, group)}"
            raise FailedError(problem + (f" ({wrong - 1:,} more of the groups are wrong)" if wrong > 1 else ""))

    # --- the files of groups

    @cached_property
    def _paths(self) -> Mapping[str, Path]:
        return {path.name: path for path in self.inputs.sizes}

    def _inputs_of(self, group: int) -> list[str]:
        return [file.name for file in read_manifest(GroupManifest, self.packed, group)[0].inputs]

    def _shards_of(self, group: int) -> dict[int, Path]:
        """The shards of a group by their numbers in the folder."""
        table = self.metadata.shard_table
        first = int(table.group_firsts[group])
        return {number: self.packed / table.name(number) for number in range(first, first + int(table.group_sizes[group]))}

    def files_of(self, group: int) -> Iterator[Path]:
        """The files that are read for a group."""
        yield from self._shards_of(group).values()
        yield from (manifest_path(self.packed, group), index_path(self.packed, group))
        yield from (self._paths[name] for name in self._inputs_of(group) if name in self._paths)

    # --- reading

    def _read(self, numbers: Sequence[int]) -> Iterator[tuple[int, _ReadGroup]]:
        """Read groups, one after the other."""
        names = {number: self._inputs_of(number) for number in numbers}
        known = [name for of_group in names.values() for name in of_group]
        missing = sorted(set(known) - set(self._paths))
        if missing:
            named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
            raise FailedError(
                f"{self.packed}: {len(missing):,} of {len(known):,} input files are missing from the records: {named};"
                " verify with the files that were packed"
            )
        sizes = self.metadata.shard_table.bytes
        firsts, counts = self.metadata.shard_table.group_firsts, self.metadata.shard_table.group_sizes
        total = sum(self.inputs.sizes[self._paths[name]] for name in known)
        total += sum(int(sizes[firsts[number] : firsts[number] + counts[number]].sum()) for number in numbers)
        schema = PackedSchema.of(self.metadata)
        with self.run.reporter.task("verify", total, "bytes") as task:
            for first in range(0, len(numbers), _GROUPS_AT_ONCE):
                at_once = numbers[first : first + _GROUPS_AT_ONCE]
                files = [file for number in at_once for file in self._files_to_read(number, names[number])]
                yield from _read_groups(files, schema, task, self.run.workers)

    def _files_to_read(self, group: int, inputs: Sequence[str]) -> Iterator[_FileToRead]:
        for name in inputs:
            yield _FileToRead(self._paths[name], self.inputs.sizes[self._paths[name]], group, None)
        sizes = self.metadata.shard_table.bytes
        for shard, path in self._shards_of(group).items():
            yield _FileToRead(path, int(sizes[shard]), group, shard)

    def _difference(self, number: int, group: _ReadGroup) -> str:
        """In which sequences the shards of a group differ from its input files."""
        inputs, shards = [self._paths[name] for name in self._inputs_of(number)], list(self._shards_of(number).values())
        return describe_difference(inputs, shards, self.metadata, group.unpacked, group.repacked, self.run.workers)

    # --- what the files of the folder must state

    @cached_property
    def _plan_sha256(self) -> str:
        return _plan_sha256_of(self.packed, self.metadata)

    def _hold(self, number: int, group: _ReadGroup) -> GroupManifest:
        if not group.unpacked.is_same(group.repacked):
            raise FailedError(f"{self.packed}: the shards do not hold the sequences of the input files")
        return _hold_group(self.packed, self.metadata, self._plan_sha256, number, group)

    def _bound(self, manifest: GroupManifest, in_parts: bool) -> int:
        """Packs that are proven to be necessary for a group.

        By simple sums. In parts, by a solver where they miss more than the group's share of the gap of the folder, so that
        the last step, which adds the bounds up, seldom needs one.
        """
        counts = np.array(manifest.counts, np.int64)
        depth, groups = self.metadata.depth, len(self.metadata.shard_table.group_firsts)
        simple = simple_certificate(counts, depth).bound
        if not in_parts or (manifest.packs - simple) * groups <= self.metadata.gap:
            return simple
        from gaudi_bert.packing.exact.bounds import prove_bound  # slow to load, and rarely needed here

        return max(simple, prove_bound(counts, depth).bound)

    def add_up(self, groups: Iterable[ProvenGroup]) -> Proof[Verification]:
        """What the folder must state, by all its groups."""
        sums, names = PackedSums(), list[str]()
        fingerprint = bound = 0
        metadata, path = self.metadata, self.packed / METADATA_NAME
        for proven in groups:
            manifest, crc = read_manifest(GroupManifest, self.packed, proven.group)
            if manifest.plan_sha256 != self._plan_sha256:
                raise FailedError(
                    f"{manifest_path(self.packed, proven.group)}: is of another plan than its folder; {manifest.remedy}"
                )
            sums.add(manifest, crc)
            names += [file.name for file in manifest.inputs]
            fingerprint += int(proven.fingerprint or "0", 16)
            bound += proven.lower_bound
        self._check_names(names)
        self._check_bad_files(names)
        if metadata.lower_bound > min(bound, metadata.packs):
            counts = partial(counts_of_groups, self.packed, metadata)
            check_bound(path, metadata.lower_bound, metadata.packs, counts, metadata.depth, metadata.remedy)
        right = Metadata(
            # The sizes are those of every record that was read, the others those of the settings.
            **{key: getattr(metadata, key) for key in Metadata.planned},
            **sums.stored(metadata.max_sequence_length, metadata.lower_bound),
            tool_version=metadata.tool_version,
            vocabulary=metadata.vocabulary if self.inputs.vocabulary is None else VocabularyInfo.of(self.inputs.vocabulary),
            input_files=len(names),
            bad_files=metadata.bad_files,
        )
        return Proof(right, Verification.of(right, f"{fingerprint % 2**64:016x}"))

    def _check_names(self, names: Sequence[str]) -> None:
        """Each file of the records is that of one manifest; the files were held to their CRCs with their groups."""
        known = {*names, *(file.name for file in self.metadata.bad_files)}
        if len(set(names)) != len(names):
            raise FailedError(f"{self.packed}: two manifests name the same input file; {self.metadata.remedy}")
        for name in self._paths:
            if name not in known:
                raise FailedError(
                    f"{self.packed}: input file {name} is not among those that were packed; {self.metadata.remedy}"
                )

    def _check_bad_files(self, names: Sequence[str]) -> None:
        """Files that were skipped as bad are in no manifest, are there as they were, and cannot be read."""
        for bad in self.metadata.bad_files:
            path, remedy = self._paths.get(bad.name), self.metadata.remedy
            if path is None or bad.name in names:
                problem = "is missing now" if path is None else "is in a manifest"
                raise FailedError(f"{self.packed}: input file {bad.name} was skipped as bad, and {problem}; {remedy}")
            with read_ahead([path]) as files, files.batch(0):
                if bad_file(path) != bad:
                    raise FailedError(f"{path}: was skipped as bad, and has changed since; {remedy}")
                if why_bad(path) is None:
                    raise FailedError(f"{path}: was skipped as bad, but can be read; {remedy}")
        if self.metadata.bad_files:
            named = ", ".join(file.name for file in self.metadata.bad_files[:_NAMED])
            count = count_of(len(self.metadata.bad_files), "bad file")
            self.run.reporter.say(f"{shown_path(self.packed)}: {count} of the records skipped: {named}")
