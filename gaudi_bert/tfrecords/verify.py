"""The stage `verify`: proof that the packed folder holds every sequence of RECORDS exactly once, byte for byte.

First pass, at the speed of a scan and in constant memory: every input file and every shard is read, checked (both CRCs of
every record, every value) and summed into fingerprints (see `scanning.fingerprint`). When the last shard of a group is read,
the group's manifest and index are held to it; equal sums, and metadata.json that agrees (`packed_proof`): done.
Second pass, only if the sums differ: the sequences of the classes that differ are compared one by one and named.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gaudi_bert.artefacts.completion import first_difference, read_signature, settings_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, Verification, of_counts
from gaudi_bert.artefacts.references import METADATA_NAME, InputFile, VocabularyInfo, manifest_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import Shard, SizeArray, index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, read_ahead, release
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.arrays import BoolArray, ByteArray, IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError, shown
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.tfrecords import packed_proof as proof
from gaudi_bert.tfrecords.files import RecordInputs, open_inputs
from gaudi_bert.tfrecords.packed_folder import ShardPaths, read_metadata
from gaudi_bert.tfrecords.scanning.file_contents import SequenceSums, packed_pieces, sum_pieces, unpacked_pieces
from gaudi_bert.tfrecords.scanning.scan import map_files, worker_count
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, PackedSchema, UnpackedSchema

Entry = TypeVar("Entry")
Pieces = Iterator[tuple[Any, Any]]


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
        prove = partial(_prove, inputs, folder, metadata, reporter, workers)
        return proof.verify_folder(
            folder, metadata, inputs.sizes, Verification, prove, reporter=reporter, overwrite=overwrite
        )


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
        self._plan_sha256 = _plan_sha256(packed, metadata)
        self._open: dict[int, _OpenGroup] = {}

    def take(self, number: int, sums: SequenceSums) -> None:
        """Add a shard as it was read; of a group that is then complete, a rebuilt manifest is held to the stored one."""
        name, (group, _) = self.table.name(number), self.table.group_and_number(number)
        read = self._open.setdefault(group, _OpenGroup({}, np.zeros(self.metadata.max_sequence_length + 1, np.int64)))
        shard = Shard(name=name, packs=sums.record_sizes.size, bytes=sums.file_bytes, crc32c=sums.file_crc32c)
        read.shards[number] = shard, _sizes_on_disk(self.packed / name, sums)
        read.counts[:] += sums.lengths[: read.counts.size]
        if len(read.shards) == self.table.group_sizes[group]:
            del self._open[group]
            try:
                self._hold(group, read)
            except FailedError as error:
                self.problems[group] = str(error)

    def _hold(self, number: int, read: _OpenGroup) -> None:
        stored, crc = proof.read_manifest(GroupManifest, self.packed, number)
        self.inputs += stored.inputs
        shards, record_sizes = zip(*(read.shards[shard] for shard in sorted(read.shards)), strict=True)
        proof.check_crc32c(self.packed, stored.shards, shards, self.metadata.remedy)
        right = GroupManifest(
            format_version=2,
            plan_sha256=self._plan_sha256,
            group=number,
            packs=sum(shard.packs for shard in shards),
            **of_counts(read.counts[1:].tolist()),
            inputs=stored.inputs,  # held to the files where those of all groups are known
            index_crc32c=_check_index(index_path(self.packed, number), record_sizes, stored.remedy),
            shards=shards,
        )
        path = manifest_path(self.packed, number)
        proof.check_same(path, stored, right)
        held = sum(self.sequences_of_inputs.get(file.name, 0) for file in stored.inputs)
        if held != right.sequences:
            raise FailedError(
                f"{path}: inputs: these files hold {held} sequences, the group has {right.sequences}; {stored.remedy}"
            )
        self.sums.add(right, crc)

    def counts(self) -> Iterator[IntArray]:
        """Of each group, int64 [L], sequences of length 1, 2, ..., by its manifest, which was held to the data."""
        for number in range(len(self.table.group_firsts)):
            yield np.array(proof.read_manifest(GroupManifest, self.packed, number)[0].counts, np.int64)


class _OpenGroup(NamedTuple):
    """What was read of a group: its shards and the sizes of their records, by number; and sequences of length 0, 1, ..."""

    shards: dict[int, tuple[Shard, SizeArray]]
    counts: IntArray


def _sizes_on_disk(path: Path, sums: SequenceSums) -> SizeArray:
    """Of each record; the scan knows the canonical size of those that another program encoded."""
    if int(sums.record_sizes.sum(dtype=np.int64)) == sums.file_bytes:
        return sums.record_sizes
    return np.array([len(payload) + FRAME_BYTES for payload in read_records(path)], np.uint32)


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
    proof.check_bound(path, metadata.lower_bound, metadata.packs, groups.counts, metadata.depth, metadata.remedy)
    right = Metadata(
        # The sizes are those of every record that was read, the others those of the settings.
        **{key: getattr(metadata, key) for key in Metadata.planned},
        **groups.sums.stored(metadata.max_sequence_length, metadata.lower_bound),
        tool_version=metadata.tool_version,
        vocabulary=metadata.vocabulary if inputs.vocabulary is None else VocabularyInfo.of(inputs.vocabulary),
        input_files=len(contents.inputs),
    )
    return proof.Proof(right, contents.verification(right))


def _plan_sha256(packed: Path, metadata: Metadata) -> str:
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
    schema = packed_schema.unpacked
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
        read = partial(unpacked_pieces, schema=schema, progress=task.advance)
        present = _read_files(paths, read, take_input, workers)
        read = partial(packed_pieces, schema=packed_schema, progress=task.advance)
        try:
            _read_files(shards, read, take_shard, workers)
        except InputError as error:
            raise FailedError(str(error)) from error
    if not (unpacked.sums == repacked.sums).all() or unpacked.tokens != repacked.tokens:
        if groups is not None:
            _check_none_is_missing(packed, groups.inputs, paths)
        packs = list(shards)
        with read_ahead([paths]) as one, one.batch(0), read_ahead([packs]) as other, other.batch(0):
            difference = _describe_difference(paths, schema, packs, metadata, unpacked, repacked, workers)
        raise FailedError(f"{packed}: {difference}")
    return _Contents(tuple(present), repacked)


def _check_none_is_missing(packed: Path, known: Sequence[InputFile], paths: Sequence[Path]) -> None:
    """Name the input files that the manifests list and RECORDS lacks: all of their sequences would be foreign."""
    missing = sorted({file.name for file in known} - {path.name for path in paths})
    if missing:
        raise FailedError(
            f"{packed}: {len(missing):,} of {len(known):,} input files are missing from the records: "
            f"{_listed(missing[:_NAMED], len(missing))}; verify with the files that were packed"
        )


def _read_files(
    files: Sequence[Path], read: Callable[..., Pieces], take: Callable[[int, SequenceSums], Entry], workers: int | None
) -> list[Entry]:
    """What `take` makes of each file and its sums, one at a time; a store's files are fetched shortly before."""
    lock = threading.Lock()
    with read_ahead(files, worker_count(workers, len(files))) as batches:

        def read_file(number: int, buffer: ByteArray) -> Entry:
            with batches.batch(number):
                path = files[number]
                sums = sum_pieces(read(path, buffer=buffer) if path.stat().st_size else iter(()))
                with lock:
                    return take(number, sums)

        return map_files(read_file, range(len(files)), workers)


