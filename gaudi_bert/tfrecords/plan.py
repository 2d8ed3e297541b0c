"""The stage `plan`: histograms in, `plan.json` out: which lengths share a pack, how often, and how near the optimum that is.

The plan is a function of the histograms and the settings alone, byte for byte. Each group of files is packed within itself;
the bound of the plan is the sum of the groups' proven bounds. Groups are formed from names and sizes; the counts of a file
are read when its group is packed, part by part (`artefacts.plan`), so that many machines can make the parts of one plan, and
memory is bounded by a part. See `grouped_output` for kills and several writers.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.grouped_output import GroupedOutput
from gaudi_bert.artefacts.histogram import CountedFile
from gaudi_bert.artefacts.plan import (
    GROUPS_OF_A_PART,
    ListedPart,
    Plan,
    PlannedGroup,
    PlanPart,
    PlanTotals,
    files_sha256,
    most_needed,
    part_path,
    totals_of,
)
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import local_copy, mirrored, names_in
from gaudi_bert.common.files import read_file, shown_location
from gaudi_bert.common.progress import Task
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import form_groups, group_histogram, too_large_files
from gaudi_bert.packing.mixture import Packing
from gaudi_bert.tfrecords.histogram import CountedRecords, read_histograms
from gaudi_bert.tfrecords.scanning.scan import worker_count


def plan(
    histograms: Sequence[Path],
    out: Path,
    settings: PackingSettings,
    run: StageRun,
    *,
    last_finishes: bool = False,
) -> StageOutput[PlanTotals] | GroupsResult:
    """Plan the packing of the records that one or several histograms count; the quality of the plan, in total.

    A run that does a part returns the totals of its groups; or those of the plan where that is finished already, or with
    `last_finishes` if all parts are there then, so that nobody has to finish it.
    """
    started = time.monotonic()
    with _opened(histograms, out, settings, run) as (output, records):
        if output.begin(run.overwrite):
            seconds = 0.0 if run.part is None else None  # a part is not timed
            return StageOutput(Plan.read(output.final).totals, seconds, skipped=True)
        planning = _planning(records, settings, output, run.workers)
        if run.part is not None:
            return _plan_part(output, planning, run.share_of(range(planning.parts)), last_finishes)
        if not run.finish:
            _make_parts(output, planning, range(planning.parts))
        content = _finish(output, planning)
    if records.files is None:
        run.reporter.say(
            f"{shown_location(out)}: the histogram has no counts per file, so this plan cannot be written, only looked at"
        )
    return StageOutput(content.totals, seconds=round(time.monotonic() - started, 3))


def _plan_part(
    output: _PlanOutput, planning: _Planning, numbers: Sequence[int], last_finishes: bool
) -> StageOutput[PlanTotals] | GroupsResult:
    """Make these parts of a plan, and with `last_finishes` the plan where all are there."""
    written = _make_parts(output, planning, numbers)
    names = {part_path(output.final, part).name for part in range(planning.parts)}
    if last_finishes and names.issubset(names_in(output.folder)):
        return StageOutput(_finish(output, planning).totals)
    sums: Counter[str] = Counter()
    for _, stored in output.iter_completed(numbers):
        for group in stored.groups:
            sums.update(groups=1, sequences=group.sequences, packs=group.packs, tokens=group.tokens)
    return GroupsResult(sums["groups"], written, sums["sequences"], sums["packs"], sums["tokens"])


@contextmanager
def _opened(
    histograms: Sequence[Path], out: Path, settings: PackingSettings, run: StageRun
) -> Iterator[tuple[_PlanOutput, CountedRecords]]:
    """Where the plan is written, and the content of the histograms."""
    with ExitStack() as stack:
        records = read_histograms([stack.enter_context(local_copy(path, run.store)) for path in histograms])
        signature = Signature("plan", settings.model_dump(mode="json"), {"histogram_sha256": records.sha256})
        path = stack.enter_context(mirrored(out.parent, run.store)) / out.name
        yield _PlanOutput(path.parent, path, signature, PlanPart, lambda part: part_path(path, part), run.reporter), records


@dataclass(frozen=True)
class _PlanOutput(GroupedOutput[int, PlanPart]):
    unit = "part"

    @property
    def artefact(self) -> Path:
        """The file that is written last."""
        return self.final

    def is_complete(self, summary: PlanPart) -> bool:
        """A part is of these settings and histograms."""
        return summary.signature_sha256 == self.signature.sha256


@dataclass(frozen=True)
class _Planning:
    """What is planned: `groups` of files, one group without files where only counts are known."""

    records: CountedRecords
    groups: Sequence[Sequence[CountedFile]]
    settings: PackingSettings
    signature_sha256: str
    workers: int | None

    @property
    def parts(self) -> int:
        """How many parts the plan has."""
        return -(-len(self.groups) // GROUPS_OF_A_PART)

    def groups_of(self, part: int) -> Sequence[Sequence[CountedFile]]:
        """The groups of a part."""
        return self.groups[part * GROUPS_OF_A_PART : (part + 1) * GROUPS_OF_A_PART]

    def make(self, part: int, task: Task) -> PlanPart:
        """A part, as it is stored."""
        groups = self.groups_of(part)
        packings = self._pack(groups, task)
        depth = self.settings.depth
        return PlanPart(
            format_version=2,
            part=part,
            signature_sha256=self.signature_sha256,
            depth=max(packing.depth_used if depth == "max" else packing.depth for packing in packings),
            masked_slots=max(packing.masked_slots or 0 for packing in packings) or None,
            masked_slots_needed=most_needed(packing.masked_slots_needed for packing in packings),
            files=tuple(file for files in groups for file in files),
            groups=tuple(
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
            ),
        )

    def _pack(self, groups: Sequence[Sequence[CountedFile]], task: Task) -> list[Packing]:
        """Pack each group; several at once where there are cores (the kernels run outside Python's lock)."""
        whole, settings = self.records.histogram, self.settings

        def pack(files: Sequence[CountedFile]) -> Packing:
            counts = (file.counts for file in files)
            packing = pack_histogram(
                group_histogram(counts, whole.max_sequence_length) if files else whole,
                settings.algorithm,
                settings.depth,
                leftovers=settings.leftovers,
                effort=settings.effort,
                max_predictions=self.records.max_predictions,
                masked_slots=settings.masked_slots,
                seed=settings.seed,
            )
            task.advance()
            return packing

        workers = worker_count(self.workers, len(groups))
        if workers == 1:
            return [pack(group) for group in groups]
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(pack, groups))


