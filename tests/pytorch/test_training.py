"""`Trainer` on packs: arguments are applied or refused; any number of processes has one loss and reads each pack once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("accelerate")
pytest.importorskip("pyarrow")

from transformers import TrainingArguments

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.pytorch import PackedDataset, translate_arguments
from gaudi_bert.training.run_plan import RunPlan, RunSettings
from tests.builders.agree import agree
from tests.builders.launched import ROOT, TORCHRUN, finished
from tests.builders.packed_training import HEADS, PACKS, UPDATES, WAYS, PackedTrainer, make, write_packs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "data"
    write_packs(folder)
    return folder


def trainer_of(data: Path, out: Path, arguments: dict[str, Any], **options: Any) -> PackedTrainer:
    model, dataset, collate = make("causal", data, 0, 1, 5)
    usual = {"max_steps": 1, "remove_unused_columns": False, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(str(out), **{**usual, **arguments})
    return PackedTrainer(model=model, args=args, train_dataset=dataset, data_collator=collate, **options)


WORKERS = {"dataloader_persistent_workers": True, "dataloader_num_workers": 1}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor: the argument does not apply to packs"),
        ({}, {"compute_loss_func": lambda *_, **__: 0}, "compute_loss_func: the argument does not apply to packs"),
        (
            {"train_sampling_strategy": "group_by_length"},
            {},
            "train_sampling_strategy: the argument does not apply to packs",
        ),
        (WORKERS, {}, "dataloader_persistent_workers: .*each epoch starts new workers.*omit it"),
        (
            {"remove_unused_columns": True},
            {"eval_dataset": "data"},
            "remove_unused_columns: .*columns of eval_dataset",
        ),
    ],
)
def test_what_packs_cannot_have_is_refused_before_training(
    data: Path, tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    if "eval_dataset" in options:
        options = {"eval_dataset": {"held out": PackedDataset(data)}}
    trainer = trainer_of(data, tmp_path, arguments, **options)
    with pytest.raises(InputError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_every_pack_is_evaluated_each_time_whatever_its_share(data: Path, tmp_path: Path) -> None:
    shares = {"one": PackedDataset(data, 1, 2), "two": PackedDataset(data, 1, 3)}
    trainer = trainer_of(data, tmp_path, {"per_device_eval_batch_size": 5}, eval_dataset=shares)
    metrics = trainer.evaluate() | {"again": trainer.evaluate(shares["two"])["eval_loss"]}
    agree(metrics["eval_one_loss"], metrics["eval_two_loss"], 1e-6, scale=1.0)
    agree(metrics["eval_one_loss"], metrics["again"], 1e-6, scale=1.0)
    trainer.data_collator.packs.clear()
    assert trainer.predict(PackedDataset(data)).predictions.shape[0] == PACKS
    assert len({tuple(pack) for pack in trainer.data_collator.packs}) == PACKS


def test_options_of_the_loader_are_applied(data: Path, tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 5}
    loader = trainer_of(data, tmp_path, options).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (1, 5)


# --- arguments for packs: the figures of `train --dry-run`

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
@pytest.mark.parametrize(("factor", "processes"), [(1.0, 1), (2.008, 3)])
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
    plan = RunPlan(RunSettings.from_training_section(settings), factor, processes, slots_per_pack=8, packs=None)
    actual = translate_arguments(PADDED, factor, processes=processes, batch_packs=4, correction=correction)
    steps = actual.pop("gradient_accumulation_steps")
    agree(steps, plan.accumulation_steps, 1 if correction == "betas" else 0, scale=1.0)
    agree(actual.pop("adam_beta1"), plan.settings.beta_1)
    agree(actual.pop("adam_beta2"), plan.settings.beta_2)
    assert actual == {
        "per_device_train_batch_size": 4,
        "max_steps": plan.settings.updates,
        "warmup_steps": plan.settings.warmup_updates,
        "logging_steps": plan.settings.log_every_updates,
        "learning_rate": 1e-4,
        "remove_unused_columns": False,
    }
    assert PADDED["per_device_train_batch_size"] == 96


def test_what_is_not_named_is_left_to_trainer_and_nonsense_is_refused() -> None:
    actual = translate_arguments({"per_device_train_batch_size": 32}, 2.0)
    assert actual == {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "remove_unused_columns": False}
    assert translate_arguments({"max_steps": -1, "warmup_steps": 0.1}, 2.0, correction="betas")["max_steps"] == -1
    for factor, correction, message in (
        (0.5, "batch", r"packing_factor = 0\.5: .*at least 1"),
        (2.0, "beta", "correction = 'beta': .*batch or betas"),
    ):
        with pytest.raises(InputError, match=message):
            translate_arguments({}, factor, correction=correction)


# --- Trainer and Accelerate, one process and two, undisturbed or stopped and resumed

RUNS = [(1, False), (2, True)]


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], list[dict]]:
    """What each process wrote, by the number of processes and whether they were stopped."""
    return {each: run(data, tmp_path_factory.mktemp("processes"), *each) for each in RUNS}


def run(data: Path, out: Path, processes: int, stopped: bool) -> list[dict]:
    start = TORCHRUN if processes == 2 else [sys.executable]
    script = str(ROOT / "tests" / "builders" / "packed_training.py")
    finished([*start, script, str(data), str(out), *(["stopped"] if stopped else [])])
    return [json.loads((out / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_one_process_and_each_pack_is_read_once(runs, way: str, head: str) -> None:
    """And the trainer evaluates all packs, by any number of processes."""
    wanted = runs[1, False][0][f"trainer {head}"]
    assert len(wanted["losses"]) == UPDATES
    assert len({tuple(pack) for pack in wanted["packs"]}) == PACKS
    for ranks in runs.values():
        for found in ranks:
            agree(found[f"{way} {head}"]["losses"], wanted["losses"], 1e-4, scale=1.0)
        read = [pack for found in ranks for pack in found[f"{way} {head}"]["packs"]]
        assert sorted(read) == sorted(wanted["packs"])
        for found in ranks:
            agree(found[f"trainer {head}"]["evaluation"], [wanted["evaluation"][0]] * 2, 1e-4, scale=1.0)


@pytest.mark.slow
def test_every_other_combination_is_refused_in_every_process(runs) -> None:
    for found in runs[2, True]:
        for name, message in found["refused"].items():
            assert "PackedDataset" in message, name
            assert "rank" in message, name
            assert "\n" not in message
