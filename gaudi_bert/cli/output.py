"""How a result is printed: a few lines for people, or one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import typer

from gaudi_bert.common.progress import human_bytes

__all__ = [
    "describe_answers",
    "describe_any",
    "describe_examples",
    "describe_finetuning",
    "describe_histogram",
    "describe_packing",
    "percent",
    "print_result",
    "skipped_note",
]

Describe = Callable[[Mapping[str, Any]], list[str]]


def print_result(result: object, as_json: bool, describe: Describe) -> None:
    """Print a result of a stage or a runner as one JSON object, or as the lines that `describe` makes of that object."""
    from gaudi_bert.cli.results import to_json

    content = to_json(result)
    if as_json:
        typer.echo(json.dumps(content, allow_nan=False, default=str))
        return
    for line in describe(content):
        typer.echo(line)


def skipped_note(result: Mapping[str, Any]) -> str:
    """` (already there, nothing to do)` where a stage found its artefact finished."""
    return " (already there, nothing to do)" if result.get("skipped") else ""


def percent(share: float) -> str:
    """0.99776 as `99.776 %`."""
    return f"{100 * share:.3f} %"


def describe_packing(result: Mapping[str, Any]) -> list[str]:
    """The lines of a plan or of a packed folder."""
    lines = [
        f"{result['packs']:,} packs, {result['packing_factor']:.4f} sequences per pack, "
        f"efficiency {percent(result['efficiency'])}{skipped_note(result)}",
        f"proven lower bound {result['lower_bound']:,} packs: {result['gap']:,} above it"
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
    """The masked-LM budget of a plan, and what the smallest one would cost."""
    line = f"{result['masked_slots']} masked slots per pack, {result['masked_slots_needed']} needed"
    if result["smaller_masked_slots"]:
        smallest = result["smaller_masked_slots"][-1]
        line += f"; with {smallest['masked_slots']}, the least possible, it would be {smallest['packs']:,} packs"
    return line


def describe_examples(result: Mapping[str, Any]) -> list[str]:
    """The lines of prepared examples: one a split, and the vocabulary."""
    if "splits" not in result:
        return describe_any(result)
    lines = [
        f"{split}: {figures['sequences']:,} sequences ({figures['tokens']:,} tokens) "
        f"from {figures['text_documents']:,} documents{skipped_note(result)}"
        for split, figures in result["splits"].items()
    ]
    vocabulary = result["vocabulary"]
    origin = "trained from the text" if vocabulary["trained"] else "given"
    return [*lines, f"vocabulary of {vocabulary['size']:,} tokens, {origin}"]


def describe_histogram(result: Mapping[str, Any]) -> list[str]:
    """The lines of a histogram."""
    mean = result["tokens"] / max(result["sequences"], 1)
    return [
        f"{result['sequences']:,} sequences in {result['files']:,} files ({human_bytes(result['bytes'])}), "
        f"length {mean:.1f} on average, at most {result['max_sequence_length']}{skipped_note(result)}"
    ]


def describe_finetuning(result: Mapping[str, Any]) -> list[str]:
    """The lines of a fine-tuned model: from how much it learnt, and how good it is."""
    if "metrics" not in result:
        return describe_any(result)
    lines = [
        f"{result['task']}: {result['sequences']:,} sequences in {result['packs']:,} packs ({result['packing_factor']:.3f} "
        f"sequences per pack), {result['epochs']} epochs, {result['updates']:,} updates{skipped_note(result)}"
    ]
    if result["metrics"]:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
        lines.append(f"best by {result['best_metric']}, after update {result['best_update']:,}: {figures}")
        if result.get("baseline"):
            figures = ", ".join(f"{name} {value:.4f}" for name, value in result["baseline"].items())
            lines.append(f"always the same answer, the best one for the training data: {figures}")
    return lines


def describe_answers(result: Mapping[str, Any]) -> list[str]:
    """The line of a file of answers or of vectors."""
    if result.get("skipped"):
        return []
    padding = 100 * result["padding"]
    return [f"{result['rows']:,} rows, {result['tokens']:,} tokens; {padding:.1f} % of what was computed is padding"]


def describe_any(result: Mapping[str, Any]) -> list[str]:
    """One `key: value` line for each plain value of a result."""
    lines = []
    for key, value in result.items():
        if isinstance(value, bool | int | str) or value is None:
            lines.append(
                f"{key}: {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{key}: {value}"
            )
        elif isinstance(value, float):
            lines.append(f"{key}: {value:.6g}")
    return lines
