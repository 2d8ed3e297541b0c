"""A BERT on a device, as `engines/protocol.Model`: arrays in and out, one graph for each set of shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array, WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.protocol import ComputeDtype, ModelSpec, Trial
from gaudi_bert.engines.tensorflow.bert import BertForPretraining
from gaudi_bert.engines.tensorflow.heads import BertForTask, BertForVectors, task_sums
from gaudi_bert.engines.tensorflow.losses import pretraining_sums
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Loss, PretrainingHead, TaskHead, VectorHead

_Function = Callable[..., Any]


class TensorFlowModel:
    """A BERT and its head on a device."""

    def __init__(
        self,
        spec: ModelSpec,
        device: str = "/device:CPU:0",
        *,
        seed: int | None,
        compute_dtype: ComputeDtype = "float32",
        compiled: bool = False,
    ) -> None:
        self.spec, self._device = spec, device
        self.bert = _bert_of(spec, seed, compute_dtype, compiled)
        self.compiled = compiled
        self._outputs = _as_graph(lambda batch: self.bert(batch))
        self._evaluate = _as_graph(self._trace_evaluation)
        self._work = _as_graph(self._trace_work)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The variables by name."""
        return self.bert.variables_by_name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The variables' shapes by name."""
        return {name: tuple(variable.shape) for name, variable in self.variables.items()}

    def values(self) -> dict[str, Float32Array]:
        """A copy of the variables by name."""
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def load_values(self, values: WeightArrays) -> None:
        """Set variables by name; those that `values` does not name keep what they hold."""
        self.bert.load_values(values)

    def outputs(self, batch: BatchArrays) -> Float32Array:
        """What the head gives, without dropout."""
        values: Float32Array = self._outputs(self._tensors(batch)).numpy()
        return values

    def evaluate(self, batch: BatchArrays) -> tuple[Float32Array | None, Float32Array]:
        """The outputs, of heads that keep them, and the sums; without dropout."""
        outputs, sums = self._evaluate(self._tensors(batch))
        return outputs.numpy() if self.spec.head.keeps_outputs else None, sums.numpy()

    def trial(self, batch: BatchArrays, loss: Loss) -> Trial:
        """Outputs, losses and gradients of a model of pretraining."""
        bert = self.bert
        if not isinstance(bert, BertForPretraining):
            raise InputError("a model with the head of a task: it is tried with the heads of pretraining only")
        tensors = self._tensors(batch)
        hidden_BLH, _ = bert.with_hidden_states(tensors)
        with tf.GradientTape() as tape:
            outputs = bert(tensors)
            sums = pretraining_sums(outputs, tensors, loss)
            masked_lm_loss = sums.masked_lm_sum / sums.masked_lm_weight
            next_sentence_loss = sums.next_sentence_sum / sums.next_sentence_weight
            total = masked_lm_loss + next_sentence_loss
        gradients = tape.gradient(total, list(self.variables.values()))
        named = {name.rpartition("_")[0]: output.numpy() for name, output in outputs._asdict().items()}
        return Trial(
            {"hidden_states": hidden_BLH.numpy(), **named},
            {"masked_lm_loss": float(masked_lm_loss), "next_sentence_loss": float(next_sentence_loss)},
            {name: gradient.numpy() for name, gradient in zip(self.variables, gradients, strict=True)},
        )

    def work(self, batch: BatchArrays) -> float:
        """One forward and backward pass with dropout; a number that needs all gradients. For timing."""
        return float(self._work(self._tensors(batch)))

    @property
    def has_dropout(self) -> bool:
        """Whether a pass of training draws masks."""
        config = self.bert.config
        return max(config.hidden_dropout_prob, config.attention_probs_dropout_prob) > 0

    def loss(
        self, batch: Mapping[str, tf.Tensor], dropout_seed: tf.Tensor | None, factors: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """The loss that is minimised, its sums multiplied by `factors` [2]; and the K sums."""
        head, outputs = self.spec.head, self.bert(batch, dropout_seed=dropout_seed)
        if isinstance(head, PretrainingHead):
            sums = pretraining_sums(outputs, batch, head.loss)
            return sums.masked_lm_sum * factors[0] + sums.next_sentence_sum * factors[1], sums
        if not isinstance(head, TaskHead):
            raise InputError("a model of vectors has no loss; give it the head of a task")
        task = task_sums(head, outputs, batch)
        return task.loss * factors[0], task

    def _tensors(self, batch: BatchArrays) -> dict[str, tf.Tensor]:
        with tf.device(self._device):
            return {name: tf.constant(values) for name, values in batch.items()}

    def _trace_evaluation(self, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        head, outputs = self.spec.head, self.bert(batch)
        if isinstance(head, PretrainingHead):
            return tf.zeros([]), tf.stack(pretraining_sums(outputs, batch, head.loss))
        if isinstance(head, VectorHead):
            return outputs, tf.zeros([0])
        return (outputs if head.keeps_outputs else tf.zeros([])), tf.stack(task_sums(head, outputs, batch))

    def _trace_work(self, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        variables = list(self.variables.values())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss, _ = self.loss(batch, tf.constant([1, 2], tf.int32), tf.ones([2]))
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return tf.reduce_sum(tf.stack([tf.reduce_sum(tf.convert_to_tensor(gradient)) for gradient in gradients]))


def _bert_of(spec: ModelSpec, seed: int | None, compute_dtype: ComputeDtype, compiled: bool) -> Any:
    config, head = spec.config, spec.head
    if not isinstance(config, BertConfig):
        raise InputError(f"a model of type {config.model_type}: TensorFlow runs BERT only; set the engine to pytorch")
    if isinstance(head, PretrainingHead):
        return BertForPretraining(config, seed=seed, compute_dtype=compute_dtype, compiled=compiled)
    if isinstance(head, TaskHead):
        return BertForTask(config, head, seed=seed, compute_dtype=compute_dtype, compiled=compiled)
    return BertForVectors(config, head, seed=seed, compute_dtype=compute_dtype)


def _as_graph(function: _Function) -> tf.types.experimental.PolymorphicFunction:
    """`function` as a graph. No Python control flow on tensors has to be rewritten, which saves time while tracing."""
    return tf.function(function, autograph=False, reduce_retracing=False)