def _planning(records: CountedRecords, settings: PackingSettings, output: _PlanOutput, workers: int | None) -> _Planning:
    """Form the groups of files; one group without files where only counts are known."""
    limits = settings.group_sequences, settings.group_bytes
    groups: list[list[CountedFile]] = [[]]
    if records.files is not None:
        for file in too_large_files(records.files, *limits):
            output.reporter.say(
                f"{file.name}: {file.sequences:,} sequences, {file.bytes:,} bytes: larger than a group may be"
                f" ({limits[0]:,} sequences, {limits[1]:,} bytes), so it is a separate group"
            )
        groups = form_groups(records.files, *limits, settings.seed)
    return _Planning(records, groups, settings, output.signature.sha256, workers)


def _make_parts(output: _PlanOutput, planning: _Planning, numbers: Sequence[int]) -> int:
    """Make those of the parts that are not there yet; how many groups they have."""
    missing = output.missing(numbers)
    groups = sum(len(planning.groups_of(number)) for number in missing)
    with output.reporter.task("plan", groups, "groups") as task:
        for number in missing:
            with output.writing(number, f"{output.final}: part {number}") as needed:
                if needed:
                    planning.make(number, task).write(output.summary_path(number))
    return groups


@dataclass
class _Parts:
    """Parts that are read one after the other: the entry of each in plan.json, and all but its groups and files."""

    output: _PlanOutput
    listed: list[ListedPart] = field(default_factory=list)
    heads: list[PlanPart] = field(default_factory=list)

    def groups(self, parts: int) -> Iterator[PlannedGroup]:
        """The groups of all parts, which must be there."""
        for number, part in self.output.require_completed(range(parts), "gaudi-bert plan"):
            data = read_file(self.output.summary_path(number))
            size = {file.name: file.bytes for file in part.files}
            entry = ListedPart(
                bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                packs=tuple(group.packs for group in part.groups),
                input_bytes=tuple(sum(size[name] for name in group.files) for group in part.groups),
            )
            self.listed.append(entry)
            self.heads.append(part.model_copy(update={"files": (), "groups": ()}))
            yield from part.groups


def _finish(output: _PlanOutput, planning: _Planning) -> Plan:
    records, settings, parts = planning.records, planning.settings, _Parts(output)
    length = records.histogram.max_sequence_length
    totals = totals_of(parts.groups(planning.parts), length, settings.algorithm)
    masked_slots = max(head.masked_slots or 0 for head in parts.heads) or None
    needed = most_needed(head.masked_slots_needed for head in parts.heads)
    content = Plan(
        format_version=2,
        algorithm=settings.algorithm,
        depth=max(head.depth for head in parts.heads),
        max_sequence_length=length,
        max_predictions=records.max_predictions,
        masked_slots=masked_slots,
        seed=settings.seed,
        shard_multiple=settings.shard_multiple,
        shard_bytes=settings.shard_bytes,
        histogram_sha256=records.sha256,
        vocabulary=records.vocabulary,
        writable=records.files is not None,
        totals=PlanTotals(**totals, masked_slots=masked_slots, masked_slots_needed=needed),
        files_sha256=files_sha256((file.name, file.bytes) for file in records.files or ()),
        bad_files=records.bad_files,
        parts=tuple(parts.listed),
    )
    output.write_final(content)
    return content
