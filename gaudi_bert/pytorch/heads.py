"""Losses of packs that add up to the loss of one large batch, and BERT heads that gather positions.

The loss of a micro-batch is a sum, divided by the number of labels in the complete update, so that the losses of all
micro-batches and processes add up. `update_counts` counts the labels, and `update_loss` computes the loss of a micro-batch,
for any head with one output per token.

A head with one output per sequence must gather positions from a pack. The classes in this module compute such heads at the
first token of every sequence, and the masked-LM head at the masked positions, in static shapes. The weights and their names
are those of `transformers`.

Letters in shapes: B packs, L positions, Q masked slots, S sequences of a pack, H hidden size, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import BertForPreTraining, BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

from gaudi_bert.common.arrays import NOT_PREDICTED
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.pack_inputs import gather_positions
from gaudi_bert.encoders.pack_inputs_trial import ONE_OUTPUT_PER_ROW, check_output_per_token
from gaudi_bert.encoders.trial import move_to_device
from gaudi_bert.pytorch.collate import model_inputs

_COUNTED = (("masked_lm_labels", "next_sentence_label"), ("sequence_labels",), ("labels",))


# --- Losses that add up over micro-batches and processes


def update_counts(batches: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Count the labels in all micro-batches that this process uses for one update of the weights.

    With several processes, sum the counts over all processes (`torch.distributed.all_reduce`, `accelerator.reduce`) before
    you compute the first loss.

    Args:
        batches: The micro-batches of the update, as a `PackCollator` makes them.

    Returns:
        The number of labels, float32 [1]. For `PackedBertForPreTraining`, the number of masked positions and the number of
        sequences, float32 [2].

    Raises:
        InputError: A batch has no labels.
    """
    return torch.stack([_count_labels(batch) for batch in batches]).sum(0).float()


def _count_labels(batch: dict[str, Any]) -> torch.Tensor:
    """Return the number of labels in a batch, separately for each head. See `update_counts`."""
    for names in _COUNTED:
        if all(name in batch for name in names):
            return torch.stack([_is_predicted(batch[name]).sum() for name in names])
    raise InputError(f"the batch contains no labels, only {', '.join(batch)}; pack a table with a `labels` column")


def _is_predicted(labels: torch.Tensor) -> torch.Tensor:
    """Return which labels contribute to the loss: floating-point labels that are not NaN, and integer labels other than
    -100.
    """
    return ~labels.isnan() if labels.is_floating_point() else labels != NOT_PREDICTED


def update_loss(model: Any, batch: dict[str, Any], counts: torch.Tensor, processes: int = 1) -> torch.Tensor:
    """Compute the contribution of one micro-batch to the loss of an update of the weights. Call `backward` on the result.

    Args:
        model: A model with one output per token, or a head of this module. It may be wrapped for several processes.
        batch: A batch of a `PackCollator`, which is moved to the model's device.
        counts: The result of `update_counts`, summed over all processes.
        processes: The number of processes that train together. The loss is multiplied by this number, because wrappers
            average the gradients of the processes, although the gradients should be added.

    Returns:
        A scalar tensor. The sum over the micro-batches of all processes, divided by `processes`, is the mean loss of the
        update.

    Raises:
        InputError: The model has one output per row, although a row contains several sequences, or the batch has no labels.
    """
    inputs = move_to_device(model_inputs(batch), next(model.parameters()).device)
    counts = counts.to(inputs["input_ids"].device)
    if "sequence_positions" in inputs:
        return model(**inputs, num_items_in_batch=counts).loss * processes
    own, inner = _count_labels(inputs), getattr(model, "module", model)
    try:
        outputs = model(**inputs)
    except (RuntimeError, ValueError):
        check_output_per_token(inner)  # raises a clearer error if the head has one output per row
        raise
    if outputs.logits.shape[:2] != inputs["input_ids"].shape:
        raise InputError(f"{type(inner).__name__}: {ONE_OUTPUT_PER_ROW}")
    if not own.any():  # without labels, the loss of the head is NaN
        return outputs.logits.sum() * 0.0
    return outputs.loss * (own / counts.clamp(min=1)).squeeze() * processes


# --- Heads that are only computed at some positions


