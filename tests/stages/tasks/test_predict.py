"""Answers as a user gets them, in the order of the rows: those of transformers' own models, one row at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.stages.tasks.predict import PredictOptions, predict
from tests.builders.agree import agree
from tests.builders.bert_folder import CONFIG, write_tokenizer
from tests.builders.reporters import QUIET

pytestmark = pytest.mark.slow

TEXTS = ["the cat sat on the mat", "dogs runs", "over the hill, and south!", "the river flows north", "unable mat"] * 4
CONTEXT = "The river flows north over the hill, and the cat sat on the mat. Unable dogs runs south!"


def write_model(folder: Path, architecture: str, **config: Any) -> Any:
    """A folder as transformers writes it, with random weights that make answers differ; returns the model."""
    import torch
    import transformers

    torch.manual_seed(3)
    wanted = transformers.BertConfig(**{**CONFIG, "initializer_range": 0.3, **config})
    model = getattr(transformers, architecture)(wanted).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(folder: Path, data: Path, out: Path, options: PredictOptions | None = None, **changes: Any) -> list[dict[str, Any]]:
    predict(folder, str(data), str(out), options or PredictOptions(), changes, reporter=QUIET)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def logits_alone(model: Any, folder: Path, *texts: str) -> Any:
    import torch
    from transformers import AutoTokenizer

    with torch.inference_mode():
        return model(**AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt"))


def test_classes_of_texts(tmp_path: Path) -> None:
    names = {0: "bad", 1: "fair", 2: "good"}
    model = write_model(tmp_path / "m", "BertForSequenceClassification", id2label=names, num_labels=3)
    rows = [{"text": text, "label": "whatever"} for text in TEXTS]
    answers = run(tmp_path / "m", write_rows(tmp_path / "x.jsonl", rows), tmp_path / "y.jsonl")
    assert len(answers) == len(TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = logits_alone(model, tmp_path / "m", text).logits.softmax(-1)[0].numpy()
        agree([answer["probabilities"][name] for name in names.values()], expected, 1e-5, scale=1.0)
        assert answer["label"] == names[int(expected.argmax())]
    assert len({answer["label"] for answer in answers}) > 1


def test_several_labels_and_pairs(tmp_path: Path) -> None:
    names = {0: "joy", 1: "fear"}
    given = {"id2label": names, "num_labels": 2, "problem_type": "multi_label_classification"}
    model = write_model(tmp_path / "m", "BertForSequenceClassification", **given)
    rows = [{"text": text, "text_pair": "the cat"} for text in TEXTS]
    for text, answer in zip(
        TEXTS, run(tmp_path / "m", write_rows(tmp_path / "x.jsonl", rows), tmp_path / "y.jsonl"), strict=True
    ):
        expected = logits_alone(model, tmp_path / "m", text, "the cat").logits.sigmoid()[0].numpy()
        agree(list(answer["probabilities"].values()), expected, 1e-5, scale=1.0)
        assert answer["labels"] == [names[place] for place in np.flatnonzero(expected >= 0.5)]


def test_numbers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=1, problem_type="regression")
    data = write_rows(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    expected = [float(logits_alone(model, tmp_path / "m", text).logits) for text in TEXTS]
    answers = run(tmp_path / "m", data, tmp_path / "y.jsonl")
    agree([answer["value"] for answer in answers], expected, 1e-5, scale=1.0)


def test_tags_with_their_characters(tmp_path: Path) -> None:
    names = {0: "O", 1: "B-animal", 2: "I-animal", 3: "B-place"}
    model = write_model(tmp_path / "m", "BertForTokenClassification", id2label=names, num_labels=4)
    data = write_rows(tmp_path / "x.jsonl", [{"text": CONTEXT}, {"tokens": ["the", "cats", "runs"]}, {"text": "a hill"}])
    answers = run(tmp_path / "m", data, tmp_path / "y.jsonl")
    assert [list(answer) for answer in answers] == [["tags"]] * 3
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    expected = logits_alone(model, tmp_path / "m", CONTEXT).logits.softmax(-1)[0].numpy()
    offsets = tokenizer(CONTEXT, return_offsets_mapping=True)["offset_mapping"]
    by_start = {start: place for place, (start, end) in enumerate(offsets) if end > start}
    for tag in answers[0]["tags"]:
        first = by_start[tag["start"]]
        assert names[int(expected[first].argmax())].endswith(tag["tag"])
        word = CONTEXT[tag["start"] : tag["end"]]
        assert word == word.strip() != ""
        if " " not in word and word.isalpha():
            agree(tag["score"], expected[first].max(), 1e-5, scale=1.0)
    assert answers[0]["tags"]


def test_answers_to_questions_packed_or_not(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "BertForQuestionAnswering")
    rows = [{"question": question, "context": CONTEXT} for question in ("what flows north", "who sat", "where")]
    data = write_rows(tmp_path / "x.jsonl", rows)
    windows = PredictOptions(max_sequence_length=24)
    answers = run(tmp_path / "m", data, tmp_path / "y.jsonl", windows, n_best=3, stride=6)
    alone = PredictOptions(max_sequence_length=24, packed=False)
    unpacked = run(tmp_path / "m", data, tmp_path / "z.jsonl", alone, n_best=3, stride=6)
    for one, other in zip(answers, unpacked, strict=True):
        assert len(one["answers"]) == 3
        for mine, theirs in zip(one["answers"], other["answers"], strict=True):
            assert (mine["text"], mine["start"], mine["end"]) == (theirs["text"], theirs["start"], theirs["end"])
            assert CONTEXT[mine["start"] : mine["end"]] == mine["text"]
            agree(mine["score"], theirs["score"], 1e-5, scale=1.0)


def test_two_classes_that_transformers_did_not_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=2)
    rows = write_rows(tmp_path / "x.jsonl", [{"text": "cat"}, {"text": "the cat"}])
    answers = run(tmp_path / "m", rows, tmp_path / "y.jsonl")
    assert [set(answer["probabilities"]) for answer in answers] == [{"LABEL_0", "LABEL_1"}] * 2


def test_what_cannot_be_answered(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "BertForSequenceClassification", num_labels=2, id2label={0: "bad", 1: "good"})
    long = write_rows(tmp_path / "x.jsonl", [{"text": "cat"}, {"text": "cat " * 90}])
    with pytest.raises(InputError, match=r"x.jsonl: row 2: has 92 tokens, a sequence has at most 64"):
        run(tmp_path / "m", long, tmp_path / "y.jsonl")
    assert len(run(tmp_path / "m", long, tmp_path / "y.jsonl", too_long="truncate")) == 2
    write_model(tmp_path / "mlm", "BertForMaskedLM")
    with pytest.raises(InputError, match="masked-language-modelling has no answers to predict"):
        run(tmp_path / "mlm", long, tmp_path / "z.jsonl")
    with pytest.raises(InputError, match="--precision float16: choose one of float32, bfloat16"):
        PredictOptions(precision="float16")  # type: ignore[arg-type]
