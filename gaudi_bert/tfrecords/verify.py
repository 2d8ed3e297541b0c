"""The stage `verify`: proof that the packed folder holds every sequence of RECORDS exactly once, byte for byte.

Each group is proven by itself: its shards must hold the sequences of the input files that its manifest names. At the speed
of a scan and in constant memory, every file is read, checked (both CRCs of every record, every value) and summed into
fingerprints (see `scanning.fingerprint`). Then the sums of the group are compared and its manifest and index are held to
what was read (`group_proof`); at last metadata.json is held to all groups (`proof.folder`). So parts of the work
(`--shard K/N`) share nothing, and files that no manifest names are noticed by the last step.

Only where the sums of a group differ, a second pass compares its sequences one by one and names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, Verification
from gaudi_bert.artefacts.references import METADATA_NAME, VocabularyInfo, manifest_path
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.shards import index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, read_ahead, shown_path
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.proof.checks import check_bound, check_numbers, check_shards, counts_of_groups, read_manifest
from gaudi_bert.proof.folder import Proof, ProvenGroup, VerifiedFolder, verify_folder
from gaudi_bert.proof.parts import PartlyVerified
from gaudi_bert.tfrecords.files import RecordInputs, input_file, open_inputs
from gaudi_bert.tfrecords.group_proof import FileToRead, ReadGroup, hold_group, plan_sha256_of, read_groups
from gaudi_bert.tfrecords.histogram import why_bad
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.scanning.file_contents import describe_difference
from gaudi_bert.tfrecords.wire.schema import PackedSchema

_NAMED = 3
# Their files are listed together: a list of all would grow with the data.
_GROUPS_AT_ONCE = 256


def verify(
    records: str | Path,
    packed: Path,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> StageOutput[Verification]:
    """Verify a packed folder against its records."""
    with _opened(records, packed, reporter, workers, store) as folder:
        if not folder.has_manifests:  # the predecessor's: we write nothing into it
            return StageOutput(folder.compare())
        return verify_folder(folder, overwrite)


def verify_part(
    records: str | Path,
    packed: Path,
    part: tuple[int, int],
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> StageOutput[Verification] | GroupsResult:
    """Verify the groups K, K + N, ... of a packed folder, for `part` (K, N); `finish_verification` afterwards, once."""
    with _opened(records, packed, reporter, workers, store) as folder:
        return folder.in_parts().prove_part(part, overwrite)


def finish_verification(
    records: str | Path, packed: Path, *, reporter: Reporter, store: StoreSettings | None = None
) -> StageOutput[Verification]:
    """Write verification.json of a packed folder whose groups are all verified by `verify_part`."""
    with _opened(records, packed, reporter, None, store) as folder:
        return folder.in_parts().finish()


@contextmanager
def _opened(
    records: str | Path, packed: Path, reporter: Reporter, workers: int | None, store: StoreSettings | None
) -> Iterator[_Folder]:
    with mirrored(packed, store) as here, open_inputs(records, Objects(store)) as inputs:
        fetch(here / METADATA_NAME)
        metadata = read_metadata(here)
        check_shards(here, metadata)
        check_numbers(here, metadata)
        yield _Folder(inputs, here, metadata, reporter, workers)


@dataclass(frozen=True)
class _Folder:
    """A packed folder and its records. The predecessor's folder has no manifests: it is one group of all files."""

    inputs: RecordInputs
    packed: Path
    metadata: Metadata
    reporter: Reporter
    workers: int | None

    @cached_property
    def has_manifests(self) -> bool:
        """Whether gaudi-bert packed it."""
        return (self.packed / METADATA_NAME).exists()

    @cached_property
    def verified(self) -> VerifiedFolder[Verification]:
        """Where the result is stored."""
        return VerifiedFolder(self.packed, self.metadata, self.inputs.sizes, Verification, self.reporter)

    def in_parts(self) -> PartlyVerified[Verification]:
        """The same, of the results of groups."""
        if not self.has_manifests:
            raise InputError(f"{self.packed}: the predecessor's folder has no groups; verify it at once, without --shard")
        return PartlyVerified(self)

    def compare(self) -> Verification:
        """Compare the sequences of a folder without manifests."""
        for _, group in self._read([0]):
            if not group.unpacked.is_same(group.repacked):
                raise FailedError(f"{self.packed}: {self._difference(0, group)}")
        true = self.metadata.model_copy(update={"sequences": group.repacked.sequences, "tokens": group.repacked.tokens})
        return Verification.of(true, group.repacked.fingerprint)

    def prove(self, groups: Sequence[int], in_parts: bool = False) -> Iterator[ProvenGroup]:
        """Read groups and hold each to its manifest; where some are wrong, the first is reported when all are read."""
        first_wrong: tuple[int, ReadGroup, str] | None = None
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
        if not self.has_manifests:
            return list(self._paths)
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

    def _read(self, numbers: Sequence[int]) -> Iterator[tuple[int, ReadGroup]]:
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
        with self.reporter.task("verify", total, "bytes") as task:
            for first in range(0, len(numbers), _GROUPS_AT_ONCE):
                at_once = numbers[first : first + _GROUPS_AT_ONCE]
                files = [file for number in at_once for file in self._files_to_read(number, names[number])]
                yield from read_groups(files, schema, task, self.workers)

    def _files_to_read(self, group: int, inputs: Sequence[str]) -> Iterator[FileToRead]:
        for name in inputs:
            yield FileToRead(self._paths[name], self.inputs.sizes[self._paths[name]], group, None)
        sizes = self.metadata.shard_table.bytes
        for shard, path in self._shards_of(group).items():
            yield FileToRead(path, int(sizes[shard]), group, shard)

    def _difference(self, number: int, group: ReadGroup) -> str:
        """In which sequences the shards of a group differ from its input files."""
        inputs, shards = [self._paths[name] for name in self._inputs_of(number)], list(self._shards_of(number).values())
        return describe_difference(inputs, shards, self.metadata, group.unpacked, group.repacked, self.workers)

    # --- what the files of the folder must state

    @cached_property
    def _plan_sha256(self) -> str:
        return plan_sha256_of(self.packed, self.metadata)

    def _hold(self, number: int, group: ReadGroup) -> GroupManifest:
        if not group.unpacked.is_same(group.repacked):
            raise FailedError(f"{self.packed}: the shards do not hold the sequences of the input files")
        return hold_group(self.packed, self.metadata, self._plan_sha256, number, group)

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
        """Files that were left out as bad are in no manifest, are there as they were, and cannot be read."""
        for bad in self.metadata.bad_files:
            path, remedy = self._paths.get(bad.name), self.metadata.remedy
            if path is None or bad.name in names:
                problem = "is missing now" if path is None else "is in a manifest"
                raise FailedError(f"{self.packed}: input file {bad.name} was left out as bad, and {problem}; {remedy}")
            with read_ahead([path]) as files, files.batch(0):
                if input_file(path) != bad:
                    raise FailedError(f"{path}: was left out as bad, and has changed since; {remedy}")
                if why_bad(path) is None:
                    raise FailedError(f"{path}: was left out as bad, but can be read; {remedy}")
        if self.metadata.bad_files:
            named = ", ".join(file.name for file in self.metadata.bad_files[:_NAMED])
            count = count_of(len(self.metadata.bad_files), "bad file")
            self.reporter.say(f"{shown_path(self.packed)}: {count} of the records left out: {named}")
