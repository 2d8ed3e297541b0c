"""Fine-tuning of a BERT and of any encoder, in packs or single sequences: one loss, and a folder that `transformers` opens
without a word, whose answers are those of the run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.common.files import read_json
from gaudi_bert.config.sections import TASK_NAMES
from gaudi_bert.tasks.predict import predict
from gaudi_bert.tasks.prediction_files import PredictOptions
from tests.builders.agree import agree, identical
from tests.builders.bert_folder import without_dropout, write_bert, write_rows
from tests.builders.effort import LONG, sampled
from tests.builders.encoders import TOKENIZER, write_encoder
from tests.builders.json_lines import lines_of, losses_of
from tests.builders.reporters import QUIET, Listener, StopAfter
from tests.tasks.conftest import run

KINDS = {
    "classification": "AutoModelForSequenceClassification",
    "multi-label": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "reranking": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "masked-language-modelling": "AutoModelForMaskedLM",
    "causal-language-modelling": "AutoModelForCausalLM",
}
UPDATES = 20
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# All rows in each update, so that packs and single sequences are the same batches.
ALL_ROWS, FULL_BATCH = 13, {"epochs": UPDATES, "batch_sequences": 13, "micro_batch_packs": 13}


def check_answers(folder: Path, rows: Path) -> None:
    """The run's answers for pairs are those of the class of `transformers`, one row at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, KINDS["classification"]).from_pretrained(folder).eval()
    for row, answer in zip(lines_of(rows), lines_of(folder / "predictions.jsonl"), strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(row["text"], row["text_pair"], return_tensors="pt")).logits[0]
        agree(list(answer["probabilities"].values()), logits.softmax(-1).tolist(), 1e-5, scale=1.0)


# --- packs of rows of one length and of several, and single sequences

SEVERAL = {"row_lengths": [10, 16, 61], "max_sequence_length": 61}


@pytest.mark.parametrize(
    ("engine", "name", "task", "other"),
    [
        ("tensorflow", "bert", "classification", SEVERAL),
        ("pytorch", "bert", "token-classification", SEVERAL),
        ("pytorch", "modernbert", "regression", SEVERAL),
        ("pytorch", "roberta", "token-classification", {"depth": 1}),
    ],
    ids=["tensorflow", "pytorch", "modernbert", "single sequences"],
)
def test_packs_of_several_lengths_and_single_sequences_learn_what_packs_of_one_length_do(
    engine: str, name: str, task: str, other: dict[str, Any], tmp_path: Path
) -> None:
    """All sequences in each of twenty updates: the same losses."""
    if engine == "tensorflow":
        pytest.importorskip("tensorflow", exc_type=ImportError)
    model, rows = tmp_path / "m", write_rows(tmp_path / "rows.jsonl", task, ALL_ROWS, 1)
    if name == "bert":
        model = without_dropout(write_bert(model, layers=2), tmp_path)
    else:
        write_encoder(model, name, "AutoModelForMaskedLM", **NO_DROPOUT)
    listener, packs = Listener(), []
    for out, changes in (("packed", {"depth": 5}), ("other", other)):
        finetune = {**FULL_BATCH, "engine": engine, **changes}
        packs.append(run(task, rows, None, model, tmp_path / out, listener, finetune=finetune).content.packs)
    if other == SEVERAL:
        assert re.search(r"an update contains 13\.0 sequences on average: 1\.0 x .* 1\.0 x", listener.text)
    else:
        assert packs[0] < packs[1] == ALL_ROWS
    packed, others = losses_of(tmp_path / "packed"), losses_of(tmp_path / "other")
    assert len(packed) == UPDATES
    agree(others, packed, 1e-5, scale=1.0)


