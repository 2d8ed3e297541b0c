"""BERT with the head of a task (`model.heads.TaskHead`), and BERT that gives one vector for each text.

A head treats each sequence of a pack as if it stood alone: what it computes for a sequence depends on that sequence only.

Letters: B packs, L positions, S depth, P = B * S sequences (or B * L tokens, or B * Q masked slots), R = P or 2 P, H hidden
size, C values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.protocol import ComputeDtype
from gaudi_bert.engines.tensorflow.bert import PackedBert, encode_packs, masked_lm_logits, pool
from gaudi_bert.engines.tensorflow.dropout import ForwardPass
from gaudi_bert.engines.tensorflow.losses import cross_entropy
from gaudi_bert.engines.tensorflow.operations import dense, dropout, widen
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.features import MOST_LOGITS
from gaudi_bert.model.heads import Pooling, TaskHead, VectorHead, variables_of

# Larger than the number of any dropout in an encoder.
_HEAD_DROPOUT_SITE = 1 << 20
# Lowers the scores of tokens of other sequences: their probability is exactly 0.
_FORBIDDEN = -1e9
# Below any hidden state; a sequence that is absent has nothing else.
_LOWEST = -3.0e38


class TaskSums(NamedTuple):
    """A sum of losses, what it is divided by, and how many answers were right; scalars, float32."""

    loss: tf.Tensor
    weight: tf.Tensor
    right: tf.Tensor


class BertForTask(PackedBert):
    """BERT with the head of a task; arguments as `PackedBert`."""

    def __init__(
        self,
        config: BertConfig,
        head: TaskHead,
        *,
        seed: int | None,
        compute_dtype: ComputeDtype = "float32",
        compiled: bool = False,
    ) -> None:
        specs = variables_of(config, head)
        super().__init__(config, specs, seed=seed, compute_dtype=compute_dtype, compiled=compiled)
        self.head = head

    def __call__(self, batch: Mapping[str, tf.Tensor], *, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """The outputs of the head, wide; for language modelling the scores of all words, [B * Q, V] or [B * L, V].

        Args:
            batch: features as `TaskHead` lists them, shapes static.
            dropout_seed: int32 [2], another one for every pass of a training run; None for no dropout.
        """
        head, (packs, length) = self.head, batch["input_ids"].shape
        if not head.keeps_outputs and packs * length * self.config.vocab_size > MOST_LOGITS:
            raise InputError(
                f"batch: {packs} packs of {length} have more than {MOST_LOGITS:,} logits of {self.config.vocab_size} words; "
                "make finetune.micro_batch_packs smaller"
            )
        parameters, forward_pass = self.parameters(), ForwardPass(dropout_seed, self.compiled)
        positions_BP = None if head.read_positions is None else batch[head.read_positions]
        hidden_RH = encode_packs(batch, parameters, self.config, self.compute_dtype, forward_pass, positions_BP)
        if not head.keeps_outputs:
            return masked_lm_logits(hidden_RH, parameters, self.config, self.compiled)
        if head.is_of_text:
            pooled_PH = pool(hidden_RH, parameters)
            shape = [*batch["sequence_positions"].shape, head.width]
        else:
            pooled_PH, shape = hidden_RH, [packs, length, head.width]
        return tf.reshape(self._scores(pooled_PH, parameters, forward_pass), shape)

    def _scores(self, inputs_PH: tf.Tensor, parameters: Mapping[str, tf.Tensor], forward_pass: ForwardPass) -> tf.Tensor:
        """Wide scores [P, C] of the dense layer, with the dropout that BERT's heads but for question answering have."""
        if self.head.kind != "question-answering":
            rate = self.config.hidden_dropout_prob
            drawn = forward_pass.draw(inputs_PH.shape, rate, _HEAD_DROPOUT_SITE)
            inputs_PH = dropout(inputs_PH, drawn, rate, forward_pass.compiled)
        scope = self.head.scope
        with tf.name_scope("KEEP_FP32_PRECISION"):
            return dense(widen(inputs_PH), parameters[f"{scope}/kernel"], parameters[f"{scope}/bias"])


# --- the losses of the tasks


