"""Accumulation steps from sequences, packs and the packing factor: the published runs, and the predecessor's zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.config import TrainingSettings
from gaudi_bert.training.hyperparameters import plan_batches


def settings(sequences: int, packs: int) -> TrainingSettings:
    return TrainingSettings(global_batch_sequences=sequences, micro_batch_packs=packs)


@pytest.mark.parametrize(
    ("sequences", "packs", "factor", "workers", "steps"),
    [
        (65_536, 64, 1.0, 1, 1024),
        (65_536, 64, 1.0, 8, 128),
        (65_536, 64, 1.2, 8, 107),
        (65_536, 64, 1.2, 32, 27),
        (32_768, 8, 2.0, 8, 256),
        (32_768, 16, 2.0, 8, 128),
        (448, 28, 2.0, 8, 1),
    ],
)
def test_the_published_runs(sequences: int, packs: int, factor: float, workers: int, steps: int) -> None:
    plan = plan_batches(settings(sequences, packs), factor, workers)
    assert plan.accumulation_steps == steps
    assert abs(plan.change) < 0.02
    assert len(plan.lines()) == 1


def test_one_accumulation_step_and_factor_two_is_not_zero_steps() -> None:
    plan = plan_batches(settings(64, 64), 2.0)
    assert plan.accumulation_steps == 1
    assert plan.sequences_per_update == 128
    assert "100.0% more than global_batch_sequences = 64" in plan.lines()[1]
    assert "training.micro_batch_packs = 32 " in plan.lines()[1]


def test_a_change_that_no_number_of_packs_mends_is_said_without_a_remedy() -> None:
    lines = plan_batches(settings(9, 8), 1.157).lines()
    assert lines[1] == "note: that is 2.8% more than global_batch_sequences = 9"


def test_a_batch_that_rounding_makes_smaller_is_said() -> None:
    plan = plan_batches(settings(128, 64), 1.7)
    assert plan.accumulation_steps == 1
    assert "15.0% fewer" in plan.lines()[1]


@given(sequences=st.integers(1, 100_000), packs=st.integers(1, 200), factor=st.floats(1, 30), workers=st.integers(1, 64))
def test_never_zero_and_as_near_as_whole_micro_batches_allow(sequences, packs, factor, workers) -> None:
    plan = plan_batches(settings(sequences, packs), factor, workers)
    assert plan.accumulation_steps >= 1
    one = packs * factor * workers
    assert plan.accumulation_steps == 1 or abs(plan.sequences_per_update - sequences) <= one / 2 * (1 + 1e-9)
