"""Trainer and Accelerate, one process and two, whole or stopped and resumed: one loss, each pack once; the rest refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.agree import agree
from tests.builders.effort import LONG

pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("accelerate")
pytest.importorskip("pyarrow")

from tests.builders.packed_training import HEADS, PACKS, UPDATES, WAYS, write_packs

ROOT = Path(__file__).resolve().parents[2]
RUNS = [(1, False), (2, True), *([(1, True), (2, False)] if LONG else [])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], list[dict]]:
    """What each process wrote, by the number of processes and whether they were stopped."""
    folder = tmp_path_factory.mktemp("processes")
    write_packs(folder / "data")
    return {(processes, stopped): run(folder, processes, stopped) for processes, stopped in RUNS}


def run(folder: Path, processes: int, stopped: bool) -> list[dict]:
    out = folder / f"{processes}-{stopped}"
    out.mkdir()
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    script = str(ROOT / "tests" / "builders" / "packed_training.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *start, script, str(folder / "data"), str(out), *(["stopped"] if stopped else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]  # of every process
    return [json.loads((out / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


@pytest.mark.repeated
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_one_process_and_each_pack_is_read_once(runs, way: str, head: str) -> None:
    wanted = runs[1, False][0][f"trainer {head}"]
    assert len(wanted["losses"]) == UPDATES
    assert len({tuple(pack) for pack in wanted["packs"]}) == PACKS
    for ranks in runs.values():
        for found in ranks:
            agree(found[f"{way} {head}"]["losses"], wanted["losses"], 1e-4, scale=1.0)
        read = [pack for found in ranks for pack in found[f"{way} {head}"]["packs"]]
        assert sorted(read) == sorted(wanted["packs"])


@pytest.mark.repeated
@pytest.mark.parametrize("head", HEADS)
def test_all_packs_are_evaluated_by_any_number_of_processes(runs, head: str) -> None:
    expected = runs[1, False][0][f"trainer {head}"]["evaluation"]
    for ranks in runs.values():
        for actual in ranks:
            agree(actual[f"trainer {head}"]["evaluation"], [expected[0], expected[0]], 1e-4, scale=1.0)


def test_every_other_combination_is_refused_in_every_process(runs) -> None:
    for found in runs[2, True]:
        for name, message in found["refused"].items():
            assert "PackedDataset" in message, name
            assert "rank" in message, name
            assert "\n" not in message
