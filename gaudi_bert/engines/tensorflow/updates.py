"""One update: micro-batches forward and backward, sums over processes, clipping, the optimizer.

What the losses of a micro-batch are divided by depends on the data alone (`training/objective.py`), so it is settled first,
on the host, and gradients simply add up, over micro-batches and over processes. They are reduced once per update, and
clipped once, after they are complete.

With several processes the passes and the reduction are graphs of their own: in between, each process tells the watchdog
that it is done with its share, so that one that sleeps in its pass can be distinguished from those that wait for it.

Letters: M micro-batches, K sums of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray, Int32Array, WeightArrays
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.protocol import UpdateScalars
from gaudi_bert.engines.tensorflow.horovod import HorovodCommunicator
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.engines.tensorflow.optimizers import Optimizer, UpdateTensors, clip_factor

# The operation of a graph in which its forward pass ends: the sums of the head.
SUMS_NAME = "loss_sums"


class TensorFlowUpdates:
    """Runs updates of one model with one optimizer, each of `accumulation_steps` micro-batches on this process."""

    def __init__(
        self,
        model: TensorFlowModel,
        settings: TrainingSettings,
        communicator: Communicator,
        accumulation_steps: int,
    ) -> None:
        self._model, self._settings, self._communicator = model, settings, communicator
        self._optimizer = Optimizer(model.variables, settings, compiled=model.compiled)
        self._is_single_graph = accumulation_steps == 1 and communicator.size == 1
        self._variables = list(model.variables.values())
        self._has_dropout = model.has_dropout
        self._accumulated: list[tf.Variable] = []
        if not self._is_single_graph:
            self._accumulated = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in self._variables]
        self._passes: list[tf.Graph] = []
        self._single_update = _as_graph(self._trace_update)
        self._first = _as_graph(self._trace_first)
        self._next = _as_graph(self._trace_next)
        self._finish = _as_graph(self._trace_finish)

    def run(
        self,
        micro_batches: Sequence[BatchArrays],
        seeds_M2: Int32Array,
        factors_M2: FloatArray,
        scalars: UpdateScalars,
        update: int,
    ) -> tf.Tensor:
        """Do one update: float32 [K + 1], the sums, and the gradient's norm over all processes before clipping."""
        inputs = [
            (
                {name: tf.constant(value) for name, value in batch.items()},
                tf.constant(seeds_M2[number]),
                tf.constant(factors_M2[number], tf.float32),
            )
            for number, batch in enumerate(micro_batches)
        ]
        tensors = UpdateTensors(*(tf.constant(value, tf.float32) for value in scalars))
        if self._is_single_graph:
            return self._single_update(*inputs[0], tensors)
        sums = self._first(*inputs[0])
        for number, each in enumerate(inputs[1:], start=2):
            self._communicator.note(f"micro-batch {number} of update {update}", slow=self.graphs_built < 2)
            sums = self._next(*each, sums)
        if self._communicator.size > 1:
            sums.numpy()  # a device may still be at it
            self._communicator.arrive()
        return self._finish(sums, tensors)

    def moments(self) -> tuple[dict[str, Float32Array], dict[str, Float32Array]]:
        """A copy of the first and second moments, by variable."""
        first, second = (
            {name: moment.numpy() for name, moment in moments.items()}
            for moments in (self._optimizer.first_moments, self._optimizer.second_moments)
        )
        return first, second

    def load_moments(self, first: WeightArrays, second: WeightArrays) -> None:
        """Set all moments."""
        for moments, values in ((self._optimizer.first_moments, first), (self._optimizer.second_moments, second)):
            for name, moment in moments.items():
                moment.assign(values[name])

    def trace(self, batch: Mapping[str, tf.TensorSpec]) -> dict[str, tf.Graph]:
        """Build the graphs that `run` would use for such batches, and run nothing.

        Returns:
            `update` alone, where one micro-batch of one process makes an update; else `first`, `next` and `finish`.
        """
        scalar, sums = tf.TensorSpec([], tf.float32), tf.TensorSpec([self._model.spec.head.sums], tf.float32)
        passed = _pass_specs(batch)
        scalars = UpdateTensors(scalar, scalar, scalar)
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
    def graphs_built(self) -> int:
        """How many graphs of forward and backward passes have been built."""
        return len(self._passes)

    def _gradients(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, factors: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The gradient of this micro-batch's share of the loss, and its sums."""
        self._passes.append(tf.compat.v1.get_default_graph())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            loss, sums = self._model.loss(batch, seed if self._has_dropout else None, factors)
        sums_K = tf.stack(sums, name=SUMS_NAME)
        gradients = tape.gradient(loss, self._variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in gradients], sums_K

    def _update(self, gradients: Sequence[tf.Tensor], sums: tf.Tensor, scalars: UpdateTensors) -> tf.Tensor:
        """Sum over processes, clip, move the variables."""
        if isinstance(self._communicator, HorovodCommunicator):
            gradients = self._communicator.sum_tensors(gradients)
        factor, norm = clip_factor(gradients, self._settings.clip_norm)
        self._optimizer.apply(gradients, scalars, factor)
        return tf.concat([sums, [norm]], axis=0)

    def _trace_update(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, factors: tf.Tensor, scalars: UpdateTensors
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

    def _trace_finish(self, sums: tf.Tensor, scalars: UpdateTensors) -> tf.Tensor:
        return self._update([tf.convert_to_tensor(accumulated) for accumulated in self._accumulated], sums, scalars)


def _pass_specs(batch: Mapping[str, tf.TensorSpec]) -> tuple[dict[str, tf.TensorSpec], tf.TensorSpec, tf.TensorSpec]:
    """What one forward and backward pass is given: the batch, the dropout seed, the factors of the losses."""
    return dict(batch), tf.TensorSpec([2], tf.int32), tf.TensorSpec([2], tf.float32)


def _as_graph(function: Callable[..., tf.Tensor]) -> tf.types.experimental.PolymorphicFunction:
    """`function` as a graph. No Python control flow on tensors has to be rewritten, which saves time while tracing."""
    return tf.function(function, autograph=False, reduce_retracing=False)
