"""Stages in this process: the tasks of a pipeline, a pipeline in a bucket through a bad server, and compiled kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.artefacts.training import FineTuning
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.runners.local import RunRequest, _list_missing_inputs, run_stages
from gaudi_bert.runners.stage_table import list_pipeline_stages
from gaudi_bert.tasks.task_data import write_built_in_dataset
from tests.builders import folders
from tests.builders.bert_folder import write_bert, write_rows
from tests.builders.folders import comparable
from tests.builders.reporters import QUIET, a_run
from tests.builders.s3_server import S3Server, contents, faulty_proxy, quick, upload
from tools.kills import pipeline as small_pipeline

LEARN = {"max_sequence_length": 61, "depth": 5, "epochs": 2, "batch_sequences": 12, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and rows beside the pipeline file."""
    folder = tmp_path_factory.mktemp("tasks")
    write_bert(folder / "bert")
    (folder / "pipelines").mkdir()
    write_rows(folder / "pipelines" / "train.jsonl", "classification", 53, 1)
    write_rows(folder / "pipelines" / "held-out.jsonl", "classification", 19, 2)
    (folder / "pipelines" / "names.txt").write_text("none\nanimal\n")
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """The stages of a whole run, in `folder / "whole"`."""
    return run(folder, pipeline(folder), "finetune", "predict", "report", work="whole")


def pipeline(folder: Path, **changes: Any) -> PipelineSettings:
    files = {"data": "train.jsonl", "evaluation_data": "held-out.jsonl", "init_checkpoint": str(folder / "bert")}
    finetune = {**LEARN, **files, "log_every_updates": 1, **changes.pop("finetune", {})}
    task = {"name": "classification", "too_long": "truncate", "labels": "names.txt"}
    mapping = {"name": "tiny", "task": task, "finetune": finetune, "predict": {"data": "held-out.jsonl"}, **changes}
    return section_from_mapping(PipelineSettings, mapping, "test")


def run(folder: Path, settings: PipelineSettings, *stages: str, work: str = "work", **how: Any) -> dict[str, Any]:
    return run_stages(RunRequest(settings, folder / work, folder / "pipelines", a_run(**how)), stages)


def test_rows_are_learnt_and_answered_and_nothing_is_done_twice(folder: Path, done: dict[str, Any]) -> None:
    learnt = done["finetune"].content
    assert learnt == FineTuning.read(folder / "whole" / "tiny" / "finetune" / "metrics.json")
    assert learnt.evaluated_rows == done["predict"].rows == 19
    assert learnt.labels == ("none", "animal")
    assert 0 < learnt.baseline["accuracy"] < 1
    # Answers are those that fine-tuning gave of the same rows.
    ours, theirs = (
        [json.loads(line)["label"] for line in (folder / "whole" / "tiny" / name).read_text().splitlines()]
        for name in ("predict/predictions.jsonl", "finetune/predictions.jsonl")
    )
    assert ours == theirs
    assert "rows predicted by" in (folder / "whole" / "tiny" / "report.html").read_text()
    again = run(folder, pipeline(folder), "finetune", "predict", work="whole")
    assert again["finetune"].skipped
    assert again["predict"].skipped
    with pytest.raises(InputError, match=r"finetune.epochs: 2 in the file, 3 now"):
        run(folder, pipeline(folder, finetune={"epochs": 3}), "finetune", work="whole")