# --- the second pass: which sequences are missing, doubled or changed
#
# Only sequences whose hash falls into a class that differs are collected, and only as many classes as fit into a bounded
# table, so memory stays constant however much is wrong. Counts are then of those classes: "at least".

_MOST_SEARCHED = 1_000_000
_NAMED = 3


def _describe_difference(
    files: Sequence[Path],
    schema: UnpackedSchema,
    shards: Sequence[Path],
    metadata: Metadata,
    unpacked: SequenceSums,
    repacked: SequenceSums,
    workers: int | None,
) -> str:
    """One line: how many sequences of the records are missing, how many are too many, and the first of them."""
    classes, all_of_them = _classes_to_search(unpacked.sums, repacked.sums)
    expected = _collect(files, lambda path, buffer: unpacked_pieces(path, schema, buffer), classes, workers)
    shards = [path for path, size in zip(shards, metadata.shard_table.bytes.tolist(), strict=True) if size]
    packed_schema = PackedSchema.of(metadata)
    stored = _collect(shards, lambda path, buffer: packed_pieces(path, packed_schema, buffer), classes, workers)
    missing, extra = _surplus(expected, stored), _surplus(stored, expected)
    least = "" if all_of_them else "at least "
    parts = []
    if missing.size:
        names = [f"{files[row[1]].name} record {row[2]}" for row in missing[:_NAMED].tolist()]
        parts.append(f"{least}{missing.shape[0]} sequences of the records are missing: {_listed(names, missing.shape[0])}")
    if extra.size:
        names = [f"{shards[row[1]].name} record {row[2]} sequence {row[3]}" for row in extra[:_NAMED].tolist()]
        parts.append(f"{least}{extra.shape[0]} are doubled, changed or foreign: {_listed(names, extra.shape[0])}")
    return "; ".join([*parts, "write the folder again"])


