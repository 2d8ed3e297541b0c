"""The whole plan: what packing makes of the settings, and figures a process, a worker and in all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.config import TrainingSettings
from gaudi_bert.training.run_plan import RunPlan, correct_for_packing, plan_run

PHASE_2 = TrainingSettings(
    optimizer="lamb",
    global_batch_sequences=32_768,
    micro_batch_packs=8,
    updates=1564,
    warmup_updates=200,
    evaluate_every_updates=100,
    save_every_updates=100,
    log_every_updates=10,
)


def plan(settings: TrainingSettings, factor: float, processes: int = 8, packs: int | None = 1_000_000) -> RunPlan:
    return plan_run(settings, factor, processes=processes, processes_per_worker=8, slots_per_pack=512, packs=packs)


def test_the_batch_is_kept_and_so_is_all_else() -> None:
    made = plan(PHASE_2, 2.0)
    assert made.settings == PHASE_2
    assert made.batches.accumulation_steps == 256
    assert made.batches.sequences_per_update == 32_768


def test_or_the_packs_are_kept_and_the_betas_raised() -> None:
    """Theorem D.1: beta 0.81 becomes 0.6561 at two sequences a pack."""
    settings = PHASE_2.model_copy(update={"packing_correction": "betas", "beta_1": 0.81})
    made = plan(settings, 2.0)
    changed = made.settings
    assert changed.beta_1 == pytest.approx(0.6561)
    assert changed.beta_2 == pytest.approx(0.999**2)
    assert (changed.updates, changed.warmup_updates) == (782, 100)
    assert (changed.evaluate_every_updates, changed.save_every_updates, changed.log_every_updates) == (50, 50, 5)
    assert changed.learning_rate == settings.learning_rate
    assert made.batches.accumulation_steps == 512
    assert made.batches.packs_per_update == 32_768
    assert made.batches.sequences_per_update == 65_536
    assert abs(made.batches.change) < 0.02
    assert "beta_1 0.81 -> 0.6561" in made.short_lines()[1]
    assert "updates 1,564 -> 782, of them warm-up 200 -> 100" in made.short_lines()[1]


def test_unpacked_data_is_trained_as_asked() -> None:
    settings = PHASE_2.model_copy(update={"packing_correction": "betas"})
    assert correct_for_packing(settings, 1.0) == settings


@given(factor=st.floats(1, 40), updates=st.integers(1, 100), warmup=st.integers(0, 100))
def test_nothing_becomes_zero(factor: float, updates: int, warmup: int) -> None:
    settings = TrainingSettings(packing_correction="betas", updates=updates, warmup_updates=warmup, global_batch_sequences=1)
    made = plan(settings, factor)
    changed = made.settings
    assert changed.updates >= 1
    assert (changed.warmup_updates >= 1) == (warmup >= 1)
    assert min(changed.evaluate_every_updates, changed.save_every_updates, changed.log_every_updates) >= 1
    assert made.batches.accumulation_steps >= 1
    assert 0 <= changed.beta_1 < 1


def test_every_figure_a_process_a_worker_and_in_all() -> None:
    made = plan(PHASE_2, 2.0, processes=16)
    shares = made.as_json()["shares"]
    assert {name: share["processes"] for name, share in shares.items()} == {"process": 1, "worker": 8, "all": 16}
    assert shares["process"]["packs_per_update"] == 8 * 128
    assert shares["worker"]["sequences_per_update"] == 8 * 8 * 128 * 2
    assert shares["all"]["slots_per_update"] == 16 * 8 * 128 * 512
    assert made.as_json()["sequences"] == 32_768 * 1564
    assert json.loads(json.dumps(made.as_json())) == made.as_json()
    text = "\n".join(made.table())
    assert "sequences per update" in text
    assert "evaluate every 100 updates, that is every 3,276,800 sequences" in text
    assert "peak learning rate 0.001" in text


def test_a_batch_that_is_not_met_is_said() -> None:
    made = plan(TrainingSettings(global_batch_sequences=64, micro_batch_packs=64), 2.0, processes=1)
    assert any("100.0% more than global_batch_sequences = 64" in line for line in made.short_lines())
    assert made.as_json()["change"] == 1.0


def test_the_number_of_epochs_is_told_where_the_data_is_counted() -> None:
    assert "times the data" in plan(PHASE_2, 2.0).short_lines()[-1]
    assert "times the data" not in plan(PHASE_2, 2.0, packs=None).short_lines()[-1]
