"""The stage `verify`: proof that the packed folder holds every sequence of RECORDS exactly once, byte for byte.

First pass, at the speed of a scan and in constant memory: every input file and every shard is read, checked (both CRCs of
every record, every value, the CRC of every file against metadata.json) and summed into fingerprints (see
`records.fingerprint`). Equal sums: done, if metadata.json and the manifests say the same (`packed_proof`). Second pass,
only if they differ: the sequences of the classes that differ are compared one by one and named.

The result also tells how even and how well mixed the shards are: the packs that an epoch drops at a number of workers, and
the standard deviation of sequences per batch against that of independent draws.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gaudi_bert.artefacts.completion import read_signature, settings_path
from gaudi_bert.artefacts.packed import (
    METADATA_NAME,
    GroupManifest,
    InputFile,
    Metadata,
    Shard,
    Verification,
    VocabularyInfo,
    mixing_batch_packs,
    of_counts,
)
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, read_ahead
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.arrays import BoolArray, ByteArray, IntArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.records.file_contents import Mixing, SequenceSums, packed_pieces, sum_pieces, unpacked_pieces
from gaudi_bert.records.files import RecordFile, RecordInputs, open_inputs
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.read.scan import map_files, worker_count
from gaudi_bert.records.schema import PackedSchema, UnpackedSchema
from gaudi_bert.stages import packed_proof as proof
from gaudi_bert.stages.results import Made

File = TypeVar("File", RecordFile, Shard)
Entry = TypeVar("Entry", InputFile, Shard)
Pieces = Iterator[tuple[Any, Any]]


def verify(
    records: str | Path,
    packed: Path,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    workers: int | None = None,
    store: StoreSettings | None = None,
) -> Made[Verification]:
    """Verify a packed folder against the records that it was made from.

    Args:
        packed: the packed folder, whole.
    """
    with mirrored(packed, store) as folder, open_inputs(records, Objects(store)) as inputs:
        fetch(folder / METADATA_NAME)
        metadata = read_metadata(folder)
        proof.check_shards(folder, metadata)
        if not (folder / METADATA_NAME).exists():  # the predecessor's: we write nothing into it
            return Made(_compare(inputs, folder, metadata, reporter, workers).verification(metadata, reporter))
        sizes = {file.path: file.bytes for file in inputs.files}
        prove = partial(_prove, inputs, folder, metadata, reporter, workers)
        return proof.verify_folder(folder, metadata, sizes, Verification, prove, reporter=reporter, overwrite=overwrite)


@dataclass(frozen=True)
class _Contents:
    """What was read, of sequences that are the same on both sides.

    Attributes:
        inputs: the input files as they are.
        shards: as they are, by name.
        counts: of each group, by what the names of its shards begin with: int64 [L], sequences of length 1, 2, ...
    """

    inputs: tuple[InputFile, ...]
    shards: dict[str, Shard]
    counts: dict[str, IntArray]
    repacked: SequenceSums
    mixing: Mixing

    def verification(self, metadata: Metadata, reporter: Reporter) -> Verification:
        """The result, with a note on what does not fail a proof but is not as we write it."""
        true = metadata.model_copy(update={"sequences": self.repacked.sequences, "tokens": self.repacked.tokens})
        result = Verification.of(true, self.repacked.fingerprint, self.mixing.ratio)
        if not result.balanced:
            reporter.say(
                "note: the shards of a group differ by more than one pack, so readers of whole shards get unequal shares"
            )
        if result.mixing is not None and not result.fairly_mixed:
            reporter.say(
                f"note: sequences per batch vary {result.mixing:.2f} times as much as independent draws would (1.2 is fair)"
            )
        return result


def _prove(
    inputs: RecordInputs, packed: Path, metadata: Metadata, reporter: Reporter, workers: int | None
) -> proof.Proof[Verification]:
    """Compare the sequences of both sides, and make the manifests and the metadata anew from what was read."""
    groups = proof.shards_of_groups(packed, metadata)
    contents = _compare(inputs, packed, metadata, reporter, workers)
    proof.check_inputs(packed, metadata, contents.inputs)
    plan_sha256 = _plan_sha256(packed)
    counts = [contents.counts[_group_of(shards[0])] for shards in groups]
    manifests = [
        GroupManifest(
            format_version=1,
            plan_sha256=plan_sha256,
            group=number,
            packs=sum(contents.shards[shard.name].packs for shard in shards),
            **of_counts(counts[number].tolist()),
            shards=tuple(contents.shards[shard.name] for shard in shards),
        )
        for number, shards in enumerate(groups)
    ]
    path = packed / METADATA_NAME
    proof.check_bound(path, metadata.lower_bound, metadata.packs, counts, metadata.depth, metadata.remedy)
    right = Metadata.of_groups(
        manifests,
        metadata.lower_bound,
        tool_version=metadata.tool_version,
        vocabulary=metadata.vocabulary if inputs.vocabulary is None else VocabularyInfo.of(inputs.vocabulary),
        inputs=contents.inputs,
        # The sizes are those of every record that was read; the others nothing tells but that they are stored.
        **{key: getattr(metadata, key) for key in Metadata.planned},
    )
    return proof.Proof(manifests, right, contents.verification(right, reporter))


def _group_of(shard: Shard) -> str:
    """What the names of the shards of a group begin with."""
    return shard.name.rpartition("-")[0]


def _plan_sha256(packed: Path) -> str:
    """The plan by which all groups were written: of the folder's settings, or of the first group where they are gone."""
    path = settings_path(packed)
    fetch(path)
    stored = read_signature(path).inputs.get("plan_sha256") if path.exists() else None
    return stored if isinstance(stored, str) else proof.read_manifest(GroupManifest, packed, 0).plan_sha256


