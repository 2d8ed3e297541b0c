"""How a model is fed packs: its positions, its inputs, and which token may attend to which. `feeding_trial.py` measures it.
Behind it, which outputs belong to which sequence, and one vector for each.

RoBERTa and its descendants number positions from padding_idx + 1, so the positions of a pack, which begin at 0, are moved;
at 0 they would select other embeddings than the same sequence gets alone, without an error. Layers with a window need
a separate mask.

Two tokens of a pack may attend to each other where their sequence numbers are equal (in a causal model: to what is not
later; in a layer with a window: to what is not farther). Padding has the number 0 and attends to padding, so no row of a
mask is empty and no softmax divides by zero; nothing uses what is computed there.

Letters: B packs, L positions, X positions or slots, S depth, P positions that are read, R rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gaudi_bert.model.heads import LOWEST_HIDDEN, VectorHead


@dataclass(frozen=True)
class Feeding:
    """The feeding of a model.

    Attributes:
        position_offset: the position of a sequence's first token.
        positions, token_types: whether it takes `position_ids`, `token_type_ids`.
        causal: whether a token may attend only to what is not later.
        window: how far all layers see (1: the next token); None without a limit.
        layers: the same for each kind of layer, by the name that the model's masks have; empty where one mask serves all.
        longest_sequence: most tokens of a sequence that leaves the others of its batch as they are. RoPE of the kinds
            `dynamic` and `longrope` changes the frequencies of a complete batch for a longer one. None without a limit.
        embeds_first: whether its embeddings are computed without a mask and given to it with the mask: ESM multiplies them
            with any mask that it is given.
        unpacked_token: a token that changes the other sequences of its pack, so no row may hold it; None where none does.
        labels_own_token: in a causal model, whether a label is that of the token itself (tags), not of the next one.
    """

    position_offset: int = 0
    positions: bool = True
    token_types: bool = True
    causal: bool = False
    window: int | None = None
    layers: Mapping[str, int | None] = field(default_factory=dict)
    longest_sequence: int | None = None
    embeds_first: bool = False
    unpacked_token: int | None = None
    labels_own_token: bool = False

    @property
    def has_window(self) -> bool:
        """Whether any layer sees only part of a sequence."""
        return any(window is not None for window in (self.window, *self.layers.values()))


def fed_module(model: Any, feeding: Feeding) -> Any:
    """Return what takes the batches of `feeding`: the model, or its encoder behind embeddings that are computed first."""
    return _EmbedsFirst(model.base_model) if feeding.embeds_first else model


class _EmbedsFirst(torch.nn.Module):
    """An encoder whose embeddings do not see the mask."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.config = encoder, encoder.config

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **others: Tensor) -> Any:
        embeddings = self.encoder.embeddings(input_ids, **others)
        positions = {name: value for name, value in others.items() if name == "position_ids"}
        return self.encoder(inputs_embeds=embeddings, attention_mask=attention_mask, **positions)


def allowed_BLL(sequence_ids_BL: Tensor, causal: bool = False, window: int | None = None) -> Tensor:  # noqa: N802
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


def additive_masks(sequence_ids_BL: Tensor, feeding: Feeding, dtype: torch.dtype = torch.float32) -> Any:
    """Return what is added to scores, 0 or the lowest number of `dtype`, [B, 1, L, L]; or that of each kind of layer."""

    def mask(window: int | None) -> Tensor:
        allowed = allowed_BLL(sequence_ids_BL, feeding.causal, window)
        return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max).unsqueeze(1)

    return {kind: mask(window) for kind, window in feeding.layers.items()} or mask(feeding.window)


def target_mask(sequence_ids_BL: Tensor, feeding: Feeding, target: str, dtype: torch.dtype = torch.float32) -> Any:
    """The mask of a target of `PackCollator`, for all layers or for each kind of them."""
    if target == "transformers-5":
        return additive_masks(sequence_ids_BL, feeding, dtype)
    if target != "flex":
        return allowed_BLL(sequence_ids_BL, feeding.causal).long()
    layers = {kind: _block_mask(sequence_ids_BL, feeding.causal, reach) for kind, reach in feeding.layers.items()}
    return layers or _block_mask(sequence_ids_BL, feeding.causal, feeding.window)


def fed_positions(position_ids: Any, feeding: Feeding) -> Any:
    """Positions that begin at 0, as the model counts them; those of padding do not pass the longest sequence."""
    longest = feeding.longest_sequence
    return (position_ids if longest is None else position_ids.clip(max=longest - 1)) + feeding.position_offset


def _block_mask(sequence_ids_BL: Tensor, causal: bool = False, window: int | None = None) -> Any:
    """Make a `BlockMask` of it, for flex attention."""
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


# --- The sequences of packs in what a model gives


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
    if head.positions_feature is not None:
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
