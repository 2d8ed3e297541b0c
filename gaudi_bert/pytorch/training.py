"""A mixin that makes the `Trainer` of `transformers` train on packs, and a translation of its arguments.

With the mixin, each process reads its own packs, whereas `Trainer` alone would read every pack in every process. The losses
of all micro-batches and processes add up to the loss of one large batch (`heads.py`). A checkpoint contains the position in
the data, from which any number of processes can resume.

`translate_arguments` converts arguments for padded rows by the rules of `training/run_plan.py`. It keeps either the number
of sequences in an update, or the number of rows.
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
from gaudi_bert.encoders.pack_inputs_trial import check_output_per_token
from gaudi_bert.pytorch.collate import model_inputs
from gaudi_bert.pytorch.dataset import PackedDataset, PackedLoader
from gaudi_bert.pytorch.heads import update_counts, update_loss

_POSITION_NAME = "packs.json"
_ORDER = "the seed determines their order"
_STEPS = ("max_steps", "warmup_steps", "logging_steps", "save_steps", "eval_steps")


# --- Trainer


class PackedTrainerMixin:
    """A mixin for `Trainer` that trains on packs, in one process or several.

    `train_dataset` must be the `PackedDataset` of this process, and `data_collator` a `PackCollator`. The model must have
    one output per token, or be one of the heads of this package. Set `remove_unused_columns=False`, because the columns of
    packs are not named like the inputs of the model. A `PackedDataset` for evaluation or prediction is read completely, in
    the order of its folder. It is divided among the processes, and its `rank` is ignored.

    Example:
        ```python
        class PackedTrainer(PackedTrainerMixin, Trainer):
            pass


        trainer = PackedTrainer(
            model=model,
            args=TrainingArguments("run", remove_unused_columns=False),
            train_dataset=PackedDataset("packed/"),
            data_collator=PackCollator("transformers-5", model),
        )
        trainer.train()
        ```
    """

    args: Any
    train_dataset: PackedDataset
    eval_dataset: Any
    compute_loss_func: Any
    data_collator: Any
    model: Any
    _train_batch_size: int

    def get_train_dataloader(self) -> PackedLoader:
        """Return a loader of the packs that this process reads."""
        names = ("num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context")
        options = {name: getattr(self.args, f"dataloader_{name}", None) for name in names}
        self.train_dataset.update_batches = self.args.gradient_accumulation_steps
        return PackedLoader(self.train_dataset, self._train_batch_size, self.data_collator, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the data loader that `Trainer` uses for evaluation.

        The loader divides the packs of a `PackedDataset` among the processes, so that each pack is read once.
        """
        if eval_dataset is None or isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset if eval_dataset is None else self.eval_dataset[eval_dataset]
        packs = eval_dataset.as_map() if isinstance(eval_dataset, PackedDataset) else eval_dataset
        return super().get_eval_dataloader(packs)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the data loader that `Trainer` uses for predictions. As in `get_eval_dataloader`, packs are divided among
        the processes.
        """
        packs = test_dataset.as_map() if isinstance(test_dataset, PackedDataset) else test_dataset
        return super().get_test_dataloader(packs)  # type: ignore[misc]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return the micro-batches of the next update of the weights, and the number of labels in this update over all
        processes.

        At the end of an epoch, return an empty list and None.
        """
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
        """Return the contribution of a micro-batch to the loss of an update of the weights.

        During an evaluation, return the result of `Trainer.compute_loss` instead.
        """
        if not model.training or return_outputs or num_items_in_batch is None:
            trainer: Any = super()
            return trainer.compute_loss(model, model_inputs(inputs), return_outputs=return_outputs)
        return update_loss(model, inputs, num_items_in_batch, self.args.world_size)

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train the model from the beginning, or resume from the position in the data that a checkpoint contains.

        Args:
            resume_from_checkpoint: The folder of a checkpoint, or True for the newest one in `output_dir`.
            **options: Other options of `Trainer.train`.

        Raises:
            InputError: The checkpoint contains no position, the data set was made for another process, the model has one
                output per row, or an argument cannot be applied to packs.
        """
        trainer: Any = self
        self._check_arguments()
        check_output_per_token(self.model)
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True  # prevents Trainer from dividing the loss
        trainer.add_callback(_KeepPosition(self.train_dataset))
        self.args.ignore_data_skip = True  # prevents Trainer from reading all earlier packs again
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        if isinstance(resume_from_checkpoint, str):
            path = Path(resume_from_checkpoint) / _POSITION_NAME
            if not path.is_file():
                raise InputError(
                    f"{path}: the file is missing, so the position in the data is unknown; use a checkpoint that "
                    "a trainer with PackedTrainerMixin has saved"
                )
            self.train_dataset.load_state_dict(read_json(path))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)  # type: ignore[misc]

    def _check_arguments(self) -> None:
        """Raise an error if the data set was made for another process, or if an argument does not work with packs."""
        args, rank, processes = self.args, self.train_dataset.rank, self.train_dataset.world_size
        if (rank, processes) != (args.process_index, args.world_size):
            raise InputError(
                f"PackedDataset was made for process {rank} of {processes}, but this is process {args.process_index} of "
                f"{args.world_size}; pass rank=args.process_index and world_size=args.world_size to PackedDataset"
            )
        refused = {
            "label_smoothing_factor": (args.label_smoothing_factor, "the loss for packs does not support label smoothing"),
            "compute_loss_func": (self.compute_loss_func, "update_loss computes the loss of packs"),
            "group_by_length": (getattr(args, "group_by_length", False), _ORDER),  # only exists in transformers 4
            "train_sampling_strategy": (getattr(args, "train_sampling_strategy", "random") != "random", _ORDER),
            "dataloader_persistent_workers": (args.dataloader_persistent_workers, "each epoch starts new workers"),
        }
        for name, (given, reason) in refused.items():
            if given:
                raise InputError(f"{name}: the argument does not apply to packs, because {reason}; omit it")
        if args.n_gpu > 1:
            raise InputError(
                f"{args.n_gpu} GPUs: a process can train on only one GPU; start one process per GPU with torchrun "
                f"--nproc-per-node {args.n_gpu}"
            )
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        if args.remove_unused_columns and any(isinstance(each, PackedDataset) for each in evaluated.values()):
            raise InputError("remove_unused_columns: must be False, because True would remove columns of eval_dataset")


class _KeepPosition(TrainerCallback):
    """A callback that saves the current position in the training data with every checkpoint."""

    def __init__(self, dataset: PackedDataset) -> None:
        self._dataset = dataset

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            write_json(
                Path(args.output_dir) / f"checkpoint-{state.global_step}" / _POSITION_NAME, self._dataset.state_dict()
            )


# --- The arguments of Trainer


def translate_arguments(
    arguments: Mapping[str, Any],
    packing_factor: float,
    *,
    processes: int = 1,
    batch_packs: int | None = None,
    correction: Literal["batch", "betas"] = "batch",
) -> dict[str, Any]:
    """Translate `TrainingArguments` for padded rows into arguments for packs.

    Args:
        arguments: Arguments for padded rows, by name. For missing arguments, Trainer's defaults apply.
        packing_factor: The number of sequences per pack, at least 1, as stated in the data's metadata.json.
        processes: The number of processes that train together.
        batch_packs: The number of packs in a micro-batch, by default `per_device_train_batch_size`.
        correction: "batch" to keep the number of sequences in an update, or "betas" to keep the number of rows.

    Returns:
        A copy of `arguments` with other values of `per_device_train_batch_size` and `gradient_accumulation_steps`, and with
        `remove_unused_columns=False`. With "betas", `adam_beta1`, `adam_beta2` and all numbers of steps change too.

    Raises:
        InputError: `packing_factor` is below 1, or `correction` is unknown.
    """
    if packing_factor < 1:
        raise InputError(f"packing_factor = {packing_factor}: must be at least 1; use the value in the data's metadata.json")
    if correction not in ("batch", "betas"):
        raise InputError(f"correction = {correction!r}: must be batch or betas")
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
            if translated.get(name, 0) >= 1:  # a smaller value is a fraction of all steps, or turns the action off
                translated[name] = max(1, round(translated[name] / packing_factor))
    return translated
