"""The sequences of packs: which token belongs to which, and one vector for each.

Letters: B packs, L positions, X positions or slots, S depth, R rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gaudi_bert.model.heads import LOWEST_HIDDEN, VectorHead


def widen(tensor: Tensor) -> Tensor:
    """`tensor` in at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def belongs(numbers_BX: Tensor, depth: int) -> Tensor:
    """Whether X belongs to each sequence of a pack, by its number there, [B, S, X]."""
    numbers_S = torch.arange(1, depth + 1, device=numbers_BX.device, dtype=numbers_BX.dtype)
    return numbers_S[:, None] == numbers_BX[:, None, :]


def vectors_of_sequences(head: VectorHead, hidden_RH: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """One vector for each sequence, [B, S, H]; those of absent ones mean nothing."""
    packs, depth = batch["sequence_positions"].shape
    if head.read_positions is not None:
        vectors_BSH = hidden_RH.reshape(packs, depth, -1)
    else:
        hidden_BLH = hidden_RH.reshape(*batch["input_ids"].shape, -1)
        if head.pooling == "mean":
            share_BSL = belongs(batch["input_mask"], depth).to(hidden_RH.dtype)
            vectors_BSH = torch.matmul(share_BSL, hidden_BLH) / share_BSL.sum(-1, keepdim=True).clamp(min=1.0)
        else:
            numbers_BLH = batch["input_mask"].long()[..., None].expand_as(hidden_BLH)
            lowest_BSH = hidden_BLH.new_full((packs, 1 + depth, hidden_BLH.shape[-1]), LOWEST_HIDDEN)
            vectors_BSH = lowest_BSH.scatter_reduce(1, numbers_BLH, hidden_BLH, "amax")[:, 1:]  # without padding's
    return torch.nn.functional.normalize(vectors_BSH, dim=-1, eps=1e-12) if head.normalize else vectors_BSH


def gather(hidden_BLH: Tensor, positions_BP: Tensor) -> Tensor:
    """The hidden states at P positions of each pack, [B, P, H]."""
    return hidden_BLH.gather(1, positions_BP.long()[..., None].expand(-1, -1, hidden_BLH.shape[-1]))
