"""Fine-tuning by two real Horovod processes is fine-tuning by one, and an evaluation counts every sequence once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from gaudi_bert.artefacts.finetuning import read_finetuning
from gaudi_bert.training.distributed.communicator import Communicator
from tests.builders import two_finetunes as script

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return script.write_files(tmp_path_factory.mktemp("rows") / "files")


@pytest.fixture(scope="module")
def by_two(files, tmp_path_factory) -> Path:
    """What two processes left."""
    pytest.importorskip("horovod", reason="HOROVOD MISSING: run `make setup-horovod` to test several processes")
    out = tmp_path_factory.mktemp("two")
    words = [sys.executable, "-m", "tests.builders.two_finetunes", str(files), str(out)]
    command = ["horovodrun", "--gloo", "-np", "2", *words]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("task", script.RUNS)
def test_the_weights_after_five_updates_are_those_of_one_process(task, files, by_two, tmp_path) -> None:
    script.fine_tuned(files, task, tmp_path / "one")
    one, two = tmp_path / "one", by_two / task
    alone, together = read_finetuning(one / "metrics.json"), read_finetuning(two / "metrics.json")
    packs = alone.packs * alone.epochs
    assert (alone.updates, together.updates) == (5, 5)
    assert packs % 6 != 0, "the last update must be ragged"
    assert (alone.sequences, alone.packs, alone.evaluated_rows) == (
        together.sequences,
        together.packs,
        together.evaluated_rows,
    )
    weights, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert weights.keys() == others.keys()
    assert max(float(np.abs(value - others[name]).max()) for name, value in weights.items()) <= 1e-6
    start = load_file(files / "bert" / "model.safetensors")
    moved = [np.abs(value - weights[f"bert.{name}"]).max() for name, value in start.items() if f"bert.{name}" in weights]
    assert max(moved) > 1e-3
    lines = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (one, two)]
    for ours, theirs in zip(*lines, strict=True):
        for name in ("kind", "update", "sequences", "tokens", "evaluated_rows", "evaluated_sequences"):
            assert ours.get(name) == theirs.get(name)
        for name in ("loss", "gradient_norm"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", script.EVALUATED_ROWS)
def test_an_evaluation_by_two_is_that_by_one_to_the_last_bit(rows, files, by_two) -> None:
    """One row is one batch: the second process has nothing to do and gives nothing."""
    model = by_two / script.EVALUATED_TASK
    alone = script.as_json(script.evaluated(model, files / f"evaluation-{rows}.jsonl", Communicator()))
    both = [json.loads((by_two / f"evaluations-{rank}.json").read_text())[str(rows)] for rank in range(2)]
    assert both[0] == both[1]
    assert both[0]["logits"] == alone["logits"]
    assert both[0]["rows"] == alone["rows"] == rows
    assert both[0]["figures"] == pytest.approx(alone["figures"], abs=1e-12)


@dataclass(frozen=True)
class OneOfMany(Communicator):
    """A process that keeps what it gives to the sums."""

    given: list[np.ndarray] = field(default_factory=list, compare=False)

    def sum_array(self, values: Any) -> np.ndarray:
        self.given.append(np.array(values, np.float64))
        return self.given[-1]


@pytest.fixture(scope="module")
def model(files, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / script.EVALUATED_TASK
    script.fine_tuned(files, script.EVALUATED_TASK, out)
    return out


@pytest.mark.parametrize("size", [3, 7])
def test_the_shares_of_any_number_of_processes_add_up_to_the_whole(size, files, model) -> None:
    path = files / "evaluation-19.jsonl"
    whole = OneOfMany()
    expected = script.evaluated(model, path, whole)
    shares = [OneOfMany(rank, size) for rank in range(size)]
    for share in shares:
        script.evaluated(model, path, share)
    sums, logits = (sum(share.given[number] for share in shares) for number in range(2))
    np.testing.assert_allclose(sums, whole.given[0], rtol=1e-12)
    np.testing.assert_array_equal(logits, expected.logits)
    shared = sum((share.given[1] != 0).any(axis=1).astype(int) for share in shares)
    assert shared.max() == 1, "a token that two processes answered"
    assert any(not share.given[1].any() for share in shares) == (size > 5)
