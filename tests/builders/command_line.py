"""The command line in this process: what a user sees, without the start of an interpreter, and what no message may show."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.cli import main


@dataclass(frozen=True)
class Done:
    """How a command ended, under the names that `subprocess` gives them."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*arguments: object, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Done:
    """Run `gaudi-bert` with these arguments, in `folder`, with this environment; anything but an exit is raised."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), inside(folder or Path.cwd(), environment):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def succeed(*arguments: object, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Done:
    """Run a command that must end with 0."""
    done = run_command(*arguments, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return done


def refusal(*arguments: object, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command that must be refused: with 2, and one line without anything else, which is returned."""
    done = run_command(*arguments, folder=folder, environment=environment)
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with these variables besides those of the tests."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def inside(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Be in a folder, with these variables (None: those that are there); afterwards all is as it was."""
    before, variables = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    _set_environment(variables if environment is None else environment)
    try:
        yield
    finally:
        os.chdir(before)
        _set_environment(variables)


def _set_environment(wanted: Mapping[str, str]) -> None:
    wanted = dict(wanted)
    os.environ.clear()
    os.environ.update(wanted)


# The words of pydantic, which are for programmers, and regular expressions.
_PYDANTIC = re.compile(
    r"Input should|should (?:match|have|be)|\bvalid (?:string|integer|number|list|tuple|dictionary|boolean)|unable to parse|"
    r"Value error|Extra inputs|Field required|instance of|constrained-|literal\[|function-|NoneType|pydantic"
)
_EXPRESSION = re.compile(r"\^\[|\\[dsw]|[\])][*+?{]|\[a-z|\[\^|\(\?")


def foreign_prose(message: str) -> str | None:
    """The first words of a message that are pydantic's, or the start of a regular expression; None where it has neither."""
    match = _PYDANTIC.search(message) or _EXPRESSION.search(message)
    return match[0] if match else None
