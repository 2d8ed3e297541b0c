"""The errors a user can meet, each with the exit code that the command line gives it.

A message is one line that names the wrong value, what is allowed, and the remedy. Anything that is not one of these
is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import reprlib

_LONGEST_MESSAGE = 1000


class GaudiBertError(Exception):
    """Base of all errors that are shown to the user as one line, of bounded length whatever the names and values in it."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, _LONGEST_MESSAGE))


class FailedError(GaudiBertError):
    """The work could not be done (disk full, check failed, worker lost): exit code 1."""

    exit_code = 1


class InputError(GaudiBertError):
    """Wrong usage or bad input (settings, files, records): exit code 2."""

    exit_code = 2


class ArgumentError(InputError, ValueError):
    """A bad argument of a function that users call from Python: what they expect there is a ValueError."""


class StoppedError(GaudiBertError):
    """Stopped on request (SIGTERM) in a state from which the same command resumes: exit code 75."""

    exit_code = 75


def shortened(text: str, most: int = 80) -> str:
    """`text` on one line, its middle omitted where it is longer than `most` characters: for values named in an error."""
    if len(text) > 4 * most:
        text = f"{text[: 2 * most]} {text[-2 * most :]}"
    line = " ".join(text.split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half]}...{line[-half:]}"


class _ShortRepr(reprlib.Repr):
    """Python's notation of a value, a few entries of each list and a few levels deep, however large the value is."""

    def repr_int(self, x: int, level: int) -> str:
        """As Python's; it refuses to write very large numbers."""
        return repr(x) if x.bit_length() < 256 else f"a number of {x.bit_length():,} bits"


def shown(value: object) -> str:
    """`value` in Python's notation, for an error: short, and soon written, whatever it is."""
    return shortened(_ShortRepr().repr(value))
