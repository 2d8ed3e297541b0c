"""Thousands of damaged files: each is refused by file and offset, or read for exactly what it still holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.effort import tries
from tests.builders.record_mutations import FILE_DAMAGE, mutants

SEED, COUNT = 20, tries(500, 20_000)


@pytest.mark.slow
@pytest.mark.repeated
def test_mutants_are_read_as_protobuf_reads_them(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, "-m", "tests.builders.fuzz_scan", str(SEED), str(COUNT), str(tmp_path)]
    result = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, "\n".join([f"exit code {result.returncode}", *lines, *result.stderr.splitlines()[-20:]])
    words = lines[-1].split()
    refused, read, more_memory = int(words[1]), int(words[3]), int(words[7])
    assert refused + read == COUNT
    assert refused > COUNT // 2
    assert read > COUNT // 20
    assert more_memory < 64


def test_mutants_are_fixed_by_their_seed() -> None:
    assert [mutant.data for mutant in mutants(7, 64)] == [mutant.data for mutant in mutants(7, 64)]


def test_every_kind_of_damage_occurs_and_changes_the_file() -> None:
    changed = {mutant.kind for mutant in mutants(7, 320) if mutant.data != mutant.original}
    assert {mutant.kind for mutant in mutants(7, 320)} == changed
    assert set(FILE_DAMAGE) < changed
