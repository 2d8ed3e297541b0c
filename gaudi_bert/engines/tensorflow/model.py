"""A BERT with any head in TensorFlow, as `engines/protocol.Model`, and reading Google's TF1 checkpoints.

Inputs and outputs are numpy arrays. There is one graph for each set of shapes. The outputs of a head for a sequence in a
pack depend only on this sequence.

Letters in shapes: B packs, L positions, Q masked slots, S depth, P = B * S sequences (or B * L tokens), H hidden size,
C outputs of a head, K sums of a head, V vocabulary. For logits of any kind: R rows, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.protocol import BatchEvaluation, ComputeDtype, LossesAndGradients, ModelSpec, check_weights
from gaudi_bert.engines.tensorflow.bert import (
    Network,
    apply_pooler,
    compute_masked_lm_logits,
    compute_pretraining_logits,
    encode_packs,
)
from gaudi_bert.engines.tensorflow.operations import ForwardPass, dense, make_graph_function, upcast_to_float32
from gaudi_bert.model.config import BertConfig, draw_initial_value
from gaudi_bert.model.heads import (
    LOWEST_HIDDEN,
    OTHER_SEQUENCE,
    Loss,
    Pooling,
    PretrainingHead,
    TaskHead,
    VectorHead,
    check_logit_count,
    parameter_specs_with_head,
)

# Each dropout in the model has a number, called its site, which determines its random numbers. The head's site is a large
# number, so that no encoder layer has the same site.
_HEAD_DROPOUT_SITE = 1 << 20

Batch = Mapping[str, tf.Tensor]


class TensorFlowModel:
    """A BERT and its head on a device.

    Args:
        spec: The config of the BERT, and its head.
        device: The TensorFlow name of the device.
        seed: The seed of the initial values. None if weights will be loaded.
        compute_dtype: The dtype of the matrix products. Even with bfloat16, variables, layer normalization, softmax and
            logits are float32. float64 is for checks of correctness.
        compiled: Whether XLA compiles chains of elementwise operations. This takes a few seconds, and makes updates on a CPU
            a tenth faster. Compiled dropout draws other masks. On Gaudi, leave this off, because its graph compiler already
            fuses such chains.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: str = "/device:CPU:0",
        *,
        seed: int | None,
        compute_dtype: ComputeDtype = "float32",
        compiled: bool = False,
    ) -> None:
        config = cast(BertConfig, spec.config)
        self.spec, self.config, self.compiled, self._device = spec, config, compiled, device
        self.compute_dtype = tf.as_dtype(compute_dtype)
        self.variables: dict[str, tf.Variable] = {
            name: tf.Variable(
                draw_initial_value(name, variable, config.initializer_range, seed), name=name, dtype=tf.float32
            )
            for name, variable in parameter_specs_with_head(config, spec.head).items()
        }
        self._outputs = make_graph_function(self.forward)
        self._evaluate = make_graph_function(self._trace_evaluation)
        self._training_pass = make_graph_function(self._trace_training_pass)

    # --- The methods of `engines/protocol.Model`

    def variable_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the variables by name."""
        return {name: tuple(variable.shape) for name, variable in self.variables.items()}

    def persistent_buffers(self) -> tuple[str, ...]:
        """Return the names of the variables that have no gradient. A BERT has no such variables."""
        return ()

    def copy_variables(self) -> dict[str, Float32Array]:
        """Return a copy of the variables by name."""
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def load_variables(self, values: WeightArrays) -> None:
        """Set variables to the given values. Variables that are not in `values` keep their current values."""
        check_weights(self.variable_shapes(), values)
        for name, value in values.items():
            self.variables[name].assign(np.asarray(value, dtype=np.float32))

    def freeze(self) -> None:
        """Do nothing, because TensorFlow chooses the memory layout of weights itself."""

    def compute_outputs(self, batch: BatchArrays) -> Float32Array:
        """Run the model on a batch without dropout, and return the outputs of its head."""
        values: Float32Array = self._outputs(self.copy_to_device(batch)).numpy()
        return values

    def evaluate_batch(self, batch: BatchArrays) -> BatchEvaluation:
        """Run the model on a batch without dropout. Return the head's outputs, and the sums over the batch that give the
        loss and the metrics.
        """
        outputs, sums = self._evaluate(self.copy_to_device(batch))
        return BatchEvaluation(outputs.numpy() if self.spec.head.metrics_need_outputs else None, sums.numpy())

    def compute_losses_and_gradients(self, batch: BatchArrays, loss: Loss) -> LossesAndGradients:
        """Run a forward and a backward pass of a pretraining model without dropout, and return its outputs, losses and
        gradients.
        """
        tensors = self.copy_to_device(batch)
        hidden_TH = encode_packs(self.build_network(), tensors)
        with tf.GradientTape() as tape:
            masked_lm_logits_BQV, next_sentence_logits_BS2 = outputs = self.forward(tensors)
            sums = _compute_pretraining_loss_and_metric_sums(outputs, tensors, loss)
            masked_lm_loss, next_sentence_loss = sums[0] / sums[1], sums[2] / sums[3]
            total = masked_lm_loss + next_sentence_loss
        gradients = tape.gradient(total, list(self.variables.values()))
        return LossesAndGradients(
            {
                "hidden_states": upcast_to_float32(hidden_TH).numpy().reshape(*batch["input_ids"].shape, -1),
                "masked_lm_logits": masked_lm_logits_BQV.numpy(),
                "next_sentence_logits": next_sentence_logits_BS2.numpy(),
            },
            {"masked_lm_loss": float(masked_lm_loss), "next_sentence_loss": float(next_sentence_loss)},
            {name: gradient.numpy() for name, gradient in zip(self.variables, gradients, strict=True)},
        )

    def run_training_pass(self, batch: BatchArrays) -> float:
        """Run a forward and a backward pass with dropout, to measure how long they take. The weights do not change.

        Return a number that depends on all gradients, so that none of them can be skipped.
        """
        return float(self._training_pass(self.copy_to_device(batch)))

    # --- Functions that TensorFlow traces into graphs. All shapes are static.

    def build_network(self, dropout_seed: tf.Tensor | None = None) -> Network:
        """Return the config, the variables and the options that all layers need for one forward pass.

        `dropout_seed` is int32 [2], or None for no dropout.
        """
        parameters = {name: tf.convert_to_tensor(variable) for name, variable in self.variables.items()}
        if self.compute_dtype == tf.float64:
            parameters = {name: tf.cast(value, tf.float64) for name, value in parameters.items()}
        return Network(self.config, parameters, self.compute_dtype, ForwardPass(dropout_seed, self.compiled))

    def forward(self, batch: Batch, dropout_seed: tf.Tensor | None = None) -> Any:
        """Run the model on a batch, and return the outputs of its head in at least float32.

        For pretraining, return the logits of both tasks. For language modelling, return logits [P, V].
        """
        network, head = self.build_network(dropout_seed), self.spec.head
        if isinstance(head, PretrainingHead):
            return compute_pretraining_logits(network, batch)
        return (
            _compute_vectors(network, head, batch)
            if isinstance(head, VectorHead)
            else _compute_task_outputs(network, head, batch)
        )

    def compute_loss_and_metric_sums(self, outputs: Any, batch: Batch) -> Sequence[tf.Tensor]:
        """Compute, from the outputs of the head, the sums over a batch that give the loss and the metrics. `model/heads.py`
        lists these sums.
        """
        head = self.spec.head
        if isinstance(head, PretrainingHead):
            return _compute_pretraining_loss_and_metric_sums(outputs, batch, head.loss)
        return _compute_task_loss_and_metric_sums(head, outputs, batch) if isinstance(head, TaskHead) else ()

    def compute_loss(
        self, batch: Batch, dropout_seed: tf.Tensor | None, factors: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """Run the model on a batch. Return the loss to differentiate, and the sums over the batch that give the reported
        loss and metrics.

        The loss is the sum of the two loss sums of the head, each multiplied by one of the `factors` [2].
        """
        sums = self.compute_loss_and_metric_sums(self.forward(batch, dropout_seed), batch)
        if isinstance(self.spec.head, PretrainingHead):
            return sums[0] * factors[0] + sums[2] * factors[1], sums
        return sums[0] * factors[0], sums

    def copy_to_device(self, batch: BatchArrays) -> dict[str, tf.Tensor]:
        """Copy a batch to the device."""
        with tf.device(self._device):
            return {name: tf.constant(values) for name, values in batch.items()}

    def _trace_evaluation(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Run the model on a batch without dropout. Return the head's outputs, and the sums over the batch that give the
        loss and the metrics.

        If the head keeps no outputs, the first result is an empty scalar.
        """
        outputs = self.forward(batch)
        sums = self.compute_loss_and_metric_sums(outputs, batch)
        return outputs if self.spec.head.metrics_need_outputs else tf.zeros([]), tf.stack(sums) if sums else tf.zeros([0])

    def _trace_training_pass(self, batch: Batch) -> tf.Tensor:
        """Run a forward and a backward pass with dropout, and return the sum of all gradient elements.

        The result depends on all gradients, so that none of them can be skipped.
        """
        variables = list(self.variables.values())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss, _ = self.compute_loss(batch, tf.constant([1, 2], tf.int32), tf.ones([2]))
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return tf.reduce_sum(tf.stack([tf.reduce_sum(tf.convert_to_tensor(gradient)) for gradient in gradients]))


