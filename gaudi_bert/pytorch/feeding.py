"""How a model is fed packs: its positions, its inputs, and which token may attend to which. `asking.py` finds it out.

RoBERTa and its descendants number positions from padding_idx + 1, so the positions of a pack, which begin at 0, are moved;
left at 0 they would select other embeddings than the same sequence gets alone, without an error. Layers with a window need
a mask of their own.

Two tokens of a pack may attend to each other where their sequence numbers are equal (in a causal model: to what is not
later; in a layer with a window: to what is not farther). Padding has the number 0 and attends to padding, so no row of a
mask is empty and no softmax divides by zero; nothing uses what is computed there.

Letters: B packs, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Feeding:
    """How a model is fed.

    Attributes:
        position_offset: the position of a sequence's first token.
        positions, token_types: whether it takes `position_ids`, `token_type_ids`.
        causal: whether a token may attend only to what is not later.
        window: how far all layers see (1: the next token); None without a limit.
        layers: the same for each kind of layer, by the name that the model's masks have; empty where one mask serves all.
    """

    position_offset: int = 0
    positions: bool = True
    token_types: bool = True
    causal: bool = False
    window: int | None = None
    layers: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def has_window(self) -> bool:
        """Whether any layer sees only part of a sequence."""
        return any(window is not None for window in (self.window, *self.layers.values()))


def allowed_BLL(sequence_ids_BL: torch.Tensor, causal: bool = False, window: int | None = None) -> torch.Tensor:  # noqa: N802
    """Bool [B, L, L]: whether position i (second axis) may attend to j (third), where |i - j| is at most `window`."""
    numbers_BL = sequence_ids_BL.to(torch.int16)  # compared four times as fast as int64
    allowed = numbers_BL[:, :, None] == numbers_BL[:, None, :]
    if causal or window is not None:
        positions_L = torch.arange(sequence_ids_BL.shape[1], device=sequence_ids_BL.device)
        distance_LL = positions_L[:, None] - positions_L[None, :]
        if causal:
            allowed = allowed & (distance_LL >= 0)
        if window is not None:
            allowed = allowed & (distance_LL.abs() <= window)
    return allowed


def additive_masks(sequence_ids_BL: torch.Tensor, feeding: Feeding, dtype: torch.dtype = torch.float32) -> Any:
    """What is added to attention scores, 0 or the lowest number of `dtype`, [B, 1, L, L]; or that of each kind of layer."""

    def mask(window: int | None) -> torch.Tensor:
        allowed = allowed_BLL(sequence_ids_BL, feeding.causal, window)
        return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max).unsqueeze(1)

    return {kind: mask(window) for kind, window in feeding.layers.items()} or mask(feeding.window)


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
