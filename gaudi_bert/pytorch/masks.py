"""Which token may attend to which, in the forms that attention takes.

Two tokens of a pack may attend to each other where their sequence numbers are equal (in a causal model: to what is not
later; in a layer with a window: to what is not farther). Padding has the number 0 and attends to padding, so no row of a
mask is empty and no softmax divides by zero; nothing uses what comes out there.

Letters: B packs, L positions.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["additive_mask_B1LL", "allowed_BLL", "block_mask"]


def allowed_BLL(sequence_ids_BL: torch.Tensor, causal: bool = False, window: int | None = None) -> torch.Tensor:  # noqa: N802
    """Bool [B, L, L]: whether position i (second axis) may attend to position j (third).

    Args:
        sequence_ids_BL: 1..1 2..2 .. 0..0.
        causal: only to j <= i.
        window: only where |i - j| is at most this.
    """
    numbers_BL = sequence_ids_BL.to(torch.int16)  # compared four times as fast as int64
    allowed = numbers_BL[:, :, None] == numbers_BL[:, None, :]
    if causal or window is not None:
        place_L = torch.arange(sequence_ids_BL.shape[1], device=sequence_ids_BL.device)
        distance_LL = place_L[:, None] - place_L[None, :]
        if causal:
            allowed = allowed & (distance_LL >= 0)
        if window is not None:
            allowed = allowed & (distance_LL.abs() <= window)
    return allowed


def additive_mask_B1LL(allowed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:  # noqa: N802
    """`allowed` [B, L, L] as what is added to attention scores: 0 or the lowest number of `dtype`, [B, 1, L, L]."""
    return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max).unsqueeze(1)


def block_mask(sequence_ids_BL: torch.Tensor, causal: bool = False, window: int | None = None) -> Any:
    """The same as a `BlockMask` for flex attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    packs, length = sequence_ids_BL.shape

    def may_attend(pack: Any, head: Any, query: Any, key: Any) -> Any:
        allowed = sequence_ids_BL[pack, query] == sequence_ids_BL[pack, key]
        if causal:
            allowed = allowed & (query >= key)
        if window is not None:
            allowed = allowed & ((query - key).abs() <= window)
        return allowed

    return create_block_mask(may_attend, packs, None, length, length, device=str(sequence_ids_BL.device))
