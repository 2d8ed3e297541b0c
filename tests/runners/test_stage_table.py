"""The table of stages: its rows belong together; what each waits for; its images and resources."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.local import RunRequest, _list_missing_inputs, run_stages, wait_for_inputs
from gaudi_bert.runners.stage_table import (
    STAGES,
    list_input_paths,
    list_pipeline_stages,
    preview_stage,
    stage_image_name,
)
from tests.builders.plans import write_plan
from tests.builders.reporters import a_run

TASK = ["task.name=classification", "finetune.data=python-docstrings", "predict.data=python-docstrings"]


def test_every_path_of_a_pipeline_file_is_read_by_a_stage() -> None:
    paths = ("prepare.evaluation_records", "prepare.vocab", "training.init_checkpoint")
    given = load_pipeline(None, [f"{key}=/data/x" for key in ("prepare.records", *paths)])
    text = load_pipeline(None, ["prepare.text=/data/x"])
    tasks = ("finetune.evaluation_data", "finetune.init_checkpoint", "finetune.vocab", "task.labels", "predict.data")
    task = load_pipeline(None, ["task.name=multi-label", *(f"{key}=/data/x" for key in ("finetune.data", *tasks))])
    keys = {key for settings in (given, text, task) for key, _ in list_input_paths(settings)}
    assert {key for stage in STAGES.values() for key in stage.input_settings} == keys


def test_only_what_is_read_is_named() -> None:
    """Not the records of a pipeline whose weights are given, nor a text where there are records."""
    given = load_pipeline(None, [*TASK, "finetune.init_checkpoint=/data/bert", "prepare.records=/data/x"])
    assert dict(list_input_paths(given)) == {"finetune.init_checkpoint": "/data/bert"}
    both = load_pipeline(None, ["prepare.text=/data/x", "prepare.records=/data/y"])
    assert dict(list_input_paths(both)) == {"prepare.records": "/data/y"}


@pytest.mark.parametrize(
    ("stage", "missing", "first"),
    [
        ("histogram", "examples/examples.json", "prepare"),
        ("train", "packed/train/metadata.json", "write"),
        ("predict", "finetune/metrics.json", "finetune"),
    ],
)
def test_a_stage_run_too_early_names_the_one_before_it(stage: str, missing: str, first: str, tmp_path: Path) -> None:
    run = RunRequest(load_pipeline(None, TASK), tmp_path, tmp_path, a_run())
    with pytest.raises(InputError, match=f"/demo/{missing}: this file does not exist; run the stage `{first}` first"):
        run_stages(run, [stage])


def test_the_stages_of_a_pipeline_are_those_that_its_file_asks_for() -> None:
    pretraining = list(STAGES)[:7]
    assert list_pipeline_stages(load_pipeline(None)) == [*pretraining, "report"]
    assert list_pipeline_stages(load_pipeline(None, TASK)) == list(STAGES)
    assert list_pipeline_stages(load_pipeline(None, [*TASK, "predict.data=null"])) == [*pretraining, "finetune", "report"]
    given = load_pipeline(None, [*TASK, "finetune.init_checkpoint=/data/bert"])
    assert list_pipeline_stages(given) == ["finetune", "predict", "report"]
    # Nothing is waited for that no stage makes.
    folder = WorkFolder.from_settings(given, Path("work"), Path())
    assert STAGES["train"].list_missing_outputs(folder) == STAGES["evaluate"].list_missing_outputs(folder) == []


@pytest.mark.parametrize(
    ("overrides", "stage", "said"),
    [
        ([], "finetune", "--stages finetune: .* only the stages prepare, .*; set finetune.data and task.name"),
        (TASK[:2], "predict", "set predict.data"),
        ([*TASK, "finetune.init_checkpoint=/data/bert"], "train", "only the stages finetune, predict, report; leave out"),
    ],
)
def test_a_stage_that_a_pipeline_has_not_is_refused(overrides: list[str], stage: str, said: str, tmp_path: Path) -> None:
    run = RunRequest(load_pipeline(None, overrides), tmp_path, tmp_path, a_run())
    with pytest.raises(InputError, match=said):
        run_stages(run, [stage])


# Waiting for what a stage needs.

# What each stage needs of a pipeline that holds evaluation data out, in the order in which it is made.
NEEDS = {
    "prepare": [],
    "histogram": ["examples/examples.json"],
    "plan": ["histogram.json", "histogram-evaluation.json"],
    "write": ["plan.json", "plan-evaluation.json"],
    "write-finish": [f"packed/{part}/group-0000{number}.json" for part in ("train", "evaluation") for number in (0, 1)],
    "verify": ["packed/train/metadata.json", "packed/evaluation/metadata.json"],
    "verify-finish": ["packed/train/verification.json", "packed/evaluation/verification.json"],
    "train": [],  # what verify-finish waits for is there then
    "evaluate": ["train/training.json"],
    "report": ["train/evaluation.json"],
}


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    return WorkFolder.from_settings(load_pipeline(None), tmp_path, tmp_path)


def make(folder: WorkFolder, name: str) -> None:
    path = folder.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_plan(path, [{(7,): 2}, {(3, 5): 1}], 8)


def test_each_stage_waits_for_what_the_one_before_it_makes(folder: WorkFolder) -> None:
    for stage, needed in NEEDS.items():
        for number, name in enumerate(needed):
            assert _list_missing_inputs(folder, stage) == [folder.root / one for one in needed[number:]]
            make(folder, name)
        assert _list_missing_inputs(folder, stage) == []


@pytest.mark.parametrize(
    ("override", "waiting"),
    [
        ("prepare.evaluation_fraction=0", {"plan": ["histogram.json"], "report": ["train/training.json"]}),
        ("prepare.records=/data/records", {"histogram": []}),
    ],
)
def test_what_no_stage_makes_is_not_waited_for(override: str, waiting: dict[str, list[str]], tmp_path: Path) -> None:
    folder = WorkFolder.from_settings(load_pipeline(None, [override]), tmp_path, tmp_path)
    assert {stage: _list_missing_inputs(folder, stage) for stage in waiting} == {
        stage: [folder.root / name for name in names] for stage, names in waiting.items()
    }


def test_finishing_a_verification_waits_for_all_its_parts(folder: WorkFolder) -> None:
    make(folder, "packed/train/verification.json")
    wanted = folder.root / "packed" / "evaluation" / "verification.json"
    for number in range(3):
        assert _list_missing_inputs(folder, "verify-finish") == [wanted]
        make(folder, f"packed/evaluation/verification-{number:05d}-of-00003.json")
    assert _list_missing_inputs(folder, "verify-finish") == []


def test_a_histogram_is_there_when_all_its_parts_are(folder: WorkFolder) -> None:
    make(folder, "histogram-evaluation.json")
    make(folder, "histogram-00000-of-00004.json")  # a part of another number does not count
    for number in range(3):
        assert _list_missing_inputs(folder, "plan") == [folder.root / "histogram.json"]
        make(folder, f"histogram-{number:05d}-of-00003.json")
    assert _list_missing_inputs(folder, "plan") == []


def test_waiting_ends_when_the_last_file_appears(folder: WorkFolder) -> None:
    make(folder, "plan.json")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            make(folder, "plan-evaluation.json")

    said = io.StringIO()
    assert wait_for_inputs(folder, "write", 1000, Reporter(said), sleep=sleep, clock=lambda: sum(waited)) == sum(waited)
    assert len(waited) == 3
    assert said.getvalue().splitlines() == [f"write: waiting for {folder.root / 'plan-evaluation.json'}"]


def test_waiting_is_bounded_and_says_what_is_missing(folder: WorkFolder) -> None:
    waited: list[float] = []
    with pytest.raises(FailedError, match=r"plan\.json and 1 more: waited 5\.0 s, but .* still missing"):
        wait_for_inputs(folder, "write", 5, Reporter(quiet=True), sleep=waited.append, clock=lambda: sum(waited))
    assert sum(waited) == 5.0


def test_each_stage_has_its_image_and_its_resources() -> None:
    servers = ["resources.cards=8", "resources.workers=2", "resources.training={cpu: 95, memory: 409Gi}"]
    settings = load_pipeline(None, [*servers, "resources.data_workers=5", "images.tag=v1"])
    steps = {name: preview_stage(settings, name) for name in STAGES}
    assert steps["prepare"]["image"] == "gaudi-bert-data:v1"
    assert [step["containers"] for step in steps.values()] == [5, 5, 1, 5, 5, 2, 1, 2, 1, 1]
    assert [step["cards"] for step in steps.values()] == [0, 0, 0, 0, 0, 8, 1, 8, 1, 0]
    assert (steps["train"]["cpu"], steps["train"]["memory"]) == ("95", "409Gi")


@pytest.mark.parametrize(
    ("given", "train", "finetune"),
    [
        ([], "train-cpu", "train-cpu"),
        (["training.engine=pytorch"], "train-cpu-pytorch", "train-cpu-pytorch"),
        (["finetune.engine=pytorch"], "train-cpu", "train-cpu-pytorch"),
        (["resources.cards=8", "finetune.engine=tensorflow"], "train-gaudi-pytorch", "train-gaudi"),
    ],
)
def test_the_image_goes_by_cards_and_engine(given: list[str], train: str, finetune: str) -> None:
    settings = load_pipeline(None, [*given, "images.tag=v1"])
    images = {name: stage_image_name(settings, stage) for name, stage in STAGES.items() if stage.runs_model}
    assert images == {
        **dict.fromkeys(("train", "evaluate"), f"gaudi-bert-{train}:v1"),
        **dict.fromkeys(("finetune", "predict"), f"gaudi-bert-{finetune}:v1"),
    }
    own = load_pipeline(None, [*given, "images.train=mine", "images.tag=v1"])
    assert {stage_image_name(own, stage) for stage in STAGES.values() if stage.runs_model} == {"mine:v1"}
