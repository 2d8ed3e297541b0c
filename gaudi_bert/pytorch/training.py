"""Pretraining BERT on packs with PyTorch: heads and losses, `transformers`' `Trainer`, and its arguments.

Heads. `transformers` computes the masked-LM head at all L positions, and the next-sentence head at the first position of a
row. Here the first is computed at the masked positions, the second at the first token of every sequence, gathered in static
shapes. A loss is a sum over a micro-batch, divided by what the whole update counts, so that accumulated micro-batches and
processes add up to the loss of one large batch; each divided by its own count, they would weigh a token by how few others
are masked beside it.

Trainer. Each process reads its own share (`Trainer` would read every pack in every process), and a checkpoint keeps the
position in the data, from which any number of processes goes on.

Arguments. A row holds f sequences instead of one (f: the packing factor). Either an update keeps its sequences and takes
1 / f of the rows (`correction="batch"`), or it keeps its rows, sees f times the sequences, and there are 1 / f of the
updates, with moments that decay f times as fast (`"betas"`; Krell et al. 2021, theorem D.1). These are the rules of
`gaudi-bert train --dry-run`.

Letters: B packs, L positions, Q masked slots, S sequences of a pack, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy
from transformers import BertForPreTraining, TrainerCallback
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.trainer_utils import get_last_checkpoint

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import write_json
from gaudi_bert.pytorch.dataset import PackedDataset, PackedLoader
from gaudi_bert.records.schema import NOT_PREDICTED

_POSITION_NAME = "packs.json"
_STEPS = ("max_steps", "warmup_steps", "logging_steps", "save_steps", "eval_steps")


# --- heads and losses


def update_counts(batches: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Masked positions and sequences of the micro-batches of one update on this process, float32 [2].

    With several processes, add theirs (`torch.distributed.all_reduce`) before the first loss is computed.
    """
    counts = [
        torch.stack([(batch[name] != NOT_PREDICTED).sum() for name in ("masked_lm_labels", "next_sentence_label")])
        for batch in batches
    ]
    return torch.stack(counts).sum(0).float()


class PackedBertForPreTraining(BertForPreTraining):
    """`BertForPreTraining` for the batches of `PackCollator(gather_heads=True)`; weights and their names are the same."""

    accepts_loss_kwargs = True  # Trainer then gives `num_items_in_batch`, and divides by nothing itself

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor,
        position_ids: torch.Tensor,
        masked_lm_positions: torch.Tensor,
        sequence_positions: torch.Tensor,
        masked_lm_labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        **beside: Any,
    ) -> BertForPreTrainingOutput:
        """Logits [B, Q, vocabulary] and [B, S, 2], and, with labels, the loss.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids: as the collator makes them.
            masked_lm_positions: int64 [B, Q]; what unused slots point to is not used.
            sequence_positions: int64 [B, S], the first token of each sequence.
            masked_lm_labels: int64 [B, Q], -100 in unused slots.
            next_sentence_label: int64 [B, S], -100 in unused slots.
            num_items_in_batch: `update_counts` of the whole update; those of this batch when None.
            **beside: what the collator gives beside the inputs, not used.
        """
        hidden_BLH = self.bert(
            input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, position_ids=position_ids
        )[0]
        masked_BQH = _gather(hidden_BLH, masked_lm_positions)
        first_BSH = _gather(hidden_BLH, sequence_positions)
        words = self.cls.predictions(masked_BQH)
        pooler = self.bert.pooler
        sentences = self.cls.seq_relationship(pooler.activation(pooler.dense(first_BSH)))
        loss = None
        if masked_lm_labels is not None and next_sentence_label is not None:
            if num_items_in_batch is None:
                labels = {"masked_lm_labels": masked_lm_labels, "next_sentence_label": next_sentence_label}
                num_items_in_batch = update_counts([labels])
            masked_count, sequence_count = num_items_in_batch.clamp(min=1).to(words.device)
            loss = _summed(words, masked_lm_labels) / masked_count + _summed(sentences, next_sentence_label) / sequence_count
        return BertForPreTrainingOutput(loss=loss, prediction_logits=words, seq_relationship_logits=sentences)


def _gather(hidden_BLH: torch.Tensor, positions_BK: torch.Tensor) -> torch.Tensor:
    """The rows of `hidden_BLH` at K positions of each pack, [B, K, H]."""
    return hidden_BLH.gather(1, positions_BK.unsqueeze(-1).expand(-1, -1, hidden_BLH.shape[-1]))


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the negative log likelihood where there is a label, float32."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NOT_PREDICTED, reduction="sum")


# --- Trainer


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
        """As of `Trainer`; from a checkpoint it goes on at that checkpoint's pack.

        Raises:
            InputError: the checkpoint has no position in the data, or is of other packs.
        """
        trainer: Any = self
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
            self.train_dataset.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)  # type: ignore[misc]


class _KeepPosition(TrainerCallback):
    """Writes the position in the data into every checkpoint."""

    def __init__(self, dataset: PackedDataset) -> None:
        self._dataset = dataset

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called after a checkpoint was written."""
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
        arguments: as for padded rows; what is not named in them is left to Trainer's defaults.
        packing_factor: sequences per pack, at least 1: in the data's metadata.json.
        processes: that train together.
        batch_packs: packs of a micro-batch; `per_device_train_batch_size` when None.
        correction: what is kept: the sequences of an update (`batch`) or its rows (`betas`).

    Returns:
        A copy with `per_device_train_batch_size`, `gradient_accumulation_steps` and, for `betas`, `adam_beta1`, `adam_beta2`
        and the numbers of steps changed, and `remove_unused_columns=False`.

    Raises:
        InputError: the factor is below 1, or `correction` is neither.
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
