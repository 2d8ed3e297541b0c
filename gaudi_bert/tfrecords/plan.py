"""The stages `histogram` and `plan`: count the sequences of each length in RECORDS, and plan which lengths share a pack.

`histogram` reads RECORDS once and checks every byte. Every record is checked against the contract of pretraining examples,
so that bad input is rejected before anything is planned or written. Several threads read the files, each in constant memory.
The result does not depend on the number of threads.

`plan` reads histograms and writes `plan.json`. A plan states which sequence lengths share a pack, how many such packs there
are, and a proven lower bound on the number of packs. It depends only on the histograms and the settings, byte for byte.
Files are divided into groups by their names and sizes. Each group is packed on its own, and the bound of the plan is the sum
of the proven bounds of its groups. The counts of all files are in memory (about 6 kB per file), and later also those of the
groups. This takes 250 MiB for 20,000 files.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from gaudi_bert.artefacts.base import InputFile, VocabularyInfo, part_path
from gaudi_bert.artefacts.completion import (
    Signature,
    begin_artefact_unless_finished,
    check_output_path,
    is_artefact_finished,
)
from gaudi_bert.artefacts.histogram import CountedFile, HistogramFile
from gaudi_bert.artefacts.mirrored_folder import mirror_folder, open_local_copy, prefetch_batches
from gaudi_bert.artefacts.plan import Plan, PlannedGroup, PlanTotals, compute_totals
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun
from gaudi_bert.common.arrays import ByteArray, Int32Array
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import exclusive_lock, format_location
from gaudi_bert.common.processor import choose_worker_count, map_in_threads
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram, build_group_histogram, divide_files_into_groups, find_oversized_files
from gaudi_bert.packing.strategies import Packing
from gaudi_bert.tfrecords.scan import (
    RecordInputs,
    RecordScan,
    UnpackedFormat,
    allocate_scan_buffer,
    compute_bad_file_identity,
    find_largest_token_id,
    map_files_in_threads,
    open_inputs,
    read_record_schema,
)
from gaudi_bert.tfrecords.wire.framing import NO_RECORD
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema

OnBadFile = Literal["stop", "skip"]

_MAX_REPORTED_FILES = 20
_SKIP_HINT = "pass --on-bad-file skip to `gaudi-bert pack` or `gaudi-bert histogram`"
# To check whether the vocabulary fits the records, find the largest token id in every 16th sequence. Searching all sequences
# would take an eighth longer.
_ID_SEARCH_STEP = 16
# To merge counts less often, collect the lengths and masked counts of about this many sequences before adding them to the
# totals.
_MERGE_SEQUENCES = 1 << 16


def count_records(
    records: str | Path,
    out: Path,
    run: StageRun,
    *,
    on_bad_file: OnBadFile = "stop",
    numbered: bool = False,
) -> StageOutput[HistogramFile] | PlainResult:
    """Check all records, count their sequences by length and number of masked positions, and write the counts to a histogram
    file.

    If there is a `vocab.txt` next to the folder of the records, the histogram also identifies this vocabulary. If the
    histogram exists already, no record is read.

    Args:
        records: A folder, a file or a glob of unpacked records, on this machine or as a URL.
        out: The histogram file to write.
        run: The settings of the run. If it selects a part, only the files of this part are counted. There cannot be more
            parts than files.
        on_bad_file: "stop" rejects a file that cannot be read. "skip" skips the file and lists it in the result.
        numbered: Write a part to its own file (`artefacts.base.part_path`) and not to `out`.

    Returns:
        The histogram, or a plain result if this part has no files.

    Raises:
        InputError: A file is bad and `on_bad_file` is "stop", all files are bad, the files have records of different sizes,
            or a token id is not in the vocabulary.
    """
    if on_bad_file not in get_args(OnBadFile):
        raise InputError(f"--on-bad-file {on_bad_file}: the value must be {' or '.join(get_args(OnBadFile))}")
    with open_inputs(records, run.store) as inputs, mirror_folder(out.parent, run.store) as folder:
        if run.part is not None:
            part = run.part[0], min(run.part[1], len(inputs.sizes))
            run, out = replace(run, part=part), part_path(out, part) if numbered else out
        sizes = {path: inputs.sizes[path] for path in run.select_items_of_this_run(list(inputs.sizes))}
        if not sizes:
            return PlainResult(["nothing to do, because there are fewer files than parts"], {"files": 0, "skipped": True})
        info = None if inputs.vocabulary is None else VocabularyInfo.from_file(inputs.vocabulary)
        policy = {} if on_bad_file == "stop" else {"on_bad_file": on_bad_file}
        signature = Signature(
            "histogram",
            {"shard": None if run.part is None else list(run.part), **policy},
            {
                "files": {path.name: size for path, size in sizes.items()},
                "vocabulary": None if info is None else info.as_json(),
            },
        )
        path = folder / out.name
        if begin_artefact_unless_finished(path, path, signature, run.overwrite):
            run.reporter.say(f"{format_location(out)}: the histogram exists already, so there is nothing to do")
            return StageOutput(HistogramFile.read(path), skipped=True)
        content = _count_sequences_in_files(inputs, sizes, info, on_bad_file, run)
        content.write(path)
        return StageOutput(content)


class _CountedRecords(NamedTuple):
    """The sequence counts of one record file, together with its feature sizes and the largest token id that was found.

    Attributes:
        file: The file and its counts.
        schema: The sizes of its records.
        others: The features of its records that packed records do not contain.
        largest_id: The largest token id among the sequences that were searched.
    """

    file: CountedFile
    schema: UnpackedSchema
    others: list[str]
    largest_id: int


def _count_sequences_in_files(
    inputs: RecordInputs,
    sizes: Mapping[Path, int],
    vocabulary: VocabularyInfo | None,
    on_bad_file: OnBadFile,
    run: StageRun,
) -> HistogramFile:
    """Count the records of all files in several threads, and return the histogram.

    All files are read even if some are bad, so that all bad files are reported together. Files of a store are downloaded
    shortly before they are read.

    Raises:
        InputError: See `count_records`.
    """
    files, ahead = list(sizes), choose_worker_count(run.workers, len(sizes))
    with run.reporter.task("histogram", sum(sizes.values()), "bytes") as task, prefetch_batches(files, ahead) as batches:

        def count_file(number: int, buffer: ByteArray) -> _CountedRecords | tuple[InputFile, str]:
            """Count the records of one file. If the file is bad, return its name, size and checksum with the error message
            instead.
            """
            path = files[number]
            with batches.keep_batch_local_during(number):
                try:
                    return _count_sequences_in_file(path, buffer, task.advance)
                except InputError as error:
                    return compute_bad_file_identity(path), str(error)

        results = map_files_in_threads(count_file, range(len(files)), run.workers)
    bad = [result for result in results if not isinstance(result, _CountedRecords)]
    _report_bad_files(inputs, bad, len(files), on_bad_file, run.reporter)
    good = [result for result in results if isinstance(result, _CountedRecords)]
    schema = _find_common_schema(inputs, good)
    largest = max(good, key=lambda result: result.largest_id)
    if vocabulary is not None and largest.largest_id >= vocabulary.size:
        raise InputError(
            f"{inputs.vocabulary}: the vocabulary has {vocabulary.size:,} tokens, but {inputs.folder / largest.file.name}"
            f" contains the token id {largest.largest_id:,}; replace it with the vocabulary of these records, or remove it"
        )
    if good[0].others:
        names = ", ".join(f"`{name}`" for name in good[0].others)
        run.reporter.say(f"{inputs.folder / good[0].file.name}: the features {names} are not copied to packed records")
    counted = [each.file for each in good]
    return HistogramFile(
        max_sequence_length=schema.max_sequence_length,
        max_predictions=schema.max_predictions,
        sequences=sum(file.sequences for file in counted),
        tokens=sum(file.tokens for file in counted),
        vocabulary=vocabulary,
        counts=tuple(build_group_histogram((file.counts for file in counted), schema.max_sequence_length).counts.tolist()),
        bad_files=tuple(file for file, _ in bad),
        files=tuple(counted),
    )


def find_file_problem(path: Path) -> str | None:
    """Read a record file, and return the error message if it is invalid, otherwise None."""
    try:
        _count_sequences_in_file(path, allocate_scan_buffer(), lambda _: None)
    except InputError as error:
        return str(error)
    return None


def _report_bad_files(
    inputs: RecordInputs,
    bad_files: Sequence[tuple[InputFile, str]],
    file_count: int,
    on_bad_file: OnBadFile,
    reporter: Reporter,
) -> None:
    """Report which record files are bad and why, and raise an error unless bad files may be skipped.

    Args:
        inputs: The files of RECORDS.
        bad_files: The bad files, each with the reason.
        file_count: The number of all files, good or bad.
        on_bad_file: "stop" or "skip".
        reporter: Receives the reasons of up to 20 files, and a summary.

    Raises:
        InputError: There are bad files and `on_bad_file` is "stop", or all files are bad.
    """
    if not bad_files:
        return
    reasons = [reason for _, reason in bad_files]
    if file_count == 1:
        raise InputError(reasons[0])
    if len(bad_files) == 1 and on_bad_file == "stop":
        raise InputError(f"{reasons[0]}, or skip the file: {_SKIP_HINT}")
    for reason in reasons[:_MAX_REPORTED_FILES]:
        reporter.say(reason)
    shown_files = _format_file_names([file.name for file, _ in bad_files], _MAX_REPORTED_FILES)
    summary = f"{inputs.shown}: {shown_files} of {file_count:,} cannot be read, for example {shorten(reasons[0], 300)}"
    if on_bad_file == "stop":
        raise InputError(f"{summary}; create these files again, or skip them: {_SKIP_HINT}")
    if len(bad_files) == file_count:
        raise InputError(f"{summary}; no file remains to pack, so create the files again")
    reporter.say(f"{summary}; these files are skipped because of --on-bad-file skip")


def _find_common_schema(inputs: RecordInputs, results: Sequence[_CountedRecords]) -> UnpackedSchema:
    """Check that the records of all files have the same feature sizes, and return these sizes.

    Raises:
        InputError: The files have records of different sizes.
    """
    files_of: dict[UnpackedSchema, list[str]] = {}
    for result in results:
        files_of.setdefault(result.schema, []).append(result.file.name)
    common_schema, *others = sorted(files_of, key=lambda schema: -len(files_of[schema]))
    if others:
        sizes = ", ".join(
            f"{schema.max_sequence_length} input_ids and {schema.max_predictions} masked_lm_positions"
            f" in {_format_file_names(files)}"
            for schema, files in [(others[0], files_of[others[0]]), (common_schema, files_of[common_schema])]
        )
        raise InputError(
            f"{inputs.shown}: all records must have the same size, found {sizes}; select one size with a pattern"
        )
    return common_schema


def _format_file_names(names: Sequence[str], max_names: int = 3) -> str:
    """Format a number of files with the names of the first ones, such as "5 files (a, b, c and 2 more)"."""
    more = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return f"{format_count(len(names), 'file')} ({', '.join(shorten(name, 30) for name in names[:max_names])}{more})"


def _count_sequences_in_file(path: Path, buffer: ByteArray, progress: Callable[[int], None]) -> _CountedRecords:
    """Check the records of one file, and count its sequences by length and number of masked positions.

    Args:
        path: The file.
        buffer: The scan buffer of this thread (`scan.allocate_scan_buffer`).
        progress: Called with the number of bytes that were read.

    Raises:
        InputError: The file cannot be read, contains no record, or a record is damaged or violates the contract.
    """
    schema, others = read_record_schema(path)  # all other records must have the sizes of the first
    indexed = UnpackedFormat.for_scan_in_chunks(schema, buffer)
    scan = RecordScan(path, indexed, buffer, progress=progress)
    totals: Counter[int] = Counter()
    pending: list[Int32Array] = []
    largest = 0
    for _ in scan.process_chunk_by_chunk():
        rows = indexed.index.rows[: indexed.rows]
        largest = max(largest, find_largest_token_id(indexed.index, indexed.rows, _ID_SEARCH_STEP))
        pending.append(rows["length"] * np.int32(schema.max_predictions + 1) + rows["masked"])
        if sum(keys.size for keys in pending) >= _MERGE_SEQUENCES:
            _merge_counts(totals, pending)
    _merge_counts(totals, pending)
    if indexed.count == 0:
        raise InputError(f"{path}: {NO_RECORD}")
    counts = [(*divmod(key, schema.max_predictions + 1), count) for key, count in sorted(totals.items())]
    counted = CountedFile(
        name=path.name,
        bytes=scan.file_bytes,
        crc32c=scan.file_crc32c,
        sequences=indexed.count,
        tokens=sum(length * count for length, _, count in counts),
        counts=np.array(counts, np.int64),
    )
    return _CountedRecords(counted, schema, others, largest)


def _merge_counts(totals: Counter[int], pending: list[Int32Array]) -> None:
    """Add the sequences in `pending` to the counts in `totals`, and clear `pending`.

    Each sequence is represented by a key, which is its length times (max_predictions + 1) plus its number of masked
    positions.
    """
    if pending:
        keys, counts = np.unique(np.concatenate(pending), return_counts=True)
        totals.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
        pending.clear()


# --- planning packs from histograms


def plan_packs(histograms: Sequence[Path], out: Path, settings: PackingSettings, run: StageRun) -> StageOutput[PlanTotals]:
    """Plan how to pack the records that one or several histograms describe, and write plan.json.

    Args:
        histograms: The histogram files, possibly in an object store.
        out: The plan file to write.
        settings: The packing settings.
        run: The options of the run.

    Returns:
        The metrics of the plan, even if the plan was already finished.

    Raises:
        InputError: A histogram is invalid, or `out` contains a plan that was made with other settings.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        counted = HistogramFile.read_and_merge(
            [stack.enter_context(open_local_copy(path, run.store)) for path in histograms]
        )
        histogram_sha256 = counted.sha256
        signature = Signature("plan", settings.model_dump(mode="json"), {"histogram_sha256": histogram_sha256})
        path = stack.enter_context(mirror_folder(out.parent, run.store)) / out.name
        finished = is_artefact_finished(path, path, signature)
        if not finished:
            check_output_path(path, path, signature.stage, run.overwrite)
            with exclusive_lock(path, str(out), wait=True):
                finished = begin_artefact_unless_finished(path, path, signature, run.overwrite)
        if finished:
            run.reporter.say(f"{format_location(out)}: the plan already exists, so there is nothing to do")
            return StageOutput(Plan.read(path).totals, seconds=0.0, skipped=True)
        groups = _divide_files_into_groups(counted, settings, run.reporter)
        content = _build_plan(counted, histogram_sha256, groups, _pack_groups(counted, groups, settings, run), settings)
        content.write(path)
    if counted.files is None:
        run.reporter.say(
            f"{format_location(out)}: the histogram contains no counts per file, so no packs can be written from this plan"
        )
    return StageOutput(content.totals, seconds=round(time.monotonic() - started, 3))


