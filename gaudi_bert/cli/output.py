"""How a result is printed: a few lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import typer

from gaudi_bert.common.launch import is_first_process
from gaudi_bert.common.progress import count_of, human_bytes

_Describe = Callable[[Mapping[str, Any]], list[str]]


def print_result(result: object, as_json: bool, describe: _Describe) -> None:
    """Print a result of a stage or a runner as one JSON object, or as the lines that `describe` makes of that object."""
    from gaudi_bert.cli.results import to_json

    content = to_json(result)
    if as_json:
        typer.echo(json.dumps(content, allow_nan=False, default=str))
        return
    for line in describe(content):
        typer.echo(line)


def print_shared_result(result: object, as_json: bool, describe: _Describe) -> None:
    """Print what all processes of a launcher did together, once: every process has the same result, the first prints it."""
    if is_first_process():
        print_result(result, as_json, describe)


def skipped_note(result: Mapping[str, Any]) -> str:
    """` (already there, nothing to do)` where a stage had nothing to do."""
    return " (already there, nothing to do)" if result.get("skipped") else ""


def describe_packing(result: Mapping[str, Any]) -> list[str]:
    """The lines of a plan or of a packed folder."""
    lines = [
        f"{count_of(result['packs'], 'pack')}, {result['packing_factor']:.4f} sequences per pack, "
        f"efficiency {100 * result['efficiency']:.3f} %{skipped_note(result)}",
        f"proven lower bound {count_of(result['lower_bound'], 'pack')}: {result['gap']:,} above it"
        + (f"; the tokens alone need {result['token_bound']:,}" if "token_bound" in result else ""),
    ]
    if "algorithm" in result:
        used = [name for name in result.get("algorithms_used", ()) if name != result["algorithm"]]
        made_by = f" (by {' and '.join(used)})" if used else ""
        lines.append(f"algorithm {result['algorithm']}{made_by}, depth {result.get('depth_used', result.get('depth'))}")
    if result.get("masked_slots_needed"):
        lines.append(_masked_slots_line(result))
    return lines


def _masked_slots_line(result: Mapping[str, Any]) -> str:
    """The masked slots of a plan, and what the smallest possible number of them would cost."""
    needs = f"the data need {result['masked_slots_needed']}"
    if result["smaller_masked_slots"]:
        smallest = result["smaller_masked_slots"][-1]
        more = smallest["packs"] - result["packs"]
        needs += f"; forcing {smallest['masked_slots']} would cost {count_of(more, 'more pack')}"
    return f"{result['masked_slots']} masked slots per pack ({needs})"


def describe_verification(result: Mapping[str, Any]) -> list[str]:
    """The line of a folder that was verified."""
    return [f"every one of {count_of(result['sequences'], 'sequence')} is there exactly once{skipped_note(result)}"]


def describe_examples(result: Mapping[str, Any]) -> list[str]:
    """The lines of prepared examples: one per split, and the vocabulary."""
    if "splits" not in result:
        return describe_any(result)
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
    mean = result["tokens"] / max(result["sequences"], 1)
    return [
        f"{count_of(result['sequences'], 'sequence')} in {count_of(result['files'], 'file')} "
        f"({human_bytes(result['bytes'])}), mean length {mean:.1f}, at most {result['max_sequence_length']}"
        f"{skipped_note(result)}"
    ]


def describe_finetuning(result: Mapping[str, Any]) -> list[str]:
    """The lines of a fine-tuned model: what it was trained on, and how good it is."""
    if "metrics" not in result:
        return describe_any(result)
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
            lines.append(f"always the same answer, the best one for the training data: {_metrics(result['baseline'])}")
    return lines


def _metrics(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def describe_answers(result: Mapping[str, Any]) -> list[str]:
    """The line of a file of answers or of vectors."""
    if result.get("skipped"):
        return []
    counted = f"{count_of(result['rows'], 'row')}, {count_of(result['tokens'], 'token')}"
    cut = f"; {result['cut_rows']:,} were longer than {result['max_sequence_length']} tokens" if result["cut_rows"] else ""
    bad = f"; {result['bad_rows']:,} cannot be read" if result.get("bad_rows") else ""
    return [f"{counted}{cut}{bad}; {100 * result['padding']:.1f} % of what was computed is padding"]


def describe_any(result: Mapping[str, Any]) -> list[str]:
    """One `key: value` line for each plain value of a result."""
    lines = []
    for key, value in result.items():
        if isinstance(value, float):
            lines.append(f"{key}: {value:.6g}")
        elif isinstance(value, int) and not isinstance(value, bool):
            lines.append(f"{key}: {value:,}")
        elif isinstance(value, bool | str) or value is None:
            lines.append(f"{key}: {value}")
    return lines
