"""The stage `verify` of packed TFRecords in parts: `proof_parts` has the flow, `verify` the same for a complete folder.

A part holds each of its groups to the input files that its manifest names, so parts share nothing: the shards of a group
must hold exactly the sequences of its files. Files that no manifest names are noticed by the last step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.artefacts.packed import GroupManifest, GroupVerification, Metadata, PackedSums, Verification
from gaudi_bert.artefacts.references import METADATA_NAME, InputFile, manifest_path
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.shards import index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, read_ahead
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.arrays import ByteArray, IntArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.tfrecords import packed_proof as proof
from gaudi_bert.tfrecords.differences import Pieces, describe_difference, describe_missing_files
from gaudi_bert.tfrecords.files import RecordInputs, open_inputs
from gaudi_bert.tfrecords.group_proof import ReadGroup, hold_group, plan_sha256_of
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.proof_parts import PartlyVerified, Take
from gaudi_bert.tfrecords.scanning.file_contents import SequenceSums, packed_pieces, sum_pieces, unpacked_pieces
from gaudi_bert.tfrecords.scanning.scan import map_files, worker_count
from gaudi_bert.tfrecords.verify import rebuilt_metadata
from gaudi_bert.tfrecords.wire.schema import PackedSchema


def verify_shard(
    records: str | Path,
    packed: Path,
    shard: tuple[int, int],
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> StageOutput[Verification] | GroupsResult:
    """Verify the groups K, K + N, ... of a packed folder, for `shard` (K, N); `finish_verification` afterwards, once."""
    with _opened(records, packed, reporter, workers, store) as (folder, parts):
        return parts.prove_shard(shard, folder.prove, overwrite)


def finish_verification(
    records: str | Path, packed: Path, *, reporter: Reporter, store: StoreSettings | None = None
) -> StageOutput[Verification]:
    """Write verification.json of a packed folder whose groups are all verified by `verify_shard`."""
    with _opened(records, packed, reporter, None, store) as (folder, parts):
        return parts.finish(folder.add_up)


@contextmanager
def _opened(
    records: str | Path, packed: Path, reporter: Reporter, workers: int | None, store: StoreSettings | None
) -> Iterator[tuple[_Folder, PartlyVerified[Verification]]]:
    with mirrored(packed, store) as here, open_inputs(records, Objects(store)) as inputs:
        fetch(here / METADATA_NAME)
        metadata = read_metadata(here)
        if not (here / METADATA_NAME).exists():
            raise InputError(f"{packed}: the predecessor's folder has no groups; verify it at once, without --shard")
        proof.check_shards(here, metadata)
        proof.check_numbers(here, metadata)
        verified = proof.VerifiedFolder(here, metadata, inputs.sizes, Verification, reporter)
        folder = _Folder(inputs, here, metadata, reporter, workers)
        yield folder, PartlyVerified(verified, folder.files_of)


@dataclass(frozen=True)
class _Folder:
    """A packed folder and its records, of which some groups are read."""

    inputs: RecordInputs
    packed: Path
    metadata: Metadata
    reporter: Reporter
    workers: int | None

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """The input files by their names."""
        return {path.name: path for path in self.inputs.sizes}

    def shards_of(self, group: int) -> dict[int, Path]:
        """The shards of a group by their numbers in the folder."""
        table = self.metadata.shard_table
        first = int(table.group_firsts[group])
        return {number: self.packed / table.name(number) for number in range(first, first + int(table.group_sizes[group]))}

    def files_of(self, group: int) -> Iterator[Path]:
        """The files that are read to verify a group."""
        yield from self.shards_of(group).values()
        yield from (manifest_path(self.packed, group), index_path(self.packed, group))
        manifest, _ = proof.read_manifest(GroupManifest, self.packed, group)
        yield from (self.paths[file.name] for file in manifest.inputs if file.name in self.paths)

    def prove(self, numbers: Sequence[int], take: Take) -> None:
        """Verify groups, and call `take` with each that is proven; of those that are not, the first is reported."""
        reading = _Reading(self, numbers, take)
        with self.reporter.task("verify", sum(each.bytes for each in reading.files), "bytes") as task:
            reading.read(task, self.workers)
        for number in sorted(reading.wrong):
            raise FailedError(reading.wrong[number])

    def add_up(self, groups: Iterable[GroupVerification]) -> proof.Proof[Verification]:
        """What the folder must state, by the proofs of all groups and the manifests that they hold for."""
        sums, packed_files = PackedSums(), list[InputFile]()
        fingerprint = bound = 0
        plan_sha256 = plan_sha256_of(self.packed, self.metadata)
        for group in groups:
            manifest, crc = proof.read_manifest(GroupManifest, self.packed, group.group)
            if manifest.plan_sha256 != plan_sha256:
                path = manifest_path(self.packed, group.group)
                raise FailedError(f"{path}: is of another plan than its folder; {manifest.remedy}")
            sums.add(manifest, crc)
            packed_files += manifest.inputs
            fingerprint += int(group.fingerprint or "0", 16)
            bound += group.lower_bound
        self._check_names(packed_files)
        if self.metadata.lower_bound > min(bound, self.metadata.packs):
            self._check_bound()
        right = rebuilt_metadata(self.inputs, self.metadata, sums)
        return proof.Proof(right, Verification.of(right, f"{fingerprint % 2**64:016x}"))

    def _check_names(self, packed_files: Sequence[InputFile]) -> None:
        """Each file of the records is that of one manifest; the parts have held the files to their CRCs."""
        names = {file.name for file in packed_files}
        if len(names) != len(packed_files):
            raise FailedError(f"{self.packed}: two manifests name the same input file; {self.metadata.remedy}")
        for name in self.paths:
            if name not in names:
                raise FailedError(
                    f"{self.packed}: input file {name} is not among those that were packed; {self.metadata.remedy}"
                )

    def _check_bound(self) -> None:
        metadata, path = self.metadata, self.packed / METADATA_NAME
        counts = partial(proof.counts_of_groups, self.packed, metadata)
        proof.check_bound(path, metadata.lower_bound, metadata.packs, counts, metadata.depth, metadata.remedy)


class _File(NamedTuple):
    """A file to read: of which group, and the number of the shard; None for an input file."""

    path: Path
    bytes: int
    group: int
    shard: int | None


@dataclass
class _OpenGroup:
    """What was read of a group so far; `missing` counts the files that are still to be read."""

    missing: int
    inputs: Sequence[InputFile]
    shards: ReadGroup
    unpacked: SequenceSums = field(default_factory=SequenceSums)
    repacked: SequenceSums = field(default_factory=SequenceSums)
    present: list[InputFile] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)


class _Reading:
    """Some groups while their files are read, side by side; each is held to what was read with its last file."""

    def __init__(self, folder: _Folder, numbers: Sequence[int], take: Take) -> None:
        self.folder, self.metadata, self.take = folder, folder.metadata, take
        self.files: list[_File] = []
        self.wrong: dict[int, str] = {}
        self._schema = PackedSchema.of(folder.metadata)
        self._plan_sha256 = plan_sha256_of(folder.packed, folder.metadata)
        self._numbers, self._open = numbers, dict[int, _OpenGroup]()
        for number in numbers:
            self.files += self._files_of(number)

    def _files_of(self, number: int) -> list[_File]:
        names = self._inputs_of(number)
        missing = sorted({file.name for file in names} - set(self.folder.paths))
        if missing:
            raise FailedError(f"{self.folder.packed}: {describe_missing_files(missing, len(names))}")
        paths, sizes = self.folder.paths, self.metadata.shard_table.bytes
        inputs = [_File(paths[file.name], self.folder.inputs.sizes[paths[file.name]], number, None) for file in names]
        shards = self.folder.shards_of(number)
        return inputs + [_File(path, int(sizes[shard]), number, shard) for shard, path in shards.items()]

    def _inputs_of(self, number: int) -> Sequence[InputFile]:
        return proof.read_manifest(GroupManifest, self.folder.packed, number)[0].inputs

    def read(self, task: Task, workers: int | None) -> None:
        """Read all files, group after group; those of a store are fetched shortly before."""
        lock, ahead = threading.Lock(), worker_count(workers, len(self.files))
        sides = [[file.path for file in self.files if (file.shard is None) == is_input] for is_input in (False, True)]
        # Of each file, which one it is of its side.
        of_side = np.cumsum([file.shard is None for file in self.files], dtype=np.int64)
        with read_ahead(sides[0], ahead) as shards, read_ahead(sides[1], ahead) as inputs:

            def read_file(number: int, buffer: ByteArray) -> None:
                file, before = self.files[number], int(of_side[number])
                batches, batch = (inputs, before - 1) if file.shard is None else (shards, number - before)
                with batches.batch(batch):
                    sums = sum_pieces(self._pieces(file, task, buffer) if file.path.stat().st_size else iter(()))
                    with lock:
                        self._take_file(file, sums)

            map_files(read_file, range(len(self.files)), workers)

    def _pieces(self, file: _File, task: Task, buffer: ByteArray) -> Pieces:
        if file.shard is None:
            yield from unpacked_pieces(file.path, self._schema.unpacked, buffer, task.advance)
            return
        try:
            yield from packed_pieces(file.path, self._schema, buffer, task.advance)
        except InputError as error:
            raise FailedError(str(error)) from error

    def _take_file(self, file: _File, sums: SequenceSums) -> None:
        group = self._group(file.group)
        if file.shard is None:
            name = file.path.name
            group.unpacked.add(sums)
            group.sequences[name] = sums.sequences
            group.present.append(InputFile(name=name, bytes=sums.file_bytes, crc32c=sums.file_crc32c))
        else:
            group.repacked.add(sums)
            group.shards.add(file.shard, file.path, sums)
        group.missing -= 1
        if not group.missing:
            del self._open[file.group]
            try:
                self.take(file.group, self._hold(file.group, group))
            except FailedError as error:
                self.wrong[file.group] = str(error)

    def _group(self, number: int) -> _OpenGroup:
        if number not in self._open:
            inputs = self._inputs_of(number)
            files = len(inputs) + int(self.metadata.shard_table.group_sizes[number])
            self._open[number] = _OpenGroup(files, inputs, ReadGroup(self.metadata.max_sequence_length))
        return self._open[number]

    def _hold(self, number: int, group: _OpenGroup) -> dict[str, Any]:
        """Hold a group that was read to its input files and its manifest; what its proof states."""
        packed, metadata = self.folder.packed, self.metadata
        unpacked, repacked = group.unpacked, group.repacked
        if not (unpacked.sums == repacked.sums).all() or unpacked.tokens != repacked.tokens:
            files = [self.folder.paths[file.name] for file in group.inputs]
            shards = list(self.folder.shards_of(number).values())
            difference = describe_difference(files, shards, metadata, unpacked, repacked, 1)
            raise FailedError(f"{packed}: group {number}: {difference}")
        right, _ = hold_group(packed, metadata, self._plan_sha256, number, group.shards, group.sequences)
        proof.check_inputs(packed, right.inputs, group.present, metadata.remedy)
        figures = {key: getattr(right, key) for key in ("sequences", "packs", "tokens")}
        return {**figures, "lower_bound": self._bound(right), "fingerprint": repacked.fingerprint}

    def _bound(self, manifest: GroupManifest) -> int:
        """Packs that are proven to be necessary for a group.

        By simple sums, if they miss no more than the group's share of the gap of the folder; else by a solver, so that the
        last step, which adds the bounds up, seldom needs one.
        """
        counts: IntArray = np.array(manifest.counts, np.int64)
        depth, groups = self.metadata.depth, len(self.metadata.shard_table.group_firsts)
        simple = simple_certificate(counts, depth).bound
        if (manifest.packs - simple) * groups <= self.metadata.gap:
            return simple
        from gaudi_bert.packing.exact.bounds import prove_bound  # slow to load, and rarely needed here

        return max(simple, prove_bound(counts, depth).bound)