def build_histogram(histogram_file: HistogramFile) -> Histogram:
    """Create the `Histogram` that the packing algorithms need from the content of a histogram.json file."""
    return Histogram(
        histogram_file.max_sequence_length,
        np.array(histogram_file.counts, np.int64),
        histogram_file.compute_max_masked_positions(),
    )


def _divide_files_into_groups(
    histogram_file: HistogramFile, settings: PackingSettings, reporter: Reporter
) -> Sequence[Sequence[CountedFile]]:
    """Divide the input files of a histogram into groups. The files of a group are packed together.

    If the histogram contains no counts per file, return one group without files.
    """
    if histogram_file.files is None:
        return [[]]
    limits = settings.group_sequences, settings.group_bytes
    for file in find_oversized_files(histogram_file.files, *limits):
        reporter.say(
            f"{file.name}: {file.sequences:,} sequences and {file.bytes:,} bytes exceed the limits of a group"
            f" ({limits[0]:,} sequences, {limits[1]:,} bytes), so this file is a group of its own"
        )
    return divide_files_into_groups(histogram_file.files, *limits, settings.seed)


def _pack_groups(
    histogram_file: HistogramFile, groups: Sequence[Sequence[CountedFile]], settings: PackingSettings, run: StageRun
) -> list[Packing]:
    """Pack each group of input files, and return the packings in the order of the groups. Several groups are packed at the
    same time.
    """
    length, whole = histogram_file.max_sequence_length, build_histogram(histogram_file)
    with run.reporter.task("plan", len(groups), "groups") as task:

        def pack(files: Sequence[CountedFile], _: ByteArray) -> Packing:
            """Pack one group of input files."""
            packing = pack_histogram(
                build_group_histogram((file.counts for file in files), length) if files else whole,
                settings.algorithm,
                settings.depth,
                leftovers=settings.leftovers,
                effort=settings.effort,
                max_predictions=histogram_file.max_predictions,
                masked_slots=settings.masked_slots,
                seed=settings.seed,
            )
            task.advance()
            return packing

        return list(map_in_threads(pack, groups, run.workers, lambda: np.zeros(0, np.uint8)))


