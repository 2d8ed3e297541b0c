"""Stages that work in a bucket, killed at random moments behind a bad server: the same bytes, nothing half-made in sight.

`benchmarks/stores.py --kills 50` is the long form.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.s3_server import S3Server


@pytest.mark.slow
def test_killed_in_a_bucket(repository: Path, tmp_path: Path, s3: S3Server) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.builders.kill_in_store",
        str(tmp_path),
        "3",
        "prepare,histogram,plan,write,verify,train,evaluate,report",
        "5",
    ]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("10 killed; faults of the server: "), done.stdout
