"""Names that the tests of real containers share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from gaudi_bert import __version__

BASE = "gaudi-bert-base:bookworm"
# The same, with PyTorch's wheel where this machine has one.
WHEELS = "gaudi-bert-base:wheels"
DATA = f"gaudi-bert-data:{__version__}"
TRAIN = f"gaudi-bert-train-cpu:{__version__}"
TRAIN_PYTORCH = f"gaudi-bert-train-cpu-pytorch:{__version__}"
# Debian's: the first one on the PATH may be a newer client that cannot build without a plugin.
DOCKER = "/usr/bin/docker"

Docker = Callable[..., subprocess.CompletedProcess[str]]


def build(file: Path, context: Path, tag: str, **arguments: str) -> subprocess.CompletedProcess[str]:
    """Build an image; its exit code is the caller's to check."""
    command = [DOCKER, "build", "--progress=plain", "--file", str(file), "--tag", tag]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    if os.environ.get("PIP_CERT"):
        command += ["--secret", f"id=ca_bundle,src={os.environ['PIP_CERT']}"]
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    return subprocess.run([*command, str(context)], capture_output=True, text=True, check=False, env=environment)
