"""TensorFlow's BERT: what it refuses, the last layer; losses by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.bert import encode_packs
from gaudi_bert.engines.tensorflow.model import _compute_pretraining_loss_and_metric_sums
from gaudi_bert.engines.tensorflow.operations import gather_tokens
from gaudi_bert.training.verify_model import collate_packs
from tests.builders.agree import agree
from tests.builders.gaudi_graphs import operations_of
from tests.builders.model_packs import random_packs, small_model


def small_batch(masked_slots: int = 17) -> dict[str, tf.Tensor]:
    batch = collate_packs(random_packs(1, [[11, 5, 13], [17, 9]]), 31, masked_slots, 3)
    return {name: tf.constant(value) for name, value in batch.items()}


def test_unknown_weights_are_refused():
    model = small_model()
    for name in ("bert/extra", "cls/predictions/output_bias"):
        with pytest.raises(InputError, match=name):
            model.load_variables({name: np.zeros(3)})


def product_size(graph):
    """Numbers that all matrix products of a graph give."""
    products = (each for each in operations_of(graph) if each.type in ("MatMul", "BatchMatMulV2"))
    return sum(each.outputs[0].shape.num_elements() for each in products)


@pytest.mark.parametrize(("attention", "masked_slots", "is_cheaper"), [("causal", 30, True), ("bidirectional", 31, False)])
def test_last_layer_is_computed_where_it_is_read(attention, masked_slots, is_cheaper):
    """Of 31 places."""
    model, batch = small_model(attention=attention, compute_dtype="float64"), small_batch(masked_slots)
    positions = batch["masked_lm_positions"]
    values, gradients, flops = [], [], []
    for run in (
        lambda batch: encode_packs(model.build_network(), batch, positions),
        lambda batch: gather_tokens(encode_packs(model.build_network(), batch), positions, 31),
    ):
        with tf.GradientTape() as tape:
            values.append(run(batch))
            total = tf.reduce_sum(tf.square(values[-1]))
        gradients.append(tape.gradient(total, list(model.variables.values()), unconnected_gradients="zero"))
        flops.append(product_size(tf.function(run, autograph=False).get_concrete_function(batch).graph))
    agree(values[0], values[1], 1e-13)
    for read, whole in zip(*gradients, strict=True):
        agree(read, whole, 1e-10)
    assert (flops[0] < flops[1]) == is_cheaper


# --- Losses and right answers by hand, of one pack of two sequences: masked slots 0 and 2 belong to the first, slot 1 to the
# second, slot 3 is unused. Two words.

BATCH = {
    "masked_lm_ids": tf.constant([[0, 1, 0, 0]], tf.int32),
    "masked_lm_weights": tf.constant([[1.0, 2.0, 1.0, 0.0]]),
    "next_sentence_positions": tf.constant([[0, 5, 0]], tf.int32),
    "next_sentence_labels": tf.constant([[1, 0, 0]], tf.int32),
    "next_sentence_weights": tf.constant([[1.0, 1.0, 0.0]]),
}
WORDS = tf.math.log([[[0.9, 0.1], [0.25, 0.75], [0.2, 0.8], [0.9, 0.1]]])
SENTENCES = tf.math.log([[[0.2, 0.8], [0.4, 0.6], [0.5, 0.5]]])
TOKENS = -np.log([0.9, 0.75, 0.2])  # the third is wrong


@pytest.mark.parametrize(
    ("loss", "masked", "right", "weight"),
    [("token", TOKENS.sum(), 2, 3), ("sequence", (TOKENS[0] + TOKENS[2]) / 2 + TOKENS[1], 1.5, 2)],
)
def test_sums_by_hand(loss, masked, right, weight):
    expected = [masked, weight, -np.log(0.8) - np.log(0.4), 2, right, weight, 1, 2]
    agree(
        [float(each) for each in _compute_pretraining_loss_and_metric_sums((WORDS, SENTENCES), BATCH, loss)], expected, 1e-6
    )


def test_a_sequence_without_masked_positions_counts_for_next_sentence_alone():
    batch = {**BATCH, "masked_lm_weights": tf.constant([[1.0, 0.0, 1.0, 0.0]])}
    sums = _compute_pretraining_loss_and_metric_sums((WORDS, SENTENCES), batch, "sequence")
    assert (float(sums[1]), float(sums[3])) == (1, 2)
