"""AdamW and LAMB on plain variables, in plain TensorFlow operations with static shapes.

Both keep, for every variable w with gradient g, the moments

    m <- beta_1 * m + (1 - beta_1) * g          v <- beta_2 * v + (1 - beta_2) * g * g

corrected for their start at zero by 1 / (1 - beta^t), and form the direction

    u = m^ / (sqrt(v^) + epsilon) + weight_decay * w

where the last term is omitted for biases and layer norms. AdamW (Loshchilov and Hutter 2019, algorithm 2) moves
w <- w - rate * u. LAMB (You et al. 2020, algorithm 2) moves w <- w - rate * |w| / |u| * u, with a ratio of 1 where either
norm is zero; MLPerf's variant leaves the ratio at 1 for the variables that are not decayed (`layer_adaptation: decayed`).

The two corrections are computed on the host in float64 and passed in, so that no step counter lives in the graph.

What happens to a variable is a chain of elementwise operations. On a CPU each of them would read and write a large variable
once; `compiled` (XLA) makes one pass of the chain, and writes where it has read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.tensorflow.operations import kernel
from gaudi_bert.model.config import is_decayed

# Variables of fewer numbers lie in the processor's caches: they are not worth a compilation.
LEAST_COMPILED = 2**16


class UpdateTensors(NamedTuple):
    """What changes from update to update, float32 scalars."""

    learning_rate: tf.Tensor
    first_correction: tf.Tensor
    second_correction: tf.Tensor


class _State(NamedTuple):
    """A variable and its moments, float32 of one shape."""

    variable: tf.Variable
    first_moment: tf.Variable
    second_moment: tf.Variable


class _Constants(NamedTuple):
    """The numbers of the rule that stay as they are for a variable."""

    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float


def clip_factor(gradients: Sequence[tf.Tensor], clip_norm: float) -> tuple[tf.Tensor, tf.Tensor]:
    """What all gradients are multiplied by so that their joint Euclidean norm is at most `clip_norm` (0: they stay).

    Also the norm before; both are float32 scalars. The norm is not finite when a gradient is not.
    """
    # Not tf.add_n: it adds into whichever input's memory is free just then, so its order, and its last bit, vary.
    norm = tf.sqrt(2.0 * tf.reduce_sum(tf.stack([tf.nn.l2_loss(gradient) for gradient in gradients])))
    return tf.ones([]) if clip_norm == 0 else clip_norm / tf.maximum(norm, clip_norm), norm


class Optimizer:
    """AdamW or LAMB over named variables.

    `compiled` makes one pass over memory for each large variable, by XLA (for CPUs). `apply` takes gradients in the order of
    `variables`; moments are known by the names of the variables.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], settings: TrainingSettings, *, compiled: bool = False) -> None:
        self.variables = dict(variables)
        self.settings = settings
        self._compiled = compiled
        self.first_moments = {name: self._zeros(variable) for name, variable in self.variables.items()}
        self.second_moments = {name: self._zeros(variable) for name, variable in self.variables.items()}

    def apply(self, gradients: Sequence[tf.Tensor], scalars: UpdateTensors, factor: tf.Tensor) -> None:
        """Move every variable by its gradient times `factor`; `gradients` in the order of `variables`."""
        for (name, variable), gradient in zip(self.variables.items(), gradients, strict=True):
            is_adapted = self.settings.layer_adaptation == "all" or is_decayed(name)
            move = _lamb if self.settings.optimizer == "lamb" and is_adapted else _adamw
            state = _State(variable, self.first_moments[name], self.second_moments[name])
            is_compiled = self._compiled and variable.shape.num_elements() >= LEAST_COMPILED
            kernel(move, is_compiled)(state, gradient, factor, scalars, self._constants(name))

    def _constants(self, name: str) -> _Constants:
        decay = self.settings.weight_decay if is_decayed(name) else 0.0
        return _Constants(self.settings.beta_1, self.settings.beta_2, self.settings.epsilon, decay)

    @staticmethod
    def _zeros(variable: tf.Variable) -> tf.Variable:
        return tf.Variable(tf.zeros(variable.shape, tf.float32), trainable=False)


def _adamw(state: _State, gradient: tf.Tensor, factor: tf.Tensor, scalars: UpdateTensors, constants: _Constants) -> None:
    """Move a variable and its moments by its gradient times `factor`."""
    direction = _direction(state, gradient * factor, scalars, constants)
    state.variable.assign_sub(scalars.learning_rate * direction)


def _lamb(state: _State, gradient: tf.Tensor, factor: tf.Tensor, scalars: UpdateTensors, constants: _Constants) -> None:
    """The same with the trust ratio."""
    direction = _direction(state, gradient * factor, scalars, constants)
    state.variable.assign_sub(scalars.learning_rate * _trust_ratio(state.variable.value(), direction) * direction)


def _direction(state: _State, gradient: tf.Tensor, scalars: UpdateTensors, constants: _Constants) -> tf.Tensor:
    """Advances the moments, and gives u."""
    first = constants.beta_1 * state.first_moment + (1.0 - constants.beta_1) * gradient
    second = constants.beta_2 * state.second_moment + (1.0 - constants.beta_2) * tf.square(gradient)
    state.first_moment.assign(first)
    state.second_moment.assign(second)
    direction = first * scalars.first_correction / (tf.sqrt(second * scalars.second_correction) + constants.epsilon)
    return direction + constants.weight_decay * state.variable if constants.weight_decay > 0 else direction


def _trust_ratio(variable: tf.Tensor, direction: tf.Tensor) -> tf.Tensor:
    """|w| / |u|, or 1 where either is zero: float32 scalar."""
    variable_norm = tf.norm(variable)
    direction_norm = tf.norm(direction)
    usable = tf.logical_and(variable_norm > 0, direction_norm > 0)
    return tf.where(usable, variable_norm / tf.where(usable, direction_norm, 1.0), 1.0)
