"""TensorFlow's BERT: what it refuses, the last layer; losses by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.bert import PretrainingOutputs, attention_bias, outputs_of_every_token
from gaudi_bert.engines.tensorflow.model import pretraining_sums
from gaudi_bert.model.features import join_sequences
from tests.builders.agree import agree
from tests.builders.gaudi_graphs import operations_of
from tests.builders.model_packs import random_packs, small_model


def small_batch(masked_slots: int = 17, depth: int = 3) -> dict[str, tf.Tensor]:
    batch = join_sequences(random_packs(1, [[11, 5, 13], [17, 9]]), 31, masked_slots, depth)
    return {name: tf.constant(value) for name, value in batch.items()}


def test_variables_are_named_and_outputs_have_the_sizes_of_the_batch():
    model = small_model()
    assert all(variable.name == f"{name}:0" for name, variable in model.variables.items())
    shapes = [tuple(part.shape) for part in model.forward(small_batch(masked_slots=19, depth=7))]
    assert shapes == [(2, 7, 21), (2, 19, 53), (2, 7, 2)]


def test_batches_of_unknown_size_and_unknown_weights_are_refused():
    model = small_model()
    specs = {name: tf.TensorSpec([None, *value.shape[1:]], value.dtype) for name, value in small_batch().items()}
    with pytest.raises(InputError, match="every size known"):
        tf.function(model.forward, autograph=False).get_concrete_function(specs)
    with pytest.raises(InputError, match=r"bert/extra is \[3\] there, absent here"):
        model.load_values({"bert/extra": np.zeros(3)})
    with pytest.raises(InputError, match=r"output_bias is \[3\] there, \[53\] here"):
        model.load_values({"cls/predictions/output_bias": np.zeros(3)})


def product_size(graph):
    """Numbers that all matrix products of a graph give."""
    products = (each for each in operations_of(graph) if each.type in ("MatMul", "BatchMatMulV2"))
    return sum(each.outputs[0].shape.num_elements() for each in products)


@pytest.mark.parametrize(
    ("attention", "masked_slots", "is_cheaper"),
    [("causal", 27, True), ("bidirectional", 28, False)],
)
def test_last_layer_is_computed_where_it_is_read(attention, masked_slots, is_cheaper):
    """Of 31 places, 3 are read for sequences: with 28 masked slots as many are read as there are."""
    model, batch = small_model(attention=attention, compute_dtype="float64"), small_batch(masked_slots)
    losses, gradients, flops = [], [], []
    for run in (model.forward, lambda batch: outputs_of_every_token(model.network(), batch)[1]):
        with tf.GradientTape() as tape:
            sums = pretraining_sums(run(batch), batch, "token")
            losses.append(sums[0] + sums[2])
        gradients.append(tape.gradient(losses[-1], list(model.variables.values())))
        flops.append(product_size(tf.function(run, autograph=False).get_concrete_function(batch).graph))
    agree(losses[0], losses[1], 1e-13)
    for read, whole in zip(*gradients, strict=True):
        agree(read, whole, 1e-10)
    assert (flops[0] < flops[1]) == is_cheaper


# --- Losses and accuracies by hand, of one pack of two sequences: masked slots 0 and 2 belong to the first, slot 1 to the
# second, slot 3 is unused. Two words.

BATCH = {
    "masked_lm_ids": tf.constant([[0, 1, 0, 0]], tf.int32),
    "masked_lm_weights": tf.constant([[1.0, 2.0, 1.0, 0.0]]),
    "next_sentence_positions": tf.constant([[0, 5, 0]], tf.int32),
    "next_sentence_labels": tf.constant([[1, 0, 0]], tf.int32),
    "next_sentence_weights": tf.constant([[1.0, 1.0, 0.0]]),
}
TOKENS = -np.log([0.5, 0.75, 0.25])


def sums_of(loss: str, word_shares=(0.5, 0.25, 0.25, 0.1), sentences=((0.2, 0.8), (0.4, 0.6), (0.5, 0.5)), **changes):
    words = tf.math.log([[[share, 1 - share] for share in word_shares]])
    outputs = PretrainingOutputs(tf.zeros([1, 1, 1]), words, tf.math.log([[list(shares) for shares in sentences]]))
    return [float(value) for value in pretraining_sums(outputs, {**BATCH, **changes}, loss)]


@pytest.mark.parametrize(
    ("loss", "masked", "weight"), [("token", TOKENS.sum(), 3), ("sequence", (TOKENS[0] + TOKENS[2]) / 2 + TOKENS[1], 2)]
)
def test_sums_by_hand(loss, masked, weight):
    masked_sum, masked_weight, sentence_sum, sentence_weight, _, masked_count, *sentences = sums_of(loss)
    agree(masked_sum, masked, 1e-6)
    agree(sentence_sum, -np.log(0.8) - np.log(0.4), 1e-6)
    assert (masked_weight, masked_count, sentence_weight) == (weight, weight, 2)
    assert sentences == [1, 2]


@pytest.mark.parametrize(("loss", "correct", "count"), [("token", 2, 3), ("sequence", 1.5, 2)])
def test_accuracy_follows_the_loss(loss, correct, count):
    assert sums_of(loss, (0.9, 0.1, 0.2, 0.9), ((0.2, 0.8),) * 3)[4:6] == [correct, count]


def test_a_sequence_without_masked_positions_counts_for_next_sentence_alone_and_no_other_loss_is_known():
    sums = sums_of("sequence", masked_lm_weights=tf.constant([[1.0, 0.0, 1.0, 0.0]]))
    assert (sums[1], sums[3]) == (1, 2)
    with pytest.raises(InputError, match="token or sequence"):
        sums_of("pack")


def test_attention_bias_at_depth_four():
    mask = np.array([[1, 1, 2, 3, 4, 4, 0]], np.int32)
    bias = attention_bias(tf.constant(mask), causal=False).numpy()[0, 0]
    np.testing.assert_array_equal(bias == 0, mask[0][:, np.newaxis] == mask[0][np.newaxis, :])
    assert set(np.unique(bias)) == {-10000.0, 0.0}
    causal = attention_bias(tf.constant(mask), causal=True).numpy()[0, 0]
    np.testing.assert_array_equal(causal == 0, np.tril(bias == 0))
