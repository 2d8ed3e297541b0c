"""Real containers: only where `scripts/test-containers.sh` has made Docker and the images ready."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.real_containers import DOCKER, Docker


@pytest.fixture(scope="session")
def docker() -> Docker:
    """Runs the docker client; skips loudly where there are no containers to test."""
    if os.environ.get("GAUDI_BERT_TEST_CONTAINERS") != "1":
        pytest.skip("CONTAINERS ARE NOT TESTED HERE: run scripts/test-containers.sh")

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([DOCKER, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def gaudi_bert() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in a folder."""

    def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gaudi_bert", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)

    return run
