"""Fine-tuning from files to a folder that transformers opens: what it leaves, killed and run again, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.training import FineTuning
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.runs.finetune import finetune
from gaudi_bert.runs.labelled_data import FineTuneFiles
from gaudi_bert.tasks.task import import_task_class
from gaudi_bert.tasks.task_models import load_initial_weights
from tests.builders.agree import agree
from tests.builders.bert_folder import write_bert
from tests.builders.json_lines import lines_of, write_lines
from tests.builders.reporters import Listener
from tests.tasks.conftest import run


# Spans in windows are put together from several sequences; the other tasks are in tests/tasks/test_equivalence.
def test_the_best_checkpoint_is_kept_and_nothing_is_done_twice(files, model, tmp_path) -> None:
    data, evaluation = files["classification"]
    changes = {"best_metric": "loss", "learning_rate": 0.4, "warmup_share": 0.0, "epochs": 3, "evaluate_every_updates": 1}
    result = run("classification", data, evaluation, model, tmp_path / "out", finetune=changes).content
    losses = {
        line["update"]: line["loss"] for line in lines_of(tmp_path / "out/metrics.jsonl") if line["kind"] == "evaluation"
    }
    assert result == FineTuning.read(tmp_path / "out" / "metrics.json")
    assert result.best_update == min(losses, key=losses.__getitem__) < result.updates
    agree(result.metrics["loss"], losses[result.best_update], 1e-12, scale=1.0)
    again = run("classification", data, evaluation, model, tmp_path / "out", finetune=changes)
    assert again.skipped
    still = {"learning_rate": 1e-30, "epochs": 1, "evaluate_every_updates": 1}  # nothing moves: equal in all
    result = run("classification", data, evaluation, model, tmp_path / "still", finetune=still).content
    assert result.best_update == result.updates > 1
    with pytest.raises(InputError, match=r"finetune.epochs: 3 in the file, 4 now"):
        run("classification", data, evaluation, model, tmp_path / "out", finetune={**changes, "epochs": 4})


def test_a_finished_model_is_fine_tuned_further(files, finished, tmp_path) -> None:
    """Its head is kept; and a decoder goes on as one."""
    listener = Listener()
    for task in ("classification", "causal-language-modelling"):
        run(task, *files[task], finished(task).out, tmp_path / task, listener, dry_run=True)
    assert listener.text.count("0 variables are initialized randomly") == 2
    decoder = finished("causal-language-modelling").out
    assert json.loads((decoder / "config.json").read_text())["is_decoder"]
    start = load_initial_weights(
        decoder, import_task_class("causal-language-modelling")(TaskSettings(name="causal-language-modelling"))
    )
    assert start.config.attention == "causal"


GOOD = ({"text": "the cat", "label": "a"}, {"text": "the dog", "label": "b"})


@pytest.mark.parametrize(
    ("task", "learnt", "measured", "message"),
    [
        ("classification", GOOD, ({"text": "the", "label": "c"},), r"evaluation\.jsonl: line 1 \(row 1\): .*'c'"),
        (
            "classification",
            (*GOOD, {"text": "cat " * 70, "label": "a"}),
            GOOD,
            r"line 3 \(row 3\): the row has 72 tokens, .* raise finetune\.max_s",
        ),
        ("classification", GOOD[:1], GOOD[:1], r"only the label 'a'"),
        ("token-classification", ({"tokens": ["a", "b"], "tags": ["B-x", "NN"]},), GOOD, r"the tag 'NN' does not match"),
    ],
)
def test_bad_rows_are_named(task, learnt, measured, message, model, tmp_path) -> None:
    data, evaluation = write_lines(tmp_path / "train.jsonl", learnt), write_lines(tmp_path / "evaluation.jsonl", measured)
    with pytest.raises(InputError, match=message) as error:
        run(task, data, evaluation, model, tmp_path / "out", task_settings={"too_long": "error"})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer_is_refused(files, model, tmp_path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    for name in ("vocab.txt", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(InputError, match=r"contains no tokenizer; .*--vocab"):
        run("classification", files["classification"][0], None, bare, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("task", "evaluates", "changes", "message"),
    [
        ("classification", False, {"max_sequence_length": 65}, r"max_sequence_length = 65: the model has only 64 positions"),
        (None, False, {}, r"--task \(task\.name\): the task is not set"),
        ("classification", False, {"best_metric": "accuracy"}, r"finetune\.best_metric"),
        (
            *("classification", True, {"best_metric": "pearson"}),
            "best_metric = pearson: classification does not have this metric; choose one of .*accuracy",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(files, model, tmp_path, task, evaluates, changes, message) -> None:
    data, evaluation = files["classification"]
    with pytest.raises(InputError, match=message):
        run(task, data, evaluation if evaluates else None, model, tmp_path / "out", finetune=changes)
    assert not (tmp_path / "out").exists()


def test_no_evaluation_data_leaves_the_last_weights(files, model, tmp_path) -> None:
    data, _ = files["regression"]
    result = run("regression", data, None, model, tmp_path / "out", finetune={"epochs": 1}).content
    assert (result.metrics, result.best_update) == ({}, result.updates)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert np.isfinite(result.packing_factor)


def everything_in(out: Path) -> dict[str, bytes]:
    """All that a run leaves, but for how fast it was."""
    files = [path for path in out.rglob("*") if path.is_file()]
    clocks = {out / "metrics.jsonl", out / "engine.log", *out.glob("tensorboard/*")}
    return {str(path.relative_to(out)): path.read_bytes() for path in files if path not in clocks}


def test_a_run_that_was_killed_before_the_model_was_written_leaves_the_same_bytes(files, finished, model, tmp_path) -> None:
    """Of one that is killed in its updates see `test_embedding.py` and `test_finetune_engines.py`."""
    whole, killed = finished("classification").out, tmp_path / "killed"
    shutil.copytree(whole, killed)
    for name in ("metrics.json", "model.safetensors", "predictions.jsonl"):
        (killed / name).unlink()
    shutil.rmtree(killed / "tensorboard")
    listener = Listener()
    run("classification", *files["classification"], model, killed, listener)
    assert "finetune: resuming after update " in listener.text
    assert "train: " not in listener.text
    assert everything_in(killed) == everything_in(whole)


def test_a_dry_run_compares_lengths_of_rows_and_depths(files, tmp_path) -> None:
    """Rows are as long as the model has positions, where nobody says it; and the padded batches are those of an update."""
    model, compared = write_bert(tmp_path / "m", layers=1, positions=64), []
    for micro_batch_packs in (1, 16):
        changes = {"batch_sequences": 8, "micro_batch_packs": micro_batch_packs}
        settings = section_from_mapping(PipelineSettings, {"task": {"name": "classification"}, "finetune": changes}, "test")
        listener, inputs = Listener(), FineTuneFiles(files["classification"][0], None, model)
        planned = finetune(settings, inputs, tmp_path / "out", reporter=listener, dry_run=True)
        assert planned.plan.slots_per_pack == 64
        table = [line.split() for line in listener.lines if line.strip().startswith("64 ")]
        assert [row[1] for row in table] == ["3", "6", "12", "max"]
        assert [int(row[2]) for row in table] == sorted((int(row[2]) for row in table), reverse=True)
        assert int(table[0][2]) == 18  # of 53 rows
        compared.append([line for line in listener.lines if "batches padded to their longest" in line])
    assert len(compared[0]) == 1
    assert compared[0] == compared[1]