def test_rows_of_several_lengths_are_taken_up_to_the_same_bits(files: Any, model: Path, tmp_path: Path) -> None:
    """With dropout, and an evaluation in rows of several lengths, which is that of rows of one."""
    rows, changes = files["multi-label"], {**SEVERAL, "engine": "pytorch", "batch_sequences": 9}
    listener = Listener()
    run("multi-label", *rows, model, tmp_path / "out", listener, finetune=changes)
    assert "rows of 10, 16 and 61" in listener.text
    assert "times that of batches padded to their longest sequence" in listener.text
    for update in (1, 4):
        with pytest.raises(StoppedError):
            run("multi-label", *rows, model, tmp_path / "stopped", StopAfter(update), finetune=changes)
    run("multi-label", *rows, model, tmp_path / "stopped", finetune=changes)
    for name in ("model.safetensors", "metrics.json", "predictions.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    predict(tmp_path / "out", str(rows[1]), str(tmp_path / "answers.jsonl"), PredictOptions(), {}, reporter=QUIET)
    agree(lines_of(tmp_path / "answers.jsonl"), lines_of(tmp_path / "out" / "predictions.jsonl"), 1e-5, scale=1.0)


# --- what a run leaves, of a BERT and of other encoders

# Of embedding models see tests/tasks/test_embedding.py.
TASKS_WITH_ANSWERS = [task for task in TASK_NAMES if task != "embedding"]
CASES = [(name, task) for name in ("bert", "roberta") for task in TASKS_WITH_ANSWERS]
CASES += [("modernbert", task) for task in (TASKS_WITH_ANSWERS[:-1] if LONG else ["question-answering"])]


@pytest.mark.parametrize(("name", "task"), sampled(CASES, 4))
def test_what_a_run_leaves(name: str, task: str, files: Any, model: Path, finished: Any, tmp_path: Path) -> None:
    if name == "bert":
        out, result, start = finished(task).out, finished(task).result, model
    else:
        listener, out, start = Listener(), tmp_path / "out", tmp_path / "m"
        write_encoder(start, name, "AutoModelForMaskedLM")
        result = run(task, *files[task], start, out, listener).content
        assert "finetune: engine pytorch: the model is not a BERT" in listener.text
        losses = losses_of(out)
        assert losses[-1] < losses[0]
    again = run(task, *files[task], start, out)
    assert (again.skipped, again.content) == (True, result)
    assert result.sequences >= 53
    assert result.packs >= result.lower_bound
    assert result.evaluated_rows == 19
    (kind,) = read_json(out / "config.json")["architectures"]
    opened, report = getattr(transformers, KINDS[task]).from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(opened).__name__ == kind
    if result.labels:
        assert tuple(opened.config.id2label.values()) == result.labels
    library = transformers.AutoTokenizer.from_pretrained(out)
    ids = library("the cat")["input_ids"]
    assert ids[0] == library.cls_token_id if name == "bert" else ids == TOKENIZER.encode("the cat").ids
    if task.endswith("language-modelling"):
        assert set(result.metrics) == {"loss", "accuracy", "perplexity"}
        return
    assert set(result.metrics) > {"loss"}
    assert len(lines_of(out / "predictions.jsonl")) == 19
    predict(out, str(files[task][1]), str(tmp_path / "answers.jsonl"), PredictOptions(), {}, reporter=QUIET)
    agree(lines_of(tmp_path / "answers.jsonl"), lines_of(out / "predictions.jsonl"), 1e-5, scale=1.0)
    if task == "classification":
        check_answers(out, files[task][1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes_them"), [("deepseek", False), ("ibert", True)])
def test_what_a_model_stores_beside_its_parameters(name: str, changes_them: bool, files: Any, tmp_path: Path) -> None:
    """Given buffers are trained with, survive a stop, and are written as `transformers` itself would."""
    given = write_encoder(tmp_path / "m", name, "AutoModelForSequenceClassification")
    stored = given.state_dict().keys() - dict(given.named_parameters()).keys()
    assert stored
    with torch.no_grad():
        for buffer in map(given.get_buffer, sorted(stored)):
            buffer.add_(torch.linspace(-2.0, 2.0, buffer.numel()).reshape(buffer.shape))
    given.save_pretrained(tmp_path / "m")
    rows, out = files["classification"], tmp_path / "out"
    run("classification", *rows, tmp_path / "m", out)
    with pytest.raises(StoppedError):
        run("classification", *rows, tmp_path / "m", tmp_path / "stopped", StopAfter(5))
    run("classification", *rows, tmp_path / "m", tmp_path / "stopped")
    weights, resumed = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "stopped"))
    identical(resumed, weights)
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    opened.save_pretrained(tmp_path / "again")
    identical(load_file(tmp_path / "again" / "model.safetensors"), weights)
    assert any(not np.array_equal(weights[buffer], given.get_buffer(buffer).numpy()) for buffer in stored) == changes_them
    check_answers(out, rows[1])


@pytest.mark.parametrize(
    ("name", "task", "changes", "message"),
    [
        (
            "deberta",
            "classification",
            {},
            "model type 'deberta-v2': no mask keeps its sequences separate .*single sequence in each row",
        ),
        ("modernbert", "causal-language-modelling", {}, "model type 'modernbert': transformers has no class for causal"),
        (
            "roberta",
            "regression",
            {"engine": "tensorflow"},
            "finetune.engine .*= tensorflow: the TensorFlow engine supports only BERT",
        ),
        ("roberta", "regression", {"max_sequence_length": 65}, "max_sequence_length = 65: the model has only 64 positions"),
        (
            "roberta",
            "regression",
            {"row_lengths": [32, 65]},
            "row_lengths = 65: the model has only 64 positions; set a smaller value",
        ),
        ("roberta", "regression", {"row_lengths": [8, 16]}, "row_lengths: .* tokens.* the longest row .*16"),
        (
            "roberta",
            "embedding",
            {"row_lengths": [8, 16]},
            "row_lengths = .*: .* not supported for embedding",
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
