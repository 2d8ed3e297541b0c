"""Two real Horovod processes on this machine: the same figures as one process, one end for all, whoever fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.runners.training_processes import run_training_processes
from gaudi_bert.runs.records import train
from gaudi_bert.training.checkpoint import _list_checkpoints, read_checkpoint, write_checkpoint
from gaudi_bert.training.evaluate import evaluate
from tests.builders import training_data as data
from tests.builders import training_updates as work
from tests.builders import two_processes as script
from tests.builders.agree import agree, identical
from tests.builders.reporters import QUIET

pytest.importorskip("horovod", reason="HOROVOD MISSING: run `make setup-horovod` to test several processes")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    data.write_packed(folder / "train", data.make_packs(29))
    data.write_packed(folder / "three", data.make_packs(29), shards=3)
    data.write_packed(folder / "evaluation", data.make_packs(19, seed=8))
    return folder


@pytest.fixture(scope="module")
def results(records, tmp_path_factory) -> Path:
    """What two processes left (see `builders/two_processes.py`)."""
    out = tmp_path_factory.mktemp("two")
    command = ["horovodrun", "--gloo", "-np", "2", sys.executable, "-m", "tests.builders.two_processes", records, out]
    done = subprocess.run(
        command, cwd=ROOT, env=script.ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    (out / "output").write_text(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
    assert (out / "rank-0.json").exists(), (out / "output").read_text()
    return out


@pytest.fixture(scope="module")
def ranks(results) -> list[dict]:
    return [json.loads((results / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", script.CASES)
def test_two_processes_are_one_big_batch(results, case) -> None:
    """The parameters after five updates, however the packs are shared out; but for `local`, as the predecessor had it."""
    arguments = {**script.CASES[case], "micro_batches": 1}
    one, start, two = (
        work.run_updates(Communicator(), **arguments),
        work.make_model().copy_variables(),
        np.load(results / f"{case}.npz"),
    )
    assert (work.largest_difference(one, two) <= 1e-6) == (case != "local")
    assert work.largest_difference(one, start) > 1e-3


def test_a_signal_to_one_process_stops_both_with_one_checkpoint(ranks, results) -> None:
    for each in ranks:
        assert "stopped on request after update 7 of 1000000" in each["stopped"]
    files = _list_checkpoints(results / "stopped" / "checkpoints")
    assert [file.name for file in files] == ["update-00000007.safetensors"]
    assert read_checkpoint(files[0]).progress["processes"] == 2


def test_one_process_goes_on_from_two(records, results, tmp_path, capsys) -> None:
    stopped = results / "stopped"
    rare = {"log_every_updates": 1_000_000, "save_every_updates": 1_000_000}
    long_run = script.settings(updates=1_000_000, threads=None, **rare)
    saved = json.loads((stopped / "settings.json").read_text())
    saved["settings"]["training"]["updates"] = 9
    (stopped / "settings.json").write_text(json.dumps(saved))
    short = long_run.model_copy(update={"training": long_run.training.model_copy(update={"updates": 9})})
    summary = train(short, records / "train", None, stopped, reporter=Reporter(), resume=True)
    assert (summary.content.updates, summary.content.processes) == (9, 1)
    said = capsys.readouterr().err
    assert "resuming after update 7" in said
    assert "read in another order" not in said


def test_an_evaluation_by_two_is_the_evaluation_by_one(ranks, records, results, tmp_path) -> None:
    file = _list_checkpoints(results / "trained" / "checkpoints")[-1]
    stored = read_checkpoint(file)
    stored.settings["training"]["threads"] = None  # this process has its threads
    alone = to_json(evaluate(records / "evaluation", write_checkpoint(tmp_path, stored), reporter=QUIET))
    together = ranks[0]["evaluated"]
    identical(ranks[1]["evaluated"], together)
    agree(together, alone, 1e-9, scale=1.0)


def test_two_processes_share_three_shards_and_the_target_stops_the_run_for_both(ranks, results) -> None:
    assert ranks[0]["trained"]["reached_target"]
    assert ranks[0]["trained"]["updates"] < 12
    assert ranks[0]["trained"]["processes"] == 2
    identical(ranks[1]["trained"], ranks[0]["trained"])
    update = ranks[0]["trained"]["updates"]
    assert [file.name for file in _list_checkpoints(results / "trained" / "checkpoints")] == [
        f"update-{update:08d}.safetensors"
    ]


# --- connecting, by our own launcher

CONNECTS = """
import os, signal, sys
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.tensorflow.engine import connect_processes
rank = os.environ["HOROVOD_RANK"]
if rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
try:
    settings = TrainingSettings()
    with connect_processes(settings, {}).watch_processes_during_block(settings):
        pass
except GaudiBertError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_a_process_that_is_lost_when_they_connect_ends_both(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "5")
    settings = load_pipeline(None, ["training.engine=tensorflow", "resources.workers=2"])
    with pytest.raises(FailedError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        run_training_processes(settings, "train", [sys.executable, "-c", CONNECTS])
    assert "Wait timeout" in capfd.readouterr().err


# --- a process that is lost or stopped in its fourth update ends the other by one line

LOST = """
import os, signal, sys
from gaudi_bert.cli import main
from gaudi_bert.training.objective import TrainingStep
step = TrainingStep.run_update
def run(self, micro_batches, update, learning_rate):
    sums = step(self, micro_batches, update, learning_rate)
    if update == 4 and os.environ["HOROVOD_RANK"] == "1":
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    return sums
TrainingStep.run_update = run
main(sys.argv[2:])
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_is_lost_in_an_update_ends_the_other(
    end: str, records: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {**script.TRAINING, "updates": 8, "save_every_updates": 2, "stall_seconds": 12, "measure_speedup": "false"}
    sets = [f"training.{name}={value}" for name, value in values.items()]
    sets += [f"model.{name}={value}" for name, value in script.MODEL.items()]
    command = ["train", "--data", str(records / "train"), "--out", str(tmp_path / "out"), "--engine", "tensorflow"]
    command += [word for value in sets for word in ("--set", value)]
    settings = load_pipeline(None, ["training.engine=tensorflow", "resources.workers=2"])
    with pytest.raises(FailedError):
        run_training_processes(settings, "train", [sys.executable, "-c", LOST, end, *command])
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    assert line.startswith("error: rank 0 of 2 aborts during ")
    assert line.endswith("; the last saved update is 2; run the same command again to resume")
