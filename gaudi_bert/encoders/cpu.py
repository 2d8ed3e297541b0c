"""Faster implementations of operations that PyTorch computes slowly on a CPU.

These are matrix products, dropout, attention, cross entropy, and the gradients of embeddings.

For matrix products, PyTorch calls MKL, which does not use the widest registers of processors that are not Intel's. On an AMD
processor with AVX-512, oneDNN, which PyTorch also contains, is twice as fast. With AVX2, MKL is faster, by a tenth in
forward passes and by up to nine tenths in gradients. Only the logits of a vocabulary take a third less time with oneDNN.

A separate pass over large tensors in memory for each operation would take as long as the matrix products. Therefore
attention is computed for a few heads at a time, and losses for a few rows at a time, so that their data stays in the cache.

Letters in shapes: B packs, N heads, G heads that are computed together, P query positions, L positions, D head size, I
inputs and O outputs of a product. For losses: R rows, C classes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_LEAST_WORK = 1 << 22  # multiplications; for smaller products, the overhead of calling oneDNN would dominate
_PART = 768  # number of terms of a sum that are computed at a time
_MANY_COLUMNS = 1 << 14  # a product with at least so many columns computes the logits of a vocabulary
_MOST_ADDED = 1 << 22  # elements of a result that still stay in the cache while its parts are added
_EAGER = (Tensor, torch.nn.Parameter)
_DROPOUT_STEPS = 1 << 16
_NUMBERS_TOGETHER = 1 << 18  # elements per thread that stay in its cache together with intermediate results


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `left @ right + bias` for matrices. `right` may be a result of `pack_weights`."""
    if right.is_mkldnn:
        return _by_onednn(left.to(right.dtype), right, bias)
    if is_large_product(left, right):
        return _Product.apply(left, right, bias, False)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def pack_weights(weights_IO: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert weights to a dtype and to oneDNN's own layout, without gradients.

    Otherwise, oneDNN and other libraries rearrange the weights in each product, which takes half of the time for 32 rows,
    and autocast converts them to bfloat16 in each product.

    Args:
        weights_IO: The right side of matrix products.
        dtype: The dtype of the products, float32 or bfloat16.

    Returns:
        The weights in oneDNN's layout, which only `product` can use. If oneDNN cannot be used, the layout does not change.
    """
    weights_IO = weights_IO.detach().to(dtype)
    if not (is_eager(weights_IO) and has_onednn(dtype)):
        return weights_IO
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights_IO.t().contiguous())  # noqa: SLF001
    return packed


def linear(inputs: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `inputs @ weights.T + bias` for matrices."""
    if is_large_product(inputs, weights.t()):
        return _Product.apply(inputs, weights, bias, True)
    return functional.linear(inputs, weights, bias)


class _LinearPatch(TorchFunctionMode):
    """A context in which calls of `torch.nn.functional.linear` call `_linear_layer` instead."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        del types
        compute = _linear_layer if function is functional.linear else function
        return compute(*arguments, **(options or {}))


def patch_linear() -> TorchFunctionMode:
    """Return a context in which the linear layers of all modules are computed by `linear`."""
    return _LinearPatch()


def _linear_layer(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer for inputs with any number of axes, with `linear` if the product is large."""
    if input.dim() < 2 or not is_large_product(input.flatten(0, -2), weight.t()):
        return functional.linear(input, weight, bias)
    return linear(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])


