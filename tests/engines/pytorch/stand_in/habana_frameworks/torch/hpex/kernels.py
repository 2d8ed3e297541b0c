"""Attention by one kernel, with the arguments that the vendor documents, in their order."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from habana_frameworks.record import record


class FusedSDPA(torch.autograd.Function):
    """The shares of a softmax, times the values; the mask is added to the scores."""

    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_sequence_lengths: Tensor | None = None,
        padding_side: str = "left",
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            mask = None if attn_mask is None else list(attn_mask.shape)
            types = [str(each.dtype).removeprefix("torch.") for each in (query, key, value, attn_mask)]
            record("FusedSDPA", query=list(query.shape), mask=mask, dropout_p=dropout_p, is_causal=is_causal, types=types)
        context.scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        shares = torch.softmax(query @ key.transpose(-1, -2) * context.scale + attn_mask, dim=-1)
        context.save_for_backward(query, key, value, shares)
        return shares @ value

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, shares = context.saved_tensors
        by_shares = gradients[0] @ value.transpose(-1, -2)
        by_scores = shares * (by_shares - (by_shares * shares).sum(-1, keepdim=True)) * context.scale
        by_value = shares.transpose(-1, -2) @ gradients[0]
        return by_scores @ key, by_scores.transpose(-1, -2) @ query, by_value, *[None] * 8
