"""The sums of the heads in TensorFlow, as `model/heads.py` lists them, so that micro-batches and ranks add up exactly.

Token-weighted (the predecessor's, and the default): every masked position counts the same. Per sequence (Krell et al.,
2021, section 3.2.3): every sequence counts the same, by the mean over its own masked positions. Next sentence: every
sequence counts the same. The caller divides each sum by its weight, or by expected counts (the paper's T.6).
`masked_lm_weights` holds the number of the sequence that a masked slot belongs to, 0 where it is unused.

Letters: B packs, L positions, Q masked slots, S depth, V vocabulary; R rows and C classes of any logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.bert import PretrainingOutputs
from gaudi_bert.model.heads import Loss, TaskHead

# Lowers the scores of tokens of other sequences: their probability is exactly 0.
_FORBIDDEN = -1e9


def pretraining_sums(outputs: PretrainingOutputs, batch: Mapping[str, tf.Tensor], loss: Loss) -> tuple[tf.Tensor, ...]:
    """Masked-LM loss and weight, next-sentence loss and weight, then correct and count of both: 8 scalars, wide."""
    words_BQV, sentences_BS2 = outputs.masked_lm_logits_BQV, outputs.next_sentence_logits_BS2
    weights_BQ, masked_weight = _masked_slot_weights(batch, loss, words_BQV.dtype)
    masked_sum, masked_correct = _weighted(words_BQV, batch["masked_lm_ids"], weights_BQ)
    sentence_weights_BS = tf.cast(batch["next_sentence_weights"], words_BQV.dtype)
    sentence_sum, sentence_correct = _weighted(sentences_BS2, batch["next_sentence_labels"], sentence_weights_BS)
    sentence_weight = tf.reduce_sum(sentence_weights_BS)
    correct = (masked_correct, masked_weight, sentence_correct, sentence_weight)
    return masked_sum, masked_weight, sentence_sum, sentence_weight, *correct


def _masked_slot_weights(batch: Mapping[str, tf.Tensor], loss: str, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """The weight of every masked slot, [B, Q], and what the weights add up to, an integer.

    A used slot weighs 1, or, per sequence, 1 / (masked slots of its sequence); then the total is the number of sequences
    that have a masked slot.
    """
    numbers_BQ = batch["masked_lm_weights"]
    used_BQ = tf.cast(numbers_BQ > 0, dtype)
    if loss == "token":
        return used_BQ, tf.reduce_sum(used_BQ)
    if loss != "sequence":
        raise InputError(f"loss = {loss!r}; it must be token or sequence")
    depth = batch["next_sentence_positions"].shape[1]
    belongs_BSQ = _belongs(numbers_BQ, depth, dtype)
    slots_BS1 = tf.reduce_sum(belongs_BSQ, axis=-1, keepdims=True)
    weights_BQ = tf.reduce_sum(belongs_BSQ / tf.maximum(slots_BS1, 1.0), axis=1)
    return weights_BQ, tf.reduce_sum(tf.minimum(slots_BS1, 1.0))


def _belongs(numbers_BX: tf.Tensor, depth: int, dtype: tf.DType) -> tf.Tensor:
    """1 where X belongs to a sequence of the pack by its number, else 0, [B, S, X]."""
    numbers_S = tf.cast(tf.range(1, depth + 1), numbers_BX.dtype)
    return tf.cast(tf.equal(numbers_S[:, tf.newaxis], numbers_BX[:, tf.newaxis, :]), dtype)


def _weighted(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted sums of the negative log likelihood and of right answers; logits [..., C], the others [...]."""
    losses_R, right_R = _likelihoods(logits, labels)
    weights_R = tf.reshape(weights, [-1])
    return tf.reduce_sum(losses_R * weights_R), tf.reduce_sum(right_R * weights_R)


