"""A training step as a graph, traced for given sizes without memory and without running anything.

Forward and backward pass are traced on tensors that have shapes and no numbers. Gaudi compiles a graph once for one set of
shapes: what depends on values, or goes to the host, is found here, before there is a card. Matrix products are counted
exactly, memory as `engines/graph_report.py` describes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.graph_report import GraphProblem, GraphReport, PassMemory, TensorLives
from gaudi_bert.engines.protocol import Device, StepSpec
from gaudi_bert.engines.pytorch.bert import plain_attention
from gaudi_bert.engines.pytorch.encoder_model import build_encoder
from gaudi_bert.engines.pytorch.model import TorchBert, TorchModel
from gaudi_bert.model.config import BertConfig
from gaudi_bert.pytorch.pooling import widen

# Memory is measured at these numbers of packs, and is of the form c + d * B between them and beyond.
_FEW_PACKS, _MANY_PACKS = 4, 6
_DATA_DEPENDENT = ("nonzero", "unique", "masked_select", "_local_scalar_dense", "item", "repeat_interleave", "bincount")
_VIEWS = (
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"),
    *("unbind", "split", "split_with_sizes", "detach", "alias", "getitem"),
)


def report_on_step(step: StepSpec, settings: LoopSettings, communication_MB: int) -> GraphReport:
    """Trace the step, check that it is fit for Gaudi, and say what it costs."""
    model = model_of(step, settings)
    parameters = sum(parameter.numel() for parameter in model.parameters_by_name.values())
    few, many = (trace_pass(model, step, packs) for packs in (_FEW_PACKS, _MANY_PACKS))

    def flops(forward_only: bool) -> int:
        fewer, more = (matrix_flops(graph, forward_only=forward_only) for graph in (few, many))
        return fewer + (more - fewer) // (_MANY_PACKS - _FEW_PACKS) * (step.packs - _FEW_PACKS)

    return GraphReport.of(
        check_graph(few),
        parameters=parameters,
        operations=sum(node.op == "call_function" for node in few.graph.nodes),
        flops_per_micro_batch=flops(forward_only=False),
        repeated_flops=flops(forward_only=True) if step.has_update_loss else 0,
        accumulation_steps=step.accumulation_steps,
        few=_pass_memory(few, _FEW_PACKS),
        many=_pass_memory(many, _MANY_PACKS),
        packs=step.packs,
        communication_MB=communication_MB,
    )


def model_of(step: StepSpec, settings: LoopSettings) -> TorchModel:
    """The model of a step; a BERT computes attention as on Gaudi."""
    device = Device("cpu", "cpu", settings.precision, "", compiles=False, recomputes=settings.recompute)
    if not isinstance(step.model.config, BertConfig):
        return build_encoder(step.model, device, seed=None)
    model = TorchBert(step.model, device, seed=None)
    model.attention = plain_attention
    return model


def trace_pass(model: TorchModel, step: StepSpec, packs: int) -> torch.fx.GraphModule:
    """The graph of one forward and backward pass, as `updates.py` runs it.

    It ends in what the forward pass ended in (the sums, or outputs whose gradient the host gives), and the gradients.
    """
    shapes, seed = {name: parameter.shape for name, parameter in model.parameters_by_name.items()}, np.zeros(2, np.int32)

    def forward(batch: dict[str, Any]) -> tuple[Any, Any]:
        if step.has_update_loss:
            outputs = widen(model.training_outputs(batch, seed))
            return outputs, outputs
        loss, sums = model.loss(batch, seed, torch.ones(2))
        return loss, sums * 1.0  # the operation at which the forward pass ends

    def forward_and_backward(parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        leaves = {name: value.requires_grad_() for name, value in parameters.items()}
        start, last = model.with_parameters(leaves, partial(forward, batch))
        gradients = torch.autograd.grad(start, list(leaves.values()), torch.ones_like(start), allow_unused=True)
        return last, [gradient for gradient in gradients if gradient is not None]

    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        parameters = {name: torch.empty(shape) for name, shape in shapes.items()}
        batch = {
            name: torch.empty((packs, *shape), dtype=getattr(torch, kind)) for name, (shape, kind) in step.features.items()
        }
        graph: torch.fx.GraphModule = make_fx(forward_and_backward)(parameters, batch)
    return graph


def check_graph(graph: torch.fx.GraphModule) -> list[GraphProblem]:
    """All that is not fit for Gaudi; none where it is fit."""
    return [problem for node in graph.graph.nodes if node.op == "call_function" for problem in _problems(node)]


def _problems(node: torch.fx.Node) -> Iterator[GraphProblem]:
    kind = _kind(node)

    def problem(what: str, actual: str) -> GraphProblem:
        return GraphProblem(what, "update", node.name, kind, actual)

    if kind in _DATA_DEPENDENT:
        yield problem("data-dependent shape", "the size of its output, or what the host does next, depends on values")
    for tensor in _tensors(node):
        if any(not isinstance(size, int) for size in tensor.shape):
            yield problem("dynamic shape", f"its shape is {tuple(tensor.shape)}")
        if tensor.dtype in (torch.float64, torch.complex64, torch.complex128):
            yield problem("double precision", f"it is {tensor.dtype}")


def matrix_flops(graph: torch.fx.GraphModule, *, forward_only: bool = False) -> int:
    """Floating-point operations of all matrix products, attention by one operation among them."""
    total, last = 0, _end_of_forward_pass(graph) if forward_only else None
    for node in takewhile(lambda node: node is not last, graph.graph.nodes):
        formula = flop_registry.get(getattr(torch.ops.aten, _kind(node).replace("_for_cpu", ""), None))
        if formula is not None:
            arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
            total += formula(*arguments, **options, out_val=node.meta["val"])
    return total


def _pass_memory(graph: torch.fx.GraphModule, packs: int) -> PassMemory:
    """The memory of a pass; parameters and inputs are not counted."""
    lives = TensorLives[torch.fx.Node]()
    owners: dict[torch.fx.Node, torch.fx.Node | None] = {}
    moment, moments = -1, {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            owners[node] = None
            continue
        moment += node.op == "call_function"
        moments[node] = moment
        for read in node.all_input_nodes:
            owner = owners.get(read)
            if owner is not None:
                lives.read(owner, max(moment, 0))
        if node.op == "call_function":
            is_view = _kind(node) in _VIEWS and node.all_input_nodes
            owners[node] = owners.get(node.all_input_nodes[0]) if is_view else node
            if not is_view:
                lives.create(node, moment, _bytes(node))
    end = moments[_end_of_forward_pass(graph)]
    return PassMemory(packs, lives.alive(moment + 1), lives.retained(created_before=end, read_after=end))


def _end_of_forward_pass(graph: torch.fx.GraphModule) -> torch.fx.Node:
    (results,) = next(node for node in reversed(graph.graph.nodes) if node.op == "output").args
    last: torch.fx.Node = results[0]
    return last


def _kind(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _bytes(node: torch.fx.Node) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in _tensors(node))
