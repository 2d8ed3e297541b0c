"""`PackedTrainerMixin` applies an argument of `Trainer`, or refuses it before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("accelerate")
pytest.importorskip("pyarrow")

from transformers import TrainingArguments

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch import PackedDataset
from tests.builders.agree import agree
from tests.builders.packed_training import PACKS, PackedTrainer, make, write_packs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "data"
    write_packs(folder)
    return folder


def trainer_of(data: Path, out: Path, arguments: dict[str, Any], **options: Any) -> PackedTrainer:
    model, dataset, collate = make("masked", data, 0, 1, 5)
    usual = {"max_steps": 1, "remove_unused_columns": False, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(str(out), **{**usual, **arguments})
    return PackedTrainer(model=model, args=args, train_dataset=dataset, data_collator=collate, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor: cannot be applied to packs"),
        ({}, {"compute_loss_func": lambda *_, **__: 0}, "compute_loss_func: cannot be applied to packs"),
        ({"train_sampling_strategy": "group_by_length"}, {}, "train_sampling_strategy: cannot be applied to packs"),
        (
            {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
            {},
            r"dataloader_persistent_workers: cannot .* \(each epoch starts its own workers\); leave it out",
        ),
    ],
)
def test_what_packs_cannot_have_is_refused_before_training(
    data: Path, tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    trainer = trainer_of(data, tmp_path, arguments, **options)
    with pytest.raises(InputError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_columns_of_packs_to_evaluate_are_not_removed(data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(data, tmp_path, {"remove_unused_columns": True}, eval_dataset={"held out": PackedDataset(data)})
    with pytest.raises(InputError, match="remove_unused_columns: would remove the columns of eval_dataset; set it to False"):
        trainer.train()


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
    loader = trainer_of(
        data, tmp_path, {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 5}
    ).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (1, 5)
