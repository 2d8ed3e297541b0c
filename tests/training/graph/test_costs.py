"""Costs of a graph, against hand counts and against graphs small enough to follow with a pencil."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.config import TrainingSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.inputs import BatchSizes
from gaudi_bert.training.graph.costs import MemoryModel, activation_bytes, live_bytes, matrix_flops, memory_model
from gaudi_bert.training.graph.report import trace_step

CONFIG = BertConfig(
    vocab_size=31,
    hidden_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=10,
    max_position_embeddings=13,
)
SIZES = BatchSizes(packs=5, positions=11, masked_slots=4, depth=2)
KILOBYTE = 1024 * tf.float32.size


def token_type_flops(config: BertConfig, sizes: BatchSizes) -> int:
    """Two rows are looked up by a product, whose backward pass is one product, not two."""
    return 2 * sizes.packs * sizes.positions * config.type_vocab_size * config.hidden_size


def forward_flops(config: BertConfig, sizes: BatchSizes) -> int:
    """By hand, without the token types: two for every multiplication of the matrix products.

    In the last layer only the tokens that a head reads ask and are passed on; all of them are asked.
    """
    tokens, hidden = sizes.packs * sizes.positions, config.hidden_size
    read = sizes.packs * (sizes.masked_slots + sizes.depth)
    masked = sizes.packs * sizes.masked_slots * (hidden * hidden + hidden * config.vocab_size)
    sentences = sizes.packs * sizes.depth * (hidden * hidden + 2 * hidden)
    layers = 0
    for asking in [tokens] * (config.num_hidden_layers - 1) + [read]:
        keys_and_values = 2 * tokens * hidden * hidden
        queries_and_output = 2 * asking * hidden * hidden
        attention = 2 * asking * sizes.positions * hidden
        feed_forward = 2 * asking * hidden * config.intermediate_size
        layers += keys_and_values + queries_and_output + attention + feed_forward
    return 2 * (layers + masked + sentences)


@pytest.mark.parametrize("packs", [1, 5])
def test_flops_are_those_counted_by_hand_three_times_over(packs) -> None:
    """A backward pass multiplies twice for each product of the forward pass."""
    sizes = SIZES._replace(packs=packs)
    graphs = trace_step(CONFIG, TrainingSettings(), sizes, 1)
    assert matrix_flops(graphs["update"]) == 3 * forward_flops(CONFIG, sizes) + 2 * token_type_flops(CONFIG, sizes)


def test_transposed_and_batched_products_are_counted() -> None:
    with tf.Graph().as_default() as graph:
        tf.matmul(tf.zeros([3, 5]), tf.zeros([3, 7]), transpose_a=True)
        tf.matmul(tf.zeros([3, 5]), tf.zeros([7, 5]), transpose_b=True)
        tf.matmul(tf.zeros([2, 4, 3, 5]), tf.zeros([2, 4, 3, 7]), transpose_a=True)
    assert matrix_flops(graph) == 2 * (3 * 5 * 7 + 3 * 5 * 7 + 8 * 3 * 5 * 7)


def chain() -> tf.Graph:
    """Three tensors of one kilobyte-of-floats each, and a view; the first is read again at the end."""
    with tf.Graph().as_default() as graph:
        start = tf.compat.v1.placeholder(tf.float32, [1024])
        first = tf.exp(start, name="first")
        second = tf.exp(tf.reshape(first, [32, 32]), name="second")
        tf.multiply(tf.reshape(second, [1024]), first, name="third")
    return graph


def test_tensors_live_from_their_birth_to_their_last_reader_and_views_cost_nothing() -> None:
    graph = chain()
    alive = dict(zip((operation.name for operation in graph.get_operations()), live_bytes(graph), strict=True))
    assert (alive["first"], alive["second"], alive["third"]) == (KILOBYTE, 2 * KILOBYTE, 3 * KILOBYTE)


def test_kept_for_the_backward_pass_is_what_it_reads_of_the_forward_pass() -> None:
    with tf.Graph().as_default() as graph:
        start = tf.compat.v1.placeholder(tf.float32, [1024])
        forward = tf.exp(start)
        unused = tf.exp(forward)
        sums = tf.reduce_sum(unused)
        _ = forward * 2.0
    assert activation_bytes(graph, sums.op) == KILOBYTE


def test_memory_for_any_number_of_packs_is_what_a_trace_would_say() -> None:
    def measured(packs: int) -> np.ndarray:
        return live_bytes(trace_step(CONFIG, TrainingSettings(), SIZES._replace(packs=packs), 2)["next"])

    model = memory_model(measured(64), measured(66), 64, 66)
    assert model.peak(1718) == measured(1718).max()
    budget = model.peak(23)
    assert model.peak(model.most_packs(budget)) <= budget < model.peak(model.most_packs(budget) + 1)
    assert model.most_packs(model.peak(1) - 1) == 0


def test_measurements_that_do_not_belong_together_are_a_defect() -> None:
    with pytest.raises(ValueError, match="2 and 3 operations"):
        memory_model([1, 2], [1, 2, 3], 1, 2)
    with pytest.raises(ValueError, match="not of the form"):
        memory_model([1, 2], [2, 5], 2, 4)
    assert MemoryModel(np.array([7]), np.array([0])).peak(1000) == 7
