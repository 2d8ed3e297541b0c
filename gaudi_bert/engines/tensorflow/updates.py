"""One update: micro-batches forward and backward, sums over processes, clipping, the optimizer.

What the losses of a micro-batch are divided by depends on the data alone (`objective.py`), so it is settled first,
on the host, and gradients simply add up, over micro-batches and over processes. They are reduced once per update, and
clipped once, after they are complete.

With several processes the passes and the reduction are graphs of their own: in between, each process tells the watchdog
that it is done with its share, so that one that sleeps in its pass can be distinguished from those that wait for it.

Dropout has no state: its seed is a function of (seed, update, micro-batch, process), so a resumed run draws the same masks.

Letters: M micro-batches, K sums of an objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Int32Array, WeightArrays, random_words
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.model.bert import PackedBert
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.objective import GLOBAL, LossDenominators, Objective, PretrainingObjective
from gaudi_bert.training.tensorflow.optimizers import Optimizer, UpdateScalars, clip_factor

# The operation of a graph in which its forward pass ends: the sums of the objective.
SUMS_NAME = "loss_sums"


def dropout_seed(seed: int, update: int, micro_batch: int, rank: int) -> Int32Array:
    """Seed of one forward pass, int32 [2]."""
    return random_words(1, seed, "dropout", update, micro_batch, rank).view(np.int32)


class TrainingStep:
    """Runs updates of one model with one optimizer.

    Each update has `accumulation_steps` micro-batches on this process, whose losses are divided by `denominators`;
    `settings` gives `loss`, `clip_norm` and the seed of dropout. Without an objective, the losses of pretraining are
    minimised.
    """

    def __init__(
        self,
        model: PackedBert,
        optimizer: Optimizer,
        communicator: Communicator,
        settings: TrainingSettings,
        *,
        accumulation_steps: int,
        denominators: LossDenominators = GLOBAL,
        objective: Objective | None = None,
    ) -> None:
        self.model, self.optimizer, self._communicator = model, optimizer, communicator
        self._settings = settings
        self.objective = objective if objective is not None else PretrainingObjective(settings.loss)
        self._accumulation_steps, self._denominators = accumulation_steps, denominators
        self._is_single_graph = accumulation_steps == 1 and communicator.size == 1
        self._variables = list(optimizer.variables.values())
        self._has_dropout = max(model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) > 0
        self._accumulated: list[tf.Variable] = []
        if not self._is_single_graph:
            self._accumulated = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in self._variables]
        self._passes: list[tf.Graph] = []
        self._single_update = _as_graph(self._trace_update)
        self._first = _as_graph(self._trace_first)
        self._next = _as_graph(self._trace_next)
        self._finish = _as_graph(self._trace_finish)

    def run(self, micro_batches: Sequence[BatchArrays], update: int, learning_rate: float) -> tf.Tensor:
        """Do update number `update` (from 1).

        float32 [K + 1]: the sums of the objective over this process's micro-batches, and the gradient's norm over all
        processes before clipping.
        """
        if len(micro_batches) != self._accumulation_steps:
            raise ValueError(f"{len(micro_batches)} micro-batches given, {self._accumulation_steps} make an update")
        weights_M2 = np.array([self.objective.weights(batch) for batch in micro_batches])
        packs = len(micro_batches[0]["input_ids"])
        factors_M2 = self._denominators.factors(weights_M2, packs, self._communicator)
        scalars = self.optimizer.scalars(update, learning_rate)
        inputs = [
            (
                {name: tf.constant(value) for name, value in batch.items()},
                self._dropout_seed(update, number),
                tf.constant(factors_M2[number], tf.float32),
            )
            for number, batch in enumerate(micro_batches)
        ]
        if self._is_single_graph:
            return self._single_update(*inputs[0], scalars)
        sums = self._first(*inputs[0])
        for number, each in enumerate(inputs[1:], start=2):
            self._communicator.note(f"micro-batch {number} of update {update}", slow=self.graphs_traced < 2)
            sums = self._next(*each, sums)
        if self._communicator.size > 1:
            sums.numpy()  # a device may still be at it
            self._communicator.arrive()
        return self._finish(sums, scalars)

    def state(self) -> dict[str, WeightArrays]:
        """What a checkpoint stores of it, by the fields of `Checkpoint`."""
        states = {
            "variables": self.model.variables_by_name,
            "first_moments": self.optimizer.first_moments,
            "second_moments": self.optimizer.second_moments,
        }
        return {name: {key: each.numpy() for key, each in variables.items()} for name, variables in states.items()}

    def trace(self, batch: Mapping[str, tf.TensorSpec]) -> dict[str, tf.Graph]:
        """Build the graphs that `run` would use for such batches, and run nothing.

        Returns:
            `update` alone, where one micro-batch of one process makes an update; else `first`, `next` and `finish`.
        """
        scalar, sums = tf.TensorSpec([], tf.float32), tf.TensorSpec([self.objective.sums], tf.float32)
        passed = _pass_specs(batch)
        scalars = UpdateScalars(scalar, scalar, scalar)
        if self._is_single_graph:
            return {"update": self._single_update.get_concrete_function(*passed, scalars).graph}
        return {
            "first": self._first.get_concrete_function(*passed).graph,
            "next": self._next.get_concrete_function(*passed, sums).graph,
            "finish": self._finish.get_concrete_function(sums, scalars).graph,
        }

    def trace_pass(self, batch: Mapping[str, tf.TensorSpec]) -> tf.Graph:
        """Build the graph of the first of several micro-batches: up to the operation `SUMS_NAME` it is the forward pass."""
        return self._first.get_concrete_function(*_pass_specs(batch)).graph

    @property
    def graph(self) -> tf.Graph:
        """The graph of the last forward and backward pass, once `run` has been called."""
        return self._passes[-1]

    @property
    def graphs_traced(self) -> int:
        """How many graphs of forward and backward passes have been built."""
        return len(self._passes)

    def _dropout_seed(self, update: int, micro_batch: int) -> tf.Tensor:
        return tf.constant(dropout_seed(self._settings.seed, update, micro_batch, self._communicator.rank))

    def _gradients(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, factors: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The gradient of this micro-batch's share of the loss, and its sums."""
        self._passes.append(tf.compat.v1.get_default_graph())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            outputs = self.model(batch, dropout_seed=seed if self._has_dropout else None)
            loss, sums = self.objective.loss(outputs, batch, factors)
        sums_K = tf.stack(sums, name=SUMS_NAME)
        gradients = tape.gradient(loss, self._variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in gradients], sums_K

    def _update(self, gradients: Sequence[tf.Tensor], sums: tf.Tensor, scalars: UpdateScalars) -> tf.Tensor:
        """Sum over processes, clip, move the variables."""
        gradients = self._communicator.sum_tensors(gradients)
        factor, norm = clip_factor(gradients, self._settings.clip_norm)
        self.optimizer.apply(gradients, scalars, factor)
        return tf.concat([sums, [norm]], axis=0)

    def _trace_update(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, factors: tf.Tensor, scalars: UpdateScalars
    ) -> tf.Tensor:
        gradients, sums = self._gradients(batch, seed, factors)
        return self._update(gradients, sums, scalars)

    def _trace_first(self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
        gradients, sums = self._gradients(batch, seed, factors)
        for accumulated, gradient in zip(self._accumulated, gradients, strict=True):
            accumulated.assign(gradient)
        return sums

    def _trace_next(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, factors: tf.Tensor, sums_before: tf.Tensor
    ) -> tf.Tensor:
        gradients, sums = self._gradients(batch, seed, factors)
        for accumulated, gradient in zip(self._accumulated, gradients, strict=True):
            accumulated.assign_add(gradient)
        return sums_before + sums

    def _trace_finish(self, sums: tf.Tensor, scalars: UpdateScalars) -> tf.Tensor:
        return self._update([tf.convert_to_tensor(accumulated) for accumulated in self._accumulated], sums, scalars)


def _pass_specs(batch: Mapping[str, tf.TensorSpec]) -> tuple[dict[str, tf.TensorSpec], tf.TensorSpec, tf.TensorSpec]:
    """What one forward and backward pass is given: the batch, the dropout seed, the factors of the losses."""
    return dict(batch), tf.TensorSpec([2], tf.int32), tf.TensorSpec([2], tf.float32)


def _as_graph(function: Callable[..., tf.Tensor]) -> tf.types.experimental.PolymorphicFunction:
    """`function` as a graph. No Python control flow on tensors has to be rewritten, which saves time while tracing."""
    return tf.function(function, autograph=False, reduce_retracing=False)
