"""The stages `pack` and `write` for TFRecords. This module packs the groups of a plan, and `packs.write` controls the stage.

A group is read completely into memory, without its padding, before its packs are written. The number of shards of a group is
always a multiple of `shard_multiple`. If the group has fewer packs than shards, some shards are empty files.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from gaudi_bert import __version__
from gaudi_bert.artefacts.base import METADATA_NAME, InputFile, VocabularyInfo, counts_to_json_fields, manifest_path
from gaudi_bert.artefacts.completion import Signature, check_output_path
from gaudi_bert.artefacts.mirrored_folder import mirror_folder, open_local_copy, remove_local_copies
from gaudi_bert.artefacts.packed import GroupManifest, PackedMetadata, PackedTotals, RecordManifest, RecordMetadata
from gaudi_bert.artefacts.plan import PlannedGroup, WritablePlan
from gaudi_bert.artefacts.results import PackResult, PlainResult, StageOutput, StageRun, require_complete
from gaudi_bert.artefacts.shards import IndexArray, Shard, divide_packs, index_path, shard_name, write_index
from gaudi_bert.common.arrays import ByteArray, IntArray
from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError
from gaudi_bert.common.files import (
    check_path_to_write,
    format_location,
    get_store_url,
    is_in_store,
    read_text,
    resolve_links,
)
from gaudi_bert.common.processor import choose_worker_count, map_in_threads
from gaudi_bert.common.progress import Task, format_bytes, format_count
from gaudi_bert.common.sampling import sample_packs
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packing.certificate import Certificate, prove_bound_by_totals, verify_certified_lower_bound
from gaudi_bert.packs.write import GroupFilesAndSize, PackingJob, write_packs
from gaudi_bert.tfrecords.packed_shards import PackEncoder
from gaudi_bert.tfrecords.plan import OnBadFile, count_records, plan_packs
from gaudi_bert.tfrecords.scan import (
    CompactedFormat,
    IndexedSequences,
    RecordInputs,
    RecordScan,
    get_records_folder,
    map_files_in_threads,
    open_inputs,
)
from gaudi_bert.tfrecords.verify import verify_records
from gaudi_bert.tfrecords.wire.framing import RecordStream
from gaudi_bert.tfrecords.wire.schema import PackedSchema, UnpackedSchema

_WRITERS_PER_CORE = 4


def pack_records(
    records: str | Path,
    out: Path,
    settings: PackingSettings,
    run: StageRun,
    *,
    on_bad_file: OnBadFile = "stop",
    verify: bool = False,
) -> PackResult:
    """Pack unpacked TFRecords into a folder, by running the stages `histogram`, `plan` and `write` one after the other.

    The histogram and the plan are stored next to the output, in `<out>-plan/`.

    Args:
        records: A folder, a file or a glob of unpacked records, on this machine or as a URL.
        out: The folder of the packs.
        settings: The settings of the packing.
        run: The settings of the run, which must do all parts.
        on_bad_file: "stop" rejects a file that cannot be read, and "skip" skips it.
        verify: Verify the packs after they are written.

    Returns:
        The results of `write`, `plan` and, if `verify` is set, of the verification.

    Raises:
        InputError: The run is only a part, `out` is the folder of the records, or the input is invalid.
        FailedError: The verification fails.
    """
    check_path_to_write(out)
    if not run.runs_whole_stage:
        raise InputError(
            f"{out}: `pack` cannot pack a part of the records; use `histogram`, `plan` and `write` to share the work"
        )
    _check_separate_folders(records, out)
    with mirror_folder(out, run.store) as folder:  # otherwise the plan of other packs would be replaced before the error
        check_output_path(folder, folder / METADATA_NAME, "write", run.overwrite)
    histogram_path = out.with_name(f"{out.name}-plan") / "histogram.json"
    plan_path = histogram_path.with_name("plan.json")
    count_records(records, histogram_path, run, on_bad_file=on_bad_file)
    planned = plan_packs([histogram_path], plan_path, settings, run)
    written = require_complete(write_packed_records(records, plan_path, out, run))
    proof = require_complete(verify_records(records, out, replace(run, overwrite=False))) if verify else None
    return PackResult(written, planned, proof)


def write_packed_records(
    records: str | Path,
    plan: Path,
    out: Path,
    run: StageRun,
    *,
    shards: Mapping[str, int] | None = None,
) -> StageOutput[PackedMetadata] | PlainResult:
    """Pack records into a folder according to a plan.

    Args:
        records: The same records from which the plan was made: a folder, a file or a glob, on this machine or as a URL.
        plan: The plan.
        out: The folder of the packs.
        run: The settings of the run, which may select a part of the groups.
        shards: Values of `shard_multiple` and `shard_bytes` that replace the plan's values.

    Returns:
        The metadata of the folder. If the run does only a part, the totals of its groups, or of the folder if it is
        finished.

    Raises:
        InputError: The records differ from the plan, the plan is invalid, or a group needs more memory than is available.
    """
    _check_separate_folders(records, out)
    with open_local_copy(plan, run.store) as plan_path, mirror_folder(out, run.store) as folder:
        content = WritablePlan.read(plan_path).model_copy(update=dict(shards or {}))
        settings = {key: getattr(content, key) for key in RecordMetadata.planned}
        signature = Signature("write", settings, {"plan_sha256": content.sha256})
        return write_packs(_RecordPacking(folder, run, signature, records, plan_path, content))


def _check_separate_folders(records: str | Path, out: Path) -> None:
    """Check that the output folder is not the folder of the records.

    Raises:
        InputError: Both are the same folder.
    """
    if is_in_store(records) or is_in_store(out):
        same = is_in_store(records) and is_in_store(out) and get_store_url(records) == get_store_url(out)
    else:
        same = resolve_links(get_records_folder(records)) == resolve_links(out)
    if same:
        raise InputError(
            f"{format_location(records)}: the output folder must not be the folder of the records; choose another one"
        )


@dataclass
class _PlannedRecords:
    """The input files of a plan, and a buffer for the group that is being packed.

    Attributes:
        inputs: The files of the records.
        plan: The plan.
        buffer: The memory for the current group. It grows to the size of the largest group so far and is used again.
    """

    inputs: RecordInputs
    plan: WritablePlan
    buffer: ByteArray = field(default_factory=lambda: _allocate_buffer(0))

    @cached_property
    def _path_by_name(self) -> dict[str, Path]:
        """The paths of the input files that the plan lists, by file name."""
        return _match_planned_files(self.inputs.shown, self.inputs.sizes, self.plan)

    def list_group_files(self, number: int) -> list[Path]:
        """Return the paths of the input files of a group."""
        return [self._path_by_name[file.name] for file in self.plan.groups[number].files]

    def get_buffer(self, size: int) -> ByteArray:
        """Return the buffer, after enlarging it to at least `size` bytes."""
        if self.buffer.size < size:
            self.buffer = _allocate_buffer(size)
        return self.buffer


@dataclass(frozen=True)
class _RecordPacking(PackingJob[_PlannedRecords]):
    """The job that packs the TFRecords of a plan.

    Attributes:
        records: The records: a folder, a file or a glob, on this machine or as a URL.
        plan_path: The plan file, for error messages.
        plan: The plan.
    """

    records: str | Path
    plan_path: Path
    plan: WritablePlan

    metadata_type = RecordMetadata
    command = "gaudi-bert write"
    unit = "bytes"

    @property
    def source_sha256(self) -> str:
        """The SHA-256 of the plan."""
        return str(self.signature.inputs["plan_sha256"])

    @contextmanager
    def open_inputs(self) -> Iterator[_PlannedRecords]:
        """List the input files of the plan. Files in an object store are available until the `with` block ends."""
        with open_inputs(self.records, self.run.store) as inputs:
            yield _PlannedRecords(inputs, self.plan)

    def count_groups(self, inputs: _PlannedRecords) -> int:
        """Return the number of groups that the plan divides the input files into."""
        return len(self.plan.groups)

    @cached_property
    def _packs_before_group(self) -> IntArray:
        """The number of packs that precede each group, int64 [groups]."""
        packs = np.array([group.packs for group in self.plan.groups], np.int64)
        return np.cumsum(packs) - packs

    def check_and_list_group_files(self, inputs: _PlannedRecords, group_numbers: Sequence[int]) -> GroupFilesAndSize:
        """Check that each of the given groups fits into memory, and that the plan's lower bound on its number of packs is
        correct.

        Args:
            inputs: The files of the records.
            group_numbers: The groups to check.

        Returns:
            The input files of each group, and the size of all these files in bytes.

        Raises:
            InputError: The vocabulary differs from the plan's vocabulary, a bound cannot be proven, or a group needs more
                memory than is available.
        """
        vocabulary, available = inputs.inputs.vocabulary, _get_available_memory()
        if vocabulary is not None and VocabularyInfo.from_file(vocabulary) != self.plan.vocabulary:
            raise InputError(
                f"{vocabulary}: the vocabulary has changed since the plan was made; create the histogram and the plan again"
            )
        for number in group_numbers:
            self._check_lower_bound_of_group(number)
            _check_group_memory(number, self.plan.groups[number], inputs.list_group_files(number), available)
        return GroupFilesAndSize(
            list(map(inputs.list_group_files, group_numbers)),
            sum(self.plan.groups[number].input_bytes for number in group_numbers),
        )

    def write_group(self, inputs: _PlannedRecords, group_number: int, task: Task) -> RecordManifest:
        """Read one group into memory, pack it, and write its shards and its index.

        Reading the group is half of its progress, and writing its packs is the other half.

        Args:
            inputs: The files of the records.
            group_number: The number of the group.
            task: Receives the progress in bytes of the input files.

        Returns:
            The manifest of the group. Its shards and its index are already written.

        Raises:
            InputError: An input file differs from the plan, or a pack has too many masked positions.
        """
        plan, planned, schema = self.plan, self.plan.groups[group_number], PackedSchema.from_sizes(self.plan)
        paths, advance = inputs.list_group_files(group_number), lambda count: task.advance(count / 2)
        group = _read_group_into_memory(
            paths, planned.files, schema.unpacked_schema, inputs.get_buffer, self.run.workers, advance
        )
        assignment = sample_packs(group.lengths, planned.strategies, plan.seed, group_number)
        encoder = PackEncoder(schema, group, assignment)
        shards = encoder.count_shards(plan.shard_multiple, plan.shard_bytes)
        bounds = divide_packs(planned.packs, shards, int(self._packs_before_group[group_number]))
        share = planned.input_bytes / planned.packs / 2
        cores = choose_worker_count(self.run.workers, shards)
        slots = threading.Semaphore(cores)

        def write_shard(shard: int, output: ByteArray) -> tuple[Shard, IndexArray]:
            """Write one shard. Return its entry for the manifest of the group, and its part of the group's index file."""
            path = self.folder / shard_name(group_number, shard, RecordMetadata.shard_ending)
            first, last = int(bounds[shard]), int(bounds[shard + 1])
            written = encoder.write_shard(path, first, last, output, slots, lambda packs: task.advance(packs * share))
            remove_local_copies(path)
            return written

        written = list(map_in_threads(write_shard, range(shards), _WRITERS_PER_CORE * cores, encoder.allocate_output_buffer))
        index = index_path(self.folder, group_number)
        index_crc32c = write_index(index, [entries for _, entries in written])
        remove_local_copies(index)
        return RecordManifest(
            format_version=2,
            source_sha256=self.source_sha256,
            group=group_number,
            packs=planned.packs,
            **counts_to_json_fields(np.bincount(group.lengths, minlength=plan.max_sequence_length + 1)[1:].tolist()),
            inputs=tuple(file.model_copy(update={"sequences": 0}) for file in planned.files),
            index_crc32c=index_crc32c,
            shards=tuple(shard for shard, _ in written),
        )

    def check_manifest(self, manifest: GroupManifest) -> None:
        """Check that a stored manifest agrees with the plan on the number of packs and the sequence lengths of its group.

        Raises:
            FailedError: A number differs.
        """
        planned = self.plan.groups[manifest.group]
        expected = {
            "packs": planned.packs,
            **counts_to_json_fields(_count_planned_sequences(planned, self.plan.max_sequence_length).tolist()),
        }
        if any(getattr(manifest, key) != value for key, value in expected.items()):
            path = manifest_path(self.folder, manifest.group)
            stated = f"{format_count(manifest.packs, 'pack')} and {format_count(manifest.sequences, 'sequence')}"
            raise FailedError(f"{path}: the manifest states {stated}, which differ from the plan; {manifest.remedy}")

    def build_metadata(self, inputs: _PlannedRecords, totals: PackedTotals) -> RecordMetadata:
        """Return the metadata of the folder, computed from the plan and the totals of all manifests."""
        return RecordMetadata(
            **{key: getattr(self.plan, key) for key in RecordMetadata.planned},
            **totals.to_metadata_fields(self.plan.max_sequence_length, self.plan.totals.lower_bound),
            tool_version=__version__,
            vocabulary=self.plan.vocabulary,
            input_files=len(totals.input_names),
            bad_files=self.plan.bad_files,
        )

    def _check_lower_bound_of_group(self, group_number: int) -> None:
        """Check the lower bound that the plan states for the number of packs in a group.

        The bound is recomputed in integers from the prices and sequence lengths in the plan.

        Raises:
            InputError: The prices do not prove the bound that the plan states.
        """
        plan, group = self.plan, self.plan.groups[group_number]
        counts = _count_planned_sequences(group, plan.max_sequence_length)
        claimed = prove_bound_by_totals(counts, plan.depth)
        if group.bound_prices is not None and claimed.bound < group.lower_bound:
            claimed = Certificate(np.array(group.bound_prices, np.int64), plan.depth, group.lower_bound)
        try:
            proven = verify_certified_lower_bound(claimed, counts)
        except (FailedError, InputError) as error:
            raise InputError(f"{self.plan_path}: group {group_number}: {error}; create the plan again") from error
        if not group.lower_bound <= min(proven, group.packs):
            problem = f"the plan states a lower bound of {group.lower_bound} packs, but its data prove only {proven}"
            raise InputError(f"{self.plan_path}: group {group_number}: {problem}; create the plan again")


