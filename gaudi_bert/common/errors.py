"""The errors a user can meet, each with the exit code that the command line gives it; and remedies that many of them name.

A message is one line that names the wrong value, what is allowed, and the remedy. Anything that is not one of these
is a defect of ours and keeps its traceback.
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
        """Write an integer as Python does, which refuses very large ones."""
        return repr(x) if x.bit_length() < 256 else f"a number of {x.bit_length():,} bits"


def shown(value: object) -> str:
    """`value` in Python's notation, for an error: short, and soon written, whatever it is."""
    return shortened(_ShortRepr().repr(value))


def enumerated(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


# --- the remedy for a library that is missing: how an extra of this package is installed
#
# The package is on no index yet, so that this names the clone, as "Install" in docs/start.md does: change both once it is
# published.

_TENSORFLOW_PYTHONS = ((3, 10), (3, 11))
# Which extra of this package installs a library.
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


def require(libraries: Iterable[str], what: str) -> None:
    """Refuse `what` where libraries of `EXTRAS` are missing, before long work would notice it."""
    missing = [library for library in dict.fromkeys(libraries) if find_spec(library) is None]
    if missing:
        names = enumerated(map(library_title, missing))
        are = "which is" if len(missing) == 1 else "which are"
        command = install_command(",".join(dict.fromkeys(EXTRAS[library] for library in missing)))
        raise InputError(f"{what} needs {names}, {are} not installed; run: {command}")


def library_title(library: str) -> str:
    """Return what people call a library."""
    return {"torch": "PyTorch", "tensorflow": "TensorFlow", "sklearn": "scikit-learn"}.get(library, library)


def install_command(extra: str) -> str:
    """The command that installs what an extra needs (or several, `text,report`), for the Python that runs."""
    python, package = shlex.quote(sys.executable), _package(extra)
    if "pytorch" in extra.split(
        ","
    ):  # on a machine without a GPU, uv takes PyTorch's build for CPUs; pip takes 3 GB, that for GPUs
        return f"{python} -m pip install uv && {python} -m uv pip install --torch-backend auto {package}"
    if extra == "tensorflow" and not has_tensorflow():
        return f"python3.11 -m venv env && env/bin/python -m pip install {package}"
    return f"{python} -m pip install {package}"


def has_tensorflow(python: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Whether there is a TensorFlow 2.15 for a version of Python."""
    return python in _TENSORFLOW_PYTHONS


def _package(extra: str) -> str:
    """The package and its extra, as pip takes them: from the clone that it was installed from, while that is there."""
    from importlib.metadata import distributions  # slow to load, and seldom needed

    # In a clone there are two: the metadata of setuptools next to the sources does not know where it was installed from.
    origins = (each.read_text("direct_url.json") for each in distributions(name="gaudi-bert"))
    origin = json.loads(next(filter(None, origins), "{}"))
    clone = Path(unquote(urlsplit(origin.get("url", "")).path))
    if not (clone / "pyproject.toml").is_file():
        return shlex.quote(f"./gaudi-bert[{extra}]")
    package = shlex.quote(f"{clone}[{extra}]")
    return f"--editable {package}" if origin.get("dir_info", {}).get("editable") else package
