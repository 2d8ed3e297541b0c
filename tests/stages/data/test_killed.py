"""Packing that is killed at random moments and run again gives the bytes of an undisturbed run, every time."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.effort import tries
from tests.builders.tables import random_rows, write_parquet
from tests.oracles.wire import example, frame, random_sequence

SEED, MOMENTS, TABLE_MOMENTS = 11, tries(6, 40), tries(4, 20)


@pytest.mark.repeated
def test_the_whole_packing_at_random_moments(repository: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    rng = random.Random(SEED)
    for number in range(8):
        payloads = [example(random_sequence(rng, 61, 9)) for _ in range(200)]
        (records / f"part-{number}").write_bytes(b"".join(frame(payload) for payload in payloads))
    command = [sys.executable, "-m", "tests.builders.kill_pack", str(records), str(tmp_path), str(SEED), str(MOMENTS)]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.splitlines()[-1].split()[1]) >= MOMENTS, result.stdout


@pytest.mark.repeated
def test_the_packing_of_a_table_at_random_moments(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    write_parquet(tmp_path / "rows.parquet", random_rows(900, 60, seed=SEED), row_group_size=50)
    arguments = [str(tmp_path / "rows.parquet"), str(tmp_path), str(SEED), str(TABLE_MOMENTS)]
    command = [sys.executable, "-m", "tests.builders.kill_table", *arguments]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.splitlines()[-1].split()
    assert int(words[1]) >= TABLE_MOMENTS, result.stdout
    assert int(words[6]) >= 1, result.stdout
