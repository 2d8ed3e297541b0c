"""One run, two engines: stopped, resumed by itself or by the other, in one process and in two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", exc_type=ImportError)

from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.runs.records import train
from gaudi_bert.training import run
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint
from gaudi_bert.training.evaluate import evaluate
from tests.builders import training_data as data
from tests.builders.agree import agree, identical
from tests.builders.launched import TORCHRUN, finished
from tests.builders.reporters import QUIET, Listener, StopAfter
from tests.training.conftest import settings

pytestmark = pytest.mark.usefixtures("one_thread")
BY_PYTORCH = {"engine": "pytorch", "log_every_updates": 1}


def last_weights(out: Path) -> dict:
    stored = read_checkpoint(find_checkpoint(out))
    assert stored.update == 20
    assert "pytorch" not in json.dumps(dict(stored.settings)), "the checkpoint names a framework"
    return {**stored.variables, **{f"moment {name}": value for name, value in stored.first_moments.items()}}


@pytest.fixture(scope="module")
def by_pytorch(packed: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pytorch") / "train"
    train(settings(**BY_PYTORCH), packed, held_out, out, reporter=QUIET)
    return out


def test_a_stopped_run_keeps_its_engine_and_ends_with_the_same_bits(packed, held_out, by_pytorch, tmp_path) -> None:
    out, listener = tmp_path / "train", Listener()
    with pytest.raises(StoppedError):
        train(settings(**BY_PYTORCH), packed, held_out, out, reporter=StopAfter(9))
    train(settings(log_every_updates=1), packed, held_out, out, reporter=listener)
    assert listener.text.splitlines()[0] == "train: engine pytorch: the run started with this engine"
    assert yaml.safe_load((out / "settings.yaml").read_text())["training"]["engine"] == "pytorch"
    identical(last_weights(out), last_weights(by_pytorch))


def test_a_stop_that_another_process_was_asked_for_stops_this_one(packed, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Communicator, "is_true_in_any_process", lambda self, value: True)
    with pytest.raises(StoppedError, match="after update 1 of 20"):
        train(settings(**BY_PYTORCH), packed, None, tmp_path / "train", reporter=QUIET)
    assert read_checkpoint(find_checkpoint(tmp_path / "train")).update == 1


def test_each_engine_resumes_and_evaluates_what_the_other_left(packed, held_out, whole_run, by_pytorch, tmp_path) -> None:
    pytest.importorskip("tensorflow", exc_type=ImportError)
    out = tmp_path / "train"
    with pytest.raises(StoppedError):
        train(settings(**BY_PYTORCH), packed, held_out, out, reporter=StopAfter(9))
    train(settings(engine="tensorflow"), packed, held_out, out, reporter=QUIET)
    moved = read_checkpoint(find_checkpoint(out)).variables
    for name, value in read_checkpoint(find_checkpoint(whole_run)).variables.items():
        agree(moved[name], value, 0.02, scale=1.0)  # their dropout differs
    for folder in (whole_run, by_pytorch):
        one, other = (
            evaluate(held_out, folder, reporter=QUIET, engine=engine).content.as_json()
            for engine in ("tensorflow", "pytorch")
        )
        for name, value in one.items():
            if isinstance(value, float):
                agree(other[name], value, 1e-5, scale=1.0)


def test_a_step_is_compiled_once(packed, held_out, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 updates with an evaluation between: one graph each, without a break, and none compiled twice."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ on a CPU")
    reset()
    counters.clear()
    # It makes the graphs of `inductor`, those of the backward pass too, and no code of them, which takes minutes.
    monkeypatch.setattr("gaudi_bert.engines.pytorch.engine._COMPILERS", {"cpu": "aot_eager"})
    train(settings(compile=True, engine="pytorch"), packed, held_out, tmp_path / "train", reporter=QUIET)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize(("device", "message"), [("cuda", "PyTorch finds no GPU"), ("hpu", "habana_frameworks is not")])
def test_a_device_that_is_not_there_is_one_line(packed, tmp_path, device: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"training.device = {device}: .*{message}.*set training.device = cpu"):
        train(settings(engine="pytorch", device=device), packed, None, tmp_path / "train", reporter=QUIET)


# --- the steps before a model is built


def test_a_finished_run_is_read_before_its_engine_is_loaded(packed, held_out, by_pytorch, monkeypatch) -> None:
    monkeypatch.setattr(run, "load_engine", None)
    result = train(settings(**BY_PYTORCH), packed, held_out, by_pytorch, reporter=QUIET)
    assert (result.skipped, result.content.updates) == (True, 20)


# --- two processes: the same as one, and one that is lost

# Each process would draw dropout of its own.
MODEL = {**data.MODEL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHORT = {
    "updates": 12, "save_every_updates": 4, "global_batch_sequences": 16, "micro_batch_packs": 2, "warmup_updates": 3,
    "log_every_updates": 4, "evaluate_every_updates": 6, "threads": 1,
}  # fmt: skip


def test_two_processes_are_one_big_batch(packed, held_out, tmp_path) -> None:
    words = ["-m", "gaudi_bert", "train", "--data", packed, "--evaluation-data", held_out, "--out", tmp_path / "two"]
    values = {f"training.{key}": value for key, value in {**SHORT, "engine": "pytorch"}.items()}
    values |= {f"model.{key}": value for key, value in MODEL.items()}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    done = finished([*TORCHRUN, *map(str, words), *sets])
    assert "by 2 processes" in done.stdout
    alone = section_from_mapping(PipelineSettings, {"model": MODEL, "training": {**SHORT, "engine": "pytorch"}}, "a test")
    train(alone, packed, held_out, tmp_path / "one", reporter=QUIET)
    one, two = (read_checkpoint(find_checkpoint(tmp_path / name)) for name in ("one", "two"))
    agree(two.variables, one.variables, 1e-6, scale=1.0)
    results = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("one", "two")]
    assert [result["processes"] for result in results] == [1, 2]
    assert results[0]["sequences"] == results[1]["sequences"]
    agree(results[1]["evaluation"], results[0]["evaluation"], 1e-5, scale=1.0)
