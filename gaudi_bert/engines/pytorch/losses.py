"""The sums of the heads in PyTorch, as `model/heads.py` lists them; in at least float32.

Letters: B packs, L positions, Q masked slots, S depth, P rows of logits, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from gaudi_bert.model.heads import Loss, TaskHead
from gaudi_bert.pytorch.cpu import cross_entropy
from gaudi_bert.pytorch.pooling import belongs

# Lowers the scores of tokens of other sequences: their probability is exactly 0.
_FORBIDDEN = -1e9


def pretraining_sums(words_BQV: Tensor, sentences_BS2: Tensor, batch: Mapping[str, Tensor], loss: Loss) -> Tensor:
    """Masked-LM loss and weight, next-sentence loss and weight, then correct and count of both: [8]."""
    weights_BQ, masked_weight = _masked_slot_weights(batch, loss, words_BQV.dtype)
    masked_sum, masked_right = _weighed_likelihoods(words_BQV, batch["masked_lm_ids"], weights_BQ)
    sentence_weights_BS = batch["next_sentence_weights"].to(words_BQV.dtype)
    sentence_sum, sentence_right = _weighed_likelihoods(sentences_BS2, batch["next_sentence_labels"], sentence_weights_BS)
    sentence_weight = sentence_weights_BS.sum()
    correct = (masked_right, masked_weight, sentence_right, sentence_weight)
    return torch.stack([masked_sum, masked_weight, sentence_sum, sentence_weight, *correct])


def _masked_slot_weights(batch: Mapping[str, Tensor], loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weight of every masked slot, [B, Q], and what the weights add up to, an integer.

    A used slot weighs 1, or, per sequence, 1 / (masked slots of its sequence).
    """
    numbers_BQ = batch["masked_lm_weights"]
    if loss == "token":
        used_BQ = (numbers_BQ > 0).to(dtype)
        return used_BQ, used_BQ.sum()
    depth = batch["next_sentence_positions"].shape[1]
    belongs_BSQ = belongs(numbers_BQ, depth).to(dtype)
    slots_BS1 = belongs_BSQ.sum(-1, keepdim=True)
    return (belongs_BSQ / slots_BS1.clamp(min=1.0)).sum(1), slots_BS1.clamp(max=1.0).sum()


def _likelihoods(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The negative log likelihood of each label, and 1 where it is the likeliest class, flat [P]; logits [..., C]."""
    logits_PC, labels_P = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    losses_P = cross_entropy(logits_PC, labels_P)
    return losses_P, (logits_PC.detach().argmax(-1) == labels_P).to(logits.dtype)


def _weighed_likelihoods(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    losses_P, right_P = _likelihoods(logits, labels)
    weights_P = weights.reshape(-1)
    return (losses_P * weights_P).sum(), (right_P * weights_P).sum()


def task_sums(head: TaskHead, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The sum of losses of a task, what it is divided by, and right answers: [3]."""
    weights = batch["target_weights"].to(logits.dtype)
    if head.kind in ("multi-label", "reranking"):
        targets_BSC = batch["targets"].to(logits.dtype).reshape(logits.shape)
        losses = functional.binary_cross_entropy_with_logits(logits, targets_BSC, reduction="none").mean(-1)
        right = ((logits >= 0) == (targets_BSC > 0.5)).all(-1).to(logits.dtype)
    elif head.kind == "regression":
        losses = (logits.squeeze(-1) - batch["targets"].to(logits.dtype)).square()
        right = torch.zeros_like(losses)
    elif head.kind == "question-answering":
        losses, right = _span_losses(logits, batch)
    else:
        losses, right = _likelihoods(logits, batch["targets"])
    weights = weights.reshape(losses.shape)
    return torch.stack([(losses * weights).sum(), weights.sum(), (right * weights).sum()])


def _span_losses(logits_BL2: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Half the sum of both likelihoods, and whether both are right, [B, S]; a sequence's answer is among its own tokens."""
    packs, depth = batch["target_weights"].shape
    own_BSL = belongs(batch["input_mask"], depth).to(logits_BL2.dtype)
    own_BS2L = logits_BL2.transpose(1, 2)[:, None] + ((1.0 - own_BSL) * _FORBIDDEN)[:, :, None, :]
    losses_P, right_P = _likelihoods(own_BS2L, batch["targets"])
    return losses_P.reshape(packs, depth, 2).mean(-1), right_P.reshape(packs, depth, 2).amin(-1)
