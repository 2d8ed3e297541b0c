"""Updates in TensorFlow: forward and backward passes of micro-batches, sums over processes, clipping, and the optimizer.

Gradients are added over the micro-batches and then over the processes, once per update. The complete gradient is clipped
once. With several processes, the passes and the sum over processes are separate graphs, because each process reports to the
watchdog between them that it waits for the others.

Letters in shapes: M micro-batches, K sums of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, FloatArray, Int32Array, WeightArrays
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Communicator, Moments, UpdateLoss, UpdateScalars, WaitForSums
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.engines.tensorflow.operations import compile_kernel_if_enabled, make_graph_function
from gaudi_bert.model.config import has_weight_decay


class TensorFlowUpdates:
    """Trains one model with one optimizer, one update of the variables at a time.

    Args:
        model: The model.
        settings: The settings of the training loop.
        communicator: The processes of the run.
        accumulation_steps: The maximum number of micro-batches in an update on this process.

    Attributes:
        graphs: The graphs of the forward and backward passes that were traced.
    """

    def __init__(
        self, model: TensorFlowModel, settings: LoopSettings, communicator: Communicator, accumulation_steps: int
    ) -> None:
        self._model, self._settings, self._communicator = model, settings, communicator
        self._optimizer = _Optimizer(model.variables, settings, compiled=model.compiled)
        self._is_single_graph = accumulation_steps == 1 and communicator.size == 1
        self._variables = list(model.variables.values())
        self._has_dropout = max(model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) > 0
        self._accumulated: list[tf.Variable] = []
        if not self._is_single_graph:
            self._accumulated = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in self._variables]
        self.graphs: list[tf.Graph] = []
        self._lengths: set[int] = set()
        self._single_update = make_graph_function(self._trace_single_update)
        self._accumulate = make_graph_function(self._accumulate_micro_batch_gradients)
        self._outputs = make_graph_function(self._trace_forward_pass)
        self._finish = make_graph_function(self._apply_update)

    def run_update(
        self,
        micro_batches: Sequence[BatchArrays],
        dropout_seeds_M2: Int32Array,
        loss_factors_M2: FloatArray,
        scalars: UpdateScalars,
        update: int,
        update_loss: UpdateLoss | None = None,
    ) -> WaitForSums:
        """Add up gradients, clip them, and update the variables. See `engines/protocol.Updates.run_update`."""
        inputs = [
            (
                {name: tf.constant(value) for name, value in batch.items()},
                tf.constant(dropout_seeds_M2[number]),
                tf.constant(loss_factors_M2[number], tf.float32),
            )
            for number, batch in enumerate(micro_batches)
        ]
        tensors = UpdateScalars(*(tf.constant(value, tf.float32) for value in scalars))
        if update_loss is not None:
            coupled = [(batch, seed) for batch, seed, _ in inputs]
            return self._update_in_two_passes(coupled, tensors, update, update_loss).numpy
        if self._is_single_graph:
            (only,) = inputs
            return self._single_update(*only, tensors).numpy
        sums: tf.Tensor = None
        for number, each in enumerate(inputs):
            self._report_to_watchdog(number, update, each[0])
            sums = self._accumulate(*each, sums)
        if self._communicator.size > 1:
            sums.numpy()  # waits until the device has finished the passes
            self._communicator.record_waiting_for_others()
        return self._finish(self._accumulated, sums, tensors).numpy

    def _update_in_two_passes(
        self,
        inputs: Sequence[tuple[Mapping[str, tf.Tensor], tf.Tensor]],
        scalars: UpdateScalars,
        update: int,
        update_loss: UpdateLoss,
    ) -> tf.Tensor:
        """Run one update with a loss that depends on the outputs of all micro-batches.

        The last micro-batch is computed once, and all others twice.
        """
        last, outputs = len(inputs) - 1, []
        for number, each in enumerate(inputs[:-1]):
            self._report_to_watchdog(number, update, each[0])
            outputs.append(self._outputs(*each).numpy())
        self._report_to_watchdog(last, update, inputs[last][0])
        output, tape = self._record_forward_pass(*inputs[last])
        sums, gradients = update_loss([*outputs, output.numpy()])
        totals = self._backpropagate(output, tape, gradients[last])
        for number, each in enumerate(inputs[:-1]):
            self._report_to_watchdog(number, update, each[0])
            added = self._backpropagate(*self._record_forward_pass(*each), gradients[number])
            totals = [total + gradient for total, gradient in zip(totals, added, strict=True)]
        self._communicator.record_waiting_for_others()
        return self._finish(totals, tf.constant(sums, tf.float32), scalars)

    def _record_forward_pass(self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor) -> tuple[tf.Tensor, tf.GradientTape]:
        """Run the model on a batch with dropout, and return its outputs and the gradient tape that recorded the pass."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            return self._outputs(batch, seed), tape

    def _backpropagate(self, output: tf.Tensor, tape: tf.GradientTape, gradient: FloatArray | tf.Tensor) -> list[tf.Tensor]:
        """Return the gradients of all variables, given a recorded pass and the gradient of its outputs."""
        given, none = tf.convert_to_tensor(gradient, output.dtype), tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(output, self._variables, output_gradients=given, unconnected_gradients=none)
        return [tf.convert_to_tensor(each) for each in gradients]

    def _report_to_watchdog(self, number: int, update: int, batch: Mapping[str, tf.Tensor]) -> None:
        """Report to the watchdog which micro-batch begins, and whether it may take long.

        The first micro-batch of each row length may take long, because a graph is built for it.
        """
        length = batch["input_ids"].shape[1]
        is_new = length not in self._lengths
        if number or (is_new and self._lengths):
            slow = is_new or len(self.graphs) < 2
            self._communicator.record_activity(f"micro-batch {number + 1} of update {update}", slow=slow)
        self._lengths.add(length)

    def copy_moments(self) -> Moments:
        """Return copies of the first and second moments, by variable name."""
        first, second = ({name: moment.numpy() for name, moment in moments.items()} for moments in self._optimizer.moments)
        return Moments(first, second)

    def load_moments(self, first: WeightArrays, second: WeightArrays) -> None:
        """Set the first and second moments of all variables."""
        for moments, values in zip(self._optimizer.moments, (first, second), strict=True):
            for name, moment in moments.items():
                moment.assign(values[name])

    def _compute_gradients(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, loss_factors: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Run the forward and backward pass of a micro-batch. Return its gradients, and the sums over the micro-batch that
        give the loss and the metrics.
        """
        self.graphs.append(tf.compat.v1.get_default_graph())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            loss, sums = self._model.compute_loss(batch, seed if self._has_dropout else None, loss_factors)
        sums_K = tf.stack(sums)
        gradients = tape.gradient(loss, self._variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in gradients], sums_K

    def _apply_update(self, gradients: Sequence[tf.Tensor], sums: tf.Tensor, scalars: UpdateScalars) -> tf.Tensor:
        """Sum the gradients over all processes, clip the sum, and update the variables.

        Returns:
            The sums, followed by the gradient norm before clipping, [K + 1].
        """
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        gradients = self._communicator.sum_tensors(gradients)
        factor, norm = _compute_clip_factor_and_norm(gradients, self._settings.clip_norm)
        self._optimizer.apply_gradients(gradients, scalars, factor)
        return tf.concat([sums, [norm]], axis=0)

    def _trace_single_update(
        self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor, loss_factors: tf.Tensor, scalars: UpdateScalars
    ) -> tf.Tensor:
        """Run a complete update with a single micro-batch on a single process."""
        gradients, sums = self._compute_gradients(batch, seed, loss_factors)
        return self._apply_update(gradients, sums, scalars)

    def _accumulate_micro_batch_gradients(
        self,
        batch: Mapping[str, tf.Tensor],
        seed: tf.Tensor,
        loss_factors: tf.Tensor,
        previous_sums: tf.Tensor | None,
    ) -> tf.Tensor:
        """Run the forward and backward pass of a micro-batch, and add its gradients to the stored ones. For the first
        micro-batch of an update, `previous_sums` is None, and its gradients replace the stored ones.

        Return the head's loss and metric sums over all micro-batches so far.
        """
        gradients, sums = self._compute_gradients(batch, seed, loss_factors)
        for accumulated, gradient in zip(self._accumulated, gradients, strict=True):
            if previous_sums is None:
                accumulated.assign(gradient)
            else:
                accumulated.assign_add(gradient)
        return sums if previous_sums is None else previous_sums + sums

    def _trace_forward_pass(self, batch: Mapping[str, tf.Tensor], seed: tf.Tensor) -> tf.Tensor:
        """Run the model on a micro-batch, and return the outputs of its head."""
        self.graphs.append(tf.compat.v1.get_default_graph())
        return self._model.forward(batch, seed if self._has_dropout else None)


# --- AdamW, LAMB and clipping, implemented with TensorFlow operations on static shapes
#
# For every variable w with gradient g, both optimizers store the moments
#
#     m <- beta_1 * m + (1 - beta_1) * g          v <- beta_2 * v + (1 - beta_2) * g * g
#
# The moments start at zero, so they are multiplied by the bias corrections 1 / (1 - beta^t) to give m^ and v^. The direction
# is
#
#     u = m^ / (sqrt(v^) + epsilon) + weight_decay * w
#
# Biases and layer normalization have no weight decay. AdamW (Loshchilov and Hutter 2019, algorithm 2) computes
# w <- w - rate * u. LAMB (You et al. 2020, algorithm 2) computes w <- w - rate * |w| / |u| * u, with a ratio of 1 if either
# norm is zero. In MLPerf's variant, the ratio is also 1 for variables without weight decay (`layer_adaptation: decayed`).
#
# The bias corrections are computed on the host in float64 and passed to the graph, so that the graph needs no step counter.


# The update of a variable is compiled only if the variable has at least this many elements. Smaller variables fit into the
# CPU caches, so compiling is not worthwhile for them.
_MIN_COMPILED_ELEMENTS = 2**16


def _compute_clip_factor_and_norm(gradients: Sequence[tf.Tensor], clip_norm: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the factor that clips the gradients to a joint norm of at most `clip_norm`, and their joint norm before
    clipping.

    After the multiplication, the gradients have a joint norm of at most `clip_norm`. With a `clip_norm` of 0, the factor is
    1.
    """
    # tf.add_n adds its inputs in an order that depends on which memory is free. The last bit of the sum could therefore
    # vary, so stack the squared norms and sum the stack.
    norm = tf.sqrt(2.0 * tf.reduce_sum(tf.stack([tf.nn.l2_loss(gradient) for gradient in gradients])))
    return tf.ones([]) if clip_norm == 0 else clip_norm / tf.maximum(norm, clip_norm), norm


class _Optimizer:
    """Updates variables with AdamW or LAMB, and stores their moments.

    Args:
        variables: The variables by name.
        settings: The optimizer and its hyperparameters.
        compiled: Whether XLA compiles the update of large variables, which then takes only one pass over memory on a CPU.

    Attributes:
        moments: The first and the second moments, by variable name.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], settings: LoopSettings, *, compiled: bool = False) -> None:
        self._variables, self._settings, self._compiled = dict(variables), settings, compiled
        self.moments: tuple[dict[str, tf.Variable], ...] = tuple(
            {
                name: tf.Variable(tf.zeros(variable.shape, tf.float32), trainable=False)
                for name, variable in self._variables.items()
            }
            for _ in range(2)
        )

    def apply_gradients(self, gradients: Sequence[tf.Tensor], scalars: UpdateScalars, factor: tf.Tensor) -> None:
        """Update every variable with its gradient times `factor`. The gradients are in the order of the variables."""
        settings = self._settings
        for (name, variable), gradient in zip(self._variables.items(), gradients, strict=True):
            is_adapted = settings.optimizer == "lamb" and (settings.layer_adaptation == "all" or has_weight_decay(name))
            decay = settings.weight_decay if has_weight_decay(name) else 0.0
            hyperparameters = (settings.beta_1, settings.beta_2, settings.epsilon, decay, is_adapted)
            is_compiled = self._compiled and variable.shape.num_elements() >= _MIN_COMPILED_ELEMENTS
            first, second = (moments[name] for moments in self.moments)
            compile_kernel_if_enabled(_update_variable, is_compiled)(
                variable, first, second, gradient, factor, scalars, hyperparameters
            )


def _update_variable(
    variable: tf.Variable,
    first_moment: tf.Variable,
    second_moment: tf.Variable,
    gradient: tf.Tensor,
    factor: tf.Tensor,
    scalars: UpdateScalars,
    hyperparameters: tuple[float, float, float, float, bool],
) -> None:
    """Update a variable and its moments with its gradient multiplied by `factor`.

    `hyperparameters` contains beta_1, beta_2, epsilon, the weight decay, and whether the step size is adapted as in LAMB.
    """
    beta_1, beta_2, epsilon, decay, is_adapted = hyperparameters
    gradient = gradient * factor
    first = beta_1 * first_moment + (1.0 - beta_1) * gradient
    second = beta_2 * second_moment + (1.0 - beta_2) * tf.square(gradient)
    first_moment.assign(first)
    second_moment.assign(second)
    direction = first * scalars.first_correction / (tf.sqrt(second * scalars.second_correction) + epsilon)
    direction = direction + decay * variable if decay > 0 else direction
    rate = scalars.learning_rate
    if is_adapted:
        variable_norm, direction_norm = tf.norm(variable.value()), tf.norm(direction)
        usable = tf.logical_and(variable_norm > 0, direction_norm > 0)
        rate *= tf.where(usable, variable_norm / tf.where(usable, direction_norm, 1.0), 1.0)
    variable.assign_sub(rate * direction)
