"""Dropout, attention, cross entropy and the gradients of embeddings, faster than PyTorch computes them on a CPU.

A separate pass over large tensors in memory for each operation would take as long as the matrix products. Therefore
attention is computed for a few heads at a time, and losses for a few rows at a time, so that their data stays in the cache.

Letters in shapes: B packs, N heads, G heads that are computed together, P query positions, L positions, D head size. For
losses: R rows, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gaudi_bert.encoders.matrix_products import is_eager, multiply_large

_DROPOUT_STEPS = 1 << 16
_NUMBERS_TOGETHER = 1 << 18  # elements per thread that stay in its cache together with intermediate results


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
            scores_GPL = multiply_large(query[tile] / math.sqrt(query.shape[-1]), key[tile].mT).add_(bias[tile[0]])
            shares_GPL = torch.softmax(scores_GPL, -1)
            if keeps:
                shares.append(shares_GPL)
            used_GPL = shares_GPL if drawn is None else _stays(drawn[tile], dropped, scores_GPL).mul_(shares_GPL)
            result[tile] = multiply_large(used_GPL, value[tile])
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
            of_shares_GPL = multiply_large(gradient_GPD, value[tile].mT)
            used_GPL = shares_GPL
            if drawn is not None:
                stays_GPL = _stays(drawn[tile], dropped, torch.empty_like(shares_GPL))
                of_shares_GPL.mul_(stays_GPL)
                used_GPL = stays_GPL.mul_(shares_GPL)
            of_value[tile] = multiply_large(gradient_GPD.mT, used_GPL).mT
            of_scores_GPL = torch._softmax_backward_data(of_shares_GPL, shares_GPL, -1, torch.float32)  # noqa: SLF001
            of_query[tile] = multiply_large(of_scores_GPL, key[tile]) * size_scale
            of_key[tile] = multiply_large(query[tile].mT * size_scale, of_scores_GPL).mT
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
