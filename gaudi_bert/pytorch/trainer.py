"""What a `transformers` `Trainer` (or optimum-habana's `GaudiTrainer`) needs for packs, as a class to put before it.

    class PackedTrainer(PackedTrainerMixin, Trainer): ...

Each process reads its own share (`Trainer` would read every pack in every process), losses are divided by the counts of the
whole update over all processes, and a checkpoint keeps the place in the data, from which any number of processes goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import write_json
from gaudi_bert.pytorch.dataset import PackedDataset, PackedLoader
from gaudi_bert.pytorch.heads import update_counts

__all__ = ["PLACE_NAME", "PackedTrainerMixin"]

PLACE_NAME = "packs.json"


class PackedTrainerMixin:
    """Put before `Trainer`; its `train_dataset` is a `PackedDataset` of this process, its `data_collator` a `PackCollator`.

    Needs `remove_unused_columns=False`: the names of rows are not those of the model's inputs.
    """

    args: Any
    train_dataset: PackedDataset
    data_collator: Any
    _train_batch_size: int

    def get_train_dataloader(self) -> PackedLoader:
        """The loader of this process's share."""
        options = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        self.train_dataset.update_batches = self.args.gradient_accumulation_steps
        return PackedLoader(self.train_dataset, self._train_batch_size, self.data_collator, **options)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """The micro-batches of an update, and what it counts over all processes."""
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        counts = update_counts(batches).to(device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(counts)
        return batches, counts

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """As of `Trainer`; from a checkpoint it goes on at the pack where that one stood.

        Raises:
            InputError: the checkpoint has no place in the data, or that of other packs.
        """
        trainer: Any = self
        trainer.add_callback(_KeepPlace(self.train_dataset))
        self.args.ignore_data_skip = True  # the data set goes to its place; Trainer would read its way there
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        if isinstance(resume_from_checkpoint, str):
            path = Path(resume_from_checkpoint) / PLACE_NAME
            if not path.is_file():
                raise InputError(
                    f"{path}: missing, so the place in the data is not known; use a checkpoint of PackedTrainerMixin"
                )
            self.train_dataset.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)  # type: ignore[misc]


class _KeepPlace(TrainerCallback):
    """Writes the place in the data into every checkpoint."""

    def __init__(self, dataset: PackedDataset) -> None:
        self._dataset = dataset

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called after a checkpoint was written."""
        if state.is_world_process_zero:
            write_json(Path(args.output_dir) / f"checkpoint-{state.global_step}" / PLACE_NAME, self._dataset.state_dict())
