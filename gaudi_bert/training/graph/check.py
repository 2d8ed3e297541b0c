"""Is a graph fit for Gaudi? Looked at without Gaudi, operation by operation, into every function it calls.

Gaudi compiles a graph once for one set of shapes, and keeps what it compiled. A shape that is not known when the
graph is traced, or that depends on data, means compiling again at every step; what the card cannot do (strings,
double precision, 64-bit arithmetic, calls back to Python) cuts the graph in pieces and sends tensors to the host and
back. None of it is an error at run time: it is only slow, so it has to be looked for. Whole numbers of 64 bits are
let pass where they are a handful: step counters, seeds, and the keys of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import tensorflow as tf

__all__ = ["GraphProblem", "check_graphs", "operations_of"]

# The size of the output depends on values, whatever the inputs. Others, e.g. Range or Tile, are found by their shape.
DATA_DEPENDENT = {
    "Where",
    "Unique",
    "UniqueV2",
    "UniqueWithCounts",
    "UniqueWithCountsV2",
    "ListDiff",
    "DynamicPartition",
    "NonMaxSuppression",
    "NonMaxSuppressionV2",
    "NonMaxSuppressionV3",
    "NonMaxSuppressionV4",
    "NonMaxSuppressionV5",
    "NonMaxSuppressionWithOverlaps",
}
DATA_DEPENDENT_PREFIXES = ("Ragged", "Sparse", "DenseToDenseSet", "DenseToSparseSet", "SetSize")
# Dense in, dense out: only the labels, the zeros, or the rows that are picked give them their name.
NOT_DATA_DEPENDENT = {"SparseSoftmaxCrossEntropyWithLogits", "SparseMatMul", "SparseSegmentSumGrad", "SparseToDense"}
HOST_CALLS = {
    "PyFunc",
    "PyFuncStateless",
    "EagerPyFunc",
    "NumericVerify",
    "Print",
    "PrintV2",
    "Assert",
    "CheckNumerics",
    "CheckNumericsV2",
    "Timestamp",
    "WriteSummary",
    "HistogramSummary",
    "ScalarSummary",
    "MergeSummary",
    "XlaHostCompute",
    "_XlaHostComputeMlir",
}
DOUBLE = {tf.float64, tf.complex64, tf.complex128}
LONG = {tf.int64, tf.uint64}
MOST_LONG_NUMBERS = 4
HANDLES = {tf.resource, tf.variant}


@dataclass(frozen=True)
class GraphProblem:
    """Why one operation is not for Gaudi.

    Attributes:
        kind: `dynamic shape`, `data-dependent shape`, `double precision`, `string`, `64-bit integers`, `host call`, or
            `unknown function`.
        graph: where it is: a graph's name, with the functions that lead to it.
        operation: its name.
        type: its type, e.g. `MatMul`.
        found: what is wrong with it.
    """

    kind: str
    graph: str
    operation: str
    type: str
    found: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.type} {self.operation} in {self.graph}: {self.found}"

    def as_json(self) -> dict[str, str]:
        """The problem for machines."""
        return asdict(self)


def check_graphs(graphs: Mapping[str, tf.Graph]) -> list[GraphProblem]:
    """All that is not fit for Gaudi in graphs given by name; none where they are fit."""
    return [
        problem
        for name, graph in graphs.items()
        for place, operation in operations_of(graph, name)
        for problem in _problems(place, operation)
    ]


def operations_of(graph: tf.Graph, name: str = "graph") -> Iterator[tuple[str, tf.Operation]]:
    """Every operation of `graph` and, once each, of all functions that it calls (calls, branches, loop bodies).

    Yields:
        The place (`name`, and the functions on the way), and the operation.
    """
    seen: set[str] = set()
    waiting = [(name, graph)]
    while waiting:
        place, present = waiting.pop()
        for operation in present.get_operations():
            yield place, operation
            for called in called_functions(operation):
                body = function_body(operation.graph, called)
                if called not in seen and body is not None:
                    seen.add(called)
                    waiting.append((f"{place} > {called}", body))


def called_functions(operation: tf.Operation) -> list[str]:
    """Names of the functions that `operation` calls."""
    names: list[str] = []
    for attribute in operation.node_def.attr.values():
        functions = [attribute.func] if attribute.HasField("func") else list(attribute.list.func)
        names.extend(function.name for function in functions if function.name)
    return names


def function_body(graph: tf.Graph, name: str) -> tf.Graph | None:
    """The graph of function `name`; None where it is known by its serialised form alone."""
    # The only way to a body with its shapes: the public serialised form has lost them.
    definition = graph._get_function(name)  # noqa: SLF001
    return getattr(definition, "graph", None)


def _problems(place: str, operation: tf.Operation) -> Iterator[GraphProblem]:
    def problem(kind: str, found: str) -> GraphProblem:
        return GraphProblem(kind, place, operation.name, operation.type, found)

    if _is_data_dependent(operation.type):
        yield problem("data-dependent shape", "the size of its output depends on values")
    if operation.type in HOST_CALLS:
        yield problem("host call", "runs on the host in the middle of the step")
    for called in called_functions(operation):
        if function_body(operation.graph, called) is None:
            yield problem("unknown function", f"calls {called}, whose body cannot be looked at")
    for tensor in operation.outputs:
        if tensor.dtype in HANDLES:
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
    return kind in DATA_DEPENDENT or (kind.startswith(DATA_DEPENDENT_PREFIXES) and kind not in NOT_DATA_DEPENDENT)


def _is_handful(tensor: tf.Tensor) -> bool:
    """Whether it can be a counter, a seed or a key, but not data."""
    elements = tensor.shape.num_elements()
    return elements is not None and elements <= MOST_LONG_NUMBERS
