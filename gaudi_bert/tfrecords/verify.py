"""The stage `verify` for packed TFRecords. This module reads the groups, and `packs.verify` controls the stage.

The shards of a group must contain the same sequences as the input files that the group manifest names. Every file is read in
constant memory, checked, and reduced to a sum of hashes (`tfrecords.fingerprint`). If the shards of a group do not contain
the same sequences as its input files, both sums are still equal with a probability of about 2**-64. If the sums differ, a
second pass compares the hashes one by one, so that the error names the first missing and surplus sequences.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaudi_bert.artefacts.base import METADATA_NAME, InputFile, VocabularyInfo, counts_to_json_fields
from gaudi_bert.artefacts.completion import Signature, read_signature, settings_path
from gaudi_bert.artefacts.mirrored_folder import (
    download_missing_files,
    format_path,
    mirror_folder,
    prefetch_batches,
    remove_local_copies,
)
from gaudi_bert.artefacts.packed import PackedTotals, RecordManifest, RecordMetadata, Verification
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun
from gaudi_bert.artefacts.shards import IndexArray, Shard, index_path
from gaudi_bert.common.arrays import ByteArray, IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
from gaudi_bert.common.processor import choose_worker_count, map_in_threads
from gaudi_bert.common.progress import Task, format_count
from gaudi_bert.packs.verify import (
    PackedFolder,
    VerifiedGroup,
    check_inputs_unchanged,
    check_same_content,
    prove_group_lower_bound,
    verify_packs,
)
from gaudi_bert.tfrecords.fingerprint import (
    PackSizes,
    ScannedPacks,
    check_and_hash_packs,
    hash_unpacked_sequences,
    sum_hashes,
)
from gaudi_bert.tfrecords.plan import find_file_problem
from gaudi_bert.tfrecords.scan import (
    CHUNK_BYTES,
    RecordInputs,
    RecordScan,
    StatusAndPosition,
    UnpackedFormat,
    allocate_scan_buffer,
    compute_bad_file_identity,
    map_files_in_threads,
    open_inputs,
)
from gaudi_bert.tfrecords.wire.example import build_position_varint_table
from gaudi_bert.tfrecords.wire.features import make_feature_table
from gaudi_bert.tfrecords.wire.framing import ScanStatus
from gaudi_bert.tfrecords.wire.schema import MAX_RECORD_BYTES, MAX_SEQUENCE_LENGTH, PackedSchema, UnpackedSchema

_MAX_NAMED_FILES = 3
# Listing the files of all groups at once would use memory in proportion to the data. Therefore, list the files of this many
# groups at a time.
_GROUPS_AT_ONCE = 256


def verify_records(records: str | Path, packed: Path, run: StageRun) -> StageOutput[Verification] | PlainResult:
    """Verify that a packed folder contains every sequence of the unpacked records exactly once.

    Args:
        records: A folder, a file or a glob of the unpacked records, on this machine or as a URL.
        packed: The packed folder.
        run: The settings of the run, such as the number of workers and the part of the groups to verify.

    Returns:
        The verification, or the totals of a part if `run` selects a part.

    Raises:
        FailedError: The packed folder differs from its records or from its own metadata.
        InputError: The records or the packed folder cannot be read.
    """
    with mirror_folder(packed, run.store) as here, open_inputs(records, run.store) as inputs:
        download_missing_files(here / METADATA_NAME)
        return verify_packs(_RecordVerifier(inputs, PackedFolder(here, RecordMetadata.read(here), RecordManifest), run), run)


class _FileSummary(NamedTuple):
    """The checksum, fingerprint and sequence lengths of one input file or shard.

    Attributes:
        path: The file.
        is_input: True for an input file, False for a shard.
        identity: Name, size and CRC-32C of the file.
        fingerprint: The sum of the mixed hashes of all sequences, modulo 2**64.
        lengths: int64 [MAX_SEQUENCE_LENGTH + 1]. Entry n is the number of sequences that have n tokens.
        record_index: uint32 [packs, 2], the size and checksum of each record of a shard. Empty for an input file.
    """

    path: Path
    is_input: bool
    identity: InputFile
    fingerprint: int
    lengths: IntArray
    record_index: IndexArray


@dataclass(frozen=True)
class _RecordVerifier:
    """Compares the shards of each group with the input files of the group. Implements the protocol `GroupVerifier`.

    Attributes:
        inputs: The files of the records.
        folder: The packed folder.
        run: The settings of the run.
    """

    inputs: RecordInputs
    folder: PackedFolder[RecordMetadata, RecordManifest]
    run: StageRun

    @cached_property
    def _path_by_name(self) -> Mapping[str, Path]:
        """The paths of the input files, by file name."""
        return {path.name: path for path in self.inputs.sizes}

    def verify_groups(self, manifests: Iterable[RecordManifest]) -> Iterator[VerifiedGroup[RecordManifest]]:
        """Read the input files and shards of each group, compare them, and yield one result per group.

        The groups are read in batches of 256. Several threads read the files of a batch, before their groups are compared.

        Args:
            manifests: The manifests of the groups to read.

        Raises:
            FailedError: The stored settings do not belong to these packs, or a group differs from its input files.
            InputError: An input file cannot be read.
        """
        metadata, plan_sha256 = self.folder.metadata, self.folder.read_manifest(0).source_sha256
        # settings.json in the packed folder states the settings and the SHA-256 of the plan from which the packs were
        # written. To detect files that come from different plans, check that these settings are those in metadata.json, and
        # that the SHA-256 is the one in the manifest of group 0. The other manifests are later compared with this SHA-256.
        path = settings_path(self.folder.path, self.folder.path / METADATA_NAME)
        download_missing_files(path)
        expected = Signature(
            "write", {key: getattr(metadata, key) for key in RecordMetadata.planned}, {"plan_sha256": plan_sha256}
        )
        check_same_content(path, read_signature(path), expected, metadata.remedy, "metadata.json and its manifests")
        remaining = iter(manifests)
        total = int(metadata.shard_table.bytes.sum()) + sum(self.inputs.sizes.values())
        total //= 1 if self.run.part is None else self.run.part[1]
        with self.run.reporter.task("verify", total, "bytes") as task:
            while batch := list(itertools.islice(remaining, _GROUPS_AT_ONCE)):
                files = [self._list_group_files(manifest) for manifest in batch]
                results = self._read_files([file for group_files in files for file in group_files], task)
                for manifest, group_files in zip(batch, files, strict=True):
                    yield self._compare_group(manifest, plan_sha256, list(itertools.islice(results, len(group_files))))

    def _list_group_files(self, manifest: RecordManifest) -> list[tuple[Path, bool]]:
        """Return the input files of a group, followed by its shards.

        Returns:
            Pairs (path, whether the file is an input file).

        Raises:
            FailedError: An input file of the group is missing from the records.
        """
        names = [file.name for file in manifest.inputs]
        missing = [name for name in names if name not in self._path_by_name]
        if missing:
            raise FailedError(
                f"{self.folder.path}: {len(missing):,} of {len(names):,} input files of group {manifest.group} are missing"
                f" from the records: {', '.join(missing[:_MAX_NAMED_FILES])}; pass the files that were packed"
            )
        shards = self.folder.list_shards(manifest.group)
        return [*((self._path_by_name[name], True) for name in names), *((path, False) for path in shards)]

    def _read_files(self, files: Sequence[tuple[Path, bool]], task: Task) -> Iterator[_FileSummary]:
        """Read files in several threads, and yield one summary per file, in the given order.

        Files of an object store are downloaded shortly before they are read.

        Raises:
            InputError: An input file cannot be read or is invalid.
            FailedError: A shard cannot be read or is invalid.
        """
        ahead, schema = choose_worker_count(self.run.workers, len(files)), PackedSchema.from_sizes(self.folder.metadata)
        with prefetch_batches([path for path, _ in files], ahead) as batches:

            def summarize_file(number: int, buffer: ByteArray) -> _FileSummary:
                """Read and summarize one file. An invalid shard raises a FailedError instead of an InputError."""
                path, is_input = files[number]
                with batches.keep_batch_local_during(number):
                    try:
                        return _summarize_file(path, is_input, schema, buffer, task.advance)
                    except InputError as error:
                        if is_input:
                            raise
                        raise FailedError(str(error)) from error

            yield from map_in_threads(summarize_file, range(len(files)), self.run.workers, allocate_scan_buffer)

    def _compare_group(
        self, stored: RecordManifest, plan_sha256: str, files: Sequence[_FileSummary]
    ) -> VerifiedGroup[RecordManifest]:
        """Compare the shards of a group with its input files, and recompute the group manifest.

        Args:
            stored: The manifest as it is stored in the packed folder.
            plan_sha256: The SHA-256 of the plan, which the recomputed manifest states.
            files: The summaries of the group's input files and shards.

        Returns:
            The stored and the recomputed manifest, the proven bound and the fingerprint. The caller compares the manifests.

        Raises:
            FailedError: The shards contain other sequences than the input files, a shard or an input file has another
                checksum than the manifest states, or the index is wrong.
        """
        packed, metadata = self.folder.path, self.folder.metadata
        inputs, shards = ([file for file in files if file.is_input == side] for side in (True, False))
        fingerprint, lengths = _sum_fingerprints_and_lengths(shards)
        input_fingerprint, input_lengths = _sum_fingerprints_and_lengths(inputs)
        if fingerprint != input_fingerprint or not np.array_equal(lengths, input_lengths):
            records, packs_of_them = ([file.path for file in side] for side in (inputs, shards))
            difference = _describe_difference(records, packs_of_them, PackedSchema.from_sizes(metadata), self.run.workers)
            raise FailedError(f"{packed}: group {stored.group}: {difference}")
        written = tuple(
            Shard(name=file.path.name, packs=len(file.record_index), **file.identity.size_and_crc32c) for file in shards
        )
        for stored_shard, read_shard in zip(stored.shards, written, strict=False):
            if stored_shard.crc32c != read_shard.crc32c:
                raise FailedError(
                    f"{packed / stored_shard.name}: the CRC-32C of the shard differs from the manifest of its group;"
                    f" {metadata.remedy}"
                )
        identities = tuple(file.identity for file in inputs)
        check_inputs_unchanged(packed, stored.inputs, identities, metadata.remedy)
        expected = RecordManifest(
            format_version=2,
            source_sha256=plan_sha256,
            group=stored.group,
            packs=sum(shard.packs for shard in written),
            **counts_to_json_fields(lengths[1 : metadata.max_sequence_length + 1].tolist()),
            inputs=identities,
            index_crc32c=_check_index_and_compute_crc32c(
                index_path(packed, stored.group), [file.record_index for file in shards], stored.remedy
            ),
            shards=written,
        )
        bound = prove_group_lower_bound(self.folder, expected.counts, expected.packs)
        return VerifiedGroup(stored, expected, bound, fingerprint)

    def build_expected_metadata(self, totals: PackedTotals) -> RecordMetadata:
        """Return the expected contents of metadata.json, computed from the group manifests.

        Args:
            totals: The totals of all group manifests.

        Raises:
            FailedError: Two manifests name the same input file, an input file is in no manifest, or a file that was skipped
                as bad has changed.
        """
        names, metadata, packed = totals.input_names, self.folder.metadata, self.folder.path
        if len(set(names)) != len(names):
            raise FailedError(f"{packed}: two group manifests list the same input file; {metadata.remedy}")
        known = {*names, *(file.name for file in metadata.bad_files)}
        for name in self._path_by_name:
            if name not in known:
                raise FailedError(f"{packed}: input file {name} was not packed; {metadata.remedy}")
        self._check_skipped_files_still_bad(names)
        vocabulary = self.inputs.vocabulary
        return RecordMetadata(
            # Copy these values instead of computing them again. The sizes were checked against every record, and the other
            # values against the stored settings.
            **{key: getattr(metadata, key) for key in RecordMetadata.planned},
            **totals.to_metadata_fields(metadata.max_sequence_length, metadata.lower_bound),
            tool_version=metadata.tool_version,
            vocabulary=metadata.vocabulary if vocabulary is None else VocabularyInfo.from_file(vocabulary),
            input_files=len(names),
            bad_files=metadata.bad_files,
        )

    def _check_skipped_files_still_bad(self, packed_names: Sequence[str]) -> None:
        """Check that the files that packing skipped as bad are unchanged and still cannot be read, and report how many there
        are.

        Raises:
            FailedError: A skipped file is missing, is in a manifest, has changed, or can be read now.
        """
        bad_files, remedy = self.folder.metadata.bad_files, self.folder.metadata.remedy
        for bad in bad_files:
            path = self._path_by_name.get(bad.name)
            if path is None or bad.name in packed_names:
                problem = "is now missing" if path is None else "is listed in a group manifest"
                raise FailedError(f"{self.folder.path}: input file {bad.name} was skipped as bad, but {problem}; {remedy}")
            with prefetch_batches([path]) as files, files.keep_batch_local_during(0):
                if compute_bad_file_identity(path) != bad:
                    raise FailedError(f"{path}: the file was skipped as bad, but has changed since then; {remedy}")
                if find_file_problem(path) is None:
                    raise FailedError(f"{path}: the file was skipped as bad, but is readable; {remedy}")
        if bad_files:
            named = ", ".join(file.name for file in bad_files[:_MAX_NAMED_FILES])
            self.run.reporter.say(
                f"{format_path(self.folder.path)}: packing skipped {format_count(len(bad_files), 'bad file')}, whose"
                f" sequences are not packed: {named}"
            )


def _check_index_and_compute_crc32c(index_file: Path, expected_entries: Sequence[IndexArray], remedy: str) -> int:
    """Check that a group's index file contains the correct size and checksum of every record, and return the file's CRC-32C.

    Args:
        index_file: The index file.
        expected_entries: The sizes and checksums of the records that were read, an array uint32 [packs, 2] for each shard.
        remedy: What the user can do, for the error message.

    Raises:
        FailedError: The index is missing, or states other sizes or checksums.
    """
    download_missing_files(index_file)
    expected = np.concatenate(expected_entries).astype("<u4").tobytes()
    stored = read_file(index_file) if index_file.exists() else None
    remove_local_copies(index_file)
    if stored is None:
        raise FailedError(f"{index_file}: the index is missing; {remedy}")
    if stored != expected:
        raise FailedError(f"{index_file}: the sizes and checksums in the index differ from those of the records; {remedy}")
    return crc32c(expected)


# --- reading a file chunk by chunk: the hash and the length of each sequence


class _PackedFormat:
    """Checks and hashes packed records for a `RecordScan`.

    Attributes:
        schema: The sizes that every record must have.
        count: The number of packs that were read so far.
        scanned: The hashes and lengths of the current chunk. The next chunk overwrites them.
    """

    def __init__(self, schema: PackedSchema, buffer: ByteArray) -> None:
        self.schema = schema
        self.count = 0
        smallest = 4 * schema.max_sequence_length + 6 * schema.masked_slots + 6 * schema.depth
        packs = (CHUNK_BYTES + MAX_RECORD_BYTES) // smallest + 1
        sequences = (packs + 1) * min(schema.depth, schema.max_sequence_length)
        self.scanned = ScannedPacks(
            hashes=np.empty(sequences, np.int64),
            lengths=np.empty(sequences, np.int32),
            sequences=np.empty(packs, np.int32),
            record_index=np.empty((packs, 2), np.uint32),
            done=np.zeros(2, np.int64),
            starts=np.empty(schema.depth + 1, np.int64),
        )
        self._buffer = buffer
        self._sizes = PackSizes(schema.max_sequence_length, schema.masked_slots, schema.depth, schema.max_predictions)
        self._table = make_feature_table(schema.features)
        self._position_varints = build_position_varint_table()

    def prepare_for_next_chunk(self) -> None:
        """Remove the results of the previous chunk of the file."""
        self.scanned.done[:] = 0

    def validate_and_collect_records(self, position: int, buffer_end: int) -> StatusAndPosition:
        """Check and hash the packs in `buffer[position:buffer_end]`.

        Returns:
            (why the scan stopped, the position of the record at which it stopped).
        """
        before = int(self.scanned.done[0])
        status, position = check_and_hash_packs(
            self._buffer, position, buffer_end, self._sizes, self._table, self._position_varints, self.scanned
        )
        self.count += int(self.scanned.done[0]) - before
        return ScanStatus(status), position


def _hash_sequences_in_chunks(
    path: Path, schema: UnpackedSchema | PackedSchema, buffer: ByteArray, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[RecordScan, ScannedPacks]]:
    """Read an input file or a shard in chunks, and yield the hashes and lengths of the sequences in each chunk.

    An unpacked record counts as a pack that contains one sequence. The record index of an input file is empty, because it is
    not needed.

    Args:
        path: The file.
        schema: The sizes of the records. Its type decides whether the file is read as an input file or as a shard.
        buffer: The scan buffer of this thread (`scan.allocate_scan_buffer`).
        progress: Called with the number of bytes that were read.

    Yields:
        (scan, chunk). The arrays of the chunk are valid until the next one is requested. After the last chunk, the scan has
        the size and CRC-32C of the file.

    Raises:
        InputError: The file cannot be read, or a record is damaged or violates the contract.
    """
    nothing = np.empty(0, np.int64)
    if isinstance(schema, UnpackedSchema):
        indexed = UnpackedFormat.for_scan_in_chunks(schema, buffer)
        hashes = np.empty(indexed.index.offsets.size, np.int64)
        scan = RecordScan(path, indexed, buffer, progress)
        for _ in scan.process_chunk_by_chunk():
            hash_unpacked_sequences(indexed.index, indexed.rows, hashes)
            lengths = indexed.index.lengths[: indexed.rows]
            yield (
                scan,
                ScannedPacks(
                    hashes=hashes[: indexed.rows],
                    lengths=lengths,
                    sequences=np.ones_like(lengths),
                    record_index=np.empty((0, 2), np.uint32),
                    done=nothing,
                    starts=nothing,
                ),
            )
    elif path.stat().st_size:  # a shard may be empty
        checked = _PackedFormat(schema, buffer)
        scan = RecordScan(path, checked, buffer, progress)
        for _ in scan.process_chunk_by_chunk():
            scanned, (packs, sequences) = checked.scanned, checked.scanned.done.tolist()
            yield (
                scan,
                ScannedPacks(
                    hashes=scanned.hashes[:sequences],
                    lengths=scanned.lengths[:sequences],
                    sequences=scanned.sequences[:packs],
                    record_index=scanned.record_index[:packs],
                    done=nothing,
                    starts=nothing,
                ),
            )


def _summarize_file(
    path: Path, is_input: bool, schema: PackedSchema, buffer: ByteArray, progress: Callable[[int], None]
) -> _FileSummary:
    """Read an input file or a shard, and return its size, checksum, fingerprint and sequence lengths.

    The parameters are those of `_hash_sequences_in_chunks`.
    """
    fingerprint, lengths = 0, np.zeros(MAX_SEQUENCE_LENGTH + 1, np.int64)
    record_index, size, checksum = [np.zeros((0, 2), np.uint32)], 0, 0
    for scan, chunk in _hash_sequences_in_chunks(path, schema.unpacked_schema if is_input else schema, buffer, progress):
        fingerprint += int(sum_hashes(chunk.hashes))
        lengths += np.bincount(chunk.lengths, minlength=lengths.size)
        size, checksum = scan.file_bytes, scan.file_crc32c
        record_index.append(chunk.record_index.copy())
    return _FileSummary(
        path,
        is_input,
        InputFile(name=path.name, bytes=size, crc32c=checksum),
        fingerprint % 2**64,
        lengths,
        np.concatenate(record_index),
    )


def _sum_fingerprints_and_lengths(files: Sequence[_FileSummary]) -> tuple[int, IntArray]:
    """Return the combined fingerprint of several files, and the number of their sequences by length."""
    lengths = sum((file.lengths for file in files), np.zeros(MAX_SEQUENCE_LENGTH + 1, np.int64))
    return sum(file.fingerprint for file in files) % 2**64, lengths


# --- finding the missing, duplicated or changed sequences of a group after its sums differ


def _describe_difference(files: Sequence[Path], shards: Sequence[Path], schema: PackedSchema, workers: int | None) -> str:
    """Return an error message that counts the missing and surplus sequences of a group, and locates up to three of each
    kind.

    All hashes of the group are in memory at once, 32 bytes for each sequence. That is about half of what packing the group
    uses.

    Args:
        files: The input files of the group.
        shards: The shards of the group.
        schema: The sizes of the packs.
        workers: The number of threads, or None for the default.
    """
    with prefetch_batches([[*files, *shards]]) as batches, batches.keep_batch_local_during(0):
        expected, stored = (
            _collect_sequence_hashes(files, schema.unpacked_schema, workers),
            _collect_sequence_hashes(shards, schema, workers),
        )
    differences = []
    for what, surplus, paths in (
        ("sequences of the records are missing from the packs", _find_surplus_rows(expected, stored), files),
        ("sequences are duplicated, changed or not in the records", _find_surplus_rows(stored, expected), shards),
    ):
        if surplus.size:
            locations = [f"{paths[row[1]].name} record {row[2]}" for row in surplus[:_MAX_NAMED_FILES].tolist()]
            if paths is shards:
                locations = [f"{name} sequence {row[3]}" for name, row in zip(locations, surplus.tolist(), strict=False)]
            more = ", ..." if len(surplus) > len(locations) else ""
            differences.append(f"{len(surplus)} {what}: {', '.join(locations)}{more}")
    return "; ".join([*differences, "write the packed data again"])


def _collect_sequence_hashes(files: Sequence[Path], schema: UnpackedSchema | PackedSchema, workers: int | None) -> IntArray:
    """Read input files or shards again, and return the hash and the location of every sequence in them.

    Returns:
        int64 [sequences, 4]. The columns are the hash, the index of the file in `files`, the number of the record from 0,
        and the number of the sequence in its record from 1.
    """

    def hash_file(number: int, buffer: ByteArray) -> IntArray:
        """Return the hashes and locations of the sequences in one file."""
        rows, record = [np.zeros((0, 4), np.int64)], 0
        for _, chunk in _hash_sequences_in_chunks(files[number], schema, buffer):
            sizes = chunk.sequences.astype(np.int64)
            owners = np.repeat(np.arange(sizes.size), sizes)
            numbers = np.arange(chunk.hashes.size) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
            rows.append(np.stack([chunk.hashes, np.full(owners.size, number), record + owners, numbers], axis=1))
            record += sizes.size
        return np.concatenate(rows)

    return np.concatenate([np.zeros((0, 4), np.int64), *map_files_in_threads(hash_file, range(len(files)), workers)])


def _find_surplus_rows(rows: IntArray, other_rows: IntArray) -> IntArray:
    """Find the hashes that occur more often in `rows` than in `other_rows`, and return the surplus rows.

    The hash is in the first column. If a hash occurs n times in `rows` and m < n times in `other_rows`, the last n - m of
    its rows are returned.
    """
    allowed = Counter(other_rows[:, 0].tolist())
    surplus = []
    for number, value in enumerate(rows[:, 0].tolist()):
        if not allowed[value]:
            surplus.append(number)
        else:
            allowed[value] -= 1
    return rows[surplus]
