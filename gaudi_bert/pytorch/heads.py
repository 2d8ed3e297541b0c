"""Losses on packs that add up: over micro-batches and processes to the loss of one large batch. Heads that gather for BERT.

A loss is a sum over a micro-batch, divided by the count of the complete update. `update_counts` counts, `update_loss`
computes the part that a micro-batch adds, for any head with one output for each token.

Heads with one output for a sequence have to gather: here they are computed at the first token of every sequence, and the
masked-LM head at the masked positions, in static shapes. Weights and their names are those of `transformers`.

Letters: B packs, L positions, Q masked slots, S sequences of a pack, H hidden size, C labels.
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
from gaudi_bert.encoders.feeding import gather
from gaudi_bert.encoders.feeding_trial import ONE_FOR_A_ROW, check_head
from gaudi_bert.encoders.trial import on_device
from gaudi_bert.pytorch.collate import model_inputs

_COUNTED = (("masked_lm_labels", "next_sentence_label"), ("sequence_labels",), ("labels",))


# --- losses that add up


def update_counts(batches: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The labels of the micro-batches of one update on this process, float32 [1].

    With the heads of pretraining [2]: masked positions and sequences. With several processes, add theirs
    (`torch.distributed.all_reduce`, `accelerator.reduce`) before the first loss is computed.

    Raises:
        InputError: a batch has no labels.
    """
    return torch.stack([_counts(batch) for batch in batches]).sum(0).float()


def _counts(batch: dict[str, Any]) -> torch.Tensor:
    for names in _COUNTED:
        if all(name in batch for name in names):
            return torch.stack([_is_label(batch[name]).sum() for name in names])
    raise InputError(f"the batch has no labels, but {', '.join(batch)}; pack a table with a column of labels")


def _is_label(labels: torch.Tensor) -> torch.Tensor:
    return ~labels.isnan() if labels.is_floating_point() else labels != NOT_PREDICTED


def update_loss(model: Any, batch: dict[str, Any], counts: torch.Tensor, processes: int = 1) -> torch.Tensor:
    """The part of an update's loss that one micro-batch adds: a scalar, for `backward`.

    Args:
        model: any with one output for each token, or a head of this module; perhaps wrapped for several processes.
        batch: of a `PackCollator`; it is moved to the model's device.
        counts: `update_counts` of the update, over all processes.
        processes: that train together. Their gradients are averaged, and the parts are to be added: so it is a factor.

    Raises:
        InputError: the model gives one output for a row, which holds several sequences; or the batch has no labels.
    """
    inputs = on_device(model_inputs(batch), next(model.parameters()).device)
    counts = counts.to(inputs["input_ids"].device)
    if "sequence_positions" in inputs:
        return model(**inputs, num_items_in_batch=counts).loss * processes
    own, inner = _counts(inputs), getattr(model, "module", model)
    try:
        outputs = model(**inputs)
    except (RuntimeError, ValueError):  # labels that do not fit the outputs
        check_head(inner)
        raise
    if outputs.logits.shape[:2] != inputs["input_ids"].shape:
        raise InputError(f"{type(inner).__name__}: {ONE_FOR_A_ROW}")
    if not own.any():  # the mean of no labels is not a number
        return outputs.logits.sum() * 0.0
    return outputs.loss * (own / counts.clamp(min=1)).squeeze() * processes


# --- heads that gather


class PackedBertForPreTraining(BertForPreTraining):
    """`BertForPreTraining` for the batches of `PackCollator(gather_heads=True)`; weights and their names are the same."""

    gathers = True  # one output for each sequence, and none for a row
    accepts_loss_kwargs = True  # Trainer then gives `num_items_in_batch`, and divides by nothing itself

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
        """Logits [B, Q, vocabulary] and [B, S, 2], and, with labels, the loss.

        Args:
            masked_lm_positions: int64 [B, Q]; what unused slots point to is not used.
            sequence_positions: int64 [B, S], the first token of each sequence.
            masked_lm_labels: int64 [B, Q], -100 in unused slots.
            next_sentence_label: int64 [B, S], -100 in unused slots.
            num_items_in_batch: `update_counts` of the complete update; those of this batch when None.
        """
        hidden_BLH = self.bert(
            input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, position_ids=position_ids
        )[0]
        masked_BQH = gather(hidden_BLH, masked_lm_positions)
        words = self.cls.predictions(masked_BQH)
        sentences = self.cls.seq_relationship(_pooled(self.bert.pooler, hidden_BLH, sequence_positions))
        loss = None
        if masked_lm_labels is not None and next_sentence_label is not None:
            if num_items_in_batch is None:
                labels = {"masked_lm_labels": masked_lm_labels, "next_sentence_label": next_sentence_label}
                num_items_in_batch = update_counts([labels])
            masked_count, sequence_count = num_items_in_batch.clamp(min=1).to(words.device)
            loss = _summed(words, masked_lm_labels) / masked_count + _summed(sentences, next_sentence_label) / sequence_count
        return BertForPreTrainingOutput(loss=loss, prediction_logits=words, seq_relationship_logits=sentences)


class PackedBertForSequenceClassification(BertForSequenceClassification):
    """`BertForSequenceClassification` for the batches of `PackCollator(sequence_labels=COLUMN)`.

    A regression where the config has one label (`num_labels=1`). Weights and their names are the same.
    """

    gathers = True  # one output for each sequence, and none for a row
    accepts_loss_kwargs = True  # Trainer then gives `num_items_in_batch`, and divides by nothing itself

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
        """Logits [B, S, C], and, with labels, the loss; values of slots without a sequence have no meaning.

        Args:
            sequence_positions: int64 [B, S], the first token of each sequence.
            sequence_labels: int64 [B, S], -100 in unused slots; for a regression float32, NaN there.
            num_items_in_batch: `update_counts` of the complete update; those of this batch when None.
        """
        hidden_BLH = self.bert(
            input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, position_ids=position_ids
        )[0]
        logits_BSC = self.classifier(self.dropout(_pooled(self.bert.pooler, hidden_BLH, sequence_positions)))
        loss = None
        if sequence_labels is not None:
            counts = num_items_in_batch
            if counts is None:
                counts = update_counts([{"sequence_labels": sequence_labels}])
            classes, is_used = logits_BSC.shape[-1], _is_label(sequence_labels)
            if (classes == 1) != sequence_labels.is_floating_point():
                given = "numbers with a fraction" if sequence_labels.is_floating_point() else "integers"
                needed = "a column of float for a regression" if classes == 1 else "integers from 0 for classes"
                raise InputError(f"num_labels = {classes}: the labels are {given}; give {needed}")
            if classes == 1:
                loss = ((logits_BSC.squeeze(-1).float() - sequence_labels)[is_used] ** 2).sum()
            else:
                loss = _summed(logits_BSC, sequence_labels)
            loss = loss / counts.clamp(min=1).to(logits_BSC.device).squeeze()
        return SequenceClassifierOutput(loss=loss, logits=logits_BSC)


def _pooled(pooler: Any, hidden_BLH: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
    """Return what BERT's pooler makes of the tokens at S positions of each pack, [B, S, H]."""
    return pooler.activation(pooler.dense(gather(hidden_BLH, positions_BS)))


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the negative log likelihood where there is a label, float32."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NOT_PREDICTED, reduction="sum")
