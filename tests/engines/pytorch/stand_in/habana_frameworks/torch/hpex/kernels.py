"""Attention by one kernel, with the arguments that the vendor documents, in their order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from habana_frameworks.record import record


class FusedSDPA:
    """The vendor's is a function of autograd."""

    @staticmethod
    def apply(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_sequence_lengths: Tensor | None = None,
        padding_side: str = "left",
    ) -> Tensor:
        """The shares of a softmax, times the values; the mask is added to the scores."""
        types = [str(each.dtype).removeprefix("torch.") for each in (query, key, value, attn_mask)]
        shape, mask = list(query.shape), list(attn_mask.shape)
        record("FusedSDPA", query=shape, mask=mask, dropout_p=dropout_p, is_causal=is_causal, types=types)
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        return torch.softmax(query @ key.transpose(-1, -2) * scale + attn_mask, dim=-1) @ value
