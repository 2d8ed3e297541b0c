"""The example scripts: two processes learn what one does, a stopped run is resumed by another number of processes; and a
served classifier gives each text, over HTTP, the answer that `transformers` gives it alone.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("transformers")

from gaudi_bert.common.errors import InputError  # noqa: E402
from tests.builders.agree import agree  # noqa: E402
from tests.builders.encoders import TEXTS, TOKENIZER, write_encoder  # noqa: E402
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
    from safetensors.numpy import load_file

    weights, positions = [], []
    for out in (tmp_path / "whole", tmp_path / "stopped"):
        run = ["--batch-sequences", "24", "--batch-packs", "2", "--max-steps", "6", "--save-steps", "3"]
        printed = run_alone("pretrain_trainer.py", "--data", str(packed), "--out", str(out), *run)
        assert "done: 6 updates; an epoch of" in printed
        weights.append(load_file(out / "model.safetensors"))
        positions.append((out / "checkpoint-6" / "packs.json").read_text(encoding="utf-8"))
        if out.name == "whole":
            shutil.copytree(out / "checkpoint-3", tmp_path / "stopped" / "checkpoint-3")
    assert positions[0] == positions[1]
    for name, value in weights[0].items():
        agree(weights[1][name], value, 1e-6, scale=1.0)


@pytest.mark.parametrize("script", ["pretrain_torchrun.py", "pretrain_trainer.py"])
@pytest.mark.parametrize(
    ("content", "message"), [(None, "missing, so the folder is not"), ("[]", "must hold `key: value` pairs")]
)
def test_a_wrong_folder_is_one_line(tmp_path: Path, run_alone, script: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metadata.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        run_alone(script, "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    said = str(end.value.code)
    assert said.startswith(f"error: {tmp_path / 'metadata.json'}: ")
    assert message in said
    assert "\n" not in said


# --- the served classifier

NAMES = {"id2label": {0: "bad", 1: "good", 2: "none"}, "label2id": {"bad": 0, "good": 1, "none": 2}}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    pytest.importorskip("fastapi", reason="FASTAPI MISSING: install the extra dev to test the served classifier")
    script = EXAMPLES / "serving" / "classifier.py"
    specification = importlib.util.spec_from_file_location("served_classifier", script)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # where pydantic looks for the types of a class
        specification.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("served") / "tuned"
    return folder, write_encoder(folder, "roberta", "AutoModelForSequenceClassification", **NAMES)


@pytest.fixture(scope="module")
def client(example: ModuleType, model: tuple[Path, Any]) -> Any:
    from fastapi.testclient import TestClient

    return TestClient(example.make_app(example.open_classifier(model[0], "cpu")))


def asked(client: Any, texts: list[str]) -> list[dict[str, Any]]:
    response = client.post("/predict", json={"texts": texts})
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["answers"]
    return answers


def test_each_text_has_its_own_answer_in_order(client: Any, model: tuple[Path, Any]) -> None:
    assert client.get("/ready").json() == {"task": "classification", "labels": ["bad", "good", "none"]}
    answers = asked(client, TEXTS)
    assert len(answers) == len(TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        with torch.no_grad():
            logits = model[1].eval()(input_ids=torch.tensor([TOKENIZER.encode(text).ids])).logits[0]
        expected = dict(zip(("bad", "good", "none"), logits.softmax(-1).tolist(), strict=True))
        agree(answer["probabilities"], expected, 1e-4, scale=1.0)
        assert answer["label"] == max(answer["probabilities"], key=answer["probabilities"].__getitem__)


def test_requests_at_once_have_the_answers_of_requests_in_turn(client: Any) -> None:
    batches = [TEXTS[first::5] for first in range(5)]
    in_turn = [asked(client, batch) for batch in batches]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda batch: asked(client, batch), batches)) == in_turn


@pytest.mark.parametrize("body", [{}, {"texts": []}, {"texts": "one"}, {"texts": ["a", 1]}, {"texts": ["a"] * 8193}])
def test_what_is_not_a_batch_of_texts_is_refused(client: Any, body: dict[str, Any]) -> None:
    assert client.post("/predict", json=body).status_code == 422


def test_a_wrong_folder_is_refused_before_it_is_served(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder; check the path"):
        example.open_classifier(tmp_path / "nowhere", "cpu")
    write_encoder(tmp_path / "bare", "roberta")
    with pytest.raises(InputError, match="has no head that is known here"):
        example.open_classifier(tmp_path / "bare", "cpu")
