"""How a result is printed: a few lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from gaudi_bert.artefacts.results import (
    GivenRecords,
    GroupsResult,
    NothingHeldOut,
    NothingToCount,
    PackResult,
    PreparedShard,
    ReportResult,
    StageOutput,
    to_json,
)
from gaudi_bert.common.errors import enumerated
from gaudi_bert.common.launch import is_first_process
from gaudi_bert.common.progress import RESULT_ALONE, count_of, human_bytes, human_rate

if TYPE_CHECKING:  # `--help` needs none of them
    from rich.text import Text

    from gaudi_bert.artefacts.examples import PreparedExamples
    from gaudi_bert.artefacts.histogram import HistogramFile
    from gaudi_bert.artefacts.packed import Metadata, TableMetadata, Verification
    from gaudi_bert.artefacts.plan import PlanTotals
    from gaudi_bert.artefacts.training import EvaluationFigures, EvaluationResult, FineTuning, TableTraining, TrainingResult
    from gaudi_bert.tasks.answers import StreamResult
    from gaudi_bert.tfrecords.inspect import RecordView, SequenceView
    from gaudi_bert.training.run_plan import RunPlan

_Result = TypeVar("_Result")


def print_result(
    result: _Result, as_json: bool, describe: Callable[[_Result], list[str]], next_command: str | None = None
) -> None:
    """Print a result of a stage or a runner as one JSON object, or as the lines that `describe` makes of it.

    `next_command` is what most users type then; it goes to people only, and not after `--quiet`.
    """
    if as_json:
        typer.echo(json.dumps(to_json(result), allow_nan=False, default=str))
        return
    for line in describe(result):
        typer.echo(line)
    if next_command is not None and not os.environ.get(RESULT_ALONE):
        typer.echo(f"Next: gaudi-bert {next_command}")


def print_shared_result(
    result: _Result, as_json: bool, describe: Callable[[_Result], list[str]], next_command: str | None = None
) -> None:
    """Print what all processes of a launcher did together, once: every process has the same result, the first prints it."""
    if is_first_process():
        print_result(result, as_json, describe, next_command)


def words_of(*words: object) -> str:
    """Words of a command, quoted where a shell needs it."""
    return " ".join(shlex.quote(str(word)) for word in words)


def skipped_note(skipped: bool) -> str:
    """` (already there, nothing to do)` where a stage had nothing to do."""
    return " (already there, nothing to do)" if skipped else ""


def packed_lines(packed: PlanTotals | Metadata | TableMetadata, rows: int | None, skipped: bool) -> list[str]:
    """Return the lines of packs: of how many sequences (or `rows` of a table), and how full they are."""
    more = f"{packed.gap:,} more than the proven minimum"
    proven = more if packed.gap else "proven: none fewer is possible"
    sequences = count_of(packed.sequences, "sequence")
    if rows is not None and rows != packed.sequences:
        sequences = f"{count_of(rows, 'row')} ({sequences})"
    return [
        f"{sequences} became {count_of(packed.packs, 'pack')} "
        f"({packed.packing_factor:.2f} times fewer), {proven}{skipped_note(skipped)}",
        f"{100 * packed.efficiency:.2f} % of the slots hold tokens",
    ]


def algorithm_line(algorithm: str, used: Sequence[str], depth: int | None) -> str:
    """Which algorithms packed; `used` are those that `algorithm` chose."""
    others = [name for name in used if name != algorithm]
    heuristics = f" (by {enumerated(others)})" if others else ""
    return f"algorithm {algorithm}{heuristics}, depth {depth}"


def describe_plan(planned: StageOutput[PlanTotals] | GroupsResult, verbose: bool = False) -> list[str]:
    """The lines of a plan, or of a part of it; more of how the packs were chosen where `verbose`."""
    if isinstance(planned, GroupsResult):
        return part_lines(planned)
    lines = packed_lines(planned.content, None, planned.skipped)
    return [*lines, *_how_it_was_planned(planned.content)] if verbose else lines


def _how_it_was_planned(totals: PlanTotals) -> list[str]:
    lines = [
        f"the tokens alone need {count_of(totals.token_bound, 'pack')}",
        algorithm_line(totals.algorithm, totals.algorithms_used, totals.depth_used),
    ]
    if totals.masked_slots_needed:
        lines.append(f"{totals.masked_slots} masked slots per pack (the data need {totals.masked_slots_needed})")
    return lines


def describe_written(
    written: StageOutput[Metadata] | GroupsResult, out: Path | None = None, verbose: bool = False
) -> list[str]:
    """The lines of a packed folder `out`, or of a part of it."""
    if isinstance(written, GroupsResult):
        return part_lines(written)
    metadata = written.content
    lines = [*packed_lines(metadata, None, written.skipped), *([] if out is None else [_wrote(out, metadata)])]
    return [*lines, algorithm_line(metadata.algorithm, (), metadata.depth)] if verbose else lines


def _wrote(out: Path, metadata: Metadata) -> str:
    table = metadata.shard_table
    return f"Wrote {out} ({count_of(len(table), 'shard')}, {human_bytes(int(table.bytes.sum()))})"


def describe_packed(result: PackResult[Metadata, Verification], out: Path, verbose: bool) -> list[str]:
    """The lines of a plan and its packed folder `out`, and of the proof where it was requested."""
    planned, metadata = result.planned, result.written.content
    skipped = result.written.skipped or (planned is not None and planned.skipped)
    lines = [*packed_lines(metadata, None, skipped), _wrote(out, metadata)]
    if verbose and planned is not None:
        lines += _how_it_was_planned(planned.content)
    elif verbose:
        lines.append(algorithm_line(metadata.algorithm, (), metadata.depth))
    return lines if result.verified is None else [*lines, *verified_lines(result.verified)]


def part_lines(part: GroupsResult, how: str = "", already: str = "there", completed: str = "work") -> list[str]:
    """The line of one part of a plan, of a packed folder, or of its proof."""
    if not part.groups:
        return ["nothing to do: there are fewer groups than parts"]
    there = "" if part.groups_written else f" (all were {already} already, nothing to do)"
    counted = f"{count_of(part.sequences, 'sequence')} in {count_of(part.packs, 'pack')}{how}{there}"
    return [f"{count_of(part.groups, 'group')}: {counted}; --finish completes the {completed} when all parts are done"]


def describe_verification(verified: StageOutput[Any] | GroupsResult) -> list[str]:
    """The line of a folder that was verified, or of a part of it."""
    if isinstance(verified, GroupsResult):
        return part_lines(verified, ", each exactly once", "verified", "proof")
    sequences = count_of(verified.content.sequences, "sequence")
    return [f"every one of {sequences} is in the packs exactly once{skipped_note(verified.skipped)}"]


def verified_lines(verified: StageOutput[Any]) -> list[str]:
    """The lines of the proof of `pack --verify`."""
    return [f"verified: {line}" for line in describe_verification(verified)]


def describe_examples(result: StageOutput[PreparedExamples] | PreparedShard | GivenRecords) -> list[str]:
    """The lines of prepared examples: one per split, and the vocabulary."""
    if isinstance(result, GivenRecords):
        return [f"nothing to do: the pipeline names its own records, {result.records}"]
    if isinstance(result, PreparedShard):
        return [f"this part is done, {count_of(len(result.missing_sections), 'section')} to be done by other parts"]
    lines = [
        f"{split}: {count_of(section.sequences, 'sequence')} ({count_of(section.tokens, 'token')}) "
        f"from {count_of(section.text_documents, 'document')}{skipped_note(result.skipped)}"
        for split, section in result.content.splits.items()
    ]
    vocabulary = result.content.vocabulary
    origin = "trained from the text" if vocabulary.trained else "given"
    return [*lines, f"vocabulary of {count_of(vocabulary.size, 'token')}, {origin}"]


def describe_histogram(counted: StageOutput[HistogramFile] | NothingToCount) -> list[str]:
    """The line of a histogram."""
    if isinstance(counted, NothingToCount):
        return ["nothing to do: there are fewer files than parts"]
    totals = counted.content.totals()
    return [
        f"{count_of(totals.sequences, 'sequence')} in {count_of(totals.files, 'file')} "
        f"({human_bytes(totals.bytes)}), mean length {totals.mean_length:.1f}, at most {totals.max_sequence_length}"
        f"{skipped_note(counted.skipped)}"
    ]


def describe_finetuning(result: StageOutput[FineTuning] | RunPlan) -> list[str]:
    """The lines of a fine-tuned model: what it was trained on, and how good it is."""
    if not isinstance(result, StageOutput):
        return [_DRY_RUN]
    tuned = result.content
    lines = [
        f"{tuned.task}: {count_of(tuned.sequences, 'sequence')} in {count_of(tuned.packs, 'pack')} "
        f"({tuned.packing_factor:.3f} sequences per pack), {count_of(tuned.epochs, 'epoch')}, "
        f"{count_of(tuned.updates, 'update')}{skipped_note(result.skipped)}"
    ]
    if tuned.metrics:
        lines.append(f"best by {tuned.best_metric}, after update {tuned.best_update:,}: {_metrics(tuned.metrics)}")
        if tuned.baseline:
            from gaudi_bert.config.sections import SEARCH_TASKS

            name = "before training" if tuned.task in SEARCH_TASKS else "majority baseline"
            lines.append(f"{name}: {_metrics(tuned.baseline)}")
    return lines


def _metrics(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def describe_answers(answered: StreamResult, out: str | None = None) -> list[str]:
    """The lines of a file of answers or of vectors."""
    if answered.skipped:
        return []
    counted = f"{count_of(answered.rows, 'row')}, {count_of(answered.tokens, 'token')}"
    cut = f"; {answered.cut_rows:,} were longer than {answered.max_sequence_length} tokens" if answered.cut_rows else ""
    bad = f"; {answered.bad_rows:,} cannot be read" if answered.bad_rows else ""
    lines = [f"{counted}{cut}{bad}; {100 * answered.padding:.1f} % of what was computed is padding"]
    return lines if out is None else [*lines, f"Wrote {out}"]


# --- pretrained models

_DRY_RUN = "a dry run: nothing was trained or written"


def describe_training(result: StageOutput[TrainingResult] | StageOutput[TableTraining] | RunPlan) -> list[str]:
    """The lines of a trained model: on how much it was trained, how fast, and how good it is."""
    if not isinstance(result, StageOutput):
        return [_DRY_RUN]
    from gaudi_bert.artefacts.training import TrainingResult

    run = result.content
    speed = "" if run.sequences_per_second is None else f", {human_rate(run.sequences_per_second, 'sequences')}"
    lines = [
        f"{count_of(run.updates, 'update')} on {count_of(run.sequences, 'sequence')} "
        f"({count_of(run.tokens, 'token')}) by {count_of(run.processes, 'process')}{speed}{skipped_note(result.skipped)}"
    ]
    if run.reached_target:
        lines.append("target accuracy reached")
    if isinstance(run, TrainingResult):
        if run.realized_speedup is not None:
            gain, limit = run.realized_speedup, run.packing_factor
            lines.append(f"{gain:.2f} times as fast as unpacked, measured; {limit:.2f} would be the limit")
        return lines if run.evaluation is None else [*lines, f"held out: {_pretraining(run.evaluation)}"]
    if run.evaluation is not None:
        accuracy, baseline = run.evaluation.accuracy, run.evaluation.unigram_baseline
        figures = f"accuracy {100 * accuracy:.1f} %, of one word for all {100 * baseline:.1f} %"
        lines.append(f"held out: {figures}; perplexity {run.evaluation.perplexity:,.1f}")
    return lines


def describe_evaluation(result: StageOutput[EvaluationResult] | NothingHeldOut) -> list[str]:
    """The lines of an evaluated checkpoint."""
    if isinstance(result, NothingHeldOut):
        return ["nothing to do: the pipeline holds no evaluation data out"]
    evaluated = result.content
    lines = [f"after update {evaluated.update:,}: {_pretraining(evaluated)}{skipped_note(result.skipped)}"]
    if evaluated.largest_difference is not None:
        lines.append(f"the same sequences unpacked give the same figures, to {evaluated.largest_difference:.1e}")
    return lines


def _pretraining(figures: EvaluationFigures) -> str:
    """The accuracies of both pretraining tasks, each with its baseline of one answer for everything."""
    frequent, more = figures.unigram_baseline, figures.next_sentence_baseline
    baseline = "" if more is None else f" (the more frequent answer: {100 * more:.1f} %)"
    return (
        f"masked-LM accuracy {100 * figures.masked_lm_accuracy:.1f} % (the most frequent token: {100 * frequent:.1f} %), "
        f"next-sentence accuracy {100 * figures.next_sentence_accuracy:.1f} %{baseline}, loss {figures.loss:.3f}, "
        f"over {count_of(figures.sequences, 'sequence')}"
    )


def describe_report(page: ReportResult) -> list[str]:
    """The lines of the page: where it is, and its figures."""
    figures = [f"{name}: {figure}" for name, figure in page.figures.items()]
    return [*figures, f"the page: {page.report} ({human_bytes(page.bytes)}); open it in a browser"]


# --- one record for people

_NEXT_SENTENCE_LABELS: dict[int | None, str] = {0: "really next", 1: "random next"}
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def show_record(view: RecordView, stream: TextIO) -> None:
    """Print one paragraph for each sequence, distinguished by number and, on a terminal, by colour.

    A masked position shows the token in the row, an arrow, and the token it replaced: `[MASK]→house`.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=not stream.isatty())
    kind = f"packed, {count_of(len(view.sequences), 'sequence')}" if view.packed else "unpacked"
    console.print(
        f"{view.file}, record {view.record}: {kind}, {count_of(view.tokens, 'token')} and {view.padding} of padding "
        f"in a row of {view.max_sequence_length}, {count_of(view.masked_slots, 'masked slot')}, {view.bytes} bytes",
        markup=False,
    )
    for sequence in view.sequences:
        colour = _COLOURS[(sequence.number - 1) % len(_COLOURS)]
        label = _NEXT_SENTENCE_LABELS.get(sequence.next_sentence_label, "unknown")
        segments = " + ".join(str(length) for _, length in sequence.segments)
        length = count_of(sequence.length, "token")
        head = f"{sequence.number}  {length} ({segments}) from {sequence.start}, {len(sequence.masked)} masked, {label}"
        console.print(Text(head, style=f"bold {colour}"))
        console.print(_sentence(sequence, colour))
    for key, size in view.other_features.items():
        console.print(f"also holds {key} ({count_of(size, 'value')})", markup=False)
    for problem in view.problems:
        console.print(Text(f"PROBLEM: {problem}", style="bold red"))


def _sentence(sequence: SequenceView, colour: str) -> Text:
    """The words of a sequence as styled text: word pieces joined, masked positions underlined."""
    from rich.text import Text

    words = sequence.tokens or [str(number) for number in sequence.input_ids]
    hidden = {masked.position: masked.token or str(masked.id) for masked in sequence.masked}
    text = Text("   ")
    for position, word in enumerate(words):
        joined = word.startswith("##") and position not in hidden
        if position and not joined:
            text.append(" ")
        if position in hidden:
            text.append(f"{word}→{hidden[position]}", style=f"underline {colour}")
        else:
            text.append(word.removeprefix("##") if joined else word, style=colour)
    return text


# What each stage of a pipeline is described by, complete or one part.
STAGES: dict[str, Callable[[Any], list[str]]] = {
    "prepare": describe_examples,
    "histogram": describe_histogram,
    "plan": describe_plan,
    "write": describe_written,
    "verify": describe_verification,
    "train": describe_training,
    "evaluate": describe_evaluation,
    "finetune": describe_finetuning,
    "predict": describe_answers,
    "report": describe_report,
}
