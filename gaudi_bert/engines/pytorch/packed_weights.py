"""Weights of a model for inference, stored once in the memory layout that oneDNN multiplies fastest on a CPU.

Letters in shapes: I inputs and O outputs of a product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gaudi_bert.encoders.matrix_products import (
    LargeProduct,
    is_large_product,
    is_plain_cpu_tensor,
    multiply_with_onednn,
    onednn_supports,
)


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `left @ right + bias` for matrices. `right` may be a result of `pack_weights`."""
    if right.is_mkldnn:
        return multiply_with_onednn(left.to(right.dtype), right, bias)
    if is_large_product(left, right):
        return LargeProduct.apply(left, right, bias, False)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def pack_weights(weights_IO: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert weights to a dtype and to the memory layout that oneDNN prefers. The result has no gradient.

    For other layouts, oneDNN and other libraries rearrange the weights in each product, which takes half of the time for 32
    rows, and autocast converts them to bfloat16 in each product.

    Args:
        weights_IO: The right side of matrix products.
        dtype: The dtype of the products, float32 or bfloat16.

    Returns:
        The weights in oneDNN's layout, which only `multiply` can use. If oneDNN cannot be used, the layout does not change.
    """
    weights_IO = weights_IO.detach().to(dtype)
    if not (is_plain_cpu_tensor(weights_IO) and onednn_supports(dtype)):
        return weights_IO
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights_IO.t().contiguous())  # noqa: SLF001
    return packed


class PackedLinear(torch.nn.Linear):
    """A linear layer for inference that stores its weights only in oneDNN's layout.

    Attributes:
        packed: The weights in oneDNN's layout.
    """

    packed: Tensor

    @property
    def weight(self) -> Tensor:
        """A copy of the weights in the layout of `torch.nn.Linear`, [O, I], for modules that read the weights of their
        layers.
        """
        return self.packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.T + bias`. Under autocast, the dtype of the weights is used, and without autocast the
        dtype of the input.
        """
        if self.packed.dtype != input.dtype and not torch.is_autocast_enabled("cpu"):
            return functional.linear(input, self.weight.to(input.dtype), self.bias)  # trials compute in float32
        bias = None if self.bias is None else self.bias.to(self.packed.dtype)
        return multiply(input.flatten(0, -2), self.packed, bias).unflatten(0, input.shape[:-1])


def pack_linear_layers(module: torch.nn.Module, compute: Callable[[], object], dtype: torch.dtype) -> None:
    """Convert the weights of linear layers for inference with `pack_weights`, in place. Only layers that run when
    `compute()` is called are converted.

    Layers whose weights are shared with another module are not changed. If `dtype` is bfloat16, layers that are also called
    outside of autocast are not changed either.

    Args:
        module: The module that contains the layers.
        compute: A function that runs the module on a batch, under autocast if `dtype` is bfloat16.
        dtype: The dtype of the products, float32 or bfloat16.
    """
    if not onednn_supports(dtype):
        return
    owners = Counter(id(weight) for owner in module.modules() for weight in owner.parameters(recurse=False))
    calls: dict[torch.nn.Linear, bool] = {}

    def note(layer: Any, inputs: tuple[Any, ...]) -> None:
        """Record whether this call of a layer would also work if the weights of the layer were converted."""
        converts = torch.is_autocast_enabled("cpu") == (dtype == torch.bfloat16)
        fits = converts and bool(inputs) and inputs[0].dim() >= 2 and owners[id(layer.weight)] == 1
        calls[layer] = calls.get(layer, True) and fits

    linear_layers = [
        layer for layer in module.modules() if type(layer) is torch.nn.Linear and is_plain_cpu_tensor(layer.weight)
    ]
    hooks = [layer.register_forward_pre_hook(note) for layer in linear_layers]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    for layer in (layer for layer, fits in calls.items() if fits):
        packed = pack_weights(layer.weight.t(), dtype)
        del layer.weight
        layer.__class__ = PackedLinear
        layer.packed = packed
