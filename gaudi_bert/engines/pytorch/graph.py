"""The training step of a pipeline as a graph, traced for given sizes without memory and without running anything.

Forward and backward pass are traced on tensors that have shapes and no numbers. Gaudi compiles a graph once for one set of
shapes: what depends on values, or goes to the host, is found here, before there is a card. Matrix products are counted
exactly, memory as `engines/graph_report.py` describes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.graph_report import GraphProblem, GraphReport, PassMemory, TensorLives
from gaudi_bert.engines.pytorch.bert import Network
from gaudi_bert.engines.pytorch.losses import pretraining_sums
from gaudi_bert.engines.pytorch.model import pretraining_outputs
from gaudi_bert.model.config import BertConfig, parameter_specs
from gaudi_bert.model.features import BatchSizes, packed_shapes

# Memory is measured at these numbers of packs, and is of the form c + d * B between them and beyond.
_FEW_PACKS, _MANY_PACKS = 4, 6
_DATA_DEPENDENT = ("nonzero", "unique", "masked_select", "_local_scalar_dense", "item", "repeat_interleave", "bincount")
_VIEWS = (
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"),
    *("unbind", "split", "split_with_sizes", "detach", "alias", "getitem"),
)


def report_on_step(
    config: BertConfig,
    settings: TrainingSettings,
    sizes: BatchSizes,
    accumulation_steps: int,
    communication_MB: int,
) -> GraphReport:
    """Trace the step, check that it is fit for Gaudi, and say what it costs."""
    few, many = (trace_pass(config, settings, sizes._replace(packs=packs)) for packs in (_FEW_PACKS, _MANY_PACKS))
    flops_per_pack = (matrix_flops(many) - matrix_flops(few)) // (_MANY_PACKS - _FEW_PACKS)
    return GraphReport.of(
        check_graph(few),
        config,
        operations=sum(node.op == "call_function" for node in few.graph.nodes),
        flops_per_micro_batch=matrix_flops(few) + flops_per_pack * (sizes.packs - _FEW_PACKS),
        accumulation_steps=accumulation_steps,
        few=_pass_memory(few, _FEW_PACKS),
        many=_pass_memory(many, _MANY_PACKS),
        packs=sizes.packs,
        communication_MB=communication_MB,
    )


def trace_pass(config: BertConfig, settings: TrainingSettings, sizes: BatchSizes) -> torch.fx.GraphModule:
    """The graph of one forward and backward pass, as `updates.py` runs it; it ends in the sums and the gradients."""
    autocasts = settings.precision == "bfloat16"

    def forward_and_backward(parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        leaves = {name: value.requires_grad_() for name, value in parameters.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
            network = Network(config, leaves, training=True, recomputes=settings.recompute)
            outputs = pretraining_outputs(network, batch)
        sums = pretraining_sums(*outputs, batch, settings.loss)
        sums = sums * 1.0  # the operation at which the forward pass ends
        gradients = torch.autograd.grad(sums[0] + sums[2], list(leaves.values()), allow_unused=True)
        return sums, [gradient for gradient in gradients if gradient is not None]

    with FakeTensorMode():
        parameters = {name: torch.empty(spec.shape) for name, spec in parameter_specs(config).items()}
        batch = {
            name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (shape, kind) in packed_shapes(sizes).items()
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


def matrix_flops(graph: torch.fx.GraphModule) -> int:
    """Floating-point operations of all matrix products, attention by one operation among them."""
    total = 0
    for node in graph.graph.nodes:
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
    output = next(node for node in graph.graph.nodes if node.op == "output")
    end = moments[output.args[0][0]]
    return PassMemory(packs, lives.alive(moment + 1), lives.retained(created_before=end, read_after=end))


def _kind(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _bytes(node: torch.fx.Node) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in _tensors(node))