def task_sums(head: TaskHead, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> TaskSums:
    """The sums of a task over a batch, as `TaskHead` describes them."""
    if head.kind == "multi-label":
        return _multi_label_sums(logits, batch)
    if head.kind == "regression":
        return _regression_sums(logits, batch)
    if head.kind == "question-answering":
        return _span_sums(logits, batch)
    weights_P = tf.cast(tf.reshape(batch["target_weights"], [-1]), logits.dtype)
    classes_P = tf.reshape(batch["targets"], [-1])
    losses_P, guesses_P = cross_entropy(tf.reshape(logits, [-1, logits.shape[-1]]), classes_P)
    right_P = tf.cast(tf.equal(guesses_P, classes_P), logits.dtype)
    return _weighed(losses_P, right_P, weights_P)


def _weighed(losses: tf.Tensor, right: tf.Tensor, weights: tf.Tensor) -> TaskSums:
    return TaskSums(tf.reduce_sum(losses * weights), tf.reduce_sum(weights), tf.reduce_sum(right * weights))


def _multi_label_sums(logits_BSC: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> TaskSums:
    """Binary cross-entropy, for each sequence the mean over its classes; right are sequences without a wrong class."""
    targets_BSC = tf.cast(batch["targets"], logits_BSC.dtype)
    losses_BSC = tf.nn.sigmoid_cross_entropy_with_logits(labels=targets_BSC, logits=logits_BSC)
    same_BSC = tf.cast(tf.equal(logits_BSC >= 0, targets_BSC > 0.5), logits_BSC.dtype)
    weights_BS = tf.cast(batch["target_weights"], logits_BSC.dtype)
    return _weighed(tf.reduce_mean(losses_BSC, axis=-1), tf.reduce_min(same_BSC, axis=-1), weights_BS)


def _regression_sums(logits_BS1: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> TaskSums:
    """Squared error; no answer is called right."""
    errors_BS = tf.squeeze(logits_BS1, axis=-1) - tf.cast(batch["targets"], logits_BS1.dtype)
    weights_BS = tf.cast(batch["target_weights"], logits_BS1.dtype)
    return _weighed(tf.square(errors_BS), tf.zeros_like(errors_BS), weights_BS)


def _span_sums(logits_BL2: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> TaskSums:
    """Half the sum of both negative log likelihoods; right where both are.

    The scores of tokens of other sequences are lowered: scores of 0 instead would be a different loss.
    """
    packs, length = batch["input_ids"].shape
    depth = batch["target_weights"].shape[1]
    numbers_S = tf.range(1, depth + 1, dtype=tf.int32)
    own_BSL = tf.equal(batch["input_mask"][:, tf.newaxis, :], numbers_S[tf.newaxis, :, tf.newaxis])
    forbidden_BS1L = ((1.0 - tf.cast(own_BSL, logits_BL2.dtype)) * _FORBIDDEN)[:, :, tf.newaxis, :]
    own_BS2L = tf.transpose(logits_BL2, [0, 2, 1])[:, tf.newaxis] + forbidden_BS1L
    targets_R = tf.reshape(batch["targets"], [-1])
    losses_R, guesses_R = cross_entropy(tf.reshape(own_BS2L, [packs * depth * 2, length]), targets_R)
    right_P = tf.reduce_min(tf.reshape(tf.cast(tf.equal(guesses_R, targets_R), logits_BL2.dtype), [-1, 2]), axis=-1)
    weights_P = tf.cast(tf.reshape(batch["target_weights"], [-1]), logits_BL2.dtype)
    return _weighed(tf.reduce_mean(tf.reshape(losses_R, [-1, 2]), axis=-1), right_P, weights_P)


# --- one vector for each text


class BertForVectors(PackedBert):
    """An encoder that gives one vector for each sequence; arguments as `PackedBert`."""

    def __init__(
        self, config: BertConfig, head: VectorHead, *, seed: int | None, compute_dtype: ComputeDtype = "float32"
    ) -> None:
        super().__init__(config, variables_of(config, head), seed=seed, compute_dtype=compute_dtype)
        self.head = head

    def __call__(self, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Vectors of the sequences of a batch, float32 [B, S, H]; those of absent ones mean nothing."""
        head = self.head
        positions_BS = None if head.read_positions is None else batch[head.read_positions]
        hidden = encode_packs(batch, self.parameters(), self.config, self.compute_dtype, ForwardPass(), positions_BS)
        packs, depth = batch["sequence_positions"].shape
        if head.pooling == "cls":
            vectors_BSH = tf.reshape(widen(hidden), [packs, depth, self.config.hidden_size])
        else:
            hidden_BLH = tf.reshape(widen(hidden), [*batch["input_ids"].shape, self.config.hidden_size])
            vectors_BSH = _pooled(hidden_BLH, batch["input_mask"], depth, head.pooling)
        return tf.math.l2_normalize(vectors_BSH, axis=-1, epsilon=1e-24) if head.normalize else vectors_BSH


def _pooled(hidden_BLH: tf.Tensor, input_mask_BL: tf.Tensor, depth: int, pooling: Pooling) -> tf.Tensor:
    """Mean or maximum over the tokens of each sequence ([CLS] and [SEP] too, as in sentence-transformers), [B, S, H].

    The mean is a product with 0 and 1; the maximum goes over flat tokens by the number of their sequence.
    """
    packs, length, hidden = hidden_BLH.shape
    if pooling == "mean":
        belongs_BSL = tf.one_hot(input_mask_BL - 1, depth, axis=1, dtype=hidden_BLH.dtype)
        tokens_BS1 = tf.reduce_sum(belongs_BSL, axis=2, keepdims=True)
        return tf.matmul(belongs_BSL, hidden_BLH) / tf.maximum(tokens_BS1, 1.0)
    first_B1 = tf.range(0, packs * (depth + 1), depth + 1, dtype=tf.int32)[:, tf.newaxis]
    segments_T = tf.reshape(input_mask_BL + first_B1, [-1])
    flat_TH = tf.reshape(hidden_BLH, [packs * length, hidden])
    most = tf.math.unsorted_segment_max(flat_TH, segments_T, packs * (depth + 1))
    return tf.maximum(tf.reshape(most, [packs, depth + 1, hidden])[:, 1:], _LOWEST)
