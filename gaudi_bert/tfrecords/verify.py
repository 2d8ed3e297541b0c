"""The stage `verify`: proof that the packed folder holds every sequence of RECORDS exactly once, byte for byte.

First pass, at the speed of a scan and in constant memory: every input file and every shard is read, checked (both CRCs of
every record, every value) and summed into fingerprints (see `scanning.fingerprint`). When the last shard of a group is read,
the group's manifest and index are held to it; equal sums, and metadata.json that agrees (`packed_proof`): done.
Second pass, only if the sums differ: the sequences of the classes that differ are compared one by one and named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, Verification
from gaudi_bert.artefacts.references import METADATA_NAME, InputFile, VocabularyInfo
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, read_ahead
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.tfrecords import packed_proof as proof
from gaudi_bert.tfrecords.differences import Pieces, describe_difference, describe_missing_files
from gaudi_bert.tfrecords.files import RecordInputs, open_inputs
from gaudi_bert.tfrecords.group_proof import ReadGroup, hold_group, plan_sha256_of
from gaudi_bert.tfrecords.packed_folder import ShardPaths, read_metadata
from gaudi_bert.tfrecords.scanning.file_contents import SequenceSums, packed_pieces, sum_pieces, unpacked_pieces
from gaudi_bert.tfrecords.scanning.scan import map_files, worker_count
from gaudi_bert.tfrecords.wire.schema import PackedSchema

Entry = TypeVar("Entry")


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
    with mirrored(packed, store) as folder, open_inputs(records, Objects(store)) as inputs:
        fetch(folder / METADATA_NAME)
        metadata = read_metadata(folder)
        proof.check_shards(folder, metadata)
        if not (folder / METADATA_NAME).exists():  # the predecessor's: we write nothing into it
            return StageOutput(_compare(inputs, folder, metadata, reporter, workers).verification(metadata))
        verified = proof.VerifiedFolder(folder, metadata, inputs.sizes, Verification, reporter)
        return proof.verify_folder(verified, partial(_prove, inputs, folder, metadata, reporter, workers), overwrite)


class _Groups:
    """The groups of a packed folder, each held to its manifest when its last shard is read, and then forgotten.

    A problem of a manifest waits until the sequences are compared, for what is missing there is the better message.
    """

    def __init__(self, packed: Path, metadata: Metadata) -> None:
        self.packed, self.metadata, self.table = packed, metadata, metadata.shard_table
        self.sums = PackedSums()
        self.inputs: list[InputFile] = []
        self.sequences_of_inputs: dict[str, int] = {}
        self.problems: dict[int, str] = {}
        self._plan_sha256 = plan_sha256_of(packed, metadata)
        self._open: dict[int, ReadGroup] = {}

    def take(self, number: int, sums: SequenceSums) -> None:
        """Add a shard as it was read; of a group that is then complete, a rebuilt manifest is held to the stored one."""
        group, _ = self.table.group_and_number(number)
        read = self._open.setdefault(group, ReadGroup(self.metadata.max_sequence_length))
        read.add(number, self.packed / self.table.name(number), sums)
        if len(read.shards) == self.table.group_sizes[group]:
            del self._open[group]
            try:
                self._hold(group, read)
            except FailedError as error:
                self.problems[group] = str(error)

    def _hold(self, number: int, read: ReadGroup) -> None:
        self.inputs += proof.read_manifest(GroupManifest, self.packed, number)[0].inputs
        right, crc = hold_group(self.packed, self.metadata, self._plan_sha256, number, read, self.sequences_of_inputs)
        self.sums.add(right, crc)


def _prove(
    inputs: RecordInputs, packed: Path, metadata: Metadata, reporter: Reporter, workers: int | None
) -> proof.Proof[Verification]:
    """Compare the sequences of both sides, hold the manifests to what was read, and rebuild the metadata from it."""
    proof.check_numbers(packed, metadata)
    groups = _Groups(packed, metadata)
    contents = _compare(inputs, packed, metadata, reporter, workers, groups)
    if groups.problems:
        raise FailedError(groups.problems[min(groups.problems)])
    path = packed / METADATA_NAME
    proof.check_inputs(packed, groups.inputs, contents.inputs, metadata.remedy)
    if len(groups.inputs) != len(contents.inputs):
        raise FailedError(f"{packed}: two manifests name the same input file; {metadata.remedy}")
    counts = partial(proof.counts_of_groups, packed, metadata)
    proof.check_bound(path, metadata.lower_bound, metadata.packs, counts, metadata.depth, metadata.remedy)
    right = rebuilt_metadata(inputs, metadata, groups.sums)
    return proof.Proof(right, contents.verification(right))


def rebuilt_metadata(inputs: RecordInputs, metadata: Metadata, sums: PackedSums) -> Metadata:
    """What metadata.json must state by what was read: `sums` of all groups, and the input files."""
    return Metadata(
        # The sizes are those of every record that was read, the others those of the settings.
        **{key: getattr(metadata, key) for key in Metadata.planned},
        **sums.stored(metadata.max_sequence_length, metadata.lower_bound),
        tool_version=metadata.tool_version,
        vocabulary=metadata.vocabulary if inputs.vocabulary is None else VocabularyInfo.of(inputs.vocabulary),
        input_files=len(inputs.sizes),
    )


@dataclass(frozen=True)
class _Contents:
    """What was read, of sequences that are the same on both sides; `inputs` are the input files as they are."""

    inputs: tuple[InputFile, ...]
    repacked: SequenceSums

    def verification(self, metadata: Metadata) -> Verification:
        """The result."""
        true = metadata.model_copy(update={"sequences": self.repacked.sequences, "tokens": self.repacked.tokens})
        return Verification.of(true, self.repacked.fingerprint)


def _compare(
    inputs: RecordInputs,
    packed: Path,
    metadata: Metadata,
    reporter: Reporter,
    workers: int | None,
    groups: _Groups | None = None,
) -> _Contents:
    """Read both sides; a sequence that is not on both is named. `groups` gets every shard."""
    packed_schema = PackedSchema.of(metadata)
    unpacked, repacked, table = SequenceSums(), SequenceSums(), metadata.shard_table

    def take_input(number: int, sums: SequenceSums) -> InputFile:
        name = paths[number].name
        unpacked.add(sums)
        if groups is not None:
            groups.sequences_of_inputs[name] = sums.sequences
        return InputFile(name=name, bytes=sums.file_bytes, crc32c=sums.file_crc32c)

    def take_shard(number: int, sums: SequenceSums) -> None:
        repacked.add(sums)
        if groups is not None:
            groups.take(number, sums)

    paths, shards = inputs.paths, ShardPaths(packed, table)
    with reporter.task("verify", sum(inputs.sizes.values()) + int(table.bytes.sum()), "bytes") as task:

        def read_input(number: int, buffer: ByteArray) -> Pieces:
            return unpacked_pieces(paths[number], packed_schema.unpacked, buffer, task.advance)

        def read_shard(number: int, buffer: ByteArray) -> Pieces:
            return packed_pieces(shards[number], packed_schema, buffer, task.advance)

        present = _read_files(paths, read_input, take_input, workers)
        try:
            _read_files(shards, read_shard, take_shard, workers)
        except InputError as error:
            raise FailedError(str(error)) from error
    if not (unpacked.sums == repacked.sums).all() or unpacked.tokens != repacked.tokens:
        missing = sorted({file.name for file in groups.inputs} - {path.name for path in paths}) if groups else []
        if groups and missing:
            raise FailedError(f"{packed}: {describe_missing_files(missing, len(groups.inputs))}")
        raise FailedError(f"{packed}: {describe_difference(paths, list(shards), metadata, unpacked, repacked, workers)}")
    return _Contents(tuple(present), repacked)


def _read_files(
    files: Sequence[Path],
    read: Callable[[int, ByteArray], Pieces],
    take: Callable[[int, SequenceSums], Entry],
    workers: int | None,
) -> list[Entry]:
    """What `take` makes of each file and its sums, one at a time; a store's files are fetched shortly before."""
    lock = threading.Lock()
    with read_ahead(files, worker_count(workers, len(files))) as batches:

        def read_file(number: int, buffer: ByteArray) -> Entry:
            with batches.batch(number):
                sums = sum_pieces(read(number, buffer) if files[number].stat().st_size else iter(()))
                with lock:
                    return take(number, sums)

        return map_files(read_file, range(len(files)), workers)
