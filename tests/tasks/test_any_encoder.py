"""`embed` and `predict` with the folder of any encoder: what `transformers` gives each text alone, or a line that helps."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from gaudi_bert.common import errors  # noqa: E402
from gaudi_bert.common.errors import install_command  # noqa: E402
from tests.builders.agree import agree  # noqa: E402
from tests.builders.bert_folder import write_bert  # noqa: E402
from tests.builders.command_line import Done, run_command  # noqa: E402
from tests.builders.encoders import LABELS, TEXTS, TOKENIZER, write_encoder  # noqa: E402

pytestmark = pytest.mark.slow


def answered(folder: Path, command: str, out: str, *more: str) -> Done:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return run_command(command, "--model", "m", "--data", "texts.jsonl", "--out", out, *more, folder=folder)


def hidden_of(model: Any, text: str) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([TOKENIZER.encode(text).ids]))[0][0]


@pytest.mark.parametrize("name", ["roberta", "modernbert"])
def test_vectors(tmp_path: Path, name: str) -> None:
    model = write_encoder(tmp_path / "m", name)
    done = answered(tmp_path, "embed", "vectors.npy")
    assert done.returncode == 0, done.stderr
    wanted = np.stack([hidden_of(model, text).mean(0).numpy() for text in TEXTS])
    agree(np.load(tmp_path / "vectors.npy"), wanted, 1e-5, scale=1.0)
    again = answered(tmp_path, "embed", "vectors.npy")
    assert again.returncode == 0, again.stderr
    unpacked = answered(tmp_path, "embed", "other.npy", "--unpacked", "--pooling", "cls", "--normalize")
    assert unpacked.returncode == 0, unpacked.stderr
    first = np.stack([torch.nn.functional.normalize(hidden_of(model, text)[0], dim=-1).numpy() for text in TEXTS])
    agree(np.load(tmp_path / "other.npy"), first, 1e-5, scale=1.0)


def test_answers_and_what_is_too_long(tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "m", "roberta", "AutoModelForSequenceClassification", **LABELS)
    done = answered(tmp_path, "predict", "answers.jsonl")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    for text, answer in zip(TEXTS, answers, strict=True):
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([TOKENIZER.encode(text).ids])).logits
        agree([*answer["probabilities"].values()], logits.softmax(-1)[0].tolist(), 1e-5, scale=1.0)
    refused = answered(tmp_path, "predict", "short.jsonl", "--max-sequence-length", "5")
    assert (refused.returncode, "a sequence has at most 5" in refused.stderr) == (2, True)


def test_tags(tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", "modernbert", "AutoModelForTokenClassification", **LABELS)
    done = answered(tmp_path, "predict", "tags.jsonl", "--precision", "bfloat16")
    assert done.returncode == 0, done.stderr
    tags = [json.loads(line)["tags"] for line in (tmp_path / "tags.jsonl").read_text().splitlines()]
    assert len(tags) == len(TEXTS)
    assert all(0 <= tag["start"] < tag["end"] <= len(text) for text, each in zip(TEXTS, tags, strict=True) for tag in each)


@pytest.mark.parametrize(
    ("name", "command", "message"),
    [
        (
            "deberta",
            "embed",
            "m: model type 'deberta-v2': no mask is right for it .*; transformers or sent",
        ),
        ("roberta", "predict", "m: its architecture is RobertaModel, which has no head for a task; fine-tune it first"),
    ],
)
def test_what_cannot_be_served_has_a_way_on(tmp_path: Path, name: str, command: str, message: str) -> None:
    write_encoder(tmp_path / "m", name)
    done = answered(tmp_path, command, "out.jsonl")
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr


def test_without_one_of_both_softwares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: set[str] = set()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else found(name, *more))
    write_bert(tmp_path / "m")
    assert answered(tmp_path, "embed", "tensorflow.npy").returncode == 0
    hidden.add("tensorflow")
    assert answered(tmp_path, "embed", "pytorch.npy").returncode == 0
    agree(np.load(tmp_path / "pytorch.npy"), np.load(tmp_path / "tensorflow.npy"), 1e-5, scale=1.0)
    hidden |= {"torch", "transformers"}
    write_encoder(tmp_path / "m", "roberta")
    done = answered(tmp_path, "embed", "none.npy")
    reason = "m: is a model of type roberta, which needs transformers; run: "
    assert (done.returncode, reason in done.stderr) == (2, True)
    monkeypatch.setattr(errors, "_TENSORFLOW_PYTHONS", ())  # as on Python 3.12
    write_bert(tmp_path / "bert")
    done = answered(tmp_path, "embed", "none.npy", "--model", "bert")
    assert (done.returncode, done.stderr.rstrip().endswith(install_command("pytorch"))) == (2, True)


def test_tensorflow_is_loaded_without_keras_which_comes_when_it_is_asked_for() -> None:
    pytest.importorskip("tensorflow", exc_type=ImportError)
    program = """
import sys
from gaudi_bert.common.tensorflow_environment import without_keras
with without_keras():
    import tensorflow as tf
print("keras.src" in sys.modules)
with without_keras():
    pass
print(tf.keras.layers.Dense(2)(tf.ones([1, 3])).shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["False", "(1, 2)"], done.stderr
