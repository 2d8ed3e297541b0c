"""Multiplies large float32 matrices on a CPU with the faster of two libraries, in the linear layers of any module.

For matrix products, PyTorch calls MKL, which does not use the widest registers of processors that are not Intel's. On an AMD
processor with AVX-512, oneDNN, which PyTorch also contains, is twice as fast. With AVX2, MKL is faster by a tenth in forward
passes and by up to nine tenths in gradients, except that oneDNN takes a third less time for the logits of a vocabulary.

Letters in shapes: I inputs and O outputs of a product.
"""

from __future__ import annotations

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


class _LinearPatch(TorchFunctionMode):
    """A context that replaces `torch.nn.functional.linear` with `_patched_linear`."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        del types
        compute = _patched_linear if function is functional.linear else function
        return compute(*arguments, **(options or {}))


def patch_linear_layers() -> TorchFunctionMode:
    """Return a context in which the linear layers of all modules call `linear`, which is faster for large matrices."""
    return _LinearPatch()


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