# --- Heads of tasks, and vectors of texts


def _compute_task_outputs(network: Network, head: TaskHead, batch: Batch) -> tf.Tensor:
    """Run the encoder and the head of a task, and return the outputs of the head in at least float32.

    For language modelling, the outputs are the logits of the vocabulary, [P, V].
    """
    packs, length = batch["input_ids"].shape
    if not head.metrics_need_outputs:
        check_logit_count(packs, length, network.config.vocab_size)
    hidden_PH = encode_packs(
        network, batch, None if head.positions_feature_name is None else batch[head.positions_feature_name]
    )
    if not head.metrics_need_outputs:
        return compute_masked_lm_logits(network, hidden_PH)
    shape = [packs, length, head.width]
    if head.predicts_per_text:
        hidden_PH, shape = apply_pooler(network, hidden_PH), [*batch["sequence_positions"].shape, head.width]
    if head.kind != "question-answering":  # BERT's span head has no dropout
        hidden_PH = network.apply_dropout(hidden_PH, _HEAD_DROPOUT_SITE)
    with tf.name_scope("KEEP_FP32_PRECISION"):
        return tf.reshape(dense(upcast_to_float32(hidden_PH), *network.get_kernel_and_bias(head.dense_name_prefix)), shape)


def _compute_vectors(network: Network, head: VectorHead, batch: Batch) -> tf.Tensor:
    """Run the encoder, and return a vector for each sequence of the batch.

    The vectors are float32 [B, S, H]. The vectors of unused sequence slots are undefined.
    """
    hidden = encode_packs(
        network, batch, None if head.positions_feature_name is None else batch[head.positions_feature_name]
    )
    (packs, depth), size = batch["sequence_positions"].shape, network.config.hidden_size
    if head.positions_feature_name is not None:
        vectors_BSH = tf.reshape(upcast_to_float32(hidden), [packs, depth, size])
    else:
        hidden_BLH = tf.reshape(upcast_to_float32(hidden), [*batch["input_ids"].shape, size])
        vectors_BSH = _pool_tokens(hidden_BLH, batch["input_mask"], depth, head.pooling)
    return tf.math.l2_normalize(vectors_BSH, axis=-1, epsilon=1e-24) if head.normalize else vectors_BSH


