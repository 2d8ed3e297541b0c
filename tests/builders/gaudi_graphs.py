"""What is not fit for Gaudi in a training step: found in its graph, operation by operation, without a card.

Gaudi compiles a graph once for one set of shapes. A shape that is not known when the graph is traced, or that depends on
data, means compiling again at every step; what the card cannot do (strings, double precision, 64-bit arithmetic, calls to
Python) sends tensors to the host and back. None of it is an error at run time: it is only slow, so it has to be looked for.
Integers of 64 bits may be a handful: step counters, seeds, and the keys of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.engines.protocol import UpdateLoss

# --- TensorFlow: the graphs that an update was traced to, and every function that they call

_HOST_CALLS = {
    *("PyFunc", "PyFuncStateless", "EagerPyFunc", "NumericVerify", "Print", "PrintV2", "Assert", "CheckNumerics"),
    *("CheckNumericsV2", "Timestamp", "WriteSummary", "HistogramSummary", "ScalarSummary", "MergeSummary"),
    *("XlaHostCompute", "_XlaHostComputeMlir"),
}
_MOST_LONG_NUMBERS = 4


def tensorflow_problems(graphs: Iterable[Any]) -> set[tuple[str, str]]:
    """What is wrong, and the type of the operation; empty where the graphs are fit."""
    return {problem for graph in graphs for operation in operations_of(graph) for problem in _problems(operation)}


def operations_of(graph: Any) -> Iterator[Any]:
    """Every operation of a graph and, once each, of all functions that it calls: calls, branches, bodies of loops."""
    seen: set[str] = set()
    waiting = [graph]
    while waiting:
        for operation in waiting.pop().get_operations():
            yield operation
            for called in _called_functions(operation):
                body = _function_body(operation.graph, called)
                if called not in seen and body is not None:
                    seen.add(called)
                    waiting.append(body)


def _called_functions(operation: Any) -> list[str]:
    names: list[str] = []
    for attribute in operation.node_def.attr.values():
        functions = [attribute.func] if attribute.HasField("func") else list(attribute.list.func)
        names.extend(function.name for function in functions if function.name)
    return names


def _function_body(graph: Any, name: str) -> Any:
    """The graph of a function; None where it is known by its serialised form alone, which has lost its shapes."""
    return getattr(graph._get_function(name), "graph", None)  # noqa: SLF001 - the only way to a body with its shapes


def _problems(operation: Any) -> Iterator[tuple[str, str]]:
    import tensorflow as tf

    kind = operation.type
    if kind in _HOST_CALLS:
        yield "host call", kind
    if any(_function_body(operation.graph, called) is None for called in _called_functions(operation)):
        yield "unknown function", kind
    for tensor in operation.outputs:
        if tensor.dtype in (tf.resource, tf.variant):
            continue
        if not tensor.shape.is_fully_defined():
            yield "dynamic shape", kind
        if tensor.dtype in (tf.float64, tf.complex64, tf.complex128):
            yield "double precision", kind
        if tensor.dtype == tf.string:
            yield "string", kind
        elements = tensor.shape.num_elements()
        if tensor.dtype in (tf.int64, tf.uint64) and (elements is None or elements > _MOST_LONG_NUMBERS):
            yield "64-bit integers", kind


# --- PyTorch: a forward and backward pass on tensors that have shapes and no numbers

# Operations of which PyTorch documents that they have no deterministic kernel on a GPU, as far as a model of text has them.
_NOT_DETERMINISTIC = (
    *("put", "kthvalue", "median", "nanmedian", "histc", "cumsum", "cumprod", "_ctc_loss", "nll_loss2d_forward"),
    *("_embedding_bag", "_embedding_bag_dense_backward", "grid_sampler_2d_backward"),
)
_DEPENDS_ON_VALUES = ("nonzero", "unique", "masked_select", "_local_scalar_dense", "item", "repeat_interleave", "bincount")


def pytorch_problems(graph: Any) -> set[tuple[str, str]]:
    """What is wrong, and the operation; empty where the graph is fit."""
    import torch

    found: set[tuple[str, str]] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        kind = str(getattr(node.target, "__name__", node.target)).split(".")[0]
        if kind in _DEPENDS_ON_VALUES:
            found.add(("data-dependent shape", kind))
        if kind in _NOT_DETERMINISTIC:
            found.add(("no deterministic kernel", kind))
        value = node.meta.get("val")
        for tensor in value if isinstance(value, tuple | list) else [value]:
            if isinstance(tensor, torch.Tensor):
                if any(not isinstance(size, int) for size in tensor.shape):
                    found.add(("dynamic shape", kind))
                if tensor.dtype in (torch.float64, torch.complex64, torch.complex128):
                    found.add(("double precision", kind))
    return found


def traced_pass(model: Any, batch: BatchArrays, update_loss: UpdateLoss | None = None) -> Any:
    """The graph of one forward and backward pass of a model of the PyTorch engine; a BERT computes attention as on Gaudi."""
    import numpy as np
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from gaudi_bert.encoders.pack_inputs import upcast_to_float32
    from gaudi_bert.engines.pytorch.bert import _plain_attention
    from gaudi_bert.engines.pytorch.bert_model import TorchBert

    seed = np.zeros(2, np.int32)
    if isinstance(model, TorchBert):
        model.attention = _plain_attention

    class Pass(torch.nn.Module):
        """Holds the model's module, so that its parameters can be replaced while a pass lasts."""

        def __init__(self) -> None:
            super().__init__()
            self.module = getattr(model, "module", torch.nn.Module())

        def forward(self, tensors: dict[str, Any]) -> Any:
            if update_loss is not None:
                return upcast_to_float32(model.compute_training_outputs(tensors, seed))
            return model.compute_loss(tensors, seed, torch.ones(2))[0]

    def forward_and_backward(parameters: dict[str, Any], tensors: dict[str, Any]) -> Sequence[Any]:
        leaves = {name: value.requires_grad_() for name, value in parameters.items()}
        if isinstance(model, TorchBert):
            model.parameters_by_name = leaves
            start = Pass()(tensors)
        else:
            named = {f"module.{name}": value for name, value in leaves.items()}
            start = torch.func.functional_call(Pass(), named, (tensors,))
        gradients = torch.autograd.grad(start, list(leaves.values()), torch.ones_like(start), allow_unused=True)
        return [gradient for gradient in gradients if gradient is not None]

    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        parameters = {name: torch.empty(parameter.shape) for name, parameter in model.parameters_by_name.items()}
        tensors = {
            name: torch.empty(values.shape, dtype=getattr(torch, values.dtype.name)) for name, values in batch.items()
        }
        return make_fx(forward_and_backward)(parameters, tensors)
