"""Stages killed at random moments and run again give the bytes of an undisturbed run, every time; on a disk and in a bucket.

`python -m tools.kills bucket FOLDER 50 11 STAGES` is the long form of the second.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.effort import LONG
from tests.builders.s3_server import S3Server
from tools.kills import run_kills

pytestmark = pytest.mark.repeated
KILLS = {"convert": 20, "pack": 50, "parts": 50, "plan": 20, "prepare": 20, "table": 20} if LONG else {"pack": 1}
# One kill of `write`, or three and one of each of the others.
STAGES = ("prepare", "histogram", "plan", "write", *(("verify", "train", "evaluate", "report") if LONG else ()))


@pytest.mark.parametrize("scenario", KILLS)
def test_killed_on_a_disk(scenario: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    assert int(run_kills(scenario, tmp_path, KILLS[scenario]).split()[0]) >= KILLS[scenario]


def test_killed_in_a_bucket_behind_a_bad_server(tmp_path: Path, s3: S3Server) -> None:
    kills, killed = (3, 2 + len(STAGES)) if LONG else (1, 1)
    last = run_kills("bucket", tmp_path, kills, seed=5, stages=",".join(STAGES))
    assert last.startswith(f"{killed} killed; faults of the server: ")