def _pool_tokens(hidden_BLH: tf.Tensor, input_mask_BL: tf.Tensor, depth: int, pooling: Pooling) -> tf.Tensor:
    """Return the mean or the maximum over the tokens of each sequence.

    The result has the shape [B, S, H]. As in sentence-transformers, the tokens include [CLS] and [SEP].
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
    return tf.maximum(tf.reshape(most, [packs, depth + 1, hidden])[:, 1:], LOWEST_HIDDEN)


# --- The loss sums and metric sums of all heads. `model/heads.py` lists them.
#
# The sums can be added over micro-batches and processes.
#
# With the masked-LM loss per token (the default), every masked token has the same weight. With the loss per sequence (Krell
# et al., 2021, section 3.2.3), every sequence has the same weight, and its loss is the mean over its masked tokens.
# `masked_lm_weights` contains the number of the sequence to which a masked slot belongs, or 0 for an unused slot.


def _compute_pretraining_loss_and_metric_sums(
    outputs: tuple[tf.Tensor, tf.Tensor], batch: Batch, loss: Loss
) -> tuple[tf.Tensor, ...]:
    """Compute the sums over a pretraining batch that give the loss and the metrics, in at least float32.

    Returns:
        The masked-LM loss and its weight, the next-sentence loss and its weight, and then for each of the two tasks the
        total weight of the correct predictions and of all predictions.
    """
    masked_lm_logits_BQV, next_sentence_logits_BS2 = outputs
    weights_BQ, masked_weight = _compute_masked_slot_weights(batch, loss, masked_lm_logits_BQV.dtype)
    masked_sum, masked_correct = _sum_losses_and_correct_predictions(
        masked_lm_logits_BQV, batch["masked_lm_ids"], weights_BQ
    )
    sentence_weights_BS = tf.cast(batch["next_sentence_weights"], masked_lm_logits_BQV.dtype)
    sentence_sum, sentence_correct = _sum_losses_and_correct_predictions(
        next_sentence_logits_BS2, batch["next_sentence_labels"], sentence_weights_BS
    )
    sentence_weight = tf.reduce_sum(sentence_weights_BS)
    correct = (masked_correct, masked_weight, sentence_correct, sentence_weight)
    return masked_sum, masked_weight, sentence_sum, sentence_weight, *correct


def _compute_masked_slot_weights(batch: Batch, loss: Loss, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the weight of every masked token in the loss, and the sum of these weights.

    The weights have the shape [B, Q]. Unused slots have the weight 0. A masked token has the weight 1 or, for the loss per
    sequence, 1 / (number of masked tokens of its sequence).
    """
    numbers_BQ = batch["masked_lm_weights"]
    used_BQ = tf.cast(numbers_BQ > 0, dtype)
    if loss == "token":
        return used_BQ, tf.reduce_sum(used_BQ)
    belongs_BSQ = _build_membership_mask(numbers_BQ, batch["next_sentence_positions"].shape[1], dtype)
    slots_BS1 = tf.reduce_sum(belongs_BSQ, axis=-1, keepdims=True)
    return tf.reduce_sum(belongs_BSQ / tf.maximum(slots_BS1, 1.0), axis=1), tf.reduce_sum(tf.minimum(slots_BS1, 1.0))


