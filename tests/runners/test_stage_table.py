"""The table of stages: its rows belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import render
from gaudi_bert.runners.local import LocalRun, run_stages
from gaudi_bert.runners.named_paths import named_paths
from gaudi_bert.runners.stage_table import STAGES, STEPS, select_stages, stages_of, steps_of

TASK = ["task.name=classification", "finetune.data=python-docstrings", "predict.data=python-docstrings"]


def test_the_stages_and_steps_are_those_of_the_design() -> None:
    pretraining = ["prepare", "histogram", "plan", "write", "verify", "train", "evaluate"]
    assert list(STAGES) == [*pretraining, "finetune", "predict", "report"]
    assert steps_of(["report", "write"]) == ["write", "write-finish", "report"]
    assert [name for name, stage in STAGES.items() if stage.shared] == ["prepare", "histogram", "write"]
    assert [name for name, stage in STAGES.items() if stage.trains] == ["train", "evaluate", "finetune", "predict"]
    assert [name for name, stage in STAGES.items() if stage.distributed] == ["train", "finetune"]


def test_a_stage_needs_and_follows_only_what_comes_before_it() -> None:
    before: set[str] = set()
    for name, stage in STAGES.items():
        assert {*stage.needs, *stage.follows} <= before
        before.add(name)


def test_every_step_has_its_manifest_in_order() -> None:
    assert list(render(load_pipeline(None, TASK)).steps) == list(STEPS)
    assert list(render(load_pipeline(None)).steps) == [step for step in STEPS if step not in ("finetune", "predict")]


def test_every_path_of_a_pipeline_file_is_read_by_a_stage() -> None:
    paths = ("prepare.evaluation_records", "prepare.vocab", "training.init_checkpoint")
    given = load_pipeline(None, [f"{key}=/data/x" for key in ("prepare.records", *paths)])
    text = load_pipeline(None, ["prepare.text=/data/x"])
    tasks = ("finetune.evaluation_data", "finetune.init_checkpoint", "finetune.vocab", "task.labels", "predict.data")
    task = load_pipeline(None, ["task.name=multi-label", *(f"{key}=/data/x" for key in ("finetune.data", *tasks))])
    keys = {key for settings in (given, text, task) for key, _ in named_paths(settings)}
    assert {key for stage in STAGES.values() for key in stage.reads} == keys


def test_stages_are_put_in_order_and_unknown_ones_refused() -> None:
    assert select_stages(["train", "prepare"]) == ["prepare", "train"]
    with pytest.raises(InputError, match=r"--stages pack: no such stage; stages are prepare, histogram, "):
        select_stages(["plan", "pack"])


@pytest.mark.parametrize(
    ("stage", "missing", "first"),
    [
        ("histogram", "examples/examples.json", "prepare"),
        ("plan", "histogram.json", "histogram"),
        ("write", "plan.json", "plan"),
        ("verify", "packed/train/metadata.json", "write"),
        ("train", "packed/train/metadata.json", "write"),
        ("finetune", "train/training.json", "train"),
        ("predict", "finetune/metrics.json", "finetune"),
    ],
)
def test_a_stage_run_too_early_names_the_one_before_it(stage: str, missing: str, first: str, tmp_path: Path) -> None:
    run = LocalRun(load_pipeline(None, TASK), tmp_path, tmp_path, Reporter(quiet=True))
    with pytest.raises(InputError, match=f"/demo/{missing}: is not there; run the stage `{first}` first"):
        run_stages(run, [stage])


def test_the_products_of_given_records_and_of_no_evaluation_are_not_missed(tmp_path: Path) -> None:
    settings = load_pipeline(None, ["prepare.records=/data/records"])
    folder = WorkFolder.of(settings, tmp_path, tmp_path)
    assert STAGES["prepare"].missing_products(folder) == []
    assert STAGES["evaluate"].missing_products(folder) == []
    assert STAGES["plan"].missing_products(folder) == [folder.root / "plan.json"]


def test_the_stages_of_a_pipeline_are_those_that_its_file_asks_for() -> None:
    pretraining = list(STAGES)[:7]
    assert stages_of(load_pipeline(None)) == [*pretraining, "report"]
    assert stages_of(load_pipeline(None, TASK)) == list(STAGES)
    assert stages_of(load_pipeline(None, [*TASK, "predict.data=null"])) == [*pretraining, "finetune", "report"]
    given = load_pipeline(None, [*TASK, "finetune.init_checkpoint=/data/bert"])
    assert stages_of(given) == ["finetune", "predict", "report"]
    # Nothing is waited for that no stage makes.
    folder = WorkFolder.of(given, Path("work"), Path())
    assert STAGES["train"].missing_products(folder) == STAGES["evaluate"].missing_products(folder) == []


@pytest.mark.parametrize(
    ("overrides", "stage", "said"),
    [
        ([], "finetune", "--stages finetune: this pipeline has only prepare, .*; set finetune.data, and task.name"),
        (TASK[:2], "predict", "set predict.data"),
        ([*TASK, "finetune.init_checkpoint=/data/bert"], "train", "has only finetune, predict, report; leave out"),
    ],
)
def test_a_stage_that_a_pipeline_has_not_is_refused(overrides: list[str], stage: str, said: str, tmp_path: Path) -> None:
    run = LocalRun(load_pipeline(None, overrides), tmp_path, tmp_path, Reporter(quiet=True))
    with pytest.raises(InputError, match=said):
        run_stages(run, [stage])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (TASK[1:2], "finetune.data is set, but no task; set task.name"),
        ([TASK[0], TASK[2]], "predict.data needs a model that this pipeline fine-tunes"),
    ],
)
def test_half_a_task_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_pipeline(None, overrides)
