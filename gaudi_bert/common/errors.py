"""The errors that users see, their exit codes, and functions that help to write their messages.

A message is one line that states the wrong value, what is allowed, and the remedy. Any other exception is a defect of this
package and is shown with a traceback. The last section checks whether optional libraries are installed, and returns the
command that installs an extra of this package.
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

_LONGEST_MESSAGE = 1000  # in characters


class GaudiBertError(Exception):
    """Base class of all errors that are shown to users as one line.

    A message may contain long names and values, so it is shortened to a limited length.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, _LONGEST_MESSAGE))


class FailedError(GaudiBertError):
    """Raised if a command failed, for example because the disk is full or a check did not pass. The exit code is 1."""


class InputError(GaudiBertError):
    """Raised if a command's usage or its input, such as settings and files, is wrong. The exit code is 2."""

    exit_code = 2


class ArgumentError(InputError, ValueError):
    """Raised if an argument of a public Python function is wrong. It is also a `ValueError`, as Python users expect."""


class StoppedError(GaudiBertError):
    """Raised if a command was stopped on request (SIGTERM) and can be resumed by running it again. The exit code is 75."""

    exit_code = 75


def shorten(text: str, max_characters: int = 80) -> str:
    """Return `text` as one line. If it is longer than `max_characters`, replace the middle with "..."."""
    if len(text) > 4 * max_characters:
        text = f"{text[: 2 * max_characters]} {text[-2 * max_characters :]}"
    line = " ".join(text.split())
    half = (max_characters - 3) // 2
    return line if len(line) <= max_characters else f"{line[:half]}...{line[-half:]}"


class _ShortRepr(reprlib.Repr):
    """Converts values to short texts in Python notation. Long lists and deep nesting are abbreviated."""

    def repr_int(self, x: int, level: int) -> str:
        """Return an integer as text. For a large integer, return only how many bits it has."""
        return repr(x) if x.bit_length() < 256 else f"a number of {x.bit_length():,} bits"


def short_repr(value: object) -> str:
    """Return a short form of `repr(value)` for messages. This function is fast even for very large values."""
    return shorten(_ShortRepr().repr(value))


def join_with_and(words: Iterable[str]) -> str:
    """Join words into a text such as "a", "a and b" or "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


# --- optional libraries, and the command that installs an extra of this package
#
# The package is not on any index yet, so the command installs it from a clone, as the section "Install" in docs/start.md
# does. Change both when the package is published.

_TENSORFLOW_PYTHONS = ((3, 10), (3, 11))  # the Python versions that TensorFlow 2.15 supports

# The optional libraries, and the extra of this package that installs each of them.
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


def require_libraries(libraries: Iterable[str], purpose: str) -> None:
    """Check that optional libraries are installed, so that a long computation does not fail later.

    Args:
        libraries: The names of the libraries, which are keys of `EXTRAS`.
        purpose: What requires the libraries, such as "serve", for the message.

    Raises:
        InputError: A library is not installed. The message contains the command that installs it.
    """
    missing = [library for library in dict.fromkeys(libraries) if find_spec(library) is None]
    if missing:
        names = join_with_and(map(library_title, missing))
        are = "which is" if len(missing) == 1 else "which are"
        command = install_command(",".join(dict.fromkeys(EXTRAS[library] for library in missing)))
        raise InputError(f"{purpose} requires {names}, {are} not installed; run: {command}")


def library_title(library: str) -> str:
    """Return the usual name of a library for messages, such as "PyTorch" for `torch`."""
    return {"torch": "PyTorch", "tensorflow": "TensorFlow", "sklearn": "scikit-learn"}.get(library, library)


def install_command(extra: str) -> str:
    """Return the shell command that installs one or several extras, such as `text,report`, for the current Python."""
    python, package = shlex.quote(sys.executable), _pip_requirement(extra)
    if "pytorch" in extra.split(","):
        # pip would install the GPU build of PyTorch (3 GB) even on a machine without a GPU. On such a machine, uv installs
        # the CPU build.
        return f"{python} -m pip install uv && {python} -m uv pip install --torch-backend auto {package}"
    if extra == "tensorflow" and not supports_tensorflow():
        return f"python3.11 -m venv env && env/bin/python -m pip install {package}"
    return f"{python} -m pip install {package}"


def supports_tensorflow(python_version: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Return whether TensorFlow 2.15 supports a Python version."""
    return python_version in _TENSORFLOW_PYTHONS


def _pip_requirement(extra: str) -> str:
    """Return the argument of `pip install` for an extra of this package.

    If the package was installed from a clone that still exists, the argument contains the path of this clone.
    """
    from importlib.metadata import distributions  # slow to load and rarely needed

    # If the package is installed from a clone, Python may find its metadata twice. The reason is that setuptools also writes
    # metadata next to the sources. Only the metadata of the installation state the path of the clone.
    origins = (each.read_text("direct_url.json") for each in distributions(name="gaudi-bert"))
    origin = json.loads(next(filter(None, origins), "{}"))
    clone = Path(unquote(urlsplit(origin.get("url", "")).path))
    if not (clone / "pyproject.toml").is_file():
        return shlex.quote(f"./gaudi-bert[{extra}]")
    package = shlex.quote(f"{clone}[{extra}]")
    return f"--editable {package}" if origin.get("dir_info", {}).get("editable") else package
