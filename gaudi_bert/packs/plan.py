"""The stage `plan`, which reads histograms and writes `plan.json`.

A plan states which sequence lengths share a pack, how many such packs there are, and a proven lower bound on the number of
packs. It depends only on the histograms and the settings, byte for byte. Files are divided into groups by their names and
sizes. Each group is packed on its own, and the bound of the plan is the sum of the proven bounds of its groups. The counts
of all files are in memory (about 6 kB per file), and later also those of the groups. This takes 250 MiB for 20,000 files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.base import InputFile
from gaudi_bert.artefacts.completion import (
    Signature,
    begin_artefact_unless_finished,
    check_output_path,
    is_artefact_finished,
)
from gaudi_bert.artefacts.histogram import CountedFile, HistogramFile
from gaudi_bert.artefacts.mirrored_folder import mirror_folder, open_local_copy
from gaudi_bert.artefacts.plan import Plan, PlannedGroup, PlanTotals, compute_totals
from gaudi_bert.artefacts.results import StageOutput, StageRun
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.files import exclusive_lock, format_location
from gaudi_bert.common.processor import map_in_threads
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram, build_group_histogram, divide_files_into_groups, find_oversized_files
from gaudi_bert.packing.strategies import Packing


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
