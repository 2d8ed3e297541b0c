"""The example scripts: two processes learn what one does, a stopped run is resumed by another number of processes."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("transformers")

from tests.builders.agree import agree  # noqa: E402
from tests.builders.launched import TORCHRUN, finished  # noqa: E402
from tests.builders.packing_case import make_case  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--hidden-size", "8", "--layers", "1", "--learning-rate", "0.01"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"), files=3).packed


@pytest.fixture
def run_alone(monkeypatch, capsys):
    """Runs a script in this process; what it printed."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *SMALL, *arguments])
        runpy.run_path(str(EXAMPLES / "pytorch" / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def run_in_two(script: str, *arguments: str) -> str:
    return finished([*TORCHRUN, str(EXAMPLES / "pytorch" / script), *SMALL, *arguments]).stdout


def losses(output: str) -> dict[str, float]:
    """What was printed, by update."""
    return {update: float(loss) for update, loss in re.findall(r"update (\d+): loss (\d+\.\d{4})", output)}


@pytest.mark.slow
def test_two_processes_learn_what_one_does_and_a_stopped_run_goes_on_alone(packed, tmp_path, run_alone) -> None:
    def arguments(out: str, updates: int) -> list[str]:
        run = ["--batch-packs", "8", "--micro-batch-packs", "2", "--dropout", "0", "--updates", str(updates)]
        return ["pretrain_torchrun.py", "--data", str(packed), "--out", str(tmp_path / out), *run]

    alone = losses(run_alone(*arguments("alone", 9)))  # more than one epoch
    assert list(alone) == [str(number) for number in range(1, 10)]
    assert alone["9"] < alone["1"]
    both, resumed = losses(run_in_two(*arguments("both", 4))), losses(run_alone(*arguments("both", 9)))
    assert (list(both), list(resumed)) == (list(alone)[:4], list(alone)[4:])
    agree({**both, **resumed}, alone, 2e-4, scale=1.0)


@pytest.mark.slow
def test_trainer_goes_on_where_it_was_stopped(packed, tmp_path, run_alone) -> None:
    pytest.importorskip("accelerate")
    run = ["--data", str(packed), "--out", str(tmp_path), "--batch-sequences", "24", "--batch-packs", "2"]
    for updates in ("3", "6"):
        printed = run_alone("pretrain_trainer.py", *run, "--save-steps", "3", "--max-steps", updates)
        assert f"done: {updates} updates; an epoch of" in printed
