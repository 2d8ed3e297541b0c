"""How a result is printed: a few lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.launch import is_first_process
from gaudi_bert.common.progress import RESULT_ALONE, count_of

if TYPE_CHECKING:  # `--help` needs none of them
    from gaudi_bert.tfrecords.inspect import RecordView


def print_result(
    result: Any,
    as_json: bool,
    lines: Sequence[str] | None = None,
    next_command: str | None = None,
    *,
    shared: bool = False,
) -> None:
    """Print a result of a stage or a runner as one JSON object, or as `lines`: by default its own.

    `next_command` is what most users type then; it goes to people only, and not after `--quiet`. What all processes of a
    launcher did together is `shared`: every process has the same result, and the first prints it.
    """
    if shared and not is_first_process():
        return
    if as_json:
        typer.echo(json.dumps(to_json(result), allow_nan=False, default=str))
        return
    for line in result.lines() if lines is None else lines:
        typer.echo(line)
    if next_command is not None and not os.environ.get(RESULT_ALONE):
        typer.echo(f"Next: gaudi-bert {next_command}")


def words_of(*words: object) -> str:
    """Words of a command, quoted where a shell needs it."""
    return " ".join(shlex.quote(str(word)) for word in words)


# --- one record for people

_NEXT_SENTENCE_LABELS: dict[int | None, str] = {0: "really next", 1: "random next"}


def record_lines(view: RecordView) -> list[str]:
    """Return a record for people: two lines for each sequence.

    A masked position shows the token in the row, an arrow, and the token it replaced: `[MASK]→house`.
    """
    kind = f"packed, {count_of(len(view.sequences), 'sequence')}" if view.packed else "unpacked"
    lines = [
        f"{view.file}, record {view.record}: {kind}, {count_of(view.tokens, 'token')} and {view.padding} of padding "
        f"in a row of {view.max_sequence_length}, {count_of(view.masked_slots, 'masked slot')}, {view.bytes} bytes"
    ]
    for sequence in view.sequences:
        label = _NEXT_SENTENCE_LABELS.get(sequence.next_sentence_label, "unknown")
        segments = " + ".join(str(length) for _, length in sequence.segments)
        length = count_of(sequence.length, "token")
        hidden = {masked.position: f"→{masked.token or masked.id}" for masked in sequence.masked}
        tokens = sequence.tokens or map(str, sequence.input_ids)
        words = [f"{token}{hidden.get(position, '')}" for position, token in enumerate(tokens)]
        text = re.sub(r" ##(?!\S*→)", "", " ".join(words))  # the pieces of a word, joined where none is masked
        head = f"{sequence.number}  {length} ({segments}) from {sequence.start}, {len(sequence.masked)} masked, {label}"
        lines += [head, f"   {text}"]
    lines += [f"also holds {key} ({count_of(size, 'value')})" for key, size in view.other_features.items()]
    return lines + [f"PROBLEM: {problem}" for problem in view.problems]