def _listed(names: list[str], count: int) -> str:
    return ", ".join(names) + (", ..." if count > len(names) else "")


def _classes_to_search(unpacked: IntArray, repacked: IntArray) -> tuple[BoolArray, bool]:
    """bool [CLASSES]: which to search; and whether these are all that differ."""
    differing = np.flatnonzero((unpacked != repacked).any(axis=1))
    sizes = np.cumsum(unpacked[differing, 0] + repacked[differing, 0])
    count = max(1, int(np.searchsorted(sizes, _MOST_SEARCHED, side="right")))
    chosen = np.zeros(unpacked.shape[0], dtype=bool)
    chosen[differing[:count]] = True
    return chosen, count >= differing.size


def _collect(
    items: Sequence[Any], open_pieces: Callable[[Any, ByteArray], Pieces], classes: BoolArray, workers: int | None
) -> IntArray:
    """int64 [sequences, 4]: hash, number of the file, number of the record, number of the sequence in it (from 1)."""

    def search(task: tuple[int, Any], buffer: ByteArray) -> IntArray:
        number, item = task
        rows, record = [], 0
        for _, piece in open_pieces(item, buffer):
            sizes = piece.pack_sizes if piece.pack_sizes is not None else np.ones(piece.hashes.size, np.int64)
            chosen = np.flatnonzero(classes[(piece.hashes >> 20) & (classes.size - 1)])
            owners = np.repeat(np.arange(sizes.size), sizes)
            numbers = np.arange(piece.hashes.size) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
            columns = (piece.hashes[chosen], np.full(chosen.size, number), record + owners[chosen], numbers[chosen])
            rows.append(np.stack(columns, axis=1))
            record += sizes.size
        return np.concatenate(rows) if rows else np.zeros((0, 4), np.int64)

    parts = map_files(search, list(enumerate(items)), workers)
    return np.concatenate(parts) if parts else np.zeros((0, 4), np.int64)


def _surplus(rows: IntArray, others: IntArray) -> IntArray:
    """Those of `rows` whose hash occurs more often there than in `others` (the later ones of each hash)."""
    allowed = Counter(others[:, 0].tolist())
    surplus = []
    for number, value in enumerate(rows[:, 0].tolist()):
        if not allowed[value]:
            surplus.append(number)
        else:
            allowed[value] -= 1
    return rows[surplus]
