"""The stage `write`: the packed shards of a plan, group by group, and metadata.json when all groups are there.

See `grouped_output` for groups, kills and several writers. From an object store, the files of a group are fetched while the
group before it is packed; to one, every shard goes up as soon as it is complete.

A group with fewer packs than shards still has them all, some of them empty files: then every reader may count
on a multiple of `shard_multiple` shards per group, and rank r of W reads the shards whose index mod W is r.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gaudi_bert import __version__
from gaudi_bert.artefacts.base import METADATA_NAME, InputFile, VocabularyInfo, manifest_path
from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.grouped_output import PackedOutput
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, of_counts
from gaudi_bert.artefacts.plan import PlannedGroup, WritablePlan, files_sha256
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.shards import Shard, SizeArray, index_path, shard_bounds, shard_name, write_index
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import local_copy, mirrored, read_ahead, release
from gaudi_bert.common.arrays import ByteArray, IntArray
from gaudi_bert.common.dealing import deal_sequences
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import followed, in_store, read_text, shown_location, url_of
from gaudi_bert.common.progress import Task, count_of, human_bytes
from gaudi_bert.packing.certificate import Certificate, check_certificate, simple_certificate
from gaudi_bert.tfrecords.files import open_inputs, records_folder
from gaudi_bert.tfrecords.packed_shards import PackEncoder, count_group_shards, output_buffer, write_packs
from gaudi_bert.tfrecords.scanning.scan import (
    CompactedFormat,
    IndexedSequences,
    RecordScan,
    empty_index,
    map_files,
    map_in_threads,
    worker_count,
)
from gaudi_bert.tfrecords.wire.framing import RecordStream
from gaudi_bert.tfrecords.wire.schema import PackedSchema, UnpackedSchema

_WRITERS_PER_CORE = 4


def write(
    records: str | Path,
    plan: Path,
    out: Path,
    run: StageRun,
    *,
    shards: Mapping[str, int] | None = None,
) -> StageOutput[Metadata] | GroupsResult:
    """Write the packed records of a plan.

    A run that does a part returns the totals of its groups; or those of the folder where that is finished already.
    `shards` has another `shard_multiple` or `shard_bytes` than the plan.
    """
    started = time.monotonic()
    with _opened(records, plan, out, run, shards) as (output, content):
        if output.begin(run.overwrite):
            return StageOutput(Metadata.read(output.folder), skipped=True)
        groups = run.share_of(range(content.group_count))
        if run.part is not None:
            return output.groups_result(groups, _write_groups(records, output, content, groups, run))
        content.check_totals()
        if not run.finish:
            _write_groups(records, output, content, groups, run)
        metadata = _finish(output, content)
    return StageOutput(metadata, seconds=round(time.monotonic() - started, 3))


@contextmanager
def _opened(
    records: str | Path, plan: Path, out: Path, run: StageRun, shards: Mapping[str, int] | None
) -> Iterator[tuple[PackedOutput[GroupManifest], WritablePlan]]:
    """Where the packs are written, which is not the folder of the records; and the plan."""
    if in_store(records) or in_store(out):
        same = in_store(records) and in_store(out) and url_of(records) == url_of(out)
    else:
        same = followed(records_folder(records)) == followed(out)
    if same:
        raise InputError(f"{shown_location(records)}: the output folder is the folder of the records; choose another one")
    with local_copy(plan, run.store) as path, mirrored(out, run.store) as folder:
        content = WritablePlan.read(path).with_shards(shards or {})
        settings = {key: getattr(content, key) for key in Metadata.planned}
        output = PackedOutput(
            folder,
            folder / METADATA_NAME,
            Signature("write", settings, {"plan_sha256": content.sha256}),
            GroupManifest,
            lambda number: manifest_path(folder, number),
            run.reporter,
            source_sha256=content.sha256,
            command="gaudi-bert write",
        )
        yield output, content


def _write_groups(
    records: str | Path,
    output: PackedOutput[GroupManifest],
    plan: WritablePlan,
    numbers: Sequence[int],
    run: StageRun,
) -> int:
    with open_inputs(records, run.store) as inputs:
        present = match_files(inputs.shown, inputs.sizes, plan)
        if inputs.vocabulary is not None and VocabularyInfo.of(inputs.vocabulary) != plan.vocabulary:
            raise InputError(
                f"{inputs.vocabulary}: is not the vocabulary of the plan; make the histogram and the plan again"
            )
        pending, available = output.missing(numbers), available_bytes()
        paths = []
        for number in pending:
            group = plan.group(number)
            _prove_group(plan, number, group)
            paths.append([present[name] for name in group.files])
            _check_group_memory(number, group, paths[-1], available)
        if not pending:
            return 0
        buffer, total = _group_buffer(0), sum(map(plan.input_bytes, pending))
        # A store's files are fetched during the group before.
        with output.reporter.task("write", total, "bytes") as task, read_ahead(paths) as batches:
            for batch, number in enumerate(pending):
                with batches.batch(batch), output.writing(number, f"{output.folder}: group {number}") as needed:
                    if not needed:
                        continue
                    size = buffer_bytes(paths[batch])
                    if buffer.size < size:
                        buffer = _group_buffer(size)
                    manifest = _write_group(output.folder, plan, number, paths[batch], buffer, task, run.workers)
                    manifest.write(output.summary_path(number))
    return len(pending)


def _group_buffer(size: int) -> ByteArray:
    """Memory for a group, of ordinary pages.

    numpy asks for huge pages, and where memory is fragmented the kernel then spends longer on making them than the
    reading itself takes.
    """
    return np.frombuffer(mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _write_group(
    out: Path, plan: WritablePlan, number: int, paths: Sequence[Path], buffer: ByteArray, task: Task, workers: int | None
) -> GroupManifest:
    """Read, pack and write one group; half of its bytes count as progress when read, half when packed."""
    planned, files = plan.group(number), plan.group_files(number)
    schema = PackedSchema.of(plan)
    group = read_group(paths, files, schema.unpacked, buffer, workers, lambda count: task.advance(count / 2))
    assignment = deal_sequences(group.lengths, planned.strategies, plan.seed, number)
    shards = count_group_shards(schema, group, assignment, plan.shard_multiple, plan.shard_bytes)
    bounds = shard_bounds(planned.packs, shards, sum(plan.group_packs[:number]))
    encoder = PackEncoder(schema, group, assignment)
    share = plan.input_bytes(number) / planned.packs / 2
    cores = worker_count(workers, shards)
    slots = threading.Semaphore(cores)

    def make(shard: int, output: ByteArray) -> tuple[Shard, SizeArray]:
        path = out / shard_name(number, shard, Metadata.shard_ending)
        first, last = int(bounds[shard]), int(bounds[shard + 1])
        written = write_packs(path, encoder, first, last, output, slots, lambda packs: task.advance(packs * share))
        release(path)
        return written

    written = map_in_threads(make, range(shards), _WRITERS_PER_CORE * cores, lambda: output_buffer(schema))
    index = index_path(out, number)
    index_crc32c = write_index(index, [sizes for _, sizes in written])
    release(index)
    return GroupManifest(
        format_version=2,
        plan_sha256=plan.sha256,
        group=number,
        packs=planned.packs,
        **of_counts(np.bincount(group.lengths, minlength=plan.max_sequence_length + 1)[1:].tolist()),
        inputs=tuple(file.model_copy(update={"sequences": 0}) for file in files),
        index_crc32c=index_crc32c,
        shards=tuple(shard for shard, _ in written),
    )


def _finish(output: PackedOutput[GroupManifest], plan: WritablePlan) -> Metadata:
    """Hold all manifests to the plan and write metadata.json."""
    sums = PackedSums()
    files = 0
    for manifest, crc32c in output.manifests(range(plan.group_count)):
        planned = plan.group(manifest.group)
        files += len(planned.files)
        right = {"packs": planned.packs, **of_counts(_counts(planned, plan.max_sequence_length).tolist())}
        if any(getattr(manifest, key) != value for key, value in right.items()):
            raise FailedError(
                f"{manifest_path(output.folder, manifest.group)}: {manifest.sequences} sequences, {manifest.packs} packs,"
                f" not those of the plan; {manifest.remedy}"
            )
        sums.add(manifest, crc32c)
    metadata = Metadata(
        **{key: getattr(plan, key) for key in Metadata.planned},
        **sums.stored(plan.max_sequence_length, plan.totals.lower_bound),
        tool_version=__version__,
        vocabulary=plan.vocabulary,
        input_files=files,
        bad_files=plan.bad_files,
    )
    output.write_final(metadata)
    return metadata


# --- a group of the plan, read into memory: once, front to back, checked, indexed and stripped of its padding on the way


def match_files(records: str | Path, sizes: Mapping[Path, int], plan: WritablePlan) -> dict[str, Path]:
    """Where each file of the plan is now, by its name; `sizes` are the files of RECORDS, which must be the same.

    A file that was bad when the records were counted, and is there as it was, is passed over.
    """
    bad = {(file.name, file.bytes) for file in plan.bad_files}
    sizes = {path: size for path, size in sizes.items() if (path.name, size) not in bad}
    paths = {path.name: path for path in sizes}
    if plan.files_sha256 == files_sha256((path.name, size) for path, size in sizes.items()):
        return paths
    for name in sorted(set(paths) - {planned.name for planned in plan.each_file()}):
        raise InputError(f"{paths[name]}: is not in the plan; make the histogram and the plan again")
    for planned in plan.each_file():
        path = paths.get(planned.name)
        if path is None:
            raise InputError(f"{records}: file {planned.name} of the plan is missing; bring it back, or plan again")
        if sizes[path] != planned.bytes:
            raise InputError(
                f"{path}: {sizes[path]} bytes, {planned.bytes} in the plan; make the histogram and the plan again"
            )
    raise InputError(f"{records}: these are the files of the plan, but files_sha256 is of others; make the plan again")


def buffer_bytes(paths: Iterable[Path]) -> int:
    """A bound on the bytes of a buffer for these files; what is not needed of it is never touched, so it costs nothing."""
    return sum(map(uncompressed_bytes, paths))


def uncompressed_bytes(path: Path) -> int:
    """A bound on the bytes of a file without its compression; a compressed one is read to its end to know them."""
    with RecordStream(path) as stream:
        if stream.most_bytes is not None:
            return stream.most_bytes
        piece, total = memoryview(bytearray(1 << 20)), 0
        while count := stream.read_into(piece):
            total += count
        return total


def read_group(
    paths: Sequence[Path],
    files: Sequence[InputFile],
    schema: UnpackedSchema,
    buffer: ByteArray,
    workers: int | None,
    progress: Callable[[int], None],
) -> IndexedSequences:
    """Read the files of a group, index them, and keep their real values in `buffer`, of at least `buffer_bytes(paths)`."""
    group = empty_index(buffer, sum(file.sequences for file in files))
    tasks, start, row = [], 0, 0
    for path, file in zip(paths, files, strict=True):
        size = uncompressed_bytes(path)
        tasks.append((path, file, (start, start + size), slice(row, row + file.sequences)))
        start, row = start + size, row + file.sequences

    def read(task: tuple[Path, InputFile, tuple[int, int], slice], pieces: ByteArray) -> None:
        path, file, region, rows = task
        compacted = CompactedFormat(schema, IndexedSequences(pieces, group.offsets[rows], group.rows[rows]), buffer, *region)
        scan = RecordScan(path, compacted, pieces, progress)
        for _piece in scan.pieces():
            pass
        _check_same(path, file, scan)

    map_files(read, tasks, workers)
    return group


def _check_same(path: Path, file: InputFile, scan: RecordScan) -> None:
    for what, actual, planned in (
        ("bytes", scan.file_bytes, file.bytes),
        ("crc32c", scan.file_crc32c, file.crc32c),
        ("sequences", scan.format.count, file.sequences),
    ):
        if actual != planned:
            raise InputError(f"{path}: {what} {actual}, {planned} in the plan; make the histogram and the plan again")


# --- what is checked before anything is written: the proof of a plan, and whether this machine's memory holds each group
#
# A group is read completely before it is packed. It is formed of complete files, so a single file may be larger than any
# limit of the settings: it is refused before it is read, not after an hour.

_BYTES_OF_A_TOKEN = 3
"""Its id, mostly two bytes of a varint, and its segment; masked positions and ids beyond 16,383 come on top."""
_BYTES_OF_A_SEQUENCE = 68
"""Its row of the index with an offset, and what it takes to deal it to a pack."""


def _prove_group(plan: WritablePlan, number: int, group: PlannedGroup) -> None:
    """Recompute the bound of a group, in integers, from its prices and the lengths that it packs."""
    counts = _counts(group, plan.max_sequence_length)
    claimed = simple_certificate(counts, plan.depth)
    if group.bound_prices is not None and claimed.bound < group.lower_bound:
        claimed = Certificate(np.array(group.bound_prices, np.int64), plan.depth, group.lower_bound)
    try:
        proven = check_certificate(claimed, counts)
    except (FailedError, InputError) as error:
        raise InputError(f"{plan.path}: group {number}: {error}; make the plan again") from error
    if not group.lower_bound <= min(proven, group.packs):
        raise InputError(
            f"{plan.path}: group {number}: its prices prove {proven} packs, not {group.lower_bound}; make the plan again"
        )


def group_memory_bytes(group: PlannedGroup) -> int:
    """What a group takes in memory at least, for data as BERT has it."""
    return _BYTES_OF_A_TOKEN * group.tokens + _BYTES_OF_A_SEQUENCE * group.sequences


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process may still take: what the machine has available, and what its container may have.

    None where the operating system does not tell.
    """
    limits = []
    for path in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        text = _text_of(path).strip()
        if text.isdecimal():
            limits.append(int(text))
    for line in _text_of(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _check_group_memory(number: int, group: PlannedGroup, paths: Sequence[Path], available: int | None) -> None:
    needed = group_memory_bytes(group)
    if available is None or needed <= available:
        return
    largest = max(paths, key=lambda path: path.stat().st_size if path.exists() else 0)
    shown, remedy = largest, "split the file into several"
    if len(paths) > 1:
        remedy = f"lower packing.group_bytes or packing.group_sequences, or split the largest file, {largest.name}"
        shown = largest.parent
    raise InputError(
        f"{shown}: group {number} has {count_of(group.sequences, 'sequence')} in "
        f"{count_of(len(paths), 'file')} and is packed in memory: at least {human_bytes(needed)} are needed, "
        f"{human_bytes(available)} are available; {remedy}, then make the histogram and the plan again"
    )


def _counts(group: PlannedGroup, max_sequence_length: int) -> IntArray:
    """int64 [L]: how many sequences of each length the strategies of the group hold."""
    counts = np.zeros(max_sequence_length + 1, np.int64)
    lengths = np.array([length for strategy, _ in group.strategies for length in strategy], np.int64)
    np.add.at(counts, lengths, np.array([count for strategy, count in group.strategies for _ in strategy], np.int64))
    return counts[1:]