def _allocate_buffer(size: int) -> ByteArray:
    """Return a zeroed buffer of at least `size` bytes that uses ordinary memory pages.

    numpy would request huge pages. If the memory is fragmented, the kernel then needs longer to create them than the group
    takes to read.
    """
    return np.frombuffer(mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


# --- reading a group into memory. Each file is read once, from the front, and is checked, indexed and stripped of its
# padding.


def _match_planned_files(records: str | Path, sizes: Mapping[Path, int], plan: WritablePlan) -> dict[str, Path]:
    """Check that the input files are the files that a plan lists, and return the paths of the input files by name.

    Bad files that were skipped when the records were counted are ignored if their name and size are unchanged.

    Args:
        records: RECORDS as messages name them.
        sizes: The files of RECORDS and their sizes in bytes.
        plan: The plan.

    Raises:
        InputError: A file is not in the plan, a planned file is missing, or a file has another size.
    """
    bad = {(file.name, file.bytes) for file in plan.bad_files}
    paths = {path.name: path for path, size in sizes.items() if (path.name, size) not in bad}
    planned = {file.name: file for group in plan.groups for file in group.files}
    for name in sorted(paths.keys() - planned.keys()):
        raise InputError(f"{paths[name]}: the plan does not contain this file; create the histogram and the plan again")
    for name, file in planned.items():
        if name not in paths:
            raise InputError(
                f"{records}: the file {name} of the plan is missing; restore the file, or create the plan again"
            )
        size = sizes[paths[name]]
        if size != file.bytes:
            raise InputError(
                f"{paths[name]}: the plan states {file.bytes} bytes, found {size}; create the histogram and the plan again"
            )
    return paths


def _compute_max_uncompressed_bytes(path: Path) -> int:
    """Return an upper bound on the uncompressed size of a file in bytes.

    A file that is compressed by GZIP or ZLIB is read to its end to compute its size.
    """
    with RecordStream(path) as stream:
        if stream.max_uncompressed_bytes is not None:
            return stream.max_uncompressed_bytes
        piece, total = memoryview(bytearray(1 << 20)), 0
        while count := stream.read_into(piece):
            total += count
        return total


def _read_group_into_memory(
    paths: Sequence[Path],
    planned_files: Sequence[InputFile],
    schema: UnpackedSchema,
    get_buffer: Callable[[int], ByteArray],
    workers: int | None,
    progress: Callable[[int], None],
) -> IndexedSequences:
    """Read the files of a group into memory, check their records, and return an index of their sequences.

    The values are copied without padding to the buffer that `get_buffer` returns. The buffer is as large as the uncompressed
    files, but the pages that the values do not fill are never touched and so use no memory.

    Args:
        paths: The files of the group.
        planned_files: The same files as the plan describes them.
        schema: The sizes of the records.
        get_buffer: Returns a buffer of at least the given size in bytes.
        workers: The number of threads, or None for the default.
        progress: Called with the number of bytes that were read.

    Raises:
        InputError: A file cannot be read, or its size, CRC-32C or number of sequences differs from the plan.
    """
    sizes = list(map(_compute_max_uncompressed_bytes, paths))
    buffer = get_buffer(sum(sizes))
    group = IndexedSequences.empty(buffer, sum(file.sequences for file in planned_files))
    tasks, start, row = [], 0, 0
    for path, file, size in zip(paths, planned_files, sizes, strict=True):
        tasks.append((path, file, (start, start + size), slice(row, row + file.sequences)))
        start, row = start + size, row + file.sequences

    def read_file(task: tuple[Path, InputFile, tuple[int, int], slice], scan_buffer: ByteArray) -> None:
        """Read one file into the part of the buffer that is reserved for it, and fill its rows of the sequence index."""
        path, file, region, rows = task
        compacted = CompactedFormat(
            schema, IndexedSequences(scan_buffer, group.offsets[rows], group.rows[rows]), buffer, *region
        )
        scan = RecordScan(path, compacted, scan_buffer, progress)
        for _chunk in scan.process_chunk_by_chunk():
            pass
        for what, actual, planned in (
            ("bytes", scan.file_bytes, file.bytes),
            ("crc32c", scan.file_crc32c, file.crc32c),
            ("sequences", scan.format.count, file.sequences),
        ):
            if actual != planned:
                raise InputError(
                    f"{path}: the plan states {what} = {planned}, found {actual}; create the histogram and the plan again"
                )

    map_files_in_threads(read_file, tasks, workers)
    return group


# --- checking that each group fits into memory, before anything is written
#
# A group is read completely before it is packed. It consists of complete files, so that a single large file may exceed the
# group size in the settings. Without this check, the process could run out of memory after an hour of work.

# The estimated memory of a token, with which `_check_group_memory` decides whether a group fits into memory. Token ids and
# segment ids are held as varints, with seven bits of the value per byte. A segment id takes one byte. Token ids up to 16,383
# take at most two. The third byte of larger ids is ignored, and so are the masked positions.
_BYTES_OF_A_TOKEN = 3
# The estimated memory of a sequence in addition to its tokens: its index row, its offset and its assignment to a pack.
_BYTES_OF_A_SEQUENCE = 68


def _get_available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory in bytes that this process can use, or None if the operating system does not report it.

    This is the smaller of the machine's available memory and the container's memory limit.
    """
    limits = []
    for path in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes", meminfo):
        with suppress(GaudiBertError):
            text = read_text(path).strip()
            if text.isdecimal():
                limits.append(int(text))
            limits += [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:")]
    return min(limits, default=None)


def _check_group_memory(number: int, group: PlannedGroup, paths: Sequence[Path], available: int | None) -> None:
    """Check that the sequences of a group of input files fit into the available memory.

    Args:
        number: The number of the group.
        group: The group as the plan describes it.
        paths: The files of the group.
        available: The available memory in bytes. None skips the check.

    Raises:
        InputError: The group needs more memory. The message names its largest file.
    """
    needed = _BYTES_OF_A_TOKEN * group.tokens + _BYTES_OF_A_SEQUENCE * group.sequences  # an estimate for typical BERT data
    if available is None or needed <= available:
        return
    largest = max(paths, key=lambda path: path.stat().st_size if path.exists() else 0)
    raise InputError(
        f"{largest}: packing group {number} ({format_count(len(paths), 'file')}) requires {format_bytes(needed)} of memory,"
        f" but only {format_bytes(available)} are available; reduce packing.group_sequences, or split this file, which is"
        " the largest of the group, and create the histogram and the plan again"
    )


def _count_planned_sequences(group: PlannedGroup, max_sequence_length: int) -> IntArray:
    """Return how many sequences of each length from 1 to L the plan puts into a group, int64 [L]."""
    counts = np.zeros(max_sequence_length + 1, np.int64)
    lengths = np.array([length for strategy, _ in group.strategies for length in strategy], np.int64)
    np.add.at(counts, lengths, np.array([count for strategy, count in group.strategies for _ in strategy], np.int64))
    return counts[1:]
