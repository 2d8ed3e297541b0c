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
from gaudi_bert.model.operations import kernel

# --- The learning rate: linear warm-up, then polynomial decay to zero
#
# Updates are counted from 1. With W warm-up updates, N updates, peak rate r and power p,
#
#     rate(t) = r * t / W                                  for t <= W
#     rate(t) = r * (1 - (t - W) / (N - W + 1)) ** p       for t > W, `decay_from: warmup`
#     rate(t) = r * (1 - (t - 1) / N) ** p                 for t > W, `decay_from: start`
#
# so no update has a rate of zero, and zero would be reached at update N + 1. `warmup` reaches the peak at update W and goes
# down from there without a step. `start` decays as if there had been no warm-up, so the rate falls at the end of the
# warm-up: with 2,000 of 7,038 updates and p = 0.5 from r to 0.846 r.
#
# Who has which: google-research/bert (`optimization.py`, p = 1) decays from the start, for its only optimizer, Adam.
# NVIDIA's and Habana's reference models raise Adam's curve until the pieces join (`warmup`), and leave that of LAMB
# (p = 0.5) as it is (`start`); MLPerf's recipe has no warm-up and p = 1. All of them count updates from 0, so that their
# warm-up is behind ours by one update, whose rate is zero; after the warm-up `start` is theirs, update by update.


def learning_rate_at(update: int, settings: TrainingSettings) -> float:
    """The learning rate of update number `update`, counted from 1; updates after the last one get 0."""
    peak, warmup, updates = settings.learning_rate, settings.warmup_updates, settings.updates
    if update <= warmup:
        return peak * update / warmup
    if settings.decay_from == "start":
        remaining = 1.0 - (update - 1) / updates
    else:
        remaining = 1.0 - (update - warmup) / (updates - warmup + 1)
    return peak * max(remaining, 0.0) ** settings.decay_power


_NOT_DECAYED = ("layernorm", "layer_norm", "bias")
# Variables of fewer numbers lie in the processor's caches: they are not worth a compilation.
LEAST_COMPILED = 2**16


class UpdateScalars(NamedTuple):
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


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to the variable `name`: not to biases and layer norms."""
    return not any(part in name.lower() for part in _NOT_DECAYED)


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

    def scalars(self, update: int, learning_rate: float) -> UpdateScalars:
        """The scalars of update number `update` (from 1)."""
        corrections = (1.0 / (1.0 - beta**update) for beta in (self.settings.beta_1, self.settings.beta_2))
        return UpdateScalars(*(tf.constant(value, tf.float32) for value in (learning_rate, *corrections)))

    def apply(self, gradients: Sequence[tf.Tensor], scalars: UpdateScalars, factor: tf.Tensor) -> None:
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


def _adamw(state: _State, gradient: tf.Tensor, factor: tf.Tensor, scalars: UpdateScalars, constants: _Constants) -> None:
    """Move a variable and its moments by its gradient times `factor`."""
    direction = _direction(state, gradient * factor, scalars, constants)
    state.variable.assign_sub(scalars.learning_rate * direction)


def _lamb(state: _State, gradient: tf.Tensor, factor: tf.Tensor, scalars: UpdateScalars, constants: _Constants) -> None:
    """The same with the trust ratio."""
    direction = _direction(state, gradient * factor, scalars, constants)
    state.variable.assign_sub(scalars.learning_rate * _trust_ratio(state.variable.value(), direction) * direction)


def _direction(state: _State, gradient: tf.Tensor, scalars: UpdateScalars, constants: _Constants) -> tf.Tensor:
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
