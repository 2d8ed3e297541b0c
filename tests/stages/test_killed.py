"""Packing that is killed at random moments and run again gives the bytes of an undisturbed run, every time."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.oracles.wire import example, frame, random_sequence

SEED, MOMENTS = 11, 20


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
