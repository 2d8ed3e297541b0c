"""BERT's pretraining heads on packs: computed where they are needed, summed, and divided by the counts of a whole update.

`transformers` computes the masked-LM head at all L positions, and the next-sentence head at the first position of a row.
Here the first is computed at the masked positions, the second at the first token of every sequence, gathered in static
shapes. A loss is a sum over a micro-batch, divided by what the whole update counts, so that accumulated micro-batches and
processes add up to the loss of one large batch; divided each by its own count, they would weigh a token by how few others
are masked beside it.

Letters: B packs, L positions, Q masked slots, S sequences of a pack, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import BertForPreTraining
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

from gaudi_bert.pytorch.rows import NOT_PREDICTED

__all__ = ["PackedBertForPreTraining", "update_counts"]


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
