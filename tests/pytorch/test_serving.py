"""The served classifier of examples/: over HTTP, each text has the answer that `transformers` gives it alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("transformers")
pytest.importorskip("fastapi", reason="FASTAPI MISSING: install the extra dev to test the served classifier")

from fastapi.testclient import TestClient  # noqa: E402

from gaudi_bert.common.errors import InputError  # noqa: E402
from tests.builders.agree import agree  # noqa: E402
from tests.builders.encoders import TEXTS, TOKENIZER, write_encoder  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "serving" / "classifier.py"
NAMES = {"id2label": {0: "bad", 1: "good", 2: "none"}, "label2id": {"bad": 0, "good": 1, "none": 2}}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    specification = importlib.util.spec_from_file_location("served_classifier", SCRIPT)
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
def client(example: ModuleType, model: tuple[Path, Any]) -> TestClient:
    return TestClient(example.make_app(example.open_classifier(model[0], "cpu")))


def asked(client: TestClient, texts: list[str]) -> list[dict[str, Any]]:
    response = client.post("/predict", json={"texts": texts})
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["answers"]
    return answers


def test_each_text_has_its_own_answer_in_order(client: TestClient, model: tuple[Path, Any]) -> None:
    assert client.get("/ready").json() == {"task": "classification", "labels": ["bad", "good", "none"]}
    answers = asked(client, TEXTS)
    assert len(answers) == len(TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        with torch.no_grad():
            logits = model[1].eval()(input_ids=torch.tensor([TOKENIZER.encode(text).ids])).logits[0]
        expected = dict(zip(("bad", "good", "none"), logits.softmax(-1).tolist(), strict=True))
        agree(answer["probabilities"], expected, 1e-4, scale=1.0)
        assert answer["label"] == max(answer["probabilities"], key=answer["probabilities"].__getitem__)


def test_requests_at_once_have_the_answers_of_requests_in_turn(client: TestClient) -> None:
    batches = [TEXTS[first::5] for first in range(5)]
    in_turn = [asked(client, batch) for batch in batches]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda batch: asked(client, batch), batches)) == in_turn


@pytest.mark.parametrize("body", [{}, {"texts": []}, {"texts": "one"}, {"texts": ["a", 1]}, {"texts": ["a"] * 8193}])
def test_what_is_not_a_batch_of_texts_is_refused(client: TestClient, body: dict[str, Any]) -> None:
    assert client.post("/predict", json=body).status_code == 422


def test_a_wrong_folder_is_refused_before_it_is_served(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder; check the path"):
        example.open_classifier(tmp_path / "nowhere", "cpu")
    write_encoder(tmp_path / "bare", "roberta")
    with pytest.raises(InputError, match="has no head that is known here"):
        example.open_classifier(tmp_path / "bare", "cpu")
