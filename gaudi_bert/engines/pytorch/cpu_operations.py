"""Dropout, attention, cross entropy and the gradients of embeddings, which PyTorch computes more slowly on a CPU.

If each operation were a separate pass over large tensors in memory, these passes would take as long as the matrix products.
Therefore attention is computed for a few heads at a time, and losses for a few rows at a time, so that their data stays in
the CPU cache.

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

from gaudi_bert.encoders.matrix_products import is_plain_cpu_tensor, multiply_large_matrices

_DROPOUT_STEPS = 1 << 16
_TILE_ELEMENTS = 1 << 18  # the number of elements per thread that fit into the CPU cache with intermediate results


def dropout(inputs: Tensor, rate: float) -> Tensor:
    """Set a fraction `rate` of the inputs to zero, and scale up the others.

    On a CPU, drawing random numbers is most of the cost of dropout. Therefore only 16 bits are drawn per element, and the
    rate is rounded to a multiple of 1 / 65,536. On other devices, and when compiling or tracing, PyTorch's own dropout is
    used. In all cases, the random numbers come from PyTorch's generator.
    """
    if not is_plain_cpu_tensor(inputs):
        return functional.dropout(inputs, rate)
    dropped_values = _quantize_dropout_rate(rate)
    keep_mask = torch.ge(
        _draw_random_int16(inputs.shape),
        dropped_values - _DROPOUT_STEPS // 2,
        out=torch.empty(inputs.shape, dtype=inputs.dtype),
    )
    return inputs * keep_mask.mul_(_DROPOUT_STEPS / (_DROPOUT_STEPS - dropped_values))


def _quantize_dropout_rate(dropout_rate: float) -> int:
    """Return the dropout rate as a multiple of 1 / 65,536, rounded to an integer of at least 1. So many of the 65,536 int16
    values stand for a dropped element.
    """
    return max(1, round(dropout_rate * _DROPOUT_STEPS))


def _draw_random_int16(shape: torch.Size) -> Tensor:
    """Return a tensor of random int16 values from PyTorch's generator."""
    words = torch.empty((shape.numel() + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    return words.view(torch.int16)[: shape.numel()].reshape(shape)


def tiled_attention(
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
    return _TiledAttention.apply(query_BNPD, key_BNLD, value_BNLD, bias_B1PL, dropout_rate)


class _TiledAttention(torch.autograd.Function):
    """Computes `tiled_attention` and its gradient. For the gradient, it keeps the probabilities before dropout and the
    random numbers.
    """

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout_rate: float) -> Tensor:
        """Compute the context of every query. The result is stored in the memory layout [B, P, N, D]."""
        random_int16 = _draw_random_int16(torch.Size((*query.shape[:3], key.shape[2]))) if dropout_rate > 0 else None
        keeps, dropped_values, result = (
            any(context.needs_input_grad),
            _quantize_dropout_rate(dropout_rate) if dropout_rate > 0 else 0,
            _empty_like_position_major(query),
        )
        shares = []
        for tile in _iterate_head_tiles(query, key):
            scores_GPL = multiply_large_matrices(query[tile] / math.sqrt(query.shape[-1]), key[tile].mT).add_(bias[tile[0]])
            probabilities_GPL = torch.softmax(scores_GPL, -1)
            if keeps:
                shares.append(probabilities_GPL)
            kept_GPL = (
                probabilities_GPL
                if random_int16 is None
                else _write_keep_mask(random_int16[tile], dropped_values, scores_GPL).mul_(probabilities_GPL)
            )
            result[tile] = multiply_large_matrices(kept_GPL, value[tile])
        context.save_for_backward(query, key, value, random_int16, *shares)
        context.dropped_values = dropped_values
        return result.mul_(_DROPOUT_STEPS / (_DROPOUT_STEPS - dropped_values))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of query, key and value."""
        query, key, value, random_int16, *shares = context.saved_tensors
        dropped_values = context.dropped_values
        keep_scale, size_scale = _DROPOUT_STEPS / (_DROPOUT_STEPS - dropped_values), 1.0 / math.sqrt(query.shape[-1])
        query_gradient, key_gradient, value_gradient = (_empty_like_position_major(each) for each in (query, key, value))
        for tile, probabilities_GPL in zip(_iterate_head_tiles(query, key), shares, strict=True):
            gradient_GPD = (gradients[0][tile] * keep_scale).contiguous()
            probability_gradient_GPL = multiply_large_matrices(gradient_GPD, value[tile].mT)
            kept_GPL = probabilities_GPL
            if random_int16 is not None:
                keep_mask_GPL = _write_keep_mask(random_int16[tile], dropped_values, torch.empty_like(probabilities_GPL))
                probability_gradient_GPL.mul_(keep_mask_GPL)
                kept_GPL = keep_mask_GPL.mul_(probabilities_GPL)
            value_gradient[tile] = multiply_large_matrices(gradient_GPD.mT, kept_GPL).mT
            score_gradient_GPL = torch._softmax_backward_data(probability_gradient_GPL, probabilities_GPL, -1, torch.float32)  # noqa: SLF001
            query_gradient[tile] = multiply_large_matrices(score_gradient_GPL, key[tile]) * size_scale
            key_gradient[tile] = multiply_large_matrices(query[tile].mT * size_scale, score_gradient_GPL).mT
        return query_gradient, key_gradient, value_gradient, None, None


def _write_keep_mask(random_int16: Tensor, dropped_values: int, out: Tensor) -> Tensor:
    """Write a dropout mask to `out`, and return it. The mask is 1 for elements that are kept, and 0 for elements that are
    dropped.
    """
    return torch.ge(random_int16, dropped_values - _DROPOUT_STEPS // 2, out=out)


def _iterate_head_tiles(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield tuples (pack, slice of heads), which select the heads that are computed together."""
    packs, heads, positions, _ = query.shape
    together = max(1, _TILE_ELEMENTS * torch.get_num_threads() // (positions * key.shape[2]))
    for pack in range(packs):
        for first in range(0, heads, together):
            yield pack, slice(first, first + together)


def _empty_like_position_major(projection_BNPD: Tensor) -> Tensor:
    """Return an empty tensor [B, N, P, D] with the memory layout [B, P, N, D].

    The projections have the same layout, so the result can later be reshaped without copying.
    """
    return torch.empty_like(projection_BNPD.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def cross_entropy(logits_RC: Tensor, labels_R: Tensor) -> Tensor:
    """Compute the negative log-likelihood of each label."""
    if is_plain_cpu_tensor(logits_RC):
        return _CrossEntropy.apply(logits_RC, labels_R)
    return functional.cross_entropy(logits_RC, labels_R, reduction="none")


class _CrossEntropy(torch.autograd.Function):
    """Computes `cross_entropy` and its gradient, a few rows at a time."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each label from its logits.

        Logits have the shape [R, C], and labels and losses have the shape [R].
        """
        sums_R = torch.cat([torch.logsumexp(logits[rows], -1) for rows in _split_rows_into_slices(logits)])
        context.save_for_backward(logits, labels, sums_R)
        return sums_R - logits.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of the logits."""
        (gradient_R,), (logits, labels, sums_R) = gradients, context.saved_tensors
        result = torch.empty_like(logits)
        for rows in _split_rows_into_slices(logits):
            torch.sub(logits[rows], sums_R[rows, None], out=result[rows]).exp_().mul_(gradient_R[rows, None])
        return result.scatter_add_(1, labels[:, None], -gradient_R[:, None]), None


def _split_rows_into_slices(logits: Tensor) -> list[slice]:
    """Divide the rows of logits into slices that fit into the CPU cache."""
    together = max(1, _TILE_ELEMENTS * torch.get_num_threads() // logits.shape[1])
    return [slice(first, first + together) for first in range(0, max(1, len(logits)), together)]


class DuplicateTiedEmbedding(torch.autograd.Function):
    """Returns an embedding table twice, for looking up rows and for the output matrix, and adds up the gradients of both
    uses.

    The sparse gradient of the rows is added in place to the gradient of the product. PyTorch would allocate two dense
    gradients and a third one for their sum.
    """

    @staticmethod
    def forward(context: Any, embedding_table: Tensor) -> tuple[Tensor, Tensor]:
        """Return two views of the embedding table, one for looking up rows and one for the matrix product. `backward` then
        receives the gradients of the two uses separately, and can add them with less memory than PyTorch needs.
        """
        context.set_materialize_grads(False)
        return embedding_table.view_as(embedding_table), embedding_table.view_as(embedding_table)

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> Tensor | None:
        """Return the dense gradient of the table, which is the sum of the gradients of both uses."""
        row_gradient, table_gradient = gradients
        if row_gradient is None or table_gradient is None:
            return table_gradient if row_gradient is None else row_gradient.to_dense()
        return table_gradient.add_(row_gradient)
