"""How a result is printed: a few lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from gaudi_bert.common.launch import is_first_process
from gaudi_bert.common.progress import RESULT_ALONE, count_of, human_bytes, human_rate

if TYPE_CHECKING:  # `--help` needs neither
    from rich.text import Text

    from gaudi_bert.tfrecords.inspect import RecordView, SequenceView

_Describe = Callable[[Mapping[str, Any]], list[str]]


def print_result(result: object, as_json: bool, describe: _Describe, next_command: str | None = None) -> None:
    """Print a result of a stage or a runner as one JSON object, or as the lines that `describe` makes of that object.

    `next_command` is what most users type then; it goes to people only, and not after `--quiet`.
    """
    from gaudi_bert.cli.results import to_json

    content = to_json(result)
    if as_json:
        typer.echo(json.dumps(content, allow_nan=False, default=str))
        return
    for line in describe(content):
        typer.echo(line)
    if next_command is not None and not os.environ.get(RESULT_ALONE):
        typer.echo(f"Next: gaudi-bert {next_command}")


def print_shared_result(result: object, as_json: bool, describe: _Describe, next_command: str | None = None) -> None:
    """Print what all processes of a launcher did together, once: every process has the same result, the first prints it."""
    if is_first_process():
        print_result(result, as_json, describe, next_command)


def words_of(*words: object) -> str:
    """Words of a command, quoted where a shell needs it."""
    return " ".join(shlex.quote(str(word)) for word in words)


def skipped_note(result: Mapping[str, Any]) -> str:
    """` (already there, nothing to do)` where a stage had nothing to do."""
    return " (already there, nothing to do)" if result.get("skipped") else ""


def describe_packing(result: Mapping[str, Any], out: Path | None = None, verbose: bool = False) -> list[str]:
    """The lines of a plan or of a packed folder `out`; more of how the packs were found where `verbose`."""
    more = f"{result['gap']:,} more than the proven minimum"
    proven = more if result["gap"] else "proven: none fewer is possible"
    packed = count_of(result["sequences"], "sequence")
    if result.get("rows", result["sequences"]) != result["sequences"]:
        packed = f"{count_of(result['rows'], 'row')} ({packed})"
    lines = [
        f"{packed} became {count_of(result['packs'], 'pack')} "
        f"({result['packing_factor']:.2f} times fewer), {proven}{skipped_note(result)}",
        f"{100 * result['efficiency']:.2f} % of the slots hold tokens",
    ]
    if out is not None:
        size = f", {human_bytes(result['bytes'])}" if "bytes" in result else ""
        lines.append(f"Wrote {out} ({count_of(result['shards'], 'shard')}{size})" if "shards" in result else f"Wrote {out}")
    return [*lines, *_how_it_was_packed(result)] if verbose else lines


def _how_it_was_packed(result: Mapping[str, Any]) -> list[str]:
    lines = []
    if "token_bound" in result:
        lines.append(f"the tokens alone need {count_of(result['token_bound'], 'pack')}")
    if "algorithm" in result:
        used = [name for name in result.get("algorithms_used", ()) if name != result["algorithm"]]
        heuristics = f" (by {' and '.join(used)})" if used else ""
        lines.append(f"algorithm {result['algorithm']}{heuristics}, depth {result.get('depth_used', result.get('depth'))}")
    if result.get("masked_slots_needed"):
        needed = result["masked_slots_needed"]
        lines.append(f"{result['masked_slots']} masked slots per pack (the data need {needed})")
    return lines


def describe_verification(result: Mapping[str, Any]) -> list[str]:
    """The line of a folder that was verified, or of a part of it."""
    if "groups_written" in result:
        return _describe_part(result, ", each exactly once", "verified", "proof")
    return [f"every one of {count_of(result['sequences'], 'sequence')} is in the packs exactly once{skipped_note(result)}"]


def describe_groups(result: Mapping[str, Any], out: Path | None = None, verbose: bool = False) -> list[str]:
    """The line of one part of a plan or of a packed folder; the lines of all parts once they are finished."""
    if "groups_written" not in result:
        return describe_packing(result, out, verbose)
    return _describe_part(result, "", "there", "work")


def _describe_part(result: Mapping[str, Any], how: str, already: str, completed: str) -> list[str]:
    if not result["groups"]:
        return ["nothing to do: there are fewer groups than parts"]
    there = "" if result["groups_written"] else f" (all were {already} already, nothing to do)"
    counted = f"{count_of(result['sequences'], 'sequence')} in {count_of(result['packs'], 'pack')}{how}{there}"
    return [f"{count_of(result['groups'], 'group')}: {counted}; --finish completes the {completed} when all parts are done"]


def describe_examples(result: Mapping[str, Any]) -> list[str]:
    """The lines of prepared examples: one per split, and the vocabulary."""
    if "records" in result:
        return [f"nothing to do: the pipeline names its own records, {result['records']}"]
    if "splits" not in result:
        remaining = len(result["missing_sections"])
        return [f"this part is done, {count_of(remaining, 'section')} to be done by other parts"]
    lines = [
        f"{split}: {count_of(figures['sequences'], 'sequence')} ({count_of(figures['tokens'], 'token')}) "
        f"from {count_of(figures['text_documents'], 'document')}{skipped_note(result)}"
        for split, figures in result["splits"].items()
    ]
    vocabulary = result["vocabulary"]
    origin = "trained from the text" if vocabulary["trained"] else "given"
    return [*lines, f"vocabulary of {count_of(vocabulary['size'], 'token')}, {origin}"]


def describe_histogram(result: Mapping[str, Any]) -> list[str]:
    """The line of a histogram."""
    if not result["files"]:
        return ["nothing to do: there are fewer files than parts"]
    mean = result["tokens"] / max(result["sequences"], 1)
    return [
        f"{count_of(result['sequences'], 'sequence')} in {count_of(result['files'], 'file')} "
        f"({human_bytes(result['bytes'])}), mean length {mean:.1f}, at most {result['max_sequence_length']}"
        f"{skipped_note(result)}"
    ]


def describe_finetuning(result: Mapping[str, Any]) -> list[str]:
    """The lines of a fine-tuned model: what it was trained on, and how good it is."""
    if "dry_run" in result:
        return [DRY_RUN]
    lines = [
        f"{result['task']}: {count_of(result['sequences'], 'sequence')} in {count_of(result['packs'], 'pack')} "
        f"({result['packing_factor']:.3f} sequences per pack), {count_of(result['epochs'], 'epoch')}, "
        f"{count_of(result['updates'], 'update')}{skipped_note(result)}"
    ]
    if result["metrics"]:
        lines.append(
            f"best by {result['best_metric']}, after update {result['best_update']:,}: {_metrics(result['metrics'])}"
        )
        if result.get("baseline"):
            from gaudi_bert.config.sections import SEARCH_TASKS

            name = "before training" if result["task"] in SEARCH_TASKS else "majority baseline"
            lines.append(f"{name}: {_metrics(result['baseline'])}")
    return lines


def _metrics(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def describe_answers(result: Mapping[str, Any], out: str | None = None) -> list[str]:
    """The lines of a file of answers or of vectors."""
    if result.get("skipped"):
        return []
    wrote = [] if out is None else [f"Wrote {out}"]
    counted = f"{count_of(result['rows'], 'row')}, {count_of(result['tokens'], 'token')}"
    cut = f"; {result['cut_rows']:,} were longer than {result['max_sequence_length']} tokens" if result["cut_rows"] else ""
    bad = f"; {result['bad_rows']:,} cannot be read" if result.get("bad_rows") else ""
    return [f"{counted}{cut}{bad}; {100 * result['padding']:.1f} % of what was computed is padding", *wrote]


# --- pretrained models

DRY_RUN = "a dry run: nothing was trained or written"


def describe_training(result: Mapping[str, Any]) -> list[str]:
    """The lines of a trained model: on how much it was trained, how fast, and how good it is."""
    if "dry_run" in result:
        return [DRY_RUN]
    speed = f", {human_rate(result['sequences_per_second'], 'sequences')}" if "sequences_per_second" in result else ""
    lines = [
        f"{count_of(result['updates'], 'update')} on {count_of(result['sequences'], 'sequence')} "
        f"({count_of(result['tokens'], 'token')}) by {count_of(result['processes'], 'process')}{speed}{skipped_note(result)}"
    ]
    if result["reached_target"]:
        lines.append("target accuracy reached")
    if "realized_speedup" in result:
        gain, factor = result["realized_speedup"], result["packing_factor"]
        lines.append(f"{gain:.2f} times as fast as unpacked, measured; {factor:.2f} would be the limit")
    return lines + ([f"held out: {_pretraining(result['evaluation'])}"] if result.get("evaluation") else [])


def describe_table_training(result: Mapping[str, Any]) -> list[str]:
    """The lines of a model of words that was trained on a packed table."""
    held_out = result.get("evaluation")
    if not held_out:
        return describe_training(result)
    figures = f"accuracy {100 * held_out['accuracy']:.1f} %, of one word for all {100 * held_out['unigram_baseline']:.1f} %"
    more = f"held out: {figures}; perplexity {held_out['perplexity']:,.1f}"
    return [*describe_training({**result, "evaluation": None}), more]


def describe_evaluation(result: Mapping[str, Any]) -> list[str]:
    """The lines of an evaluated checkpoint."""
    if not result:
        return ["nothing to do: the pipeline holds no evaluation data out"]
    lines = [f"after update {result['update']:,}: {_pretraining(result)}{skipped_note(result)}"]
    if "largest_difference" in result:
        lines.append(f"the same sequences unpacked give the same figures, to {result['largest_difference']:.1e}")
    return lines


def _pretraining(figures: Mapping[str, Any]) -> str:
    """The accuracies of both pretraining tasks, each with its baseline of one answer for everything."""
    frequent, more = figures["unigram_baseline"], figures.get("next_sentence_baseline")
    baseline = "" if more is None else f" (the more frequent answer: {100 * more:.1f} %)"
    return (
        f"masked-LM accuracy {100 * figures['masked_lm_accuracy']:.1f} % (the most frequent token: {100 * frequent:.1f} %), "
        f"next-sentence accuracy {100 * figures['next_sentence_accuracy']:.1f} %{baseline}, loss {figures['loss']:.3f}, "
        f"over {count_of(figures['sequences'], 'sequence')}"
    )


def describe_proof(result: Mapping[str, Any]) -> list[str]:
    """The line of a model whose packed and unpacked results were compared."""
    packed = f"{count_of(result['sequences'], 'sequence')} in {count_of(result['packs'], 'pack')}"
    return [
        f"packing changes nothing: {packed} give the outputs of single rows, to {result['hidden_states']:.1e}, "
        f"and the gradients, to {result['gradient']:.1e}; "
        f"{count_of(result['leak_comparisons'], 'sequence')} next to a changed one did not change by a bit"
    ]


def describe_export(result: Mapping[str, Any]) -> list[str]:
    """The line of exported weights."""
    vocabulary = f", with the vocabulary {result['vocabulary']}" if result.get("vocabulary") else ", without a vocabulary"
    return [f"{result['format']}: {count_of(result['parameters'], 'parameter')} in {', '.join(result['files'])}{vocabulary}"]


def describe_report(result: Mapping[str, Any]) -> list[str]:
    """The lines of the page: where it is, and its figures."""
    figures = [f"{name}: {figure}" for name, figure in result.items() if name not in ("report", "bytes")]
    return [*figures, f"the page: {result['report']} ({human_bytes(result['bytes'])}); open it in a browser"]


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
STAGES: dict[str, _Describe] = {
    "prepare": describe_examples,
    "histogram": describe_histogram,
    "plan": describe_groups,
    "write": describe_groups,
    "verify": describe_verification,
    "train": describe_training,
    "evaluate": describe_evaluation,
    "finetune": describe_finetuning,
    "predict": describe_answers,
    "report": describe_report,
}
