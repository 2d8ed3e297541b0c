"""The stage `verify`: proof that the packed folder holds every sequence of RECORDS exactly once, byte for byte.

First pass, at the speed of a scan and in constant memory: every input file and every shard is read, checked (both CRCs of
every record, every value, the CRC of every file against metadata.json) and summed into fingerprints (see
`records.fingerprint`). Equal sums: done, if metadata.json and the manifests say the same (`verify_metadata`). Second pass,
only if they differ: the sequences of the classes that differ are compared one by one and named.

The result is stored in the folder itself, so that the same folder is not verified twice; a shard or an input file that
changed since, if only by its time, is verified anew. It also tells how even and how well mixed the shards are: the packs
that an epoch drops at a number of workers, and the standard deviation of sequences per batch against that of independent
draws.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, settings_path
from gaudi_bert.artefacts.packed import METADATA_NAME, VERIFICATION_NAME, Metadata, Shard, Verification, VocabularyInfo
from gaudi_bert.artefacts.store.mirrored_folder import (
    fetch,
    files_in,
    is_mirrored,
    last_change,
    mirrored,
    names_in,
    read_ahead,
    remove,
    shown,
)
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.arrays import BoolArray, ByteArray, IntArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.records.file_contents import (
    Mixing,
    SequenceSums,
    dropped_packs,
    is_balanced,
    packed_pieces,
    sum_pieces,
    unpacked_pieces,
)
from gaudi_bert.records.files import RecordFile, RecordInputs, open_inputs
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.read.scan import map_files, worker_count
from gaudi_bert.records.schema import PackedSchema, UnpackedSchema
from gaudi_bert.stages.data.verify_metadata import PackedContents, ShardContents, check_metadata
from gaudi_bert.stages.results import Made


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
        _check_folder(folder, metadata)
        if not (folder / METADATA_NAME).exists():  # the predecessor's: we write nothing into it
            return Made(_prove(inputs, folder, metadata, reporter, workers))
        out, signature = folder / VERIFICATION_NAME, _signature(folder, inputs.files)
        if not overwrite and _is_verified(inputs, folder, metadata, signature):
            reporter.say(f"{shown(folder)}: already verified, nothing to do")
            return Made(Verification.read(out), skipped=True)
        is_writable = is_mirrored(folder) or os.access(folder, os.W_OK)
        if is_writable:
            # A verification is of no use to anyone once its data changed, so it is replaced without `overwrite`.
            remove(out, settings_path(out))
            begin_artefact(out, out, signature)
        else:
            reporter.say(f"note: {shown(folder)} is read-only, so the verification cannot be stored there")
        verification = _prove(inputs, folder, metadata, reporter, workers)
        if is_writable:
            verification.write(out)
    return Made(verification)


def _signature(packed: Path, files: Sequence[RecordFile]) -> Signature:
    """What is verified: the metadata, which holds every size and CRC, against these files."""
    metadata_sha256 = hashlib.sha256(read_file(packed / METADATA_NAME)).hexdigest()
    return Signature("verify", {}, {"metadata_sha256": metadata_sha256, "files": {file.name: file.bytes for file in files}})


def _is_verified(inputs: RecordInputs, packed: Path, metadata: Metadata, signature: Signature) -> bool:
    """Whether the same was verified, and nothing was changed since."""
    out, sources = packed / VERIFICATION_NAME, [packed / shard.name for shard in metadata.shards]
    if not is_mirrored(packed):
        return is_finished(out, out, signature, sources if is_mirrored(inputs.folder) else [*sources, *inputs.paths])
    if not is_finished(out, out, signature):
        return False
    return max(map(last_change, [*sources, *inputs.paths])) <= last_change(out) < math.inf


def _prove(inputs: RecordInputs, packed: Path, metadata: Metadata, reporter: Reporter, workers: int | None) -> Verification:
    """Read both sides, compare them, and compare the metadata with what was read."""
    schema, unpacked, repacked = UnpackedSchema.of(metadata), SequenceSums(), SequenceSums()
    mixing = Mixing.for_shards([shard.packs for shard in metadata.shards])
    total = sum(file.bytes for file in inputs.files) + sum(shard.bytes for shard in metadata.shards)
    with reporter.task("verify", total, "bytes") as task:
        differing = _read_inputs(inputs, schema, metadata, unpacked, workers, task.advance)
        shards = _read_shards(packed, metadata, repacked, mixing, workers, task.advance)
    if not (unpacked.sums == repacked.sums).all() or unpacked.tokens != repacked.tokens:
        paths = [packed / shard.name for shard in metadata.shards]
        with (
            read_ahead([inputs.paths]) as records,
            records.batch(0),
            read_ahead([paths]) as shards_too,
            shards_too.batch(0),
        ):
            difference = _describe_difference(inputs.files, schema, packed, metadata, unpacked, repacked, workers)
        raise FailedError(f"{packed}: {difference}")
    if differing:
        raise FailedError(f"{packed}: {differing[0]}; the sequences are the same, but write it again to be sure")
    if (packed / METADATA_NAME).exists():
        fetch(*(packed / name for name in names_in(packed) if name.startswith("group-")))
        vocabulary = None if inputs.vocabulary is None else VocabularyInfo.of(inputs.vocabulary)
        histogram = unpacked.lengths[1 : metadata.max_sequence_length + 1]
        check_metadata(packed, metadata, PackedContents(histogram, shards, vocabulary))
    return _verification(metadata, repacked, mixing, reporter)


def _check_folder(packed: Path, metadata: Metadata) -> None:
    """The folder holds the shards of the metadata, and no other TFRecords that a reader might take for its own."""
    stored, named = files_in(packed), {shard.name for shard in metadata.shards}
    for shard in metadata.shards:
        path = packed / shard.name
        if shard.name not in stored:
            raise FailedError(f"{path}: the shard is missing; write the folder again")
        if stored[shard.name].bytes != shard.bytes:
            raise FailedError(f"{path}: {stored[shard.name].bytes} bytes, metadata.json says {shard.bytes}; write it again")
    for name in sorted(stored):
        if name.startswith("packed-") and name not in named:
            raise FailedError(f"{packed / name}: is not in metadata.json; remove it, or write the folder again")


def _read_inputs(
    inputs: RecordInputs,
    schema: UnpackedSchema,
    metadata: Metadata,
    total: SequenceSums,
    workers: int | None,
    progress: Callable[[int], None],
) -> list[str]:
    """Add all input files to `total`; how they differ from those of the metadata."""
    lock, files = threading.Lock(), inputs.files
    with read_ahead([[path] for path in inputs.paths], worker_count(workers, len(files))) as batches:

        def read(number: int, buffer: ByteArray) -> tuple[int, int]:
            with batches.batch(number):
                sums = sum_pieces(unpacked_pieces(files[number].path, schema, buffer, progress))
            with lock:
                total.add(sums)
            return sums.file_bytes, sums.file_crc32c

        seen = map_files(read, range(len(files)), workers)
    present = {file.name: each for file, each in zip(files, seen, strict=True)}
    if not metadata.inputs:
        return []  # the predecessor did not note its input files
    packed = {file.name: (file.bytes, file.crc32c) for file in metadata.inputs}
    differing = [f"input file {name} is not among those that were packed" for name in present if name not in packed]
    for name, identity in packed.items():
        if name not in present:
            differing.append(f"input file {name} was packed but is missing now")
        elif present[name] != identity:
            differing.append(f"input file {name} has changed since it was packed")
    return differing


def _read_shards(
    packed: Path,
    metadata: Metadata,
    total: SequenceSums,
    mixing: Mixing,
    workers: int | None,
    progress: Callable[[int], None],
) -> dict[str, ShardContents]:
    """Add all shards to `total` and `mixing`, and hold each to its entry in the metadata; what each holds, by name."""
    lock, schema = threading.Lock(), PackedSchema.of(metadata)
    paths = {shard.name: packed / shard.name for shard in metadata.shards}

    def read_shard(shard: Shard, buffer: ByteArray) -> ShardContents:
        path = paths[shard.name]
        try:
            sums = sum_pieces(packed_pieces(path, schema, buffer, progress) if shard.bytes else iter(()))
        except InputError as error:
            raise FailedError(str(error)) from error
        if shard.crc32c is not None and sums.file_crc32c != shard.crc32c:
            raise FailedError(f"{path}: its CRC-32C differs from metadata.json; write it again")
        if sums.pack_sizes.size != shard.packs:
            raise FailedError(f"{path}: {sums.pack_sizes.size} packs, metadata.json says {shard.packs}; write it again")
        with lock:
            total.add(sums)
            mixing.add(sums.pack_sizes)
        return ShardContents(sums.pack_sizes.size, sums.sequences, sums.tokens)

    with read_ahead([[path] for path in paths.values()], worker_count(workers, len(paths))) as batches:

        def read(number: int, buffer: ByteArray) -> ShardContents:
            with batches.batch(number):
                return read_shard(metadata.shards[number], buffer)

        return dict(zip(paths, map_files(read, range(len(paths)), workers), strict=True))


def _verification(metadata: Metadata, repacked: SequenceSums, mixing: Mixing, reporter: Reporter) -> Verification:
    packs = [shard.packs for shard in metadata.shards]
    balanced = is_balanced([shard.name for shard in metadata.shards], packs)
    dropped = dropped_packs(sum(packs))
    ratio = mixing.ratio
    if not balanced:
        reporter.say(
            "note: the shards of a group differ by more than one pack, so readers of whole shards get unequal shares"
        )
    if ratio is not None and not mixing.is_fair:
        reporter.say(f"note: sequences per batch vary {ratio:.2f} times as much as independent draws would (1.2 is fair)")
    return Verification(
        sequences=repacked.sequences,
        tokens=repacked.tokens,
        packs=sum(packs),
        shards=len(packs),
        input_files=len(metadata.inputs),
        fingerprint=repacked.fingerprint,
        balanced=balanced,
        most_dropped_packs=max(dropped.values()),
        dropped_packs={str(workers): count for workers, count in dropped.items()},
        mixing=ratio,
        fairly_mixed=mixing.is_fair,
        mixing_batch_packs=mixing.batch_packs,
    )


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
    open_pieces: Callable[[Any, ByteArray], Iterator[tuple[Any, Any]]],
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
    values, inverse, counts = np.unique(left[:, 0], return_inverse=True, return_counts=True)
    others, other_counts = np.unique(right[:, 0], return_counts=True)
    allowed = np.zeros(values.size, np.int64)
    indices: IntArray = np.asarray(np.searchsorted(others, values))
    known = indices < others.size
    known[known] = others[indices[known]] == values[known]
    allowed[known] = other_counts[indices[known]]
    order = np.argsort(inverse, kind="stable")
    rank = np.empty(left.shape[0], np.int64)
    rank[order] = np.arange(left.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
    return left[rank >= allowed[inverse]]