def _likelihoods(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The negative log likelihood of each label, and 1 where it is the likeliest class, flat [R]; logits [..., C]."""
    labels_R = tf.reshape(labels, [-1])
    losses_R, guesses_R = cross_entropy(tf.reshape(logits, [-1, logits.shape[-1]]), labels_R)
    return losses_R, tf.cast(tf.equal(guesses_R, labels_R), logits.dtype)


@tf.custom_gradient
def cross_entropy(logits_RC: tf.Tensor, labels_R: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., Any]]:
    """The negative log likelihood of each label, and the likeliest class (int32), for rows of logits.

    TensorFlow's own operation takes six times as long on a CPU. Here one softmax serves loss and gradient: with m the
    largest logit of a row and p_m its share, the logarithm of the sum of exponentials is m - log p_m, where p_m is at least
    1 / C, so no logarithm of a vanishing number is ever taken.
    """
    rows, classes = logits_RC.shape
    shares_RC = tf.nn.softmax(logits_RC)
    guesses_R = tf.argmax(logits_RC, axis=-1, output_type=tf.int32)
    starts_R = tf.range(0, rows * classes, classes, dtype=tf.int32)
    flat_logits = tf.reshape(logits_RC, [-1])
    largest_R = tf.gather(flat_logits, starts_R + guesses_R)
    largest_share_R = tf.gather(tf.reshape(shares_RC, [-1]), starts_R + guesses_R)
    losses_R = largest_R - tf.gather(flat_logits, starts_R + labels_R) - tf.math.log(largest_share_R)

    def backward(losses_gradient_R: tf.Tensor, guesses_gradient: tf.Tensor) -> tuple[tf.Tensor, None]:
        del guesses_gradient
        targets_RC = tf.one_hot(labels_R, classes, dtype=logits_RC.dtype)
        return (shares_RC - targets_RC) * losses_gradient_R[:, tf.newaxis], None

    return (losses_R, guesses_R), backward


def task_sums(head: TaskHead, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """The sum of losses of a task, what it is divided by, and right answers: 3 scalars, as `TaskHead` describes them."""
    if head.kind in ("multi-label", "reranking"):
        targets_BSC = tf.reshape(tf.cast(batch["targets"], logits.dtype), logits.shape)
        losses_BSC = tf.nn.sigmoid_cross_entropy_with_logits(labels=targets_BSC, logits=logits)
        losses = tf.reduce_mean(losses_BSC, axis=-1)
        right = tf.reduce_min(tf.cast(tf.equal(logits >= 0, targets_BSC > 0.5), logits.dtype), axis=-1)
    elif head.kind == "regression":
        losses = tf.square(tf.squeeze(logits, axis=-1) - tf.cast(batch["targets"], logits.dtype))
        right = tf.zeros_like(losses)
    elif head.kind == "question-answering":
        losses, right = _span_losses(logits, batch)
    else:
        losses, right = _likelihoods(logits, batch["targets"])
    weights = tf.reshape(tf.cast(batch["target_weights"], logits.dtype), losses.shape)
    return tf.reduce_sum(losses * weights), tf.reduce_sum(weights), tf.reduce_sum(right * weights)


def _span_losses(logits_BL2: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Half the sum of both negative log likelihoods, and whether both are right, flat [B * S].

    The scores of tokens of other sequences are lowered: scores of 0 instead would be a different loss.
    """
    own_BSL = _belongs(batch["input_mask"], batch["target_weights"].shape[1], logits_BL2.dtype)
    forbidden_BS1L = ((1.0 - own_BSL) * _FORBIDDEN)[:, :, tf.newaxis, :]
    own_BS2L = tf.transpose(logits_BL2, [0, 2, 1])[:, tf.newaxis] + forbidden_BS1L
    losses_R, right_R = _likelihoods(own_BS2L, batch["targets"])
    return tf.reduce_mean(tf.reshape(losses_R, [-1, 2]), axis=-1), tf.reduce_min(tf.reshape(right_R, [-1, 2]), axis=-1)