def _build_membership_mask(sequence_numbers_BX: tf.Tensor, depth: int, dtype: tf.DType) -> tf.Tensor:
    """Return a mask that is 1 if a position or slot belongs to a sequence of the pack, and otherwise 0.

    The mask has the shape [B, S, X], where X stands for the positions or slots.
    """
    numbers_S = tf.cast(tf.range(1, depth + 1), sequence_numbers_BX.dtype)
    return tf.cast(tf.equal(numbers_S[:, tf.newaxis], sequence_numbers_BX[:, tf.newaxis, :]), dtype)


def _sum_losses_and_correct_predictions(
    logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the weighted sum of the negative log-likelihoods of all labels, and the weighted sum of the correct
    predictions.

    Logits have the shape [..., C], and labels and weights have the shape [...].
    """
    losses_R, right_R = _compute_losses_and_correctness(logits, labels)
    weights_R = tf.reshape(weights, [-1])
    return tf.reduce_sum(losses_R * weights_R), tf.reduce_sum(right_R * weights_R)


def _compute_losses_and_correctness(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the negative log-likelihood of each label. Also return 1 for each label with the largest logit, and 0 for all
    others.

    Logits have the shape [..., C]. Both results are flattened, [R].
    """
    labels_R = tf.reshape(labels, [-1])
    losses_R, guesses_R = cross_entropy(tf.reshape(logits, [-1, logits.shape[-1]]), labels_R)
    return losses_R, tf.cast(tf.equal(guesses_R, labels_R), logits.dtype)


@tf.custom_gradient
def cross_entropy(logits_RC: tf.Tensor, labels_R: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., Any]]:
    """Return the negative log-likelihood of each label, and the class with the largest logit in each row.

    The classes are int32.

    TensorFlow's own operation takes six times as long on a CPU. Here, the same softmax is used for the loss and for the
    gradient. If m is the largest logit of a row and p_m its probability, then the logarithm of the sum of the exponentials
    is m - log p_m. As p_m is at least 1 / C, the logarithm is always finite.
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


def _compute_task_loss_and_metric_sums(head: TaskHead, logits: tf.Tensor, batch: Batch) -> tuple[tf.Tensor, ...]:
    """Return the sum of the weighted losses of a task, the sum of the weights, and the weighted sum of the correct
    predictions.
    """
    if head.kind in ("multi-label", "reranking"):
        targets_BSC = tf.reshape(tf.cast(batch["targets"], logits.dtype), logits.shape)
        losses = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets_BSC, logits=logits), axis=-1)
        right = tf.reduce_min(tf.cast(tf.equal(logits >= 0, targets_BSC > 0.5), logits.dtype), axis=-1)
    elif head.kind == "regression":
        losses = tf.square(tf.squeeze(logits, axis=-1) - tf.cast(batch["targets"], logits.dtype))
        right = tf.zeros_like(losses)
    elif head.kind == "question-answering":
        losses, right = _compute_span_losses_and_correctness(logits, batch)
    else:
        losses, right = _compute_losses_and_correctness(logits, batch["targets"])
    weights = tf.reshape(tf.cast(batch["target_weights"], logits.dtype), losses.shape)
    return tf.reduce_sum(losses * weights), tf.reduce_sum(weights), tf.reduce_sum(right * weights)


def _compute_span_losses_and_correctness(logits_BL2: tf.Tensor, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the loss of each answer span, and whether both its start and its end are predicted correctly.

    Both results have the shape [B * S]. The loss is the mean of the negative log-likelihoods of start and end. The logits of
    tokens in other sequences are lowered, so that they do not contribute to the softmax.
    """
    own_BSL = _build_membership_mask(batch["input_mask"], batch["target_weights"].shape[1], logits_BL2.dtype)
    forbidden_BS1L = ((1.0 - own_BSL) * OTHER_SEQUENCE)[:, :, tf.newaxis, :]
    own_BS2L = tf.transpose(logits_BL2, [0, 2, 1])[:, tf.newaxis] + forbidden_BS1L
    losses_R, right_R = _compute_losses_and_correctness(own_BS2L, batch["targets"])
    return tf.reduce_mean(tf.reshape(losses_R, [-1, 2]), axis=-1), tf.reduce_min(tf.reshape(right_R, [-1, 2]), axis=-1)


# --- Google's TF1 checkpoints: `bert_model.ckpt.index` and `.data-00000-of-00001`
#
# Our variables have the names and the layouts of `google-research/bert`, so no conversion is needed. A checkpoint that was
# written during training also contains counters and Adam's moments (`<variable>/adam_m`), which are ignored.


def read_google_checkpoint(prefix: Path) -> dict[str, Float32Array]:
    """Read the variables of a BERT from a TF1 checkpoint, and return them by name.

    Raises:
        InputError: The checkpoint is incomplete, or is not that of a BERT.
    """
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = reader.get_variable_to_shape_map()
        # The checkpoint may also contain optimizer moments, which are not read. The name of a moment begins with the name of
        # its variable.
        weights = [name for name in names if name.startswith(("bert/", "cls/")) and name.rpartition("/")[0] not in names]
        values = {name: reader.get_tensor(name) for name in weights}
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{prefix}: the path is not a complete TF1 checkpoint ({reason}); copy its .index and .data files again"
        ) from error
    if not values:
        raise InputError(
            f"{prefix}: the checkpoint contains no variable whose name begins with bert/; pass a checkpoint from "
            "google-research/bert"
        )
    return values
