"""Looking at graphs without Gaudi: every planted fault is found, wherever it hides; costs, and a report that adds up."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.graph_report import CARDS, USABLE_SHARE, MemoryModel, memory_model
from gaudi_bert.engines.tensorflow.engine import BFLOAT16_LIST
from gaudi_bert.engines.tensorflow.graph import (
    abstract_step,
    check_graphs,
    matrix_flops,
    operations_of,
    pass_memory,
    report_on_step,
)
from gaudi_bert.model.config import BertConfig, parameter_count
from gaudi_bert.model.features import BatchSizes
from tests.builders.model_packs import pretraining_step

NUMBERS = tf.TensorSpec([4], tf.float32)
CONFIG = BertConfig(
    vocab_size=31,
    hidden_size=6,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=10,
    max_position_embeddings=13,
)
SIZES = BatchSizes(packs=5, positions=11, masked_slots=4, depth=2)
TWO_LAYERS = dataclasses.replace(CONFIG, num_hidden_layers=2)


def graph_of(function, *inputs: tf.TensorSpec) -> tf.Graph:
    with tf.Graph().as_default():
        return tf.function(function, autograph=False).get_concrete_function(*(inputs or (NUMBERS,))).graph


def python_call(numbers):
    return tf.ensure_shape(tf.py_function(lambda each: each, [numbers], tf.float32), [4])


def asserted(numbers):
    with tf.control_dependencies([tf.debugging.Assert(numbers[0] > 0, [numbers])]):
        return tf.identity(numbers)


def boxes(numbers):
    return tf.image.non_max_suppression(tf.reshape(numbers, [1, 4]), numbers[:1], 1)


FAULTS = {
    "where": (tf.where, "data-dependent shape", "Where"),
    "boolean_mask": (lambda numbers: tf.boolean_mask(numbers, numbers > 0), "data-dependent shape", "Where"),
    "unique": (lambda numbers: tf.unique(numbers)[0], "data-dependent shape", "Unique"),
    "partition": (
        lambda numbers: tf.dynamic_partition(numbers, tf.cast(numbers > 0, tf.int32), 2),
        "data-dependent shape",
        "DynamicPartition",
    ),
    "suppression": (boxes, "data-dependent shape", "NonMaxSuppressionV3"),
    "ragged": (
        lambda numbers: tf.ragged.range(tf.cast(numbers, tf.int32)).flat_values,
        "data-dependent shape",
        "RaggedRange",
    ),
    "range": (lambda numbers: tf.range(tf.cast(numbers[0], tf.int32)), "dynamic shape", "Range"),
    "double": (lambda numbers: tf.cast(numbers, tf.float64) * 2, "double precision", "Cast"),
    "string": (tf.strings.as_string, "string", "AsString"),
    "long": (lambda numbers: tf.cast(tf.tile(numbers, [2]), tf.int64), "64-bit integers", "Cast"),
    "python": (python_call, "host call", "EagerPyFunc"),
    "numpy": (
        lambda numbers: tf.ensure_shape(tf.numpy_function(lambda each: each, [numbers], tf.float32), [4]),
        "host call",
        "PyFunc",
    ),
    "print": (lambda numbers: tf.raw_ops.Print(input=numbers, data=[numbers]), "host call", "Print"),
    "assertion": (asserted, "host call", "Assert"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_found(name) -> None:
    function, kind, operation = FAULTS[name]
    problems = check_graphs({"step": graph_of(function)})
    assert (kind, operation) in {(problem.kind, problem.type) for problem in problems}
    assert all(problem.graph.startswith("step") for problem in problems)


def called(function):
    return tf.function(function, autograph=False)


def looped(function):
    def body(number, numbers):
        return number + 1, numbers + tf.cast(tf.reduce_sum(tf.shape(function(numbers))), tf.float32)

    return lambda numbers: tf.while_loop(lambda number, _: number < 3, body, [tf.constant(0), numbers])[1]


def branched(function):
    return lambda numbers: tf.cond(numbers[0] > 0, lambda: tf.size(function(numbers)), lambda: tf.constant(1))


@pytest.mark.parametrize("hide", [called, looped, branched, lambda function: called(branched(looped(function)))])
def test_faults_in_functions_loops_and_branches_are_found(hide) -> None:
    found = check_graphs({"step": graph_of(hide(tf.where))})
    places = {problem.graph for problem in found if problem.type == "Where"}
    assert places
    assert all(place.startswith("step > ") for place in places)


def test_a_function_without_a_body_to_look_at_is_a_problem(tmp_path) -> None:
    module = tf.Module()
    module.double = tf.function(lambda numbers: numbers * 2, input_signature=[NUMBERS], autograph=False)
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    graph = tf.function(lambda numbers: loaded.double(numbers), autograph=False).get_concrete_function(NUMBERS).graph
    problems = check_graphs({"step": graph})
    assert {problem.kind for problem in problems} <= {"unknown function"}


def test_counters_seeds_and_keys_of_64_bits_pass() -> None:
    def function(seed):
        return tf.random.stateless_uniform([9], tf.cast(seed, tf.int64)), tf.constant(5, tf.int64) + 1

    assert check_graphs({"step": graph_of(function, tf.TensorSpec([2], tf.int32))}) == []


def graphs_of(config: BertConfig, sizes: BatchSizes = SIZES, steps: int = 1, dtype: str = "float32", **training):
    loss = training.pop("loss", "token")
    step, batch = abstract_step(pretraining_step(config, sizes, steps, loss), TrainingSettings(**training), dtype)
    return step.trace(batch)


@functools.cache
def traced(optimizer: str, loss: str, compute_dtype: str, accumulation_steps: int) -> dict[str, tf.Graph]:
    config = CONFIG if loss == "token" else dataclasses.replace(CONFIG, attention="causal")
    return graphs_of(config, SIZES, accumulation_steps, compute_dtype, optimizer=optimizer, loss=loss)


def test_the_training_step_is_fit() -> None:
    parts, whole = traced("adamw", "token", "bfloat16", 2), traced("lamb", "sequence", "float32", 1)
    assert (set(parts), set(whole)) == ({"first", "next", "finish"}, {"update"})
    assert check_graphs({**parts, **whole}) == []


def test_what_gaudi_converts_to_bfloat16_is_there_and_is_none_of_what_must_stay() -> None:
    lists = json.loads(BFLOAT16_LIST.read_text())
    operations = [operation for _, operation in operations_of(traced("lamb", "sequence", "float32", 1)["update"])]
    converted = {*lists["allowlist"], *lists["strict_conditional_list"]}
    assert converted <= {operation.type for operation in operations}
    kinds = "Softmax Sum Mean Log Exp Erf Rsqrt Sqrt Mul AddV2 Sub BiasAddGrad"
    assert not converted & set(kinds.split())
    kept = [operation for operation in operations if "KEEP_FP32_PRECISION" in operation.name and operation.type == "MatMul"]
    assert len(kept) == 3  # the next-sentence product and its two gradients


# --- costs of a graph, against hand counts and against graphs small enough to follow with a pencil

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


def test_flops_are_those_counted_by_hand_three_times_over() -> None:
    """A backward pass multiplies twice for each product of the forward pass."""
    graphs = graphs_of(TWO_LAYERS)
    flops = 3 * forward_flops(TWO_LAYERS, SIZES) + 2 * token_type_flops(TWO_LAYERS, SIZES)
    assert matrix_flops(graphs["update"]) == flops


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
    operations = graph.get_operations()
    alive = dict(zip((each.name for each in operations), pass_memory(graph, operations[-1], 1).alive, strict=True))
    assert (alive["first"], alive["second"], alive["third"]) == (KILOBYTE, 2 * KILOBYTE, 3 * KILOBYTE)


def test_kept_for_the_backward_pass_is_what_it_reads_of_the_forward_pass() -> None:
    with tf.Graph().as_default() as graph:
        start = tf.compat.v1.placeholder(tf.float32, [1024])
        forward = tf.exp(start)
        unused = tf.exp(forward)
        sums = tf.reduce_sum(unused)
        _ = forward * 2.0
    assert pass_memory(graph, sums.op, 1).activations == KILOBYTE


def test_memory_for_any_number_of_packs_is_what_a_trace_would_say() -> None:
    def measured(packs: int) -> np.ndarray:
        graph = graphs_of(CONFIG, SIZES._replace(packs=packs))["update"]
        return pass_memory(graph, graph.get_operation_by_name("loss_sums"), packs).alive

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


# --- what is said of a training step adds up


@pytest.mark.slow
def test_the_report_adds_up() -> None:
    one = report_on_step(pretraining_step(CONFIG, SIZES), TrainingSettings(), communication_MB=0)
    many = report_on_step(pretraining_step(CONFIG, SIZES, 3), TrainingSettings(precision="bfloat16"), communication_MB=0)
    assert one.problems == many.problems == ()
    assert one.parameters == parameter_count(CONFIG)
    assert (one.parameter_bytes, one.optimizer_bytes) == (4 * one.parameters, 8 * one.parameters)
    assert many.flops_per_update == 3 * many.flops_per_micro_batch == 3 * one.flops_per_update
    assert 0 < many.activation_bytes <= many.peak_bytes
    assert [card.card for card in one.cards] == list(CARDS)
    state = many.parameter_bytes + many.optimizer_bytes + many.gradient_bytes
    per_pack = many.peak_bytes / SIZES.packs
    most = int((CARDS["Gaudi"] * USABLE_SHARE - state) / per_pack)
    assert 0.5 * most < many.cards[0].most_packs < 2 * most
    assert many.activation_bytes < one.activation_bytes, "in bfloat16"
    assert many.cards[1].most_packs > one.cards[1].most_packs
