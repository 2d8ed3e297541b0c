"""`transformers`' `Trainer` on packs, in any number of processes, and its arguments.

Trainer. Each process reads its own share (`Trainer` would read every pack in every process), losses add up to those of one
large batch (`heads.py`), and a checkpoint keeps the position in the data, from which any number of processes resumes.

Arguments. They are translated by the rules of `training/run_plan.py`: an update keeps its sequences (`correction="batch"`),
or its rows, in fewer updates (`"betas"`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json, write_json
from gaudi_bert.encoders.feeding_trial import check_head
from gaudi_bert.pytorch.collate import model_inputs
from gaudi_bert.pytorch.dataset import PackedDataset, PackedLoader
from gaudi_bert.pytorch.heads import update_counts, update_loss

_POSITION_NAME = "packs.json"
_ORDER = "their order follows from the seed"
_STEPS = ("max_steps", "warmup_steps", "logging_steps", "save_steps", "eval_steps")


# --- Trainer


class PackedTrainerMixin:
    """Put before `Trainer`; its `train_dataset` is a `PackedDataset` of this process, its `data_collator` a `PackCollator`.

    The model is any with one output for each token, or a head that gathers (`heads.py`). A `PackedDataset` to evaluate or to
    predict is read in the order of its folder, once in all processes together, whatever its rank.

    Needs `remove_unused_columns=False`: the names of rows are not those of the model's inputs.
    """

    args: Any
    train_dataset: PackedDataset
    eval_dataset: Any
    compute_loss_func: Any
    data_collator: Any
    model: Any
    _train_batch_size: int

    def get_train_dataloader(self) -> PackedLoader:
        """The loader of this process's share."""
        names = ("num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context")
        options = {name: getattr(self.args, f"dataloader_{name}", None) for name in names}
        self.train_dataset.update_batches = self.args.gradient_accumulation_steps
        return PackedLoader(self.train_dataset, self._train_batch_size, self.data_collator, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of `Trainer`, which deals the packs of a `PackedDataset`, by their numbers, to the processes."""
        if eval_dataset is None or isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset if eval_dataset is None else self.eval_dataset[eval_dataset]
        packs = eval_dataset.as_map() if isinstance(eval_dataset, PackedDataset) else eval_dataset
        return super().get_eval_dataloader(packs)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader as `get_eval_dataloader` does."""
        packs = test_dataset.as_map() if isinstance(test_dataset, PackedDataset) else test_dataset
        return super().get_test_dataloader(packs)  # type: ignore[misc]

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

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: torch.Tensor | None = None
    ) -> Any:
        """The part of the update's loss that a micro-batch adds; in an evaluation, the loss of `Trainer`."""
        if not model.training or return_outputs or num_items_in_batch is None:
            trainer: Any = super()
            return trainer.compute_loss(model, model_inputs(inputs), return_outputs=return_outputs)
        return update_loss(model, inputs, num_items_in_batch, self.args.world_size)

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train as `Trainer` does; from a checkpoint, resume at that checkpoint's pack.

        Raises:
            InputError: the checkpoint, the data set, the model, or an argument is not one for packs on this process.
        """
        trainer: Any = self
        self._check_arguments()
        check_head(self.model)
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True  # Trainer divides by nothing itself
        trainer.add_callback(_KeepPosition(self.train_dataset))
        self.args.ignore_data_skip = True  # the data set seeks; Trainer would read up to there
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        if isinstance(resume_from_checkpoint, str):
            path = Path(resume_from_checkpoint) / _POSITION_NAME
            if not path.is_file():
                raise InputError(
                    f"{path}: missing, so the position in the data is not known; use a checkpoint of PackedTrainerMixin"
                )
            self.train_dataset.load_state_dict(read_json(path))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)  # type: ignore[misc]

    def _check_arguments(self) -> None:
        """Refuse another share of the data, and arguments that have no effect on packs."""
        args, rank, processes = self.args, self.train_dataset.rank, self.train_dataset.world_size
        if (rank, processes) != (args.process_index, args.world_size):
            raise InputError(
                f"PackedDataset is the share of process {rank} of {processes}, and this is process {args.process_index} of "
                f"{args.world_size}; give PackedDataset rank=args.process_index, world_size=args.world_size"
            )
        refused = {
            "label_smoothing_factor": (args.label_smoothing_factor, "losses of packs add up, without smoothing"),
            "compute_loss_func": (self.compute_loss_func, "losses of packs add up as update_loss computes them"),
            "group_by_length": (getattr(args, "group_by_length", False), _ORDER),  # of transformers 4
            "train_sampling_strategy": (getattr(args, "train_sampling_strategy", "random") != "random", _ORDER),
            "dataloader_persistent_workers": (args.dataloader_persistent_workers, "each epoch starts its own workers"),
        }
        for name, (given, reason) in refused.items():
            if given:
                raise InputError(f"{name}: cannot be applied to packs ({reason}); leave it out")
        if args.n_gpu > 1:
            raise InputError(f"one process for {args.n_gpu} cards: start one for each, with torchrun --nproc-per-node")
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        if args.remove_unused_columns and any(isinstance(each, PackedDataset) for each in evaluated.values()):
            raise InputError("remove_unused_columns: would remove the columns of eval_dataset; set it to False")


class _KeepPosition(TrainerCallback):
    """Writes the position in the data into every checkpoint."""

    def __init__(self, dataset: PackedDataset) -> None:
        self._dataset = dataset

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            write_json(
                Path(args.output_dir) / f"checkpoint-{state.global_step}" / _POSITION_NAME, self._dataset.state_dict()
            )


# --- arguments of Trainer


def translate_arguments(
    arguments: Mapping[str, Any],
    packing_factor: float,
    *,
    processes: int = 1,
    batch_packs: int | None = None,
    correction: Literal["batch", "betas"] = "batch",
) -> dict[str, Any]:
    """`TrainingArguments` by name, for packs.

    Args:
        arguments: as for padded rows; Trainer's defaults apply to the others.
        packing_factor: sequences per pack, at least 1: in the data's metadata.json.
        processes: that train together.
        batch_packs: packs of a micro-batch; `per_device_train_batch_size` when None.
        correction: what stays constant: the sequences of an update (`batch`) or its rows (`betas`).

    Returns:
        A copy with `per_device_train_batch_size`, `gradient_accumulation_steps` and, for `betas`, `adam_beta1`, `adam_beta2`
        and the numbers of steps changed, and `remove_unused_columns=False`.
    """
    if packing_factor < 1:
        raise InputError(f"packing_factor = {packing_factor}: at least 1 is possible; take it from the data's metadata.json")
    if correction not in ("batch", "betas"):
        raise InputError(f"correction = {correction!r}: batch or betas is allowed")
    translated = dict(arguments)
    micro_batch = arguments.get("per_device_train_batch_size", 8)
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    packs = batch_packs or micro_batch
    sequences = micro_batch * accumulation * processes * (packing_factor if correction == "betas" else 1)
    translated["per_device_train_batch_size"] = packs
    translated["gradient_accumulation_steps"] = max(1, round(sequences / (packs * packing_factor * processes)))
    translated["remove_unused_columns"] = False
    if correction == "betas":
        for name, usual in (("adam_beta1", 0.9), ("adam_beta2", 0.999)):
            translated[name] = translated.get(name, usual) ** packing_factor
        for name in _STEPS:
            if translated.get(name, 0) >= 1:  # below 1 it is a share of all steps, or none at all
                translated[name] = max(1, round(translated[name] / packing_factor))
    return translated
