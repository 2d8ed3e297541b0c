"""The operations with a backward pass of their own, against automatic gradients in float64; dropout's statistics."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.model.attention import attend, attention_bias
from gaudi_bert.model.losses import cross_entropy
from gaudi_bert.model.operations import dropout, dropout_mask, gather_rows, gelu, layer_norm, without_gradient

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
    np.testing.assert_allclose(our_outputs, their_outputs, rtol=1e-11, atol=1e-12)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


def test_gelu_is_exact():
    check_same(gelu, lambda x: 0.5 * x * tf.math.erfc(-x / np.sqrt(2.0)), normal(7, 11) * 3)


def test_layer_norm():
    def plain(x, gamma, beta):
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        return (x - mean) / tf.sqrt(variance + 1e-12) * gamma + beta

    check_same(lambda x, g, b: layer_norm(x, g, b, 1e-12), plain, normal(7, 13), normal(13), normal(13))


def test_gather_rows_is_dense_and_sums_repeated_rows():
    indices = tf.constant([3, 0, 3, 3, 1], tf.int32)
    check_same(lambda table: gather_rows(table, indices), lambda table: tf.gather(table, indices), normal(5, 3))
    table = normal(5, 3)
    with tf.GradientTape() as tape:
        tape.watch(table)
        rows = gather_rows(table, indices)
    gradient = tape.gradient(rows, table)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(gradient[:, 0], [1, 1, 0, 3, 0])


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_core(causal, rate):
    mask = tf.constant([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 2, 3]], tf.int32)
    bias = attention_bias(mask, causal, tf.float64)
    kept, scale = None, 1.0
    if rate:
        kept, scale = dropout_mask(tf.TensorShape([2, 3, 7, 7]), rate, tf.constant([1, 2]), 0, tf.float64)

    def plain(query, key, value):
        shares = tf.nn.softmax(tf.einsum("bnid,bnjd->bnij", query, key) + bias)
        return tf.einsum("bnij,bnjd->bnid", shares if kept is None else shares * kept * scale, value)

    check_same(
        lambda query, key, value: attend(query, key, value, bias, kept, scale),
        plain,
        normal(2, 3, 7, 5),
        normal(2, 3, 7, 5),
        normal(2, 3, 7, 5),
    )


def test_attention_bias_at_depth_four():
    mask = np.array([[1, 1, 2, 3, 4, 4, 0]], np.int32)
    bias = attention_bias(tf.constant(mask), causal=False).numpy()[0, 0]
    np.testing.assert_array_equal(bias == 0, mask[0][:, np.newaxis] == mask[0][np.newaxis, :])
    assert set(np.unique(bias)) == {-10000.0, 0.0}
    causal = attention_bias(tf.constant(mask), causal=True).numpy()[0, 0]
    np.testing.assert_array_equal(causal == 0, np.tril(bias == 0))


def test_cross_entropy():
    labels = tf.constant([4, 0, 2, 2, 1], tf.int32)
    logits = normal(5, 6) * 3
    check_same(
        lambda x: cross_entropy(x, labels)[0],
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=x),
        logits,
    )
    np.testing.assert_array_equal(cross_entropy(logits, labels)[1], np.argmax(logits, axis=1))


def test_cross_entropy_of_a_hopeless_label_is_finite():
    losses, _ = cross_entropy(tf.constant([[0.0, 1000.0, -1000.0]]), tf.constant([2], tf.int32))
    assert losses.numpy()[0] == 2000.0


def test_without_gradient_gives_zeros():
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(without_gradient(variable) * 3.0)
    np.testing.assert_array_equal(tape.gradient(total, variable), [0, 0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.013])
def test_dropout_drops_the_asked_share_and_keeps_the_mean(rate):
    ones = tf.ones([101, 1013])
    dropped = dropout(ones, rate, tf.constant([3, 4]), 5).numpy()
    assert abs(np.mean(dropped == 0) - rate) < 4 * np.sqrt(rate * (1 - rate) / ones.shape.num_elements()) + 1 / 65536
    assert abs(dropped.mean() - 1) < 0.01
    assert len(np.unique(dropped)) == 2
    rows, columns = (dropped == 0).mean(axis=1), (dropped == 0).mean(axis=0)
    assert np.abs(rows - rate).max() < 0.1
    assert np.abs(columns - rate).max() < 0.35


def test_dropout_halves_are_independent():
    """Each random word decides two places: how often both are dropped is the product of the shares."""
    kept, _ = dropout_mask(tf.TensorShape([2, 100_000]), 0.3, tf.constant([3, 4]), 1, tf.float32)
    both = np.mean(np.all(kept.numpy() == 0, axis=0))
    assert abs(both - 0.09) < 0.005


def test_dropout_differs_by_seed_and_site_and_repeats_itself():
    def drawn(seed, site):
        return dropout(tf.ones([31, 7]), 0.5, tf.constant(seed, tf.int32), site).numpy().tobytes()

    assert drawn([1, 2], 3) == drawn([1, 2], 3)
    assert (
        len({drawn([1, 2], 3), drawn([1, 2], 4), drawn([1, 3], 3), drawn([2, 2], 3), drawn([-(2**31), 2**31 - 1], 9)}) == 5
    )


def test_no_dropout_without_seed_or_rate():
    ones = tf.ones([3, 5])
    assert dropout(ones, 0.5, None, 0) is ones
    assert dropout(ones, 0.0, tf.constant([1, 2]), 0) is ones
