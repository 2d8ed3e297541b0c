"""AdamW and LAMB against the naive twins; clipping."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.config import TrainingSettings
from gaudi_bert.training import optimizers
from gaudi_bert.training.optimizers import Optimizer, clip_factor, is_decayed
from tests.oracles import training as naive

SHAPES = {
    "bert/embeddings/word_embeddings": (13, 7),
    "bert/embeddings/LayerNorm/gamma": (7,),
    "bert/encoder/layer_0/attention/self/query/kernel": (7, 7),
    "bert/encoder/layer_0/attention/self/query/bias": (7,),
    "cls/predictions/output_bias": (13,),
}
FACTOR = np.float32(0.25)  # of clipping


def random_values(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: (scale * random.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def run_ours(settings, values, gradients_of_updates, rates, compiled: bool = False) -> dict[str, np.ndarray]:
    variables = {name: tf.Variable(value) for name, value in values.items()}
    optimizer = Optimizer(variables, settings, compiled=compiled)
    apply = tf.function(optimizer.apply, autograph=False)
    for number, (gradients, rate) in enumerate(zip(gradients_of_updates, rates, strict=True), start=1):
        given = [tf.constant(gradients[name] / FACTOR) for name in variables]
        apply(given, optimizer.scalars(number, rate), tf.constant(FACTOR))
    return {name: variable.numpy() for name, variable in variables.items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("changes", [{}, {"layer_adaptation": "decayed"}, {"weight_decay": 0.0, "beta_2": 0.9}])
def test_equals_the_naive_optimizer_after_seven_updates(optimizer: str, changes: dict, compiled: bool, monkeypatch) -> None:
    monkeypatch.setattr(optimizers, "LEAST_COMPILED", 10)  # so that some of these are compiled
    settings = TrainingSettings(optimizer=optimizer, **changes)
    values = random_values(1)
    values["cls/predictions/output_bias"][:] = 0  # LAMB's ratio is then 1
    gradients = [random_values(10 + number, 0.1) for number in range(7)]
    rates = [0.001 * (number + 1) for number in range(7)]
    ours = run_ours(settings, values, gradients, rates, compiled)
    expected = naive.run(optimizer, values, gradients, rates, settings)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_zero_gradients_of_zero_variables_leave_lamb_finite() -> None:
    values = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    ours = run_ours(TrainingSettings(optimizer="lamb"), values, [values], [0.1])
    assert all((value == 0).all() for value in ours.values())


def test_decay_spares_biases_and_layer_norms() -> None:
    assert [name for name in SHAPES if is_decayed(name)] == [
        "bert/embeddings/word_embeddings",
        "bert/encoder/layer_0/attention/self/query/kernel",
    ]


@pytest.mark.parametrize("largest", [0.0, 0.5, 1e6])
def test_clipping_is_by_the_joint_norm(largest: float) -> None:
    gradients = random_values(5)
    factor, norm = clip_factor([tf.constant(gradient) for gradient in gradients.values()], largest)
    for gradient, value in zip(gradients.values(), naive.clip(gradients, largest).values(), strict=True):
        np.testing.assert_allclose(gradient * factor.numpy(), value, rtol=1e-5)
    assert norm.numpy() == pytest.approx(np.sqrt(sum((g.astype(float) ** 2).sum() for g in gradients.values())), rel=1e-5)


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    _, norm = clip_factor([tf.constant([1.0, np.inf])], 1.0)
    assert not np.isfinite(norm.numpy())
