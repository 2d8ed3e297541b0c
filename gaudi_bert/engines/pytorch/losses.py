"""The loss sums and metric sums of all heads in PyTorch, in at least float32. `model/heads.py` lists them.

Letters in shapes: B packs, L positions, Q masked slots, S depth, P rows of logits, C outputs or classes of a head, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from gaudi_bert.encoders.pack_inputs import build_membership_mask
from gaudi_bert.engines.pytorch.cpu_operations import cross_entropy
from gaudi_bert.model.heads import OTHER_SEQUENCE, Loss, TaskHead


def pretraining_sums(
    masked_lm_logits_BQV: Tensor, next_sentence_logits_BS2: Tensor, batch: Mapping[str, Tensor], loss: Loss
) -> Tensor:
    """Compute the loss sums and metric sums of a pretraining batch, [8].

    Returns:
        The masked-LM loss and its weight, the next-sentence loss and its weight, and then for each of the two tasks the
        total weight of the correct predictions and of all predictions.
    """
    weights_BQ, masked_weight = _masked_slot_weights(batch, loss, masked_lm_logits_BQV.dtype)
    masked_sum, masked_correct = _sum_losses_and_correct(masked_lm_logits_BQV, batch["masked_lm_ids"], weights_BQ)
    sentence_weights_BS = batch["next_sentence_weights"].to(masked_lm_logits_BQV.dtype)
    sentence_sum, sentence_correct = _sum_losses_and_correct(
        next_sentence_logits_BS2, batch["next_sentence_labels"], sentence_weights_BS
    )
    sentence_weight = sentence_weights_BS.sum()
    correct = (masked_correct, masked_weight, sentence_correct, sentence_weight)
    return torch.stack([masked_sum, masked_weight, sentence_sum, sentence_weight, *correct])


def _masked_slot_weights(batch: Mapping[str, Tensor], loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight of every masked token in the loss, [B, Q], and the sum of these weights.

    Unused slots have the weight 0. A masked token has the weight 1 or, for the loss per sequence, 1 / (number of masked
    tokens of its sequence).
    """
    numbers_BQ = batch["masked_lm_weights"]
    if loss == "token":
        used_BQ = (numbers_BQ > 0).to(dtype)
        return used_BQ, used_BQ.sum()
    depth = batch["next_sentence_positions"].shape[1]
    belongs_BSQ = build_membership_mask(numbers_BQ, depth).to(dtype)
    slots_BS1 = belongs_BSQ.sum(-1, keepdim=True)
    return (belongs_BSQ / slots_BS1.clamp(min=1.0)).sum(1), slots_BS1.clamp(max=1.0).sum()


def _losses_and_correct(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each label, and whether the label has the largest logit (1 or 0).

    Logits have the shape [..., C]. Both results are flattened, [P].
    """
    logits_PC, labels_P = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    losses_P = cross_entropy(logits_PC, labels_P)
    return losses_P, (logits_PC.detach().argmax(-1) == labels_P).to(logits.dtype)


def _sum_losses_and_correct(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the negative log-likelihoods of all labels, and the weighted sum of the correct
    predictions.
    """
    losses_P, correct_P = _losses_and_correct(logits, labels)
    weights_P = weights.reshape(-1)
    return (losses_P * weights_P).sum(), (correct_P * weights_P).sum()


def task_sums(head: TaskHead, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the weighted losses of a task, the sum of the weights, and the weighted sum of the correct
    predictions.
    """
    weights = batch["target_weights"].to(logits.dtype)
    if head.kind in ("multi-label", "reranking"):
        targets_BSC = batch["targets"].to(logits.dtype).reshape(logits.shape)
        losses = functional.binary_cross_entropy_with_logits(logits, targets_BSC, reduction="none").mean(-1)
        correct = ((logits >= 0) == (targets_BSC > 0.5)).all(-1).to(logits.dtype)
    elif head.kind == "regression":
        losses = (logits.squeeze(-1) - batch["targets"].to(logits.dtype)).square()
        correct = torch.zeros_like(losses)
    elif head.kind == "question-answering":
        losses, correct = _span_losses_and_correct(logits, batch)
    else:
        losses, correct = _losses_and_correct(logits, batch["targets"])
    weights = weights.reshape(losses.shape)
    return torch.stack([(losses * weights).sum(), weights.sum(), (correct * weights).sum()])


def _span_losses_and_correct(logits_BL2: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of each answer span, and whether both its start and its end are predicted correctly, each [B, S].

    The loss is the mean of the negative log-likelihoods of start and end. The logits of tokens in other sequences are
    lowered, so that they do not contribute to the softmax.
    """
    packs, depth = batch["target_weights"].shape
    membership_BSL = build_membership_mask(batch["input_mask"], depth).to(logits_BL2.dtype)
    logits_BS2L = logits_BL2.transpose(1, 2)[:, None] + ((1.0 - membership_BSL) * OTHER_SEQUENCE)[:, :, None, :]
    losses_P, correct_P = _losses_and_correct(logits_BS2L, batch["targets"])
    return losses_P.reshape(packs, depth, 2).mean(-1), correct_P.reshape(packs, depth, 2).amin(-1)
