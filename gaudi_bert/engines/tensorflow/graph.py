"""A training step, traced for given sizes without making a variable or running anything.

Inside a `tf.Graph` a variable is only a handle, so the step of a BERT-large is traced in as little memory as a toy's, on any
machine: the graphs are those that `TensorFlowUpdates.run` builds, with Gaudi's plain kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.graph_report import GraphProblem, GraphReport, PassMemory, TensorLives
from gaudi_bert.engines.protocol import Communicator, ComputeDtype, StepSpec
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.engines.tensorflow.updates import SUMS_NAME, TensorFlowUpdates
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import variables_of

# Memory is measured at these numbers of packs. TensorFlow makes one operation of zeros with less than 1000 elements, and two
# of more; no integer c has with 64 * c < 1000 <= 66 * c, so both graphs have the same operations.
FEW_PACKS, MANY_PACKS = 64, 66


def refuse_recompute(settings: LoopSettings) -> None:
    """Only the other engine computes layers twice."""
    if settings.recompute:
        section = settings.section_name
        raise InputError(f"{section}.recompute = true: PyTorch only; set {section}.engine = pytorch, or set it to false")


def report_on_step(step: StepSpec, settings: LoopSettings, communication_MB: int) -> GraphReport:
    """Trace the step, check it, and say what it costs."""
    refuse_recompute(settings)
    config = cast(BertConfig, step.model.config)
    updates, batch = abstract_step(step, settings, "float32")
    graphs = updates.trace(batch, has_update_loss=step.has_update_loss)
    few, many = (_memory(replace(step, packs=packs), settings) for packs in (FEW_PACKS, MANY_PACKS))
    return GraphReport.of(
        check_graphs(graphs),
        parameters=sum(math.prod(variable.shape) for variable in variables_of(config, step.model.head).values()),
        operations=sum(len(graph.get_operations()) for graph in graphs.values()),
        flops_per_micro_batch=max(matrix_flops(graph) for graph in graphs.values()),
        repeated_flops=matrix_flops(graphs["outputs"]) if step.has_update_loss else 0,
        accumulation_steps=step.accumulation_steps,
        few=few,
        many=many,
        packs=step.packs,
        communication_MB=communication_MB,
    )


def _memory(step: StepSpec, settings: LoopSettings) -> PassMemory:
    """The memory of the pass of a micro-batch.

    With bfloat16, Gaudi's conversion is stood in for by the model's own, which rounds about the same tensors.
    """
    updates, batch = abstract_step(replace(step, accumulation_steps=2), settings, settings.precision)
    graph = updates.trace_pass(batch, has_update_loss=step.has_update_loss)
    return pass_memory(graph, graph.get_operation_by_name(SUMS_NAME), step.packs)


def abstract_step(
    step: StepSpec, settings: LoopSettings, compute_dtype: ComputeDtype
) -> tuple[TensorFlowUpdates, dict[str, tf.TensorSpec]]:
    """A step over variables without memory, and the batch to trace it with."""
    batch = {name: tf.TensorSpec((step.packs, *shape), dtype) for name, (shape, dtype) in step.features.items()}
    with tf.Graph().as_default():
        model = TensorFlowModel(step.model, seed=0, compute_dtype=compute_dtype)
        updates = TensorFlowUpdates(model, settings, Communicator(), step.accumulation_steps)
    return updates, batch


# --- Costs: matrix products, counted exactly, 2 * m * k * n each (everything else of BERT is small compared with them), and
# memory

# Outputs that are the memory of the first input under another shape or name.
_VIEWS = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
_PRODUCTS = {"MatMul": ("transpose_a",), "BatchMatMul": ("adj_x",), "BatchMatMulV2": ("adj_x",), "BatchMatMulV3": ("adj_x",)}


def matrix_flops(graph: tf.Graph) -> int:
    """Floating-point operations of all matrix products of `graph` and of the functions it calls, each counted once."""
    return sum(_product_flops(operation) for _, operation in operations_of(graph) if operation.type in _PRODUCTS)


def _product_flops(operation: tf.Operation) -> int:
    """2 * (elements of the product) * (length of the sums); the batch dimensions are in the product."""
    first = operation.inputs[0].shape
    transposed = any(operation.get_attr(name) for name in _PRODUCTS[operation.type])
    inner = first[-2] if transposed else first[-1]
    return 2 * operation.outputs[0].shape.num_elements() * inner


def pass_memory(graph: tf.Graph, sums: tf.Operation, packs: int) -> PassMemory:
    """The memory of one forward and backward pass in the order of tracing; the forward pass ends in `sums`.

    Inputs, constants and variables are not counted.
    """
    operations, owners = graph.get_operations(), _owners(graph)
    lives = TensorLives[str]()
    for moment, operation in enumerate(operations):
        for tensor in operation.inputs:
            if owners[tensor.name]:
                lives.read(owners[tensor.name], moment)
        for tensor in operation.outputs:
            if owners[tensor.name] == tensor.name:
                lives.create(tensor.name, moment, _bytes(tensor))
    end = operations.index(sums)
    return PassMemory(packs, lives.alive(len(operations)), lives.retained(created_before=end + 1, read_after=end))


def _owners(graph: tf.Graph) -> dict[str, str]:
    """Whose memory each tensor is, by name: its own, or that of which it is a view; empty for inputs and variables."""
    owners: dict[str, str] = {}
    for operation in graph.get_operations():
        for number, tensor in enumerate(operation.outputs):
            if operation.type in ("Placeholder", "Const", "ReadVariableOp") or tensor.dtype in _HANDLES:
                owners[tensor.name] = ""
            elif operation.type in _VIEWS:
                shown = operation.inputs[number if operation.type == "IdentityN" else 0]
                owners[tensor.name] = owners[shown.name]
            else:
                owners[tensor.name] = tensor.name
    return owners


def _bytes(tensor: tf.Tensor) -> int:
    elements = tensor.shape.num_elements()
    return 0 if elements is None or tensor.dtype in _HANDLES else elements * tensor.dtype.size


# --- Is a graph fit for Gaudi? Checked without Gaudi, operation by operation, into every function it calls.
#
# Gaudi compiles a graph once for one set of shapes, and keeps what it compiled. A shape that is not known when the
# graph is traced, or that depends on data, means compiling again at every step; what the card cannot do (strings,
# double precision, 64-bit arithmetic, calls back to Python) cuts the graph in pieces and sends tensors to the host and
# back. None of it is an error at run time: it is only slow, so it has to be looked for. Integers of 64 bits are
# allowed where they are a handful: step counters, seeds, and the keys of random numbers.

# The size of the output depends on values, whatever the inputs. Others, e.g. Range or Tile, are found by their shape.
_DATA_DEPENDENT = {
    *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "ListDiff", "DynamicPartition"),
    *("NonMaxSuppression", "NonMaxSuppressionV2", "NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5"),
    "NonMaxSuppressionWithOverlaps",
}
_DATA_DEPENDENT_PREFIXES = ("Ragged", "Sparse", "DenseToDenseSet", "DenseToSparseSet", "SetSize")
# Dense in, dense out: only the labels, the zeros, or the rows that are picked give them their name.
_NOT_DATA_DEPENDENT = {"SparseSoftmaxCrossEntropyWithLogits", "SparseMatMul", "SparseSegmentSumGrad", "SparseToDense"}
_HOST_CALLS = {
    *("PyFunc", "PyFuncStateless", "EagerPyFunc", "NumericVerify", "Print", "PrintV2", "Assert", "CheckNumerics"),
    *("CheckNumericsV2", "Timestamp", "WriteSummary", "HistogramSummary", "ScalarSummary", "MergeSummary"),
    *("XlaHostCompute", "_XlaHostComputeMlir"),
}
DOUBLE = {tf.float64, tf.complex64, tf.complex128}
LONG = {tf.int64, tf.uint64}
_MOST_LONG_NUMBERS = 4
_HANDLES = {tf.resource, tf.variant}


def check_graphs(graphs: Mapping[str, tf.Graph]) -> list[GraphProblem]:
    """All that is not fit for Gaudi in graphs given by name; none where they are fit."""
    return [
        problem
        for name, graph in graphs.items()
        for path, operation in operations_of(graph, name)
        for problem in _problems(path, operation)
    ]


def operations_of(graph: tf.Graph, name: str = "graph") -> Iterator[tuple[str, tf.Operation]]:
    """Every operation of `graph` and, once each, of all functions that it calls (calls, branches, loop bodies).

    Before the operation its path: `name`, and the functions on the way.
    """
    seen: set[str] = set()
    waiting = [(name, graph)]
    while waiting:
        path, present = waiting.pop()
        for operation in present.get_operations():
            yield path, operation
            for called in _called_functions(operation):
                body = _function_body(operation.graph, called)
                if called not in seen and body is not None:
                    seen.add(called)
                    waiting.append((f"{path} > {called}", body))


def _called_functions(operation: tf.Operation) -> list[str]:
    """Names of the functions that `operation` calls."""
    names: list[str] = []
    for attribute in operation.node_def.attr.values():
        functions = [attribute.func] if attribute.HasField("func") else list(attribute.list.func)
        names.extend(function.name for function in functions if function.name)
    return names


def _function_body(graph: tf.Graph, name: str) -> tf.Graph | None:
    """The graph of function `name`; None where it is known by its serialised form alone."""
    # The only way to a body with its shapes: the public serialised form has lost them.
    definition = graph._get_function(name)  # noqa: SLF001
    return getattr(definition, "graph", None)


def _problems(path: str, operation: tf.Operation) -> Iterator[GraphProblem]:
    def problem(kind: str, actual: str) -> GraphProblem:
        return GraphProblem(kind, path, operation.name, operation.type, actual)

    if _is_data_dependent(operation.type):
        yield problem("data-dependent shape", "the size of its output depends on values")
    if operation.type in _HOST_CALLS:
        yield problem("host call", "runs on the host in the middle of the step")
    for called in _called_functions(operation):
        if _function_body(operation.graph, called) is None:
            yield problem("unknown function", f"calls {called}, whose body cannot be looked at")
    for tensor in operation.outputs:
        if tensor.dtype in _HANDLES:
            continue
        if not tensor.shape.is_fully_defined():
            yield problem("dynamic shape", f"{tensor.name} has the shape {tensor.shape}")
        if tensor.dtype in DOUBLE:
            yield problem("double precision", f"{tensor.name} is {tensor.dtype.name}")
        if tensor.dtype == tf.string:
            yield problem("string", f"{tensor.name} is a string")
        if tensor.dtype in LONG and not _is_handful(tensor):
            yield problem("64-bit integers", f"{tensor.name} is {tensor.dtype.name} {tensor.shape}; make it int32")


def _is_data_dependent(kind: str) -> bool:
    return kind in _DATA_DEPENDENT or (kind.startswith(_DATA_DEPENDENT_PREFIXES) and kind not in _NOT_DATA_DEPENDENT)


def _is_handful(tensor: tf.Tensor) -> bool:
    """Whether it can be a counter, a seed or a key, but not data."""
    elements = tensor.shape.num_elements()
    return elements is not None and elements <= _MOST_LONG_NUMBERS