def _build_plan(
    histogram_file: HistogramFile,
    histogram_sha256: str,
    groups: Sequence[Sequence[CountedFile]],
    packings: Sequence[Packing],
    settings: PackingSettings,
) -> Plan:
    """Return the content of plan.json, given the groups of input files and their packings."""
    planned = tuple(
        PlannedGroup(
            files=tuple(InputFile(**file.size_and_crc32c, name=file.name, sequences=file.sequences) for file in files),
            sequences=packing.sequences,
            packs=packing.packs,
            lower_bound=packing.lower_bound,
            algorithm_used=packing.algorithm_used,
            strategies=tuple(packing.strategy_counts.items()),
            bound_prices=tuple(packing.certificate.prices.tolist()),
        )
        for files, packing in zip(groups, packings, strict=True)
    )
    masked_slots = max(packing.masked_slots or 0 for packing in packings) or None
    needed = [packing.masked_slots_needed for packing in packings if packing.masked_slots_needed is not None]
    return Plan(
        format_version=2,
        algorithm=settings.algorithm,
        depth=max(packing.depth_used if settings.depth == "max" else packing.depth for packing in packings),
        max_sequence_length=histogram_file.max_sequence_length,
        max_predictions=histogram_file.max_predictions,
        masked_slots=masked_slots,
        seed=settings.seed,
        shard_multiple=settings.shard_multiple,
        shard_bytes=settings.shard_bytes,
        histogram_sha256=histogram_sha256,
        vocabulary=histogram_file.vocabulary,
        writable=histogram_file.files is not None,
        totals=PlanTotals(
            **compute_totals(planned, histogram_file.max_sequence_length, settings.algorithm),
            masked_slots=masked_slots,
            masked_slots_needed=max(needed, default=None),
        ),
        bad_files=histogram_file.bad_files,
        groups=planned,
    )
