"""The stages of tasks in a pipeline, from pretrained weights to answers: run, run again, killed, and with things missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.training import FineTuning
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, pipeline_from_mapping
from gaudi_bert.runners.local import run_stages
from gaudi_bert.runners.stage_calls import RunRequest
from gaudi_bert.tasks.task_rows import make_built_in_rows
from tests.builders.bert_folder import write_bert
from tests.builders.reporters import QUIET
from tests.builders.task_files import write_rows

LEARN = {"max_sequence_length": 61, "depth": 5, "epochs": 2, "batch_sequences": 12, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and rows beside the pipeline file."""
    folder = tmp_path_factory.mktemp("tasks")
    write_bert(folder / "bert")
    (folder / "pipelines").mkdir()
    write_rows(folder / "pipelines" / "train.jsonl", "classification", 53, 1)
    write_rows(folder / "pipelines" / "held-out.jsonl", "classification", 19, 2)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """The stages of a whole run, in `folder / "whole"`."""
    return run(folder, pipeline(folder), "finetune", "predict", "report", work="whole")


def pipeline(folder: Path, **changes: Any) -> PipelineSettings:
    files = {"data": "train.jsonl", "evaluation_data": "held-out.jsonl", "init_checkpoint": str(folder / "bert")}
    finetune = {**LEARN, **files, "log_every_updates": 1, **changes.pop("finetune", {})}
    task = {"name": "classification", "too_long": "truncate"}
    mapping = {"name": "tiny", "task": task, "finetune": finetune, "predict": {"data": "held-out.jsonl"}, **changes}
    return pipeline_from_mapping(mapping, "test")


def run(folder: Path, settings: PipelineSettings, *stages: str, work: str = "work", **options: Any) -> dict[str, Any]:
    reporter = options.pop("reporter", QUIET)
    return run_stages(RunRequest(settings, folder / work, folder / "pipelines", reporter, **options), stages)


def test_rows_are_learnt_and_answered_and_nothing_is_done_twice(folder: Path, done: dict[str, Any]) -> None:
    learnt = done["finetune"].content
    assert learnt == FineTuning.read(folder / "whole" / "tiny" / "finetune" / "metrics.json")
    assert learnt.evaluated_rows == done["predict"].rows == 19
    assert 0 < learnt.baseline["accuracy"] < 1
    # Answers are those that fine-tuning gave of the same rows.
    ours, theirs = (
        [json.loads(line)["label"] for line in (folder / "whole" / "tiny" / name).read_text().splitlines()]
        for name in ("predict/predictions.jsonl", "finetune/predictions.jsonl")
    )
    assert ours == theirs
    assert "rows answered by" in (folder / "whole" / "tiny" / "report.html").read_text()
    again = run(folder, pipeline(folder), "finetune", "predict", work="whole")
    assert again["finetune"].skipped
    assert again["predict"].skipped
    with pytest.raises(InputError, match=r"finetune\.epochs = 2, not finetune\.epochs = 3"):
        run(folder, pipeline(folder, finetune={"epochs": 3}), "finetune", work="whole")


@pytest.mark.slow
def test_two_processes_learn_as_one_does(folder: Path, done: dict[str, Any]) -> None:
    pytest.importorskip("horovod", reason="HOROVOD MISSING: run `make setup-horovod` to test several processes")
    one = done["finetune"].content
    two = run(folder, pipeline(folder, resources={"workers": 2}), "finetune", work="two")["finetune"].content
    assert two.evaluated_rows == one.evaluated_rows == 19
    assert two.packs == one.packs
    assert two.baseline == one.baseline
    assert (folder / "two" / "tiny" / "finetune" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("bert", r"finetune\.init_checkpoint = .*bert: no such file or folder; check the path"),
        ("pipelines/train.jsonl", r"finetune\.data = .*train\.jsonl: no such file"),
        ("pipelines/held-out.jsonl", r"finetune\.evaluation_data = .*held-out\.jsonl: no such file"),
    ],
)
def test_what_is_missing_is_one_line_and_nothing_is_made(missing: str, said: str, folder: Path, tmp_path: Path) -> None:
    for name in ("bert", "pipelines"):
        shutil.copytree(folder / name, tmp_path / name)
    folder, path = tmp_path, tmp_path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(InputError, match=said) as error:
        run(folder, pipeline(folder), "finetune")
    assert "\n" not in str(error.value)
    assert not (folder / "work" / "tiny" / "finetune").exists()


def test_without_its_own_weights_a_pipeline_says_what_to_run_first(folder: Path) -> None:
    with pytest.raises(InputError, match=r"tiny/train/training\.json: does not exist; run the stage `train` first"):
        run(folder, pipeline(folder, finetune={"init_checkpoint": None}), "finetune", work="empty")
    with pytest.raises(InputError, match=r"tiny/finetune/metrics\.json: does not exist; run the stage `finetune` first"):
        run(folder, pipeline(folder), "predict", work="empty")


def test_a_work_folder_in_a_store_is_refused_in_one_line(folder: Path) -> None:
    settings = pipeline(folder)
    with pytest.raises(
        InputError, match=r"--work s3://bucket/work/tiny: the stages finetune and predict need a work folder"
    ):
        run_stages(RunRequest(settings, Path("s3://bucket/work"), folder / "pipelines", QUIET), ["finetune"])


def test_names_of_labels_lie_beside_the_pipeline_file(folder: Path) -> None:
    (folder / "pipelines" / "names.txt").write_text("animal\nnone\n")
    task = {"name": "classification", "too_long": "truncate", "labels": "names.txt"}
    done = run(folder, pipeline(folder, task=task, finetune={"epochs": 1}), "finetune", work="labels")
    assert done["finetune"].content.labels == ("animal", "none")


def test_built_in_rows_are_made_once_and_those_of_another_python_are_refused(tmp_path: Path) -> None:
    files = tmp_path / "rows" / "train.jsonl", tmp_path / "rows" / "evaluation.jsonl"
    make_built_in_rows(*files, reporter=QUIET)
    before = [path.read_bytes() for path in files]
    assert all(set(json.loads(line)) == {"text", "label"} for line in before[1].splitlines())
    files[0].write_bytes(b"kept\n")
    make_built_in_rows(*files, reporter=QUIET)
    assert files[0].read_bytes() == b"kept\n"
    kept = tmp_path / "rows" / "settings.json"
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps({**content, "inputs": {"python-docstrings": "2.7.18"}}))
    with pytest.raises(InputError, match=r"python-docstrings: 2\.7\.18 there"):
        make_built_in_rows(*files, reporter=QUIET)
    make_built_in_rows(*files, reporter=QUIET, overwrite=True)
    assert [path.read_bytes() for path in files] == before
