"""Trainer's arguments for packs: the figures of `train --dry-run`."""

from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.training.run_plan import RunPlan

pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("transformers")

from gaudi_bert.pytorch import translate_arguments
from tests.builders.agree import agree

PADDED = {
    "per_device_train_batch_size": 96,
    "max_steps": 1000,
    "warmup_steps": 101,
    "logging_steps": 10,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "learning_rate": 1e-4,
}


@pytest.mark.parametrize("correction", ["batch", "betas"])
@pytest.mark.parametrize("factor", [1.0, 2.008, 7.7])
@pytest.mark.parametrize("processes", [1, 3])
def test_the_rules_are_those_of_our_trainer(correction: str, factor: float, processes: int) -> None:
    settings = TrainingSettings(
        global_batch_sequences=96 * processes,
        micro_batch_packs=4,
        updates=1000,
        warmup_updates=101,
        log_every_updates=10,
        beta_1=0.9,
        beta_2=0.999,
        packing_correction=correction,
    )
    plan = RunPlan(settings, factor, processes=processes, processes_per_worker=1, slots_per_pack=8, packs=None)
    actual = translate_arguments(PADDED, factor, processes=processes, batch_packs=4, correction=correction)
    assert actual["per_device_train_batch_size"] == 4
    agree(actual["gradient_accumulation_steps"], plan.accumulation_steps, 1 if correction == "betas" else 0, scale=1.0)
    assert actual["max_steps"] == plan.settings.updates
    assert actual["warmup_steps"] == plan.settings.warmup_updates
    assert actual["logging_steps"] == plan.settings.log_every_updates
    agree(actual["adam_beta1"], plan.settings.beta_1)
    agree(actual["adam_beta2"], plan.settings.beta_2)
    assert actual["learning_rate"] == 1e-4
    assert actual["remove_unused_columns"] is False
    assert PADDED["per_device_train_batch_size"] == 96


def test_what_is_not_named_is_left_to_trainer() -> None:
    actual = translate_arguments({"per_device_train_batch_size": 32}, 2.0)
    assert actual == {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "remove_unused_columns": False}
    assert translate_arguments({"max_steps": -1, "warmup_steps": 0.1}, 2.0, correction="betas")["max_steps"] == -1


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match=r"packing_factor = 0\.5: at least 1"):
        translate_arguments({}, 0.5)
    with pytest.raises(InputError, match=r"correction = 'beta': batch or betas"):
        translate_arguments({}, 2.0, correction="beta")
