"""Fine-tuning of any encoder: a folder that `transformers` opens without a word, whose answers are those of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)

import transformers

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.config.sections import TASK_NAMES
from gaudi_bert.tasks.answers import PredictOptions
from gaudi_bert.tasks.predict import predict
from tests.builders.agree import agree
from tests.builders.effort import LONG
from tests.builders.encoders import TOKENIZER, write_encoder
from tests.builders.reporters import QUIET, Listener
from tests.tasks.conftest import run

pytestmark = pytest.mark.slow

KINDS = {
    "classification": "AutoModelForSequenceClassification",
    "multi-label": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "masked-language-modelling": "AutoModelForMaskedLM",
    "causal-language-modelling": "AutoModelForCausalLM",
}
CASES = [("roberta", task) for task in TASK_NAMES]
CASES += [("modernbert", task) for task in (TASK_NAMES[:-1] if LONG else ["question-answering"])]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "task"), CASES)
def test_what_a_run_leaves(name: str, task: str, files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", name, "AutoModelForMaskedLM")
    listener, out = Listener(), tmp_path / "out"
    result = run(task, *files[task], tmp_path / "m", out, listener).content
    assert "finetune: engine pytorch: the model is not a BERT" in listener.text
    losses = [line["loss"] for line in lines_of(out / "metrics.jsonl") if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    opened, report = getattr(transformers, KINDS[task]).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert read_json(out / "config.json")["architectures"] == [type(opened).__name__]
    assert run(task, *files[task], tmp_path / "m", out).skipped
    library = transformers.AutoTokenizer.from_pretrained(out)
    assert library("the cat")["input_ids"] == TOKENIZER.encode("the cat").ids
    if task.endswith("language-modelling"):
        assert set(result.metrics) == {"loss", "accuracy", "perplexity"}
        return
    predict(out, str(files[task][1]), str(tmp_path / "answers.jsonl"), PredictOptions(), {}, reporter=QUIET)
    agree(lines_of(tmp_path / "answers.jsonl"), lines_of(out / "predictions.jsonl"), 1e-5, scale=1.0)
    if task == "classification":
        for row, answer in zip(lines_of(files[task][1]), lines_of(out / "predictions.jsonl"), strict=True):
            logits = opened.eval()(**library(row["text"], row["text_pair"], return_tensors="pt")).logits
            agree(list(answer["probabilities"].values()), logits[0].softmax(-1).tolist(), 1e-5, scale=1.0)


def test_a_bare_encoder_and_its_own_head(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    write_encoder(tmp_path / "bare", "roberta")
    listener = Listener()
    run("classification", *files["classification"], tmp_path / "bare", tmp_path / "out", listener)
    assert "; 4 variables start from random numbers" in listener.text
    run("classification", *files["classification"], tmp_path / "out", tmp_path / "further", listener, dry_run=True)
    assert "; 0 variables start from random numbers" in listener.text


@pytest.mark.parametrize(
    ("name", "task", "changes", "message"),
    [
        ("deberta", "classification", {}, "model type 'deberta-v2': no mask is right for it .*; give it rows of one"),
        ("modernbert", "causal-language-modelling", {}, "model type 'modernbert': transformers has no class for causal"),
        ("roberta", "regression", {"engine": "tensorflow"}, "finetune.engine = tensorflow: TensorFlow runs BERT only here"),
        (
            "roberta",
            "regression",
            {"max_sequence_length": 65},
            "finetune.max_sequence_length = 65: the model has 64 positions",
        ),
    ],
)
def test_what_is_refused(
    name: str, task: str, changes: dict[str, Any], message: str, files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    write_encoder(tmp_path / "m", name)
    with pytest.raises(InputError, match=message):
        run(task, *files[task], tmp_path / "m", tmp_path / "out", finetune=changes)
    assert not (tmp_path / "out").exists()
