"""Multiplies large matrices on a CPU with the faster of two libraries, in the linear layers of any module.

For matrix products, PyTorch calls MKL, which does not use the widest registers of processors that are not Intel's. On an AMD
processor with AVX-512, oneDNN, which PyTorch also contains, is twice as fast. With AVX2, MKL is faster by a tenth in forward
passes and by up to nine tenths in gradients, except that oneDNN takes a third less time for the logits of a vocabulary.
For inference, weights can be converted to the memory layout that oneDNN multiplies fastest.

Letters in shapes: I inputs and O outputs of a product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MIN_MULTIPLICATIONS = 1 << 22  # multiplications; for smaller products, the overhead of calling oneDNN would dominate
_TERMS_PER_PART = 768  # number of terms of a sum that are computed at a time
_MANY_COLUMNS = 1 << 14  # a product with at least so many columns computes the logits of a vocabulary
_MAX_ADDED_ELEMENTS = 1 << 22  # elements of a result that still stay in the cache while its parts are added
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def linear(inputs: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `inputs @ weights.T + bias` for two matrices, with the fastest available library."""
    if is_large_product(inputs, weights.t()):
        return LargeProduct.apply(inputs, weights, bias, True)
    return functional.linear(inputs, weights, bias)


class FastLinearLayers(TorchFunctionMode):
    """A context in which the linear layers of all modules call `linear`, which is faster for large matrices."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        del types
        compute = _patched_linear if function is functional.linear else function
        return compute(*arguments, **(options or {}))


def _patched_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer for inputs with any number of axes. Large products are computed by `linear`."""
    if input.dim() < 2 or not is_large_product(input.flatten(0, -2), weight.t()):
        return functional.linear(input, weight, bias)
    return linear(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])


def is_large_product(left: Tensor, right: Tensor) -> bool:
    """Return whether `multiply_large_matrices` should be used to compute `left @ right`.

    The result is true for large float32 matrices on a CPU, if this build of PyTorch contains oneDNN.
    """
    work = left.shape[-2] * left.shape[-1] * right.shape[-1]
    wide = left.dtype == right.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return (
        wide
        and work >= _MIN_MULTIPLICATIONS
        and is_plain_cpu_tensor(left)
        and is_plain_cpu_tensor(right)
        and onednn_supports()
    )


