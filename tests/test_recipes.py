"""The committed recipes against what was published: sequences per update, hyperparameters; and published rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runs.finetune import finetune
from gaudi_bert.runs.labelled_data import FineTuneFiles
from gaudi_bert.training.run_plan import DryRun, RunPlan, RunSettings
from tests.builders.agree import agree
from tests.builders.reporters import QUIET

# Sequences of an update, peak learning rate, updates, warm-up, power of the decay: BERT-large with LAMB.
PUBLISHED = {
    "wikipedia-128": (65_536, 6e-3, 7038, 2000, 0.5),
    "wikipedia-512": (32_768, 4e-3, 1564, 200, 0.5),
    "mlperf": (448, 4.25e-4, 6700, 0, 1.0),
}
# Micro-batches of an update, unpacked, as published: of a recipe on so many cards.
PUBLISHED_STEPS = {("wikipedia-128", 32): 32, ("wikipedia-512", 1): 2048, ("mlperf", 8): 2}
CARDS = {1: ["resources.cards=1"], 8: [], 32: ["resources.workers=4"]}


def recipe(repository: Path, name: str, cards: int) -> PipelineSettings:
    """A recipe for so many cards."""
    settings = load_pipeline(repository / "pipelines" / f"{name}.yaml", CARDS[cards])
    assert settings.resources.workers * settings.resources.cards == cards
    return settings


def plan(settings: PipelineSettings, factor: float) -> RunPlan:
    processes = settings.resources.workers * settings.resources.processes_per_worker
    return RunPlan(RunSettings.from_training_section(settings.training), factor, processes, slots_per_pack=512, packs=None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_hyperparameters_are_the_published_ones(repository: Path, name: str) -> None:
    training = recipe(repository, name, 8).training
    asked = (training.global_batch_sequences, training.learning_rate, training.updates, training.warmup_updates)
    assert (*asked, training.decay_power) == PUBLISHED[name]
    assert (training.optimizer, training.beta_1, training.beta_2, training.epsilon) == ("lamb", 0.9, 0.999, 1e-6)
    assert (training.weight_decay, training.clip_norm, training.loss) == (0.01, 1.0, "token")
    assert training.layer_adaptation == ("decayed" if name == "mlperf" else "all")
    assert training.target_masked_lm_accuracy == (0.72 if name == "mlperf" else None)
    model = recipe(repository, name, 8).model  # BERT-large
    sizes = (model.num_hidden_layers, model.hidden_size, model.num_attention_heads, model.intermediate_size)
    assert sizes == (24, 1024, 16, 4096)


@pytest.mark.parametrize(("name", "cards"), PUBLISHED_STEPS)
def test_a_recipe_accumulates_as_published_and_packed_keeps_the_sequences(repository: Path, name: str, cards: int) -> None:
    settings = recipe(repository, name, cards)
    assert plan(settings, 1.0).accumulation_steps == PUBLISHED_STEPS[name, cards]
    if name != "mlperf":
        agree(plan(settings, 1.2).sequences_per_update, PUBLISHED[name][0], 0.02)


def test_phase_two_goes_on_from_phase_one(repository: Path) -> None:
    first, second = (recipe(repository, name, 8) for name in ("wikipedia-128", "wikipedia-512"))
    assert second.training.init_checkpoint == f"/work/{first.name}/train"
    assert first.model == second.model
    assert second.kubernetes.work_claim == f"{first.name}-work"


# --- the committed recipes of tasks: their hyperparameters, and rows as they are published, read to packs

# The training data and the evaluation data, below the folder of shared data.
FILES = {
    "goemotions": ("goemotions/train.tsv", "goemotions/dev.tsv"),
    "squad": ("xquad/xquad.en.json", "xquad/xquad.en.json"),
    "wnut17": ("wnut17/train.conll", "wnut17/dev.conll"),
}
# Sequences of a pack in the fewest packs that are possible, and how near ours come. That of questions is for paragraphs that
# are cut; we take the long ones in windows, which are a few more sequences, and longer ones.
TASK_FACTORS = {"goemotions": (43_410 / 7_236, 1e-3), "squad": (1_190 / 558, 0.03), "wnut17": (3_394 / 831, 1e-3)}


@pytest.mark.parametrize("name", FILES)
def test_published_rows_are_read_and_planned(
    repository: Path, shared_data: Path, minilm: Path, tmp_path: Path, name: str
) -> None:
    tasks = shared_data / "tasks"
    data, evaluation = (tasks / file for file in FILES[name])
    labels = [f"task.labels={tasks / 'goemotions/labels.txt'}"] if name == "goemotions" else []
    settings = load_pipeline(repository / "pipelines" / f"{name}.yaml", labels)
    done = finetune(settings, FineTuneFiles(data, evaluation, minilm), tmp_path / "out", reporter=QUIET, dry_run=True)
    assert isinstance(done, DryRun)
    factor, near = TASK_FACTORS[name]
    agree(done.plan.packing_factor, factor, near)
    agree(done.plan.sequences_per_update, settings.finetune.batch_sequences, 0.13)
