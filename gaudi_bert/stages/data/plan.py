"""The stage `plan`: histograms in, `plan.json` out: which lengths share a pack, how often, and how near the optimum that is.

The plan is a function of the histograms and the settings alone, byte for byte. Each group of files is packed within itself;
the bound of the plan is the sum of the groups' proven bounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.artefacts.histogram import CountedFile
from gaudi_bert.artefacts.plan import Plan, PlannedFile, PlannedGroup, PlanTotals, SmallerBudget, totals_of
from gaudi_bert.artefacts.store.copies import local_copy
from gaudi_bert.artefacts.store.location import shown_place
from gaudi_bert.artefacts.store.mirrored_folder import mirrored
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.groups import form_groups, group_histogram, too_large_files
from gaudi_bert.packing.masked_budget import budget_costs
from gaudi_bert.packing.result import Packing
from gaudi_bert.stages.data.histogram import CountedRecords, read_histograms
from gaudi_bert.stages.results import Made


def plan(
    histograms: Sequence[Path],
    out: Path,
    settings: PackingSettings,
    *,
    reporter: Reporter,
    overwrite: bool = False,
    store: StoreSettings | None = None,
) -> Made[PlanTotals]:
    """Plan the packing of the records that `histograms` count.

    Args:
        histograms: one or several histogram.json; they are merged.

    Returns:
        The quality of the plan, in total, and the seconds that it took, which are never stored.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        records = read_histograms([stack.enter_context(local_copy(path, store)) for path in histograms])
    signature = Signature("plan", settings.model_dump(mode="json"), {"histogram_sha256": records.sha256})
    with mirrored(out.parent, store) as folder:
        path = folder / out.name
        if begin_artefact(path, path, signature, overwrite):
            reporter.say(f"{shown_place(out)}: already there, nothing to do")
            return Made(Plan.read(path).totals, seconds=0.0, skipped=True)
        groups = _groups(records, settings, reporter)
        packings = _pack_groups(records, groups, settings, reporter)
        content = _content(records, groups, packings, settings)
        content.write(path)
    if records.files is None:
        reporter.say(
            f"{shown_place(out)}: the histogram has no counts per file, so this plan cannot be written, only looked at"
        )
    return Made(content.totals, seconds=round(time.monotonic() - started, 3))


def _groups(records: CountedRecords, settings: PackingSettings, reporter: Reporter) -> list[list[CountedFile]]:
    """The groups of files; one group without files where only counts are known."""
    if records.files is None:
        return [[]]
    for file in too_large_files(records.files, settings.group_sequences, settings.group_bytes):
        reporter.say(
            f"{file.name}: {file.sequences:,} sequences, {file.bytes:,} bytes: larger than a group may be"
            f" ({settings.group_sequences:,} sequences, {settings.group_bytes:,} bytes), so it is a group of its own"
        )
    return form_groups(records.files, settings.group_sequences, settings.group_bytes, settings.seed)


def _pack_groups(
    records: CountedRecords, groups: Sequence[Sequence[CountedFile]], settings: PackingSettings, reporter: Reporter
) -> list[Packing]:
    """Pack each group; several at once where there are cores (the kernels run outside Python's lock)."""
    with reporter.task("plan", len(groups), "groups") as task:

        def pack(files: Sequence[CountedFile]) -> Packing:
            capacity = records.histogram.max_sequence_length
            packing = pack_histogram(
                group_histogram((file.counts for file in files), capacity) if files else records.histogram,
                settings.algorithm,
                settings.depth,
                leftovers=settings.leftovers,
                max_predictions=records.max_predictions,
                masked_slots=settings.masked_slots,
                seed=settings.seed,
            )
            task.advance()
            return packing

        workers = min(len(os.sched_getaffinity(0)), len(groups))
        if workers == 1:
            return [pack(group) for group in groups]
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(pack, groups))


def _content(
    records: CountedRecords,
    groups: Sequence[Sequence[CountedFile]],
    packings: Sequence[Packing],
    settings: PackingSettings,
) -> Plan:
    """The plan as it is stored."""
    masked_slots = max(packing.masked_slots or 0 for packing in packings) or None
    depths = [packing.depth_used if settings.depth == "max" else packing.depth for packing in packings]
    length = records.histogram.max_sequence_length
    planned = tuple(
        PlannedGroup(
            files=tuple(file.name for file in files),
            sequences=packing.sequences,
            packs=packing.packs,
            lower_bound=packing.lower_bound,
            algorithm_used=packing.algorithm_used,
            strategies=tuple(packing.mixture.items()),
            bound_prices=tuple(packing.certificate.prices.tolist()),
        )
        for files, packing in zip(groups, packings, strict=True)
    )
    return Plan(
        format_version=1,
        algorithm=settings.algorithm,
        depth=max(depths),
        max_sequence_length=length,
        max_predictions=records.max_predictions,
        masked_slots=masked_slots,
        seed=settings.seed,
        shard_multiple=settings.shard_multiple,
        shard_bytes=settings.shard_bytes,
        histogram_sha256=records.sha256,
        vocabulary=records.vocabulary,
        writable=records.files is not None,
        totals=PlanTotals(**totals_of(planned, length, settings.algorithm, masked_slots), **_masked_totals(packings)),
        files=tuple(
            PlannedFile(name=file.name, bytes=file.bytes, crc32c=file.crc32c, sequences=file.sequences)
            for file in records.files or ()
        ),
        groups=planned,
    )


def _masked_totals(packings: Sequence[Packing]) -> dict[str, Any]:
    """What the masked positions of the data add to the totals."""
    costs = budget_costs([(packing.mixture, packing.histogram) for packing in packings], packings[0].depth)
    needed = [packing.masked_slots_needed for packing in packings if packing.masked_slots_needed is not None]
    return {
        "masked_slots_needed": max(needed, default=None),
        "smaller_masked_slots": tuple(SmallerBudget(masked_slots=budget, packs=packs) for budget, packs in costs.items()),
    }
