"""Operations with a backward pass of their own, against automatic gradients in float64; and the statistics of dropout.

What a model without dropout shows is in `tests/engines/test_protocol.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.engines.tensorflow.bert import _make_additive_attention_mask, compute_attention
from gaudi_bert.engines.tensorflow.model import cross_entropy
from gaudi_bert.engines.tensorflow.operations import (
    ForwardPass,
    compute_keep_scale,
    dense,
    dropout,
    layer_norm,
    make_keep_mask,
    residual_layer_norm,
)
from tests.builders.agree import agree

RANDOM = np.random.default_rng(5)


def normal(*shape) -> tf.Tensor:
    return tf.constant(RANDOM.normal(size=shape))


def check_same(ours, theirs, *inputs) -> None:
    """Values and gradients of two functions, under a random weighting of the outputs."""
    results = []
    for function in (ours, theirs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = function(*inputs)
            weights = tf.constant(np.random.default_rng(1).normal(size=outputs.shape))
            total = tf.reduce_sum(outputs * weights)
        results.append((outputs, [tf.convert_to_tensor(g) for g in tape.gradient(total, inputs)]))
    (our_outputs, our_gradients), (their_outputs, their_gradients) = results
    agree(our_outputs, their_outputs, 1e-11)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        agree(one, other, 1e-9)


def plain_layer_norm(x, gamma, beta):
    mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + 1e-12) * gamma + beta


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_layer_norm_also_of_a_sum(compiled, rate):
    inputs = normal(7, 13), normal(7, 13), normal(13), normal(13)
    check_same(lambda x, gamma, beta: layer_norm(x, gamma, beta, 1e-12, compiled), plain_layer_norm, *inputs[1:])
    drawn = ForwardPass(tf.constant([1, 2]), compiled).draw_dropout(inputs[0].shape, rate, 3)
    factors = (
        1.0 if drawn is None else make_keep_mask(drawn, inputs[0].shape, rate, tf.float64) * compute_keep_scale(drawn, rate)
    )
    check_same(
        lambda new, old, gamma, beta: residual_layer_norm(new, old, gamma, beta, drawn, rate, 1e-12, compiled),
        lambda new, old, gamma, beta: plain_layer_norm(new * factors + old, gamma, beta),
        *inputs,
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (5, 512), (1024, 3), (512, 512)])  # 4 KiB are 512 of float64
def test_dense(inputs, outputs, compiled):
    check_same(
        lambda x, kernel, bias: dense(x, kernel, bias, compiled),
        lambda x, kernel, bias: x @ kernel + bias,
        *(normal(11, inputs), normal(inputs, outputs), normal(outputs)),
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_core(causal, rate, compiled):
    mask = tf.constant([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 2, 3]], tf.int32)
    bias = _make_additive_attention_mask(mask, causal, tf.float64)
    shape = tf.TensorShape([2, 3, 7, 7])
    drawn = ForwardPass(tf.constant([1, 2]), compiled).draw_dropout(shape, rate, 3)
    factors = 1.0 if drawn is None else make_keep_mask(drawn, shape, rate, tf.float64) * compute_keep_scale(drawn, rate)

    def plain(query, key, value):
        shares = tf.nn.softmax(tf.einsum("bnid,bnjd->bnij", query, key) + bias)
        return tf.einsum("bnij,bnjd->bnid", shares * factors, value)

    check_same(
        lambda query, key, value: compute_attention(query, key, value, bias, drawn, rate, compiled),
        plain,
        normal(2, 3, 7, 5),
        normal(2, 3, 7, 5),
        normal(2, 3, 7, 5),
    )


def test_cross_entropy_of_a_hopeless_label():
    hopeless, _ = cross_entropy(tf.constant([[0.0, 1000.0, -1000.0]]), tf.constant([2], tf.int32))
    assert hopeless.numpy()[0] == 2000.0


def dropped(inputs: tf.Tensor, rate: float, seed: list[int], site: int, compiled: bool) -> np.ndarray:
    drawn = ForwardPass(tf.constant(seed, tf.int32), compiled).draw_dropout(inputs.shape, rate, site)
    return dropout(inputs, drawn, rate, compiled).numpy()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.013])
def test_dropout_drops_the_asked_share_and_keeps_the_mean(rate, compiled):
    ones = tf.ones([101, 1013])
    values = dropped(ones, rate, [3, 4], 5, compiled)
    assert abs(np.mean(values == 0) - rate) < 4 * np.sqrt(rate * (1 - rate) / ones.shape.num_elements()) + 1 / 65536
    assert abs(values.mean() - 1) < 0.01
    assert len(np.unique(values)) == 2
    assert dropped(ones, rate, [3, 4], 5, compiled).tobytes() == values.tobytes(), "a resumed run repeats itself"


@pytest.mark.parametrize("compiled", [False, True])
def test_places_passes_and_sites_are_independent(compiled):
    """Of neighbours, of places a power of two apart, and of the two places that share a random word (plain).

    Also where seeds are as near as counters, and where one seed's places might be another's, moved.
    """
    gone = dropped(tf.ones([200_000]), 0.3, [3, 4], 1, compiled) == 0
    for shift in (1, 2, 1013, 50_000, 65_536, 100_000):
        assert abs(np.mean(gone[shift:] & gone[:-shift]) - 0.09) < 0.006, shift
    drawn = [
        dropped(tf.ones([100_000]), 0.3, seed, site, compiled) == 0
        for seed, site in [([1, 2], 3), ([1, 2], 4), ([1, 3], 3), ([2, 2], 3), ([-(2**31), 2**31 - 1], 9)]
    ]
    for first, one in enumerate(drawn):
        for other in drawn[first + 1 :]:
            for moved in (0, 1, 2):
                assert abs(np.mean(one & np.roll(other, moved)) - 0.09) < 0.006
