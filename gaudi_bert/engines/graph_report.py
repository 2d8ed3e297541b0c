"""What is to be known of a training step before there is a card: whether its graph is fit for Gaudi, and what it costs.

An engine traces the step and looks at its operations; what it reports, and how memory grows with the packs of a micro-batch,
is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from gaudi_bert.common.arrays import IntArray

T = TypeVar("T")

CARDS = {"Gaudi": 32 * 10**9, "Gaudi2": 96 * 10**9}
"""Memory of a card in bytes."""
USABLE_SHARE = 0.9
"""The share that tensors can use: the rest is lost to alignment and to the compiled graph itself."""
_FLOAT32_BYTES = 4
_MEGABYTE = 2**20


@dataclass(frozen=True)
class GraphProblem:
    """Why one operation is not for Gaudi.

    `graph` is a graph's name, with the functions that lead to the operation.
    """

    kind: str
    graph: str
    operation: str
    type: str
    found: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.type} {self.operation} in {self.graph}: {self.found}"


@dataclass(frozen=True)
class CardFit:
    """How many packs of a micro-batch fit a card; 0: not even one."""

    card: str
    most_packs: int


@dataclass(frozen=True)
class GraphReport:
    """What is to be known of a training step before there is a card. Bytes are those of one card.

    Operations have FLOPs of matrix products, forward and backward. Activations are what the forward pass keeps for the
    backward pass; the peak is the most that is alive at once during a pass, in addition to variables, moments and gradients.
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

    @classmethod
    def of(
        cls,
        problems: Iterable[GraphProblem],
        *,
        parameters: int,
        operations: int,
        flops_per_micro_batch: int,
        repeated_flops: int,
        accumulation_steps: int,
        few: PassMemory,
        many: PassMemory,
        packs: int,
        communication_MB: int,
    ) -> GraphReport:
        """The report on a step of micro-batches of `packs`.

        `repeated_flops` are done once more for all micro-batches but one; `communication_MB` of a card are not for tensors.
        """
        one_copy = parameters * _FLOAT32_BYTES
        memory = memory_model(few.alive, many.alive, few.packs, many.packs)
        activations_per_pack = (many.activations - few.activations) // (many.packs - few.packs)
        budgets = {
            card: int((size - communication_MB * _MEGABYTE) * USABLE_SHARE) - 4 * one_copy for card, size in CARDS.items()
        }
        return cls(
            problems=tuple(problems),
            operations=operations,
            parameters=parameters,
            flops_per_micro_batch=flops_per_micro_batch,
            flops_per_update=flops_per_micro_batch * accumulation_steps + repeated_flops * (accumulation_steps - 1),
            parameter_bytes=one_copy,
            optimizer_bytes=2 * one_copy,
            gradient_bytes=one_copy,
            activation_bytes=few.activations + activations_per_pack * (packs - few.packs),
            peak_bytes=memory.peak(packs),
            cards=tuple(CardFit(card, memory.most_packs(budget)) for card, budget in budgets.items()),
        )


# --- The memory of a pass: the operations are run in the order in which they were traced (forward, then backward), a tensor
# lives from its operation to the last one that reads it, views share memory, variables are counted apart. Fusion on the
# device makes the true figure smaller, fragmentation makes it larger: it is an estimate.
#
# With B packs every tensor has c + d * B bytes, so two traces, at two values of B, give the memory at every moment for every
# B, and the largest B that fits a card is computed without tracing again.


@dataclass(frozen=True)
class PassMemory:
    """The bytes of a pass over so many packs: `alive` while each operation runs, int64 [operations]; `activations` are those
    that the forward pass retains for the backward pass.
    """

    packs: int
    alive: IntArray
    activations: int


class TensorLives(Generic[T]):
    """When each tensor that has its own memory is created and last read, in numbers of operations, and its bytes."""

    def __init__(self) -> None:
        self._births: dict[T, int] = {}
        self._deaths: dict[T, int] = {}
        self._sizes: dict[T, int] = {}

    def create(self, tensor: T, moment: int, size: int) -> None:
        """An operation creates a tensor."""
        self._births[tensor] = self._deaths[tensor] = moment
        self._sizes[tensor] = size

    def read(self, tensor: T, moment: int) -> None:
        """An operation reads it."""
        self._deaths[tensor] = moment

    def alive(self, operations: int) -> IntArray:
        """Bytes of all tensors that are alive while each operation runs, int64 [operations]."""
        changes = np.zeros(operations + 1, np.int64)
        for tensor, size in self._sizes.items():
            changes[self._births[tensor]] += size
            changes[self._deaths[tensor] + 1] -= size
        alive: IntArray = np.cumsum(changes[:-1])
        return alive

    def retained(self, created_before: int, read_after: int) -> int:
        """Bytes of those that are created before one operation and read after another."""
        return sum(
            size
            for tensor, size in self._sizes.items()
            if self._births[tensor] < created_before and self._deaths[tensor] > read_after
        )


@dataclass(frozen=True)
class MemoryModel:
    """Bytes alive at each moment of a pass over B packs: `fixed + per_pack * B`, int64 [moments]."""

    fixed: IntArray
    per_pack: IntArray

    def peak(self, packs: int) -> int:
        """The most bytes alive at any moment of a pass over `packs` packs."""
        return int((self.fixed + self.per_pack * packs).max(initial=0))

    def most_packs(self, budget: int) -> int:
        """The largest number of packs whose peak is within `budget` bytes; 0 where not even one fits."""
        if self.peak(1) > budget:
            return 0
        growing = self.per_pack > 0
        return int(((budget - self.fixed[growing]) // self.per_pack[growing]).min(initial=np.iinfo(np.int64).max))


def memory_model(small: Iterable[int], large: Iterable[int], small_packs: int, large_packs: int) -> MemoryModel:
    """The model that goes through two measurements of `live_bytes`, of the same graph at two numbers of packs.

    Raises:
        ValueError: they are not of the same graph, or not of the form `c + d * B`.
    """
    low, high = np.asarray(small), np.asarray(large)
    if low.shape != high.shape:
        raise ValueError(f"{low.size} and {high.size} operations: the graph depends on the number of packs")
    per_pack, rest = np.divmod(high - low, large_packs - small_packs)
    if rest.any():
        raise ValueError("the bytes of some tensor are not of the form c + d * B")
    return MemoryModel(low - per_pack * small_packs, per_pack)
