"""Looking at graphs without Gaudi: every planted fault is found, wherever it hides, and the real step has none."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

from gaudi_bert.config import TrainingSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.inputs import BatchSizes
from gaudi_bert.training.gaudi.runtime import BFLOAT16_LIST
from gaudi_bert.training.graph.check import check_graphs, operations_of
from gaudi_bert.training.graph.report import trace_step

NUMBERS = tf.TensorSpec([4], tf.float32)
CONFIG = BertConfig(
    vocab_size=31,
    hidden_size=6,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=10,
    max_position_embeddings=13,
)
SIZES = BatchSizes(packs=3, positions=11, masked_slots=5, depth=2)


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


@pytest.mark.parametrize(
    ("optimizer", "loss", "compute_dtype", "accumulation_steps"),
    [
        ("adamw", "token", "float32", 1),
        ("adamw", "sequence", "bfloat16", 2),
        ("lamb", "token", "bfloat16", 1),
        ("lamb", "sequence", "float32", 2),
    ],
)
def test_the_training_step_is_fit(optimizer, loss, compute_dtype, accumulation_steps) -> None:
    settings = TrainingSettings(optimizer=optimizer, loss=loss)
    graphs = trace_step(CONFIG, settings, SIZES, accumulation_steps, compute_dtype)
    assert set(graphs) == ({"update"} if accumulation_steps == 1 else {"first", "next", "finish"})
    assert check_graphs(graphs) == []


def test_what_gaudi_converts_to_bfloat16_is_there_and_is_none_of_what_must_stay() -> None:
    lists = json.loads(BFLOAT16_LIST.read_text())
    graphs = trace_step(CONFIG, TrainingSettings(optimizer="lamb", loss="sequence"), SIZES, 1)
    operations = [operation for graph in graphs.values() for _, operation in operations_of(graph)]
    converted = {*lists["allowlist"], *lists["strict_conditional_list"]}
    assert converted <= {operation.type for operation in operations}
    assert not converted & {
        "Softmax",
        "Sum",
        "Mean",
        "Log",
        "Exp",
        "Erf",
        "Rsqrt",
        "Sqrt",
        "Mul",
        "AddV2",
        "Sub",
        "BiasAddGrad",
    }
    kept = [operation for operation in operations if "KEEP_FP32_PRECISION" in operation.name and operation.type == "MatMul"]
    assert len(kept) == 3  # the next-sentence product and its two gradients
