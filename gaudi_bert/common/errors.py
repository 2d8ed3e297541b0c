"""The errors a user can meet, each with the exit code that the command line gives it.

A message is one line that names the value at fault, what is allowed, and the remedy. Anything that is not one of these
is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

__all__ = ["FailedError", "GaudiBertError", "InputError", "StoppedError", "shortened"]


class GaudiBertError(Exception):
    """Base of all errors that are shown to the user as one line."""

    exit_code = 1


class FailedError(GaudiBertError):
    """The work could not be done (disk full, check failed, worker lost): exit code 1."""

    exit_code = 1


class InputError(GaudiBertError):
    """Wrong usage or bad input (settings, files, records): exit code 2."""

    exit_code = 2


class StoppedError(GaudiBertError):
    """Stopped on request (SIGTERM) in a state from which the same command resumes: exit code 75."""

    exit_code = 75


def shortened(text: str, most: int = 80) -> str:
    """`text` on one line, its middle left out where it is longer than `most` characters: for values named in an error."""
    if len(text) > 4 * most:
        text = f"{text[: 2 * most]} {text[-2 * most :]}"
    line = " ".join(text.split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half]}...{line[-half:]}"
