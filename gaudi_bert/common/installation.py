"""How an extra of this package is installed, for messages.

The package is on no index yet, so that this names the clone, as "Install" in docs/start.md does: change both once it is
published.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

_TENSORFLOW_PYTHONS = ((3, 10), (3, 11))


def install_command(extra: str) -> str:
    """The command that installs what an extra needs, for the Python that runs."""
    python, package = shlex.quote(sys.executable), _package(extra)
    if (
        extra == "pytorch"
    ):  # uv takes PyTorch's build for CPUs on a machine without a GPU; pip takes the one for GPUs, of 3 GB
        return f"{python} -m pip install uv && {python} -m uv pip install --torch-backend auto {package}"
    if extra == "tensorflow" and not has_tensorflow():
        return f"python3.11 -m venv env && env/bin/python -m pip install {package}"
    return f"{python} -m pip install {package}"


def has_tensorflow(python: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Whether there is a TensorFlow 2.15 for a version of Python."""
    return python in _TENSORFLOW_PYTHONS


def _package(extra: str) -> str:
    """The package and its extra, as pip takes them: from the clone that it was installed from, while that is there."""
    # In a clone there are two: the metadata of setuptools next to the sources does not know where it was installed from.
    origins = (each.read_text("direct_url.json") for each in distributions(name="gaudi-bert"))
    origin = json.loads(next(filter(None, origins), "{}"))
    clone = Path(unquote(urlsplit(origin.get("url", "")).path))
    if not (clone / "pyproject.toml").is_file():
        return shlex.quote(f"./gaudi-bert[{extra}]")
    package = shlex.quote(f"{clone}[{extra}]")
    return f"--editable {package}" if origin.get("dir_info", {}).get("editable") else package