@pytest.mark.slow
def test_two_processes_learn_as_one_does(folder: Path, done: dict[str, Any]) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    one, in_two = done["finetune"].content, {"resources": {"workers": 2}, "finetune": {"engine": "pytorch"}}
    two = run(folder, pipeline(folder, **in_two), "finetune", work="two")["finetune"].content
    assert two.evaluated_rows == one.evaluated_rows == 19
    assert two.packs == one.packs
    assert two.baseline == one.baseline
    assert (folder / "two" / "tiny" / "finetune" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("bert", r"finetune\.init_checkpoint = .*bert: the file or folder does not exist; check the path"),
        ("pipelines/held-out.jsonl", r"finetune\.evaluation_data = .*held-out\.jsonl: the file or folder does not exist"),
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


def test_a_work_folder_in_a_store_is_refused_in_one_line(folder: Path) -> None:
    request = RunRequest(pipeline(folder), Path("s3://bucket/work"), folder / "pipelines", a_run())
    with pytest.raises(InputError, match="--work s3://bucket/work/tiny: the stages finetune and predict need a work"):
        run_stages(request, ["finetune"])


def test_built_in_rows_are_made_once_and_those_of_another_python_are_refused(tmp_path: Path) -> None:
    files = tmp_path / "rows" / "train.jsonl", tmp_path / "rows" / "evaluation.jsonl"
    write_built_in_dataset(*files, reporter=QUIET)
    before = [path.read_bytes() for path in files]
    assert all(set(json.loads(line)) == {"text", "label"} for line in before[1].splitlines())
    files[0].write_bytes(b"kept\n")
    write_built_in_dataset(*files, reporter=QUIET)
    assert files[0].read_bytes() == b"kept\n"
    kept = tmp_path / "rows" / "settings.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "inputs": {"python-docstrings": "2.7.18"}}))
    with pytest.raises(InputError, match=r"python-docstrings: .2\.7\.18. in the file"):
        write_built_in_dataset(*files, reporter=QUIET)
    write_built_in_dataset(*files, reporter=QUIET, overwrite=True)
    assert [path.read_bytes() for path in files] == before


# --- a pipeline from text in a bucket to a report in a bucket: the bytes of a run on a disk


SIZES = {"max_sequence_length": 31, "max_predictions": 5, "shards": 3, "duplicates": 2, "evaluation_fraction": 0.2}
RHYTHM = {"updates": 6, "save_every_updates": 2, "log_every_updates": 2, "evaluate_every_updates": 100, "threads": None}
SENTENCE = "the packed row holds several short sequences and no token of one of them sees another token"
WORDS = SENTENCE.split()


def stored_pipeline(text: str, store: dict[str, Any], **training: Any) -> PipelineSettings:
    return small_pipeline(text, store, SIZES, {**RHYTHM, **training})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "text"
    folder.mkdir()
    for number in range(3):
        documents = [
            "\n".join(" ".join(WORDS[(n * m + number) % 11 : (n * m + number) % 11 + 6]) + "." for m in range(2, 9))
            for n in range(29)
        ]
        (folder / f"book-{number}.txt").write_text("\n\n".join(documents) + "\n")
    return folder


@pytest.fixture(scope="module")
def on_disk(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the pipeline makes on a disk."""
    work = tmp_path_factory.mktemp("disk")
    settings = stored_pipeline(text.name, {})
    run_stages(RunRequest(settings, work, text.parent, a_run(workers=1)), list_pipeline_stages(settings))
    return folders.contents(work / "small")


def test_no_artefact_names_a_folder_of_this_machine(
    on_disk: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = str(tmp_path_factory.getbasetemp()).encode()
    assert [name for name, content in on_disk.items() if here in content] == []


@pytest.mark.slow
def test_a_bucket_behind_a_bad_server(s3: S3Server, text: Path, on_disk: dict[str, bytes], tmp_path: Path) -> None:
    objects = ObjectStore(quick(s3.endpoint))
    upload(text, "s3://bucket/text", objects)
    with faulty_proxy(s3.port, seed=5) as proxy:
        proxy.share = 0.1
        store = {**quick(proxy.endpoint).model_dump(), "scratch": str(tmp_path)}
        settings = stored_pipeline("s3://bucket/text", store)
        run = RunRequest(settings, Path("s3://bucket/work"), tmp_path, a_run(workers=1))
        summaries = run_stages(run, list_pipeline_stages(run.settings))
        assert sum(proxy.happened.values()) > 10
        again = run_stages(run, list_pipeline_stages(run.settings))
        assert _list_missing_inputs(run.work_folder, "report") == []
    assert list(summaries) == list(again) == list_pipeline_stages(run.settings)
    assert again["train"].skipped
    made = contents("s3://bucket/work/small", objects)
    assert comparable(made, "examples.json") == comparable(on_disk, "examples.json")
    assert {"report.html", "train/training.json", "train/metrics.jsonl"} <= made.keys()
    assert any(name.startswith("train/tensorboard/") for name in made)
    assert list(tmp_path.iterdir()) == [], "scratch is left"


@pytest.mark.slow
def test_training_goes_on_from_the_bucket(s3: S3Server, on_disk: dict[str, bytes], tmp_path: Path) -> None:
    """A run that lost its machine after the checkpoint of update 4: what is put is what goes on."""
    objects = ObjectStore(quick(s3.endpoint))
    for name, content in contents("s3://bucket/work/small", objects).items():
        if not name.startswith("train/") or name.endswith(("00000004.safetensors", "settings.json", "metrics.jsonl")):
            objects.write(f"s3://bucket/resumed/small/{name}", content)
    settings = stored_pipeline("s3://bucket/text", quick(s3.endpoint).model_dump())
    run_stages(RunRequest(settings, Path("s3://bucket/resumed"), tmp_path, a_run()), ["train", "evaluate"])
    made = contents("s3://bucket/resumed/small", objects)
    assert comparable(made, "examples.json") == comparable(on_disk, "examples.json")
    lines = [json.loads(line) for line in made["train/metrics.jsonl"].decode().splitlines()]
    assert [line["update"] for line in lines if line["kind"] == "train"] == [2, 4, 6]