def _compare(inputs: RecordInputs, packed: Path, metadata: Metadata, reporter: Reporter, workers: int | None) -> _Contents:
    """Read both sides; a sequence that is not on both is named."""
    schema, packed_schema = UnpackedSchema.of(metadata), PackedSchema.of(metadata)
    unpacked, repacked, length = SequenceSums(), SequenceSums(), metadata.max_sequence_length
    mixing = Mixing(mixing_batch_packs([shard.packs for shard in metadata.shards]))
    paths = [packed / shard.name for shard in metadata.shards]
    counts = {_group_of(shard): np.zeros(length, np.int64) for shard in metadata.shards}

    def take_input(file: RecordFile, sums: SequenceSums) -> InputFile:
        unpacked.add(sums)
        return InputFile(name=file.name, bytes=sums.file_bytes, crc32c=sums.file_crc32c)

    def take_shard(shard: Shard, sums: SequenceSums) -> Shard:
        proof.check_crc32c(packed / shard.name, shard, sums.file_crc32c, metadata.remedy)
        repacked.add(sums)
        mixing.add(sums.pack_sizes)
        counts[_group_of(shard)] += sums.lengths[1 : length + 1]
        return Shard(name=shard.name, packs=sums.pack_sizes.size, bytes=sums.file_bytes, crc32c=sums.file_crc32c)

    total = sum(file.bytes for file in inputs.files) + sum(shard.bytes for shard in metadata.shards)
    with reporter.task("verify", total, "bytes") as task:
        read = partial(unpacked_pieces, schema=schema, progress=task.advance)
        present = _read_files(inputs.files, inputs.paths, read, take_input, workers)
        read = partial(packed_pieces, schema=packed_schema, progress=task.advance)
        try:
            shards = _read_files(metadata.shards, paths, read, take_shard, workers)
        except InputError as error:
            raise FailedError(str(error)) from error
    if not (unpacked.sums == repacked.sums).all() or unpacked.tokens != repacked.tokens:
        with read_ahead([inputs.paths]) as one, one.batch(0), read_ahead([paths]) as other, other.batch(0):
            difference = _describe_difference(inputs.files, schema, packed, metadata, unpacked, repacked, workers)
        raise FailedError(f"{packed}: {difference}")
    return _Contents(tuple(present), {shard.name: shard for shard in shards}, counts, repacked, mixing)


def _read_files(
    files: Sequence[File],
    paths: Sequence[Path],
    read: Callable[..., Pieces],
    take: Callable[[File, SequenceSums], Entry],
    workers: int | None,
) -> list[Entry]:
    """What `take` makes of each file and its sums, one at a time; a store's files are fetched shortly before."""
    lock = threading.Lock()
    with read_ahead([[path] for path in paths], worker_count(workers, len(paths))) as batches:

        def read_file(number: int, buffer: ByteArray) -> Entry:
            with batches.batch(number):
                sums = sum_pieces(read(paths[number], buffer=buffer) if files[number].bytes else iter(()))
            with lock:
                return take(files[number], sums)

        return map_files(read_file, range(len(paths)), workers)


# --- the second pass: which sequences are missing, doubled or changed
#
# Only sequences whose hash falls into a class that differs are kept, and only as many classes as fit into a bounded table,
# so memory stays constant however much is wrong. Counts are then of those classes: "at least".

_MOST_KEPT = 1_000_000
_NAMED = 3


def _describe_difference(
    files: Sequence[RecordFile],
    schema: UnpackedSchema,
    packed: Path,
    metadata: Metadata,
    unpacked: SequenceSums,
    repacked: SequenceSums,
    workers: int | None,
) -> str:
    """One line: how many sequences of the records are missing, how many are too many, and the first of them."""
    classes, all_of_them = _classes_to_search(unpacked.sums, repacked.sums)
    expected = _collect(files, lambda file, buffer: unpacked_pieces(file.path, schema, buffer), classes, workers)
    shards = [shard for shard in metadata.shards if shard.bytes]
    packed_schema = PackedSchema.of(metadata)
    stored = _collect(
        shards, lambda shard, buffer: packed_pieces(packed / shard.name, packed_schema, buffer), classes, workers
    )
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
    count = max(1, int(np.searchsorted(sizes, _MOST_KEPT, side="right")))
    chosen = np.zeros(unpacked.shape[0], dtype=bool)
    chosen[differing[:count]] = True
    return chosen, count >= differing.size


def _collect(
    items: Sequence[Any],
    open_pieces: Callable[[Any, ByteArray], Pieces],
    classes: BoolArray,
    workers: int | None,
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


def _surplus(left: IntArray, right: IntArray) -> IntArray:
    """The rows of `left` whose hash occurs more often there than in `right` (the later ones of each hash)."""
    allowed = Counter(right[:, 0].tolist())
    surplus = []
    for number, value in enumerate(left[:, 0].tolist()):
        if not allowed[value]:
            surplus.append(number)
        else:
            allowed[value] -= 1
    return left[surplus]