def onednn_supports(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether PyTorch can multiply matrices of a dtype with oneDNN on this machine.

    PyTorch's interface to the required oneDNN operations is not public, so its existence is checked.
    """
    mkldnn = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return hasattr(mkldnn, "_is_mkldnn_bf16_supported") and bool(mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype == torch.float32


def is_plain_cpu_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary tensor that holds data on a CPU, and no compilation is in progress.

    Tensors that only trace shapes contain no data.
    """
    return tensor.device.type == "cpu" and type(tensor) in _PLAIN_TENSORS and not torch.compiler.is_compiling()


class LargeProduct(torch.autograd.Function):
    """A differentiable function that computes `left @ right + bias`, or `left @ right.T + bias` if `transposed` is true.

    The gradient of `right` has the same layout as `right`, and is not a view.
    """

    @staticmethod
    def forward(context: Any, left: Tensor, right: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """Compute the product."""
        context.save_for_backward(left, right)
        context.transposed = transposed
        return multiply_large_matrices(left, right.t() if transposed else right, bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each input, or None if the input needs no gradient."""
        (gradient,), (left, right), needs = gradients, context.saved_tensors, context.needs_input_grad
        left_gradient = multiply_large_matrices(gradient, right if context.transposed else right.t()) if needs[0] else None
        factors = (gradient.t(), left) if context.transposed else (left.t(), gradient)
        return (
            left_gradient,
            multiply_large_matrices(*factors) if needs[1] else None,
            gradient.sum(0) if needs[2] else None,
            None,
        )


def multiply_large_matrices(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `left @ right + bias` with PyTorch's own product or with oneDNN, whichever is faster. The factors are matrices
    or, without a bias, batches of matrices.

    If the sums in a product have many terms, the product is computed in parts, because oneDNN then takes up to a sixth less
    time.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX2" and right.shape[-1] < _MANY_COLUMNS:
        return torch.matmul(left, right) if bias is None else torch.addmm(bias, left, right)
    if left.dim() == 3:
        products = [multiply_large_matrices(*pair) for pair in zip(left, right, strict=True)]
        return torch.stack(products) if len(products) > 1 else products[0][None]
    if left.shape[1] >= 2 * _TERMS_PER_PART and left.shape[0] * right.shape[1] <= _MAX_ADDED_ELEMENTS:
        first, *others = zip(left.split(_TERMS_PER_PART, 1), right.split(_TERMS_PER_PART, 0), strict=True)
        total = multiply_large_matrices(*first, bias)
        for part in others:
            total.add_(multiply_large_matrices(*part))
        return total
    return multiply_with_onednn(_make_contiguous(left), _make_contiguous(right).t(), bias)


def multiply_with_onednn(left: Tensor, right_OI: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `left @ right.T + bias` with oneDNN."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right_OI, bias, "none", [], "")  # noqa: SLF001
    return result


def _make_contiguous(matrix: Tensor) -> Tensor:
    """Return a matrix unchanged if it is contiguous by rows or by columns. Otherwise return a contiguous copy.

    For matrices with gaps, or expanded from a single number, oneDNN is a thousand times slower.
    """
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


# --- Weights for inference, stored only once, in the memory layout that oneDNN multiplies fastest


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `left @ right + bias` for matrices. `right` may be a result of `convert_to_onednn_layout`."""
    if right.is_mkldnn:
        return multiply_with_onednn(left.to(right.dtype), right, bias)
    if is_large_product(left, right):
        return LargeProduct.apply(left, right, bias, False)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def convert_to_onednn_layout(weights_IO: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
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


class OneDnnLinear(torch.nn.Linear):
    """A linear layer for inference that stores its weights only in oneDNN's layout.

    Attributes:
        onednn_weights: The weights in oneDNN's layout.
    """

    onednn_weights: Tensor

    @property
    def weight(self) -> Tensor:
        """A copy of the weights in the layout of `torch.nn.Linear`, [O, I], for modules that read the weights of their
        layers.
        """
        return self.onednn_weights.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.T + bias`. Under autocast, the dtype of the weights is used, and without autocast the
        dtype of the input.
        """
        if self.onednn_weights.dtype != input.dtype and not torch.is_autocast_enabled("cpu"):
            return functional.linear(input, self.weight.to(input.dtype), self.bias)  # trials compute in float32
        bias = None if self.bias is None else self.bias.to(self.onednn_weights.dtype)
        return multiply(input.flatten(0, -2), self.onednn_weights, bias).unflatten(0, input.shape[:-1])


def convert_linear_layers_for_inference(
    module: torch.nn.Module, run_trial_pass: Callable[[], object], dtype: torch.dtype
) -> None:
    """Convert the weights of linear layers for inference with `convert_to_onednn_layout`, in place. Only layers that
    `run_trial_pass()` calls are converted.

    Layers whose weights are shared with another module are not changed. If `dtype` is bfloat16, layers that are also called
    outside of autocast are not changed either.

    Args:
        module: The module that contains the layers.
        run_trial_pass: A function that runs the module on a batch, under autocast if `dtype` is bfloat16.
        dtype: The dtype of the products, float32 or bfloat16.
    """
    if not onednn_supports(dtype):
        return
    owners = Counter(id(weight) for owner in module.modules() for weight in owner.parameters(recurse=False))
    calls: dict[torch.nn.Linear, bool] = {}

    def record_call(layer: Any, inputs: tuple[Any, ...]) -> None:
        """Store in `calls` whether the layer can be converted, as far as this call and the earlier calls of the layer show.

        The inputs must have rows, no other module may own the weights, and autocast must be on exactly if `dtype` is
        bfloat16.
        """
        converts = torch.is_autocast_enabled("cpu") == (dtype == torch.bfloat16)
        fits = converts and bool(inputs) and inputs[0].dim() >= 2 and owners[id(layer.weight)] == 1
        calls[layer] = calls.get(layer, True) and fits

    linear_layers = [
        layer for layer in module.modules() if type(layer) is torch.nn.Linear and is_plain_cpu_tensor(layer.weight)
    ]
    hooks = [layer.register_forward_pre_hook(record_call) for layer in linear_layers]
    try:
        run_trial_pass()
    finally:
        for hook in hooks:
            hook.remove()
    for layer in (layer for layer, fits in calls.items() if fits):
        onednn_weights = convert_to_onednn_layout(layer.weight.t(), dtype)
        del layer.weight
        layer.__class__ = OneDnnLinear
        layer.onednn_weights = onednn_weights
