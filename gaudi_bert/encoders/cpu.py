"""What PyTorch computes slowly on a CPU, computed otherwise: products, dropout, attention, losses, gradients of embeddings.

For products PyTorch calls MKL, which for other processors than Intel's leaves the widest registers unused: oneDNN, which
it brings too, is twice as fast on an AMD processor with AVX-512. With AVX2 MKL is faster: by a tenth in forward passes, by
up to nine tenths in gradients; only the logits of a vocabulary take a third less time with oneDNN. Attention is computed a
few heads at a time, and losses a few rows: going over large tensors in memory, once for each operation, takes as long as
the products.

Letters: B packs, N heads, G heads that are computed together, P positions that attend, L positions, D head size; for losses
R rows, C classes.
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

_LEAST_WORK = 1 << 22  # of two matrices, in multiplications: below it, what a call of oneDNN costs is most of its time
_PART = 768  # of what a product adds up
_MANY_COLUMNS = 1 << 14  # of a product, as many as words of a vocabulary
_MOST_ADDED = 1 << 22  # numbers of a product: more do not stay in the processor's cache between its parts
_EAGER = (Tensor, torch.nn.Parameter)
_DROPOUT_STEPS = 1 << 16
_NUMBERS_TOGETHER = 1 << 18  # for each thread: with what is computed from them, they stay in its cache


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right + bias`, of matrices; `right` may be what `pack_weights` returned."""
    if right.is_mkldnn:
        return _by_onednn(left.to(right.dtype), right, bias)
    if is_large_product(left, right):
        return _Product.apply(left, right, bias, False)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def pack_weights(weights_IO: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Copy the right side of products to a type and to oneDNN's own layout, without gradients.

    Other libraries, and oneDNN itself, rearrange the weights in each product, which takes half of the time for 32 rows.
    Autocast also converts them to bfloat16 in each product.

    Returns:
        The weights in oneDNN's layout, for `product` only. Where oneDNN cannot be used, they keep their layout.
    """
    weights_IO = weights_IO.detach().to(dtype)
    if not (is_eager(weights_IO) and has_onednn(dtype)):
        return weights_IO
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights_IO.t().contiguous())  # noqa: SLF001
    return packed


def linear(inputs: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weights.T + bias`, of matrices."""
    if is_large_product(inputs, weights.t()):
        return _Product.apply(inputs, weights, bias, True)
    return functional.linear(inputs, weights, bias)


class _LinearPatch(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        del types
        compute = _linear_layer if function is functional.linear else function
        return compute(*arguments, **(options or {}))


def patch_linear() -> TorchFunctionMode:
    """Patch `torch.nn.functional.linear` while the context lasts: linear layers of any module are computed by `linear`."""
    return _LinearPatch()


def _linear_layer(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() < 2 or not is_large_product(input.flatten(0, -2), weight.t()):
        return functional.linear(input, weight, bias)
    return linear(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])


class PackedLinear(torch.nn.Linear):
    """A linear layer that was frozen: its weights are stored in oneDNN's layout alone."""

    packed: Tensor

    @property
    def weight(self) -> Tensor:
        """A copy of the weights, [O, I], for modules that read them."""
        return self.packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`: under autocast in the type of the weights, otherwise in the type of `input`."""
        if self.packed.dtype != input.dtype and not torch.is_autocast_enabled("cpu"):
            return functional.linear(input, self.weight.to(input.dtype), self.bias)  # a trial, in float32
        bias = None if self.bias is None else self.bias.to(self.packed.dtype)
        return product(input.flatten(0, -2), self.packed, bias).unflatten(0, input.shape[:-1])


def pack_linear_layers(module: torch.nn.Module, compute: Callable[[], object], dtype: torch.dtype) -> None:
    """Freeze the linear layers that `compute` calls, each in place: `pack_weights` replaces their weights.

    If `dtype` is bfloat16, layers that are also called outside of autocast stay as they are. So do weights that several
    layers share.

    Args:
        module: the module that contains the layers.
        compute: computes one batch with the module, under autocast if `dtype` is bfloat16.
        dtype: the type of the products, float32 or bfloat16.
    """
    if not has_onednn(dtype):
        return
    owners = Counter(id(weight) for owner in module.modules() for weight in owner.parameters(recurse=False))
    calls: dict[torch.nn.Linear, bool] = {}

    def note(layer: Any, inputs: tuple[Any, ...]) -> None:
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
    """Whether `_multiply` computes `left @ right`: large float32 matrices on a CPU, in a build of PyTorch with oneDNN."""
    work = left.shape[-2] * left.shape[-1] * right.shape[-1]
    wide = left.dtype == right.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return wide and work >= _LEAST_WORK and is_eager(left) and is_eager(right) and has_onednn()


def has_onednn(dtype: torch.dtype = torch.float32) -> bool:
    """Whether oneDNN multiplies matrices of a type here; its operations are not part of PyTorch's public interface."""
    mkldnn = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return hasattr(mkldnn, "_is_mkldnn_bf16_supported") and bool(mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype == torch.float32


def is_eager(tensor: Tensor) -> bool:
    """Whether it is on a CPU, and has numbers: a trace of shapes has none."""
    return tensor.device.type == "cpu" and type(tensor) in _EAGER and not torch.compiler.is_compiling()


class _Product(torch.autograd.Function):
    """`left @ right + bias`, `right` itself or transposed; its gradient has its layout, and is not a view."""

    @staticmethod
    def forward(context: Any, left: Tensor, right: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """Multiply matrices."""
        context.save_for_backward(left, right)
        context.transposed = transposed
        return _multiply(left, right.t() if transposed else right, bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are needed."""
        (gradient,), (left, right), needs = gradients, context.saved_tensors, context.needs_input_grad
        of_left = _multiply(gradient, right if context.transposed else right.t()) if needs[0] else None
        factors = (gradient.t(), left) if context.transposed else (left.t(), gradient)
        return of_left, _multiply(*factors) if needs[1] else None, gradient.sum(0) if needs[2] else None, None


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right + bias` of matrices, or, without a bias, of each pair of them, by the library that is faster.

    What is added up is cut into parts where it is long: oneDNN takes up to a sixth less time for all of them.
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
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right_OI, bias, "none", [], "")  # noqa: SLF001
    return result


def _dense(matrix: Tensor) -> Tensor:
    """`matrix`, by rows or by columns without gaps; with gaps, or all in one number, oneDNN is a thousand times slower."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def dropout(inputs: Tensor, rate: float) -> Tensor:
    """Zero a share `rate` of `inputs` and scale the rest up, by the random numbers that follow the seed of the pass.

    On a CPU random numbers are most of what dropout costs: 16 bits of a 64-bit word serve each element, and the share is
    rounded to 1 / 65,536. A compiler, a trace of shapes without numbers, and another device draw as they do best.
    """
    if not is_eager(inputs):
        return functional.dropout(inputs, rate)
    dropped = _steps(rate)
    stays = torch.ge(_draw(inputs.shape), dropped - _DROPOUT_STEPS // 2, out=torch.empty(inputs.shape, dtype=inputs.dtype))
    return inputs * stays.mul_(_DROPOUT_STEPS / (_DROPOUT_STEPS - dropped))


def _steps(rate: float) -> int:
    """Count the random numbers, of 65,536, that drop an element."""
    return max(1, round(rate * _DROPOUT_STEPS))


def _draw(shape: torch.Size) -> Tensor:
    """Random int16."""
    words = torch.empty((shape.numel() + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    return words.view(torch.int16)[: shape.numel()].reshape(shape)


def attention_in_cache(
    query_BNPD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, bias_B1PL: Tensor, dropout_rate: float
) -> Tensor:
    """The context of every query, [B, N, P, D], in float32 on a CPU."""
    return _Attention.apply(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, dropout_rate)


class _Attention(torch.autograd.Function):
    """Attention with its dropout; the shares before dropout and the random numbers stay for the backward pass."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, rate: float) -> Tensor:
        """The context of every query, its memory in the order [B, P, N, D]."""
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
        """The gradients of query, key and value."""
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
    """1 where an element stays, 0 where it is dropped, in the memory of `out`."""
    return torch.ge(drawn, dropped - _DROPOUT_STEPS // 2, out=out)


def _tiles(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice]]:
    """The heads that are computed together: of a pack, some."""
    packs, heads, positions, _ = query.shape
    together = max(1, _NUMBERS_TOGETHER * torch.get_num_threads() // (positions * key.shape[2]))
    for pack in range(packs):
        for first in range(0, heads, together):
            yield pack, slice(first, first + together)


def _by_positions(like_BNPD: Tensor) -> Tensor:
    """Memory [B, N, P, D] in the order [B, P, N, D], in which the projections have it."""
    return torch.empty_like(like_BNPD.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def cross_entropy(logits_RC: Tensor, labels_R: Tensor) -> Tensor:
    """The negative log likelihood of each label, [R]."""
    if is_eager(logits_RC):
        return _CrossEntropy.apply(logits_RC, labels_R)
    return functional.cross_entropy(logits_RC, labels_R, reduction="none")


class _CrossEntropy(torch.autograd.Function):
    """Negative log likelihoods, some rows at a time."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """[R], from [R, C] and [R]."""
        sums_R = torch.cat([torch.logsumexp(logits[rows], -1) for rows in _rows(logits)])
        context.save_for_backward(logits, labels, sums_R)
        return sums_R - logits.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the logits."""
        (gradient_R,), (logits, labels, sums_R) = gradients, context.saved_tensors
        result = torch.empty_like(logits)
        for rows in _rows(logits):
            torch.sub(logits[rows], sums_R[rows, None], out=result[rows]).exp_().mul_(gradient_R[rows, None])
        return result.scatter_add_(1, labels[:, None], -gradient_R[:, None]), None


def _rows(logits: Tensor) -> list[slice]:
    """The rows that are computed together."""
    together = max(1, _NUMBERS_TOGETHER * torch.get_num_threads() // logits.shape[1])
    return [slice(first, first + together) for first in range(0, max(1, len(logits)), together)]


class TableOfRows(torch.autograd.Function):
    """A table twice: to look up rows, with sparse gradients, and to multiply by.

    The rows are added to the gradient of the product, in its own memory; PyTorch would fill two tables, and a third by both.
    """

    @staticmethod
    def forward(context: Any, table: Tensor) -> tuple[Tensor, Tensor]:
        """The table to look up in, and the table."""
        context.set_materialize_grads(False)
        return table.view_as(table), table.view_as(table)

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> Tensor | None:
        """The gradient, dense."""
        of_rows, of_table = gradients
        if of_rows is None or of_table is None:
            return of_table if of_rows is None else of_rows.to_dense()
        return of_table.add_(of_rows)
