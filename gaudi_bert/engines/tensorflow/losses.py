"""The losses of pretraining as sums and weights, so that micro-batches and ranks add up exactly.

Token-weighted (the predecessor's, and the default): every masked position counts the same. Per sequence
(Krell et al., 2021, section 3.2.3): every sequence counts the same, by the mean over its own masked
positions. Next sentence: every sequence counts the same. The caller divides: loss = masked_lm_sum /
masked_lm_weight + next_sentence_sum / next_sentence_weight; or by expected counts (the paper's T.6).
`masked_lm_weights` holds the number of the sequence that a masked slot belongs to, 0 where it is unused.

Letters: B packs, Q masked slots, S depth, V vocabulary; R rows and C classes of any logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.bert import PretrainingOutputs
from gaudi_bert.model.heads import Loss


class LossSums(NamedTuple):
    """Scalars, float32 as the logits are; correct / count is the accuracy, of tokens or of sequences as the loss is."""

    masked_lm_sum: tf.Tensor
    masked_lm_weight: tf.Tensor
    next_sentence_sum: tf.Tensor
    next_sentence_weight: tf.Tensor
    masked_lm_correct: tf.Tensor
    masked_lm_count: tf.Tensor
    next_sentence_correct: tf.Tensor
    next_sentence_count: tf.Tensor


def pretraining_sums(outputs: PretrainingOutputs, batch: Mapping[str, tf.Tensor], loss: Loss = "token") -> LossSums:
    """Sums and weights of both losses and of both accuracies over one batch of packs."""
    wide_dtype = outputs.masked_lm_logits_BQV.dtype
    weights_BQ, masked_weight = _masked_slot_weights(batch, loss, wide_dtype)
    masked_sum, masked_correct = _weighted(outputs.masked_lm_logits_BQV, batch["masked_lm_ids"], weights_BQ)
    sentence_weights_BS = tf.cast(batch["next_sentence_weights"], wide_dtype)
    sentence_sum, sentence_correct = _weighted(
        outputs.next_sentence_logits_BS2, batch["next_sentence_labels"], sentence_weights_BS
    )
    sentence_weight = tf.reduce_sum(sentence_weights_BS)
    return LossSums(
        masked_lm_sum=masked_sum,
        masked_lm_weight=masked_weight,
        next_sentence_sum=sentence_sum,
        next_sentence_weight=sentence_weight,
        masked_lm_correct=masked_correct,
        masked_lm_count=masked_weight,
        next_sentence_correct=sentence_correct,
        next_sentence_count=sentence_weight,
    )


def _masked_slot_weights(batch: Mapping[str, tf.Tensor], loss: str, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """The weight of every masked slot, [B, Q], and what the weights add up to, an integer.

    A used slot weighs 1, or, per sequence, 1 / (masked slots of its sequence); then the total is the number
    of sequences that have a masked slot. Slots are assigned to sequences by comparing numbers, [B, S, Q], at
    any depth.
    """
    numbers_BQ = batch["masked_lm_weights"]
    used_BQ = tf.cast(numbers_BQ > 0, dtype)
    if loss == "token":
        return used_BQ, tf.reduce_sum(used_BQ)
    if loss != "sequence":
        raise InputError(f"loss = {loss!r}; it must be token or sequence")
    depth = batch["next_sentence_positions"].shape[1]
    sequence_S = tf.cast(tf.range(1, depth + 1), numbers_BQ.dtype)
    belongs_BSQ = tf.cast(tf.equal(sequence_S[:, tf.newaxis], numbers_BQ[:, tf.newaxis, :]), dtype)
    slots_BS1 = tf.reduce_sum(belongs_BSQ, axis=-1, keepdims=True)
    weights_BQ = tf.reduce_sum(belongs_BSQ / tf.maximum(slots_BS1, 1.0), axis=1)
    return weights_BQ, tf.reduce_sum(tf.minimum(slots_BS1, 1.0))


def _weighted(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted sums of the negative log likelihood and of right answers; logits [..., classes], the others [...]."""
    classes = logits.shape[-1]
    labels_R, weights_R = tf.reshape(labels, [-1]), tf.reshape(weights, [-1])
    losses_R, guesses_R = cross_entropy(tf.reshape(logits, [-1, classes]), labels_R)
    right_R = tf.cast(tf.equal(guesses_R, labels_R), weights.dtype)
    return tf.reduce_sum(losses_R * weights_R), tf.reduce_sum(right_R * weights_R)


@tf.custom_gradient
def cross_entropy(logits_RC: tf.Tensor, labels_R: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable]:
    """The negative log likelihood of each label, and the likeliest class (int32), for rows of logits.

    TensorFlow's own operation takes six times as long on a CPU. Here one softmax serves loss and gradient:
    with m the largest logit of a row and p_m its share, the logarithm of the sum of exponentials is m - log
    p_m, where p_m is at least 1 / C, so no logarithm of a vanishing number is ever taken.
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
