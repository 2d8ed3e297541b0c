"""Errors that users see, with the exit code of each, and helpers for writing their messages.

A message is one line that names the wrong value, what is allowed, and the remedy. Any other exception is a defect of this
package and keeps its traceback. The last part of this file writes the remedy for missing libraries: how to install an extra
of this package.
"""

from __future__ import annotations

import json
import reprlib
import shlex
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LONGEST_MESSAGE = 1000
"""Characters to which a message is shortened."""


class GaudiBertError(Exception):
    """Base class of all errors that are shown to users as one line.

    The line has a bounded length, whatever names and values the message contains.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, _LONGEST_MESSAGE))


class FailedError(GaudiBertError):
    """Raised if the work could not be done, for example because the disk is full or a check failed. Exit code 1."""

    exit_code = 1


class InputError(GaudiBertError):
    """Raised if the usage or the input (settings, files, records) is wrong. Exit code 2."""

    exit_code = 2


class ArgumentError(InputError, ValueError):
    """Raised if an argument of a function that users call from Python is wrong. It is also a ValueError, as users expect."""


class StoppedError(GaudiBertError):
    """Raised if the work was stopped on request (SIGTERM) and the same command resumes it. Exit code 75."""

    exit_code = 75


def shorten(text: str, max_characters: int = 80) -> str:
    """Return `text` on one line of at most `max_characters`, with the middle replaced by dots if necessary."""
    if len(text) > 4 * max_characters:
        text = f"{text[: 2 * max_characters]} {text[-2 * max_characters :]}"
    line = " ".join(text.split())
    half = (max_characters - 3) // 2
    return line if len(line) <= max_characters else f"{line[:half]}...{line[-half:]}"


class _ShortRepr(reprlib.Repr):
    """Writes values in Python notation, with only a few entries per list and a few levels of nesting."""

    def repr_int(self, x: int, level: int) -> str:
        """Write an integer, or only its size if it is so large that Python would refuse to write it."""
        return repr(x) if x.bit_length() < 256 else f"a number of {x.bit_length():,} bits"


def short_repr(value: object) -> str:
    """Return a short Python representation of `value` for a message. It is fast, however large the value is."""
    return shorten(_ShortRepr().repr(value))


def join_with_and(words: Iterable[str]) -> str:
    """Join words as in "a", "a and b" or "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


# --- remedies for missing libraries: how to install an extra of this package
#
# The package is not on any index yet, so the command names the clone, as "Install" in docs/start.md does. Change both once
# the package is published.

_TENSORFLOW_PYTHONS = ((3, 10), (3, 11))
"""Python versions for which there is a TensorFlow 2.15."""

EXTRAS = {
    "docker": "docker",
    "fastapi": "serve",
    "h5py": "hdf5",
    "httptools": "serve",
    "jinja2": "report",
    "kubernetes": "kubernetes",
    "matplotlib": "report",
    "prometheus_client": "serve",
    "pyarrow": "parquet",
    "safetensors": "pytorch",
    "seqeval": "pytorch",
    "sklearn": "pytorch",
    "tensorflow": "tensorflow",
    "tokenizers": "text",
    "torch": "pytorch",
    "transformers": "pytorch",
    "uvicorn": "serve",
    "uvloop": "serve",
}
"""The extra of this package that installs each library."""


def require_libraries(libraries: Iterable[str], purpose: str) -> None:
    """Check that libraries are installed, before a long computation would fail without them.

    Args:
        libraries: The names of modules, which are keys of `EXTRAS`.
        purpose: What requires the libraries, such as "serve", for the message.

    Raises:
        InputError: A library is missing. The message contains the command that installs it.
    """
    missing = [library for library in dict.fromkeys(libraries) if find_spec(library) is None]
    if missing:
        names = join_with_and(map(library_title, missing))
        are = "which is" if len(missing) == 1 else "which are"
        command = install_command(",".join(dict.fromkeys(EXTRAS[library] for library in missing)))
        raise InputError(f"{purpose} requires {names}, {are} not installed; run: {command}")


def library_title(library: str) -> str:
    """Return the name by which people know a library."""
    return {"torch": "PyTorch", "tensorflow": "TensorFlow", "sklearn": "scikit-learn"}.get(library, library)


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra (or several, such as `text,report`) for the running Python."""
    python, package = shlex.quote(sys.executable), _pip_requirement(extra)
    if "pytorch" in extra.split(","):
        # On a machine without a GPU, pip would install PyTorch's GPU build of 3 GB, whereas uv chooses the CPU build.
        return f"{python} -m pip install uv && {python} -m uv pip install --torch-backend auto {package}"
    if extra == "tensorflow" and not supports_tensorflow():
        return f"python3.11 -m venv env && env/bin/python -m pip install {package}"
    return f"{python} -m pip install {package}"


def supports_tensorflow(python_version: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Return whether there is a TensorFlow 2.15 for this Python version."""
    return python_version in _TENSORFLOW_PYTHONS


def _pip_requirement(extra: str) -> str:
    """Return this package with its extra as a requirement for pip: the clone it was installed from, if that still exists."""
    from importlib.metadata import distributions  # slow to load and rarely needed

    # In a clone there are two distributions, because setuptools leaves metadata next to the sources that does not contain
    # the origin.
    origins = (each.read_text("direct_url.json") for each in distributions(name="gaudi-bert"))
    origin = json.loads(next(filter(None, origins), "{}"))
    clone = Path(unquote(urlsplit(origin.get("url", "")).path))
    if not (clone / "pyproject.toml").is_file():
        return shlex.quote(f"./gaudi-bert[{extra}]")
    package = shlex.quote(f"{clone}[{extra}]")
    return f"--editable {package}" if origin.get("dir_info", {}).get("editable") else package