class PackedBertForPreTraining(BertForPreTraining):
    """A version of `BertForPreTraining` for packs. The inputs are batches of `PackCollator(gather_heads=True)`.

    The weights and their names are the same as in `BertForPreTraining`. `forward` computes the masked-LM head only at the
    masked positions, and the next-sentence head at the first token of each sequence.
    """

    gathers = True  # the model has one output per sequence, and none per row
    accepts_loss_kwargs = True  # makes Trainer pass `num_items_in_batch` instead of dividing the loss

    def forward(
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
        **_: Any,
    ) -> BertForPreTrainingOutput:
        """Compute the outputs of both heads. If there are labels, also compute the loss.

        Args:
            input_ids: int64 [B, L].
            attention_mask: The block-diagonal mask that `PackCollator` makes.
            token_type_ids: int64 [B, L].
            position_ids: int64 [B, L], which restart at 0 in each sequence.
            masked_lm_positions: int64 [B, Q]. Positions in unused slots do not matter.
            sequence_positions: int64 [B, S], the position of the first token of each sequence.
            masked_lm_labels: int64 [B, Q], with -100 in unused slots.
            next_sentence_label: int64 [B, S], with -100 in unused slots.
            num_items_in_batch: `update_counts` of the complete update. By default, the counts of this batch.

        Returns:
            `prediction_logits` [B, Q, vocabulary], `seq_relationship_logits` [B, S, 2], and `loss`, which is None without
            labels.
        """
        hidden_BLH = self.bert(
            input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, position_ids=position_ids
        )[0]
        words = self.cls.predictions(gather_positions(hidden_BLH, masked_lm_positions))
        sentences = self.cls.seq_relationship(_pool_first_tokens(self.bert.pooler, hidden_BLH, sequence_positions))
        loss = None
        if masked_lm_labels is not None and next_sentence_label is not None:
            if num_items_in_batch is None:
                labels = {"masked_lm_labels": masked_lm_labels, "next_sentence_label": next_sentence_label}
                num_items_in_batch = update_counts([labels])
            masked_count, sequence_count = num_items_in_batch.clamp(min=1).to(words.device)
            loss = (
                _sum_losses(words, masked_lm_labels) / masked_count
                + _sum_losses(sentences, next_sentence_label) / sequence_count
            )
        return BertForPreTrainingOutput(loss=loss, prediction_logits=words, seq_relationship_logits=sentences)


class PackedBertForSequenceClassification(BertForSequenceClassification):
    """A version of `BertForSequenceClassification` for packs. The inputs are batches of
    `PackCollator(sequence_labels=COLUMN)`.

    If the config has one label (`num_labels=1`), the task is a regression. The weights and their names are the same as in
    `BertForSequenceClassification`.
    """

    gathers = True  # the model has one output per sequence, and none per row
    accepts_loss_kwargs = True  # makes Trainer pass `num_items_in_batch` instead of dividing the loss

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        sequence_positions: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        sequence_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Compute the output of the head for the first token of each sequence. If there are labels, also compute the loss.

        Args:
            input_ids: int64 [B, L].
            attention_mask: The block-diagonal mask that `PackCollator` makes.
            position_ids: int64 [B, L], which restart at 0 in each sequence.
            sequence_positions: int64 [B, S], the position of the first token of each sequence.
            token_type_ids: int64 [B, L].
            sequence_labels: int64 [B, S], with -100 in unused slots. For a regression float32, with NaN in unused slots.
            num_items_in_batch: `update_counts` of the complete update. By default, the counts of this batch.

        Returns:
            `logits` [B, S, C], which have no meaning in slots without a sequence, and `loss`, which is None without labels.

        Raises:
            InputError: The labels are integers although the model has one label, or have fractions although it has several.
        """
        hidden_BLH = self.bert(
            input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, position_ids=position_ids
        )[0]
        logits_BSC = self.classifier(self.dropout(_pool_first_tokens(self.bert.pooler, hidden_BLH, sequence_positions)))
        loss = None
        if sequence_labels is not None:
            counts = num_items_in_batch
            if counts is None:
                counts = update_counts([{"sequence_labels": sequence_labels}])
            classes, is_used = logits_BSC.shape[-1], _is_predicted(sequence_labels)
            if (classes == 1) != sequence_labels.is_floating_point():
                given = "floating-point numbers" if sequence_labels.is_floating_point() else "integers"
                needed = (
                    "regression requires floating-point labels"
                    if classes == 1
                    else "classification requires integers from 0"
                )
                raise InputError(f"num_labels = {classes}: the labels are {given}, but {needed}")
            if classes == 1:
                loss = ((logits_BSC.squeeze(-1).float() - sequence_labels)[is_used] ** 2).sum()
            else:
                loss = _sum_losses(logits_BSC, sequence_labels)
            loss = loss / counts.clamp(min=1).to(logits_BSC.device).squeeze()
        return SequenceClassifierOutput(loss=loss, logits=logits_BSC)


def _pool_first_tokens(pooler: Any, hidden_BLH: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
    """Apply BERT's pooler to the first token of each sequence.

    The result has the shape [B, S, H].
    """
    return pooler.activation(pooler.dense(gather_positions(hidden_BLH, positions_BS)))


def _sum_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the negative log-likelihoods of all labels, as a float32 scalar."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NOT_PREDICTED, reduction="sum")
