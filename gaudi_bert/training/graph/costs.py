"""What a graph costs: matrix products, and the device memory of one forward and backward pass.

Products are counted exactly, 2 * m * k * n each; everything else of BERT is small beside them. Memory is simulated:
the operations are run in the order in which they were traced (forward, then backward), an output lives from its
operation to the last one that reads it, reshapes and the like share the memory of what they show, and variables are
counted apart. Fusion on the device makes the true figure smaller, fragmentation makes it larger: it is an estimate.

With B packs every tensor has c + d * B bytes, so two traces, at two values of B, give the memory at every moment for
every B, and the largest B that fits a card is found without tracing again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.training.graph.check import HANDLES, operations_of

__all__ = ["MemoryModel", "activation_bytes", "live_bytes", "matrix_flops", "memory_model"]

# Outputs that are the memory of the first input under another shape or name.
VIEWS = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
PRODUCTS = {"MatMul": ("transpose_a",), "BatchMatMul": ("adj_x",), "BatchMatMulV2": ("adj_x",), "BatchMatMulV3": ("adj_x",)}


def matrix_flops(graph: tf.Graph) -> int:
    """Floating-point operations of all matrix products of `graph` and of the functions it calls, each counted once."""
    return sum(_product_flops(operation) for _, operation in operations_of(graph) if operation.type in PRODUCTS)


def _product_flops(operation: tf.Operation) -> int:
    """2 * (elements of the product) * (length of the sums); the batch dimensions are in the product."""
    left = operation.inputs[0].shape
    transposed = any(operation.get_attr(name) for name in PRODUCTS[operation.type])
    inner = left[-2] if transposed else left[-1]
    return 2 * operation.outputs[0].shape.num_elements() * inner


def activation_bytes(graph: tf.Graph, sums: tf.Operation) -> int:
    """Bytes that the forward pass keeps for the backward pass.

    Args:
        graph: of one forward and backward pass, in the order of tracing.
        sums: the operation that the forward pass ends in.
    """
    owners = _owners(graph)
    operations = graph.get_operations()
    end = operations.index(sums) + 1
    made = {tensor.name: _bytes(tensor) for operation in operations[:end] for tensor in operation.outputs}
    kept: dict[str, int] = {}
    for operation in operations[end:]:
        for tensor in operation.inputs:
            owner = owners[tensor.name]
            if owner in made:
                kept[owner] = made[owner]
    return sum(kept.values())


def live_bytes(graph: tf.Graph) -> IntArray:
    """Bytes of all tensors that are alive while each operation runs, int64 [operations], in the order of tracing.

    Inputs, constants and variables are not counted.
    """
    operations = graph.get_operations()
    owners = _owners(graph)
    births: dict[str, tuple[int, int]] = {}
    deaths: dict[str, int] = {}
    for moment, operation in enumerate(operations):
        for tensor in operation.inputs:
            owner = owners[tensor.name]
            if owner:
                deaths[owner] = moment
        for tensor in operation.outputs:
            if owners[tensor.name] == tensor.name:
                births[tensor.name] = (moment, _bytes(tensor))
                deaths[tensor.name] = moment
    changes = np.zeros(len(operations) + 1, np.int64)
    for name, (moment, size) in births.items():
        changes[moment] += size
        changes[deaths[name] + 1] -= size
    return np.cumsum(changes[:-1])


def _owners(graph: tf.Graph) -> dict[str, str]:
    """Whose memory each tensor is, by name: its own, or that of which it is a view; empty for inputs and variables."""
    owners: dict[str, str] = {}
    for operation in graph.get_operations():
        for number, tensor in enumerate(operation.outputs):
            if operation.type in ("Placeholder", "Const", "ReadVariableOp") or tensor.dtype in HANDLES:
                owners[tensor.name] = ""
            elif operation.type in VIEWS:
                shown = operation.inputs[number if operation.type == "IdentityN" else 0]
                owners[tensor.name] = owners[shown.name]
            else:
                owners[tensor.name] = tensor.name
    return owners


def _bytes(tensor: tf.Tensor) -> int:
    elements = tensor.shape.num_elements()
    return 0 if elements is None or tensor.dtype in HANDLES else elements * tensor.dtype.size


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
