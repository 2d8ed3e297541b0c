"""How a result is printed: a few lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from typing import Any

import typer

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.launch import is_first_process
from gaudi_bert.common.progress import RESULT_ALONE


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
