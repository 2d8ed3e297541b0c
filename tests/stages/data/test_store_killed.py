"""Stages that work in a bucket, killed at random moments behind a bad server: the same bytes, nothing half-made in sight.

`benchmarks/stores.py --kills 50` is the long form.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.effort import LONG
from tests.builders.s3_server import S3Server

# Three kills of `write`, one of each of the others.
STAGES = ["prepare", "histogram", "plan", "write", "verify", *(["train", "evaluate", "report"] if LONG else [])]


@pytest.mark.slow
@pytest.mark.repeated
def test_killed_in_a_bucket(repository: Path, tmp_path: Path, s3: S3Server) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.builders.kill_in_store",
        str(tmp_path),
        "3",
        ",".join(STAGES),
        "5",
    ]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{2 + len(STAGES)} killed; faults of the server: "), done.stdout
