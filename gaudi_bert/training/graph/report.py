"""The training step of a pipeline, traced for given sizes without making a variable or running anything.

Inside a `tf.Graph` a variable is only a handle, so the step of a BERT-large is traced in as little memory as a toy's, on any
machine: the graphs are those that `TrainingStep.run` builds, with Gaudi's plain kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from gaudi_bert.config import TrainingSettings
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.inputs import PACKED_FEATURES, BatchSizes
from gaudi_bert.model.parameters import parameter_count
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.graph.check import GraphProblem, check_graphs
from gaudi_bert.training.graph.costs import MemoryModel, activation_bytes, live_bytes, matrix_flops, memory_model
from gaudi_bert.training.optimizers import Optimizer
from gaudi_bert.training.step import SUMS_NAME, TrainingStep

__all__ = ["CARDS", "CardFit", "GraphReport", "report_on_step", "trace_step"]

FLOAT32_BYTES = 4
CARDS = {"Gaudi": 32 * 10**9, "Gaudi2": 96 * 10**9}
"""Memory of a card in bytes."""
USABLE_SHARE = 0.9
"""Of what is left for tensors: the rest is lost to alignment and to the compiled graph itself."""
MEGABYTE = 2**20
# Memory is measured at these numbers of packs. TensorFlow makes one operation of zeros with less than 1000 elements, and two
# of more; there is no whole number c with 64 * c < 1000 <= 66 * c, so both graphs have the same operations.
FEW_PACKS, MANY_PACKS = 64, 66


@dataclass(frozen=True)
class CardFit:
    """How many packs of a micro-batch fit a card; 0: not even one."""

    card: str
    most_packs: int


@dataclass(frozen=True)
class GraphReport:
    """What is to be known of a training step before there is a card. Bytes are those of one card.

    Attributes:
        problems: why the graph is not fit for Gaudi.
        operations: operations in the graphs.
        parameters: trained numbers.
        flops_per_micro_batch: of the matrix products, forward and backward.
        flops_per_update: the same over all micro-batches of one card.
        parameter_bytes: of the variables, float32.
        optimizer_bytes: of both moments.
        gradient_bytes: of the gradient, complete or summed up over micro-batches.
        activation_bytes: kept by the forward pass for the backward pass.
        peak_bytes: the most that is alive at once during a pass, beside those above but for activations.
        cards: what fits.
    """

    problems: tuple[GraphProblem, ...]
    operations: int
    parameters: int
    flops_per_micro_batch: int
    flops_per_update: int
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    peak_bytes: int
    cards: tuple[CardFit, ...]

    @property
    def is_fit(self) -> bool:
        """Whether nothing speaks against the graph."""
        return not self.problems


def report_on_step(
    config: BertConfig,
    settings: TrainingSettings,
    sizes: BatchSizes,
    accumulation_steps: int,
    communication_MB: int,
) -> GraphReport:
    """Trace the step, check it, and say what it costs.

    Args:
        config: the model.
        settings: `optimizer`, `loss`, `clip_norm` and `precision` are used.
        sizes: of a micro-batch.
        accumulation_steps: micro-batches of one update on one card.
        communication_MB: device memory kept for communication.
    """
    step, batch = _abstract_step(config, settings, sizes, accumulation_steps, "float32")
    graphs = step.trace(batch)
    flops = max(matrix_flops(graph) for graph in graphs.values())
    memory, kept = _memory(config, settings, sizes)
    parameters = parameter_count(config)
    one_copy = parameters * FLOAT32_BYTES
    budgets = {card: int((size - communication_MB * MEGABYTE) * USABLE_SHARE) - 4 * one_copy for card, size in CARDS.items()}
    return GraphReport(
        problems=tuple(check_graphs(graphs)),
        operations=sum(len(graph.get_operations()) for graph in graphs.values()),
        parameters=parameters,
        flops_per_micro_batch=flops,
        flops_per_update=flops * accumulation_steps,
        parameter_bytes=one_copy,
        optimizer_bytes=2 * one_copy,
        gradient_bytes=one_copy,
        activation_bytes=kept,
        peak_bytes=memory.peak(sizes.packs),
        cards=tuple(CardFit(card, memory.most_packs(budget)) for card, budget in budgets.items()),
    )


def _memory(config: BertConfig, settings: TrainingSettings, sizes: BatchSizes) -> tuple[MemoryModel, int]:
    """The memory of a pass over any number of packs, and what it keeps for its backward pass at `sizes`.

    With bfloat16, Gaudi's conversion is stood in for by the model's own, which rounds about the same tensors.
    """
    alive, kept = [], []
    for packs in (FEW_PACKS, MANY_PACKS):
        step, batch = _abstract_step(config, settings, sizes._replace(packs=packs), 2, settings.precision)
        graph = step.trace_pass(batch)
        alive.append(live_bytes(graph))
        kept.append(activation_bytes(graph, graph.get_operation_by_name(SUMS_NAME)))
    kept_per_pack = (kept[1] - kept[0]) // (MANY_PACKS - FEW_PACKS)
    memory = memory_model(alive[0], alive[1], FEW_PACKS, MANY_PACKS)
    return memory, kept[0] + kept_per_pack * (sizes.packs - FEW_PACKS)


def trace_step(
    config: BertConfig,
    settings: TrainingSettings,
    sizes: BatchSizes,
    accumulation_steps: int,
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
) -> dict[str, tf.Graph]:
    """The graphs of one update, by name (see `TrainingStep.trace`)."""
    step, batch = _abstract_step(config, settings, sizes, accumulation_steps, compute_dtype)
    return step.trace(batch)


def _abstract_step(
    config: BertConfig,
    settings: TrainingSettings,
    sizes: BatchSizes,
    accumulation_steps: int,
    compute_dtype: Literal["float32", "bfloat16"],
) -> tuple[TrainingStep, dict[str, tf.TensorSpec]]:
    """A step over variables without memory, and the batch to trace it with."""
    letters = {"B": sizes.packs, "L": sizes.positions, "Q": sizes.masked_slots, "S": sizes.depth}
    batch = {
        name: tf.TensorSpec([letters[letter] for letter in shape], dtype) for name, (shape, dtype) in PACKED_FEATURES.items()
    }
    with tf.Graph().as_default():
        model = BertForPretraining(config, seed=0, compute_dtype=compute_dtype)
        step = TrainingStep(
            model,
            Optimizer(model.variables_by_name, settings),
            Communicator(),
            settings,
            accumulation_steps=accumulation_steps,
        )
    return step, batch
