"""Real containers: only where `scripts/test-containers.sh` has made Docker and the images ready."""

from __future__ import annotations

import os
import subprocess

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