class PackedLinear(torch.nn.Linear):
    """A frozen linear layer whose weights are only stored in oneDNN's layout.

    Attributes:
        packed: The weights in oneDNN's layout.
    """

    packed: Tensor

    @property
    def weight(self) -> Tensor:
        """A copy of the weights in the usual layout, [O, I], for modules that read them."""
        return self.packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.T + bias`, under autocast in the dtype of the weights, otherwise in that of the input."""
        if self.packed.dtype != input.dtype and not torch.is_autocast_enabled("cpu"):
            return functional.linear(input, self.weight.to(input.dtype), self.bias)  # trials compute in float32
        bias = None if self.bias is None else self.bias.to(self.packed.dtype)
        return product(input.flatten(0, -2), self.packed, bias).unflatten(0, input.shape[:-1])


def pack_linear_layers(module: torch.nn.Module, compute: Callable[[], object], dtype: torch.dtype) -> None:
    """Freeze the linear layers that are called by `compute`, in place, and convert their weights with `pack_weights`.

    Layers whose weights are shared with another module are not changed. If `dtype` is bfloat16, layers that are also called
    outside of autocast are not changed either.

    Args:
        module: The module that contains the layers.
        compute: A function that runs the module on a batch, under autocast if `dtype` is bfloat16.
        dtype: The dtype of the products, float32 or bfloat16.
    """
    if not has_onednn(dtype):
        return
    owners = Counter(id(weight) for owner in module.modules() for weight in owner.parameters(recurse=False))
    calls: dict[torch.nn.Linear, bool] = {}

    def note(layer: Any, inputs: tuple[Any, ...]) -> None:
        """Note whether a call of a layer can use converted weights."""
        converts = torch.is_autocast_enabled("cpu") == (dtype == torch.bfloat16)
        fits = converts and bool(inputs) and inputs[0].dim() >= 2 and owners[id(layer.weight)] == 1
        calls[layer] = calls.get(layer, True) and fits

    linear_layers = [layer for layer in module.modules() if type(layer) is torch.nn.Linear and is_eager(layer.weight)]
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


def is_large_product(left: Tensor, right: Tensor) -> bool:
    """Return whether `left @ right` should be computed by `_multiply`.

    This is the case for large float32 matrices on a CPU, if this build of PyTorch contains oneDNN.
    """
    work = left.shape[-2] * left.shape[-1] * right.shape[-1]
    wide = left.dtype == right.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return wide and work >= _LEAST_WORK and is_eager(left) and is_eager(right) and has_onednn()


def has_onednn(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether oneDNN can multiply matrices of a dtype here.

    PyTorch's interface to the required oneDNN operations is not public, so its existence is checked.
    """
    mkldnn = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return hasattr(mkldnn, "_is_mkldnn_bf16_supported") and bool(mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype == torch.float32


def is_eager(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary tensor with data on a CPU, outside of compilation.

    Tensors that only trace shapes contain no data.
    """
    return tensor.device.type == "cpu" and type(tensor) in _EAGER and not torch.compiler.is_compiling()


class _Product(torch.autograd.Function):
    """Computes `left @ right + bias`, or `left @ right.T + bias` if `transposed`.

    The gradient of `right` has the same layout as `right`, and is not a view.
    """

    @staticmethod
    def forward(context: Any, left: Tensor, right: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """Compute the product."""
        context.save_for_backward(left, right)
        context.transposed = transposed
        return _multiply(left, right.t() if transposed else right, bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute those gradients that are needed."""
        (gradient,), (left, right), needs = gradients, context.saved_tensors, context.needs_input_grad
        of_left = _multiply(gradient, right if context.transposed else right.t()) if needs[0] else None
        factors = (gradient.t(), left) if context.transposed else (left.t(), gradient)
        return of_left, _multiply(*factors) if needs[1] else None, gradient.sum(0) if needs[2] else None, None


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `left @ right + bias` with the faster library, for matrices or, without a bias, for batches of matrices.

    If the sums in a product have many terms, the product is computed in parts, with which oneDNN takes up to a sixth less
    time.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX2" and right.shape[-1] < _MANY_COLUMNS:
        return torch.matmul(left, right) if bias is None else torch.addmm(bias, left, right)
    if left.dim() == 3:
        products = [_multiply(*pair) for pair in zip(left, right, strict=True)]
        return torch.stack(products) if len(products) > 1 else products[0][None]
    if left.shape[1] >= 2 * _PART and left.shape[0] * right.shape[1] <= _MOST_ADDED:
        first, *others = zip(left.split(_PART, 1), right.split(_PART, 0), strict=True)
        total = _multiply(*first, bias)
        for part in others:
            total.add_(_multiply(*part))
        return total
    return _by_onednn(_dense(left), _dense(right).t(), bias)


def _by_onednn(left: Tensor, right_OI: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `left @ right.T + bias` with oneDNN."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right_OI, bias, "none", [], "")  # noqa: SLF001
    return result


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix that is contiguous by rows or by columns, copied if necessary.

    For matrices with gaps, or expanded from a single number, oneDNN is a thousand times slower.
    """
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def dropout(inputs: Tensor, rate: float) -> Tensor:
    """Set a fraction `rate` of the inputs to zero, and scale up the others, with random numbers from PyTorch's generator.

    On a CPU, random numbers are most of the cost of dropout. Therefore only 16 bits are drawn per element, and the rate is
    rounded to a multiple of 1 / 65,536. On other devices, and when compiling or tracing, PyTorch's own dropout is used.
    """
    if not is_eager(inputs):
        return functional.dropout(inputs, rate)
    dropped = _steps(rate)
    stays = torch.ge(_draw(inputs.shape), dropped - _DROPOUT_STEPS // 2, out=torch.empty(inputs.shape, dtype=inputs.dtype))
    return inputs * stays.mul_(_DROPOUT_STEPS / (_DROPOUT_STEPS - dropped))


def _steps(rate: float) -> int:
    """Return the dropout rate as a multiple of 1 / 65,536, at least 1."""
    return max(1, round(rate * _DROPOUT_STEPS))


def _draw(shape: torch.Size) -> Tensor:
    """Draw random int16 values."""
    words = torch.empty((shape.numel() + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    return words.view(torch.int16)[: shape.numel()].reshape(shape)


def attention_in_cache(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """Compute attention in float32 on a CPU, for a few heads at a time.

    Args:
        query_BNPD: The queries.
        key_BNLD: The keys.
        value_BNLD: The values.
        bias_B1PL: The attention mask, which is added to the scores.
        dropout_rate: The dropout rate of the attention probabilities.

    Returns:
        The context of every query, [B, N, P, D].
    """
    return _Attention.apply(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, dropout_rate)


class _Attention(torch.autograd.Function):
    """Computes attention with dropout. The probabilities before dropout and the random numbers are kept for the gradient."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, rate: float) -> Tensor:
        """Compute the context of every query. Its memory is in the order [B, P, N, D]."""
        drawn = _draw(torch.Size((*query.shape[:3], key.shape[2]))) if rate > 0 else None
        keeps, dropped, result = any(context.needs_input_grad), _steps(rate) if rate > 0 else 0, _by_positions(query)
        shares = []
        for tile in _tiles(query, key):
            scores_GPL = _multiply(query[tile] / math.sqrt(query.shape[-1]), key[tile].mT).add_(bias[tile[0]])
            shares_GPL = torch.softmax(scores_GPL, -1)
            if keeps:
                shares.append(shares_GPL)
            used_GPL = shares_GPL if drawn is None else _stays(drawn[tile], dropped, scores_GPL).mul_(shares_GPL)
            result[tile] = _multiply(used_GPL, value[tile])
        context.save_for_backward(query, key, value, drawn, *shares)
        context.dropped = dropped
        return result.mul_(_DROPOUT_STEPS / (_DROPOUT_STEPS - dropped))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of query, key and value."""
        query, key, value, drawn, *shares = context.saved_tensors
        dropped = context.dropped
        keep_scale, size_scale = _DROPOUT_STEPS / (_DROPOUT_STEPS - dropped), 1.0 / math.sqrt(query.shape[-1])
        of_query, of_key, of_value = (_by_positions(each) for each in (query, key, value))
        for tile, shares_GPL in zip(_tiles(query, key), shares, strict=True):
            gradient_GPD = (gradients[0][tile] * keep_scale).contiguous()
            of_shares_GPL = _multiply(gradient_GPD, value[tile].mT)
            used_GPL = shares_GPL
            if drawn is not None:
                stays_GPL = _stays(drawn[tile], dropped, torch.empty_like(shares_GPL))
                of_shares_GPL.mul_(stays_GPL)
                used_GPL = stays_GPL.mul_(shares_GPL)
            of_value[tile] = _multiply(gradient_GPD.mT, used_GPL).mT
            of_scores_GPL = torch._softmax_backward_data(of_shares_GPL, shares_GPL, -1, torch.float32)  # noqa: SLF001
            of_query[tile] = _multiply(of_scores_GPL, key[tile]) * size_scale
            of_key[tile] = _multiply(query[tile].mT * size_scale, of_scores_GPL).mT
        return of_query, of_key, of_value, None, None


def _stays(drawn: Tensor, dropped: int, out: Tensor) -> Tensor:
    """Write to `out` 1 for each element that is kept, and 0 for each element that is dropped, and return it."""
    return torch.ge(drawn, dropped - _DROPOUT_STEPS // 2, out=out)


def _tiles(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (pack, heads) for each group of heads of a pack that are computed together."""
    packs, heads, positions, _ = query.shape
    together = max(1, _NUMBERS_TOGETHER * torch.get_num_threads() // (positions * key.shape[2]))
    for pack in range(packs):
        for first in range(0, heads, together):
            yield pack, slice(first, first + together)


def _by_positions(like_BNPD: Tensor) -> Tensor:
    """Return an empty tensor [B, N, P, D] whose memory is in the order [B, P, N, D], as that of the projections."""
    return torch.empty_like(like_BNPD.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def cross_entropy(logits_RC: Tensor, labels_R: Tensor) -> Tensor:
    """Compute the negative log-likelihood of each label, [R]."""
    if is_eager(logits_RC):
        return _CrossEntropy.apply(logits_RC, labels_R)
    return functional.cross_entropy(logits_RC, labels_R, reduction="none")


class _CrossEntropy(torch.autograd.Function):
    """Computes negative log-likelihoods, a few rows at a time."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the losses [R] from logits [R, C] and labels [R]."""
        sums_R = torch.cat([torch.logsumexp(logits[rows], -1) for rows in _rows(logits)])
        context.save_for_backward(logits, labels, sums_R)
        return sums_R - logits.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of the logits."""
        (gradient_R,), (logits, labels, sums_R) = gradients, context.saved_tensors
        result = torch.empty_like(logits)
        for rows in _rows(logits):
            torch.sub(logits[rows], sums_R[rows, None], out=result[rows]).exp_().mul_(gradient_R[rows, None])
        return result.scatter_add_(1, labels[:, None], -gradient_R[:, None]), None


def _rows(logits: Tensor) -> list[slice]:
    """Return the slices of rows that are computed together."""
    together = max(1, _NUMBERS_TOGETHER * torch.get_num_threads() // logits.shape[1])
    return [slice(first, first + together) for first in range(0, max(1, len(logits)), together)]


class TableOfRows(torch.autograd.Function):
    """Returns a table of embeddings twice: for looking up rows, whose gradient is sparse, and for a matrix product.

    The sparse gradient of the rows is added in place to the gradient of the product. PyTorch would allocate two dense
    gradients and a third one for their sum.
    """

    @staticmethod
    def forward(context: Any, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table for looking up rows, and the table for the product."""
        context.set_materialize_grads(False)
        return table.view_as(table), table.view_as(table)

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> Tensor | None:
        """Compute the dense gradient of the table."""
        of_rows, of_table = gradients
        if of_rows is None or of_table is None:
            return of_table if of_rows is None else of_rows.to_dense()
        return of_table.add_(of_rows)
