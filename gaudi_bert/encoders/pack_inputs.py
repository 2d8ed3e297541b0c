"""The inputs that a model needs for packs (masks, positions, ...), and the computation of vectors for sequences.

`pack_inputs_trial.py` determines the right `PackInputs` for a model.

RoBERTa and similar models number positions from padding_idx + 1. The positions of a pack begin at 0, which would silently
select wrong embeddings in these models, so an offset is added. Layers with a window need a mask of their own.

Two tokens of a pack may attend to each other if their sequence numbers are equal. In a causal model, a token may not attend
to later tokens, and in a layer with a window, not to tokens that are too far away. Padding has the sequence number 0 and
attends to padding, because a mask with an empty row would make the softmax divide by zero. Outputs of padding are never
used.

Letters in shapes: B packs, L positions, X positions or slots, S depth, P positions that are read, R rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gaudi_bert.model.heads import LOWEST_HIDDEN, VectorHead


@dataclass(frozen=True)
class PackInputs:
    """Describes the inputs that a model needs to process packs, such as masks, positions and segment ids.

    Attributes:
        position_offset: The position id of the first token in a sequence.
        takes_positions: Whether the model takes `position_ids`.
        takes_token_types: Whether the model takes `token_type_ids`.
        is_causal: Whether a token may only attend to itself and to earlier tokens.
        window: The maximum distance between two tokens that attend to each other, if all layers use one mask. With 1, a
            token attends to itself and its neighbours. None if there is no limit.
        window_by_layer_kind: The window of each kind of layer, by the name of its mask in the model. Empty if all layers use
            one mask.
        longest_sequence: The maximum number of tokens in a sequence. RoPE of the kinds `dynamic` and `longrope` changes the
            frequencies of the complete batch if a sequence is longer. None if there is no limit.
        embeds_without_mask: Whether the embeddings are computed without a mask, and passed to the encoder together with the
            mask. ESM needs this, because it multiplies its embeddings by any mask that it gets.
        unpacked_token: The id of a token that changes the other sequences of its pack, so that no pack may contain it. None
            if there is no such token.
        labels_own_token: Whether the label of a token in a causal model refers to the token itself, as for tags, and not to
            the next token.
    """

    position_offset: int = 0
    takes_positions: bool = True
    takes_token_types: bool = True
    is_causal: bool = False
    window: int | None = None
    window_by_layer_kind: Mapping[str, int | None] = field(default_factory=dict)
    longest_sequence: int | None = None
    embeds_without_mask: bool = False
    unpacked_token: int | None = None
    labels_own_token: bool = False

    @property
    def has_attention_window(self) -> bool:
        """Whether any layer of the model limits attention to a window of nearby tokens."""
        return any(window is not None for window in (self.window, *self.window_by_layer_kind.values()))


def wrap_model_for_packs(model: Any, pack_inputs: PackInputs) -> Any:
    """Return a module that runs a model on packs.

    It is the model itself or, if `pack_inputs.embeds_without_mask`, a module that computes the embeddings first.
    """
    return _EncoderWithUnmaskedEmbeddings(model.base_model) if pack_inputs.embeds_without_mask else model


class _EncoderWithUnmaskedEmbeddings(torch.nn.Module):
    """Runs an encoder in two steps: the embeddings without the attention mask, and then the other layers with the mask."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.config = encoder, encoder.config

    @property
    def base_model(self) -> torch.nn.Module:
        """The module itself, because it contains only an encoder."""
        return self

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **others: Tensor) -> Any:
        """Compute the embeddings, and pass them to the encoder together with the mask."""
        embeddings = self.encoder.embeddings(input_ids, **others)
        positions = {name: value for name, value in others.items() if name == "position_ids"}
        return self.encoder(inputs_embeds=embeddings, attention_mask=attention_mask, **positions)


def build_attention_mask(sequence_ids_BL: Tensor, is_causal: bool = False, window: int | None = None) -> Tensor:
    """Return a mask [B, L, L] that is true where one token of a pack may attend to another.

    Args:
        sequence_ids_BL: The number of each token's sequence from 1, or 0 for padding.
        is_causal: Whether attention to later tokens is forbidden.
        window: The maximum distance between two tokens that attend to each other, or None.

    Returns:
        bool [B, L, L], True if the position on the second axis may attend to the position on the third.
    """
    numbers_BL = sequence_ids_BL.to(torch.int16)  # comparing int16 is four times as fast as comparing int64
    allowed = numbers_BL[:, :, None] == numbers_BL[:, None, :]
    if is_causal or window is not None:
        positions_L = torch.arange(sequence_ids_BL.shape[1], device=sequence_ids_BL.device)
        distance_LL = positions_L[:, None] - positions_L[None, :]
        if is_causal:
            allowed = allowed & (distance_LL >= 0)
        if window is not None:
            allowed = allowed & (distance_LL.abs() <= window)
    return allowed


def build_additive_masks(sequence_ids_BL: Tensor, pack_inputs: PackInputs, dtype: torch.dtype = torch.float32) -> Any:
    """Compute the masks to add to the attention scores. A mask is 0 where attention is allowed, and the lowest value of the
    dtype elsewhere.

    Args:
        sequence_ids_BL: The number of each token's sequence from 1, or 0 for padding.
        pack_inputs: The inputs that the model needs for packs.
        dtype: The dtype of the masks.

    Returns:
        One mask [B, 1, L, L] for all layers, or a dictionary with a mask for each kind of layer.
    """

    def mask(window: int | None) -> Tensor:
        """Return the additive mask for the given attention window."""
        allowed = build_attention_mask(sequence_ids_BL, pack_inputs.is_causal, window)
        return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max).unsqueeze(1)

    return {kind: mask(window) for kind, window in pack_inputs.window_by_layer_kind.items()} or mask(pack_inputs.window)


def build_mask_for_collator_target(
    sequence_ids_BL: Tensor, pack_inputs: PackInputs, collator_target: str, dtype: torch.dtype = torch.float32
) -> Any:
    """Compute the attention mask in the form that a target of `PackCollator`, such as an attention kernel, requires.

    Args:
        sequence_ids_BL: The number of each token's sequence from 1, or 0 for padding.
        pack_inputs: The inputs that the model needs for packs.
        collator_target: The name of the target.
        dtype: The dtype of an additive mask.

    Returns:
        One mask for all layers, or a dictionary with a mask for each kind of layer. It is additive for "transformers-5", a
        `BlockMask` for "flex", and int64 [B, L, L] for all other targets.
    """
    if collator_target == "transformers-5":
        return build_additive_masks(sequence_ids_BL, pack_inputs, dtype)
    if collator_target != "flex":
        return build_attention_mask(sequence_ids_BL, pack_inputs.is_causal).long()
    masks = {
        kind: _build_block_mask(sequence_ids_BL, pack_inputs.is_causal, window)
        for kind, window in pack_inputs.window_by_layer_kind.items()
    }
    return masks or _build_block_mask(sequence_ids_BL, pack_inputs.is_causal, pack_inputs.window)


def shift_position_ids_for_model(position_ids: Any, pack_inputs: PackInputs) -> Any:
    """Convert position ids that begin at 0 in each sequence to position ids that begin at the model's position offset. They
    are an array or a tensor, and the result is of the same type.

    Padding may have positions beyond the longest sequence. They are limited to its last position.
    """
    longest = pack_inputs.longest_sequence
    return (position_ids if longest is None else position_ids.clip(max=longest - 1)) + pack_inputs.position_offset


def _build_block_mask(sequence_ids_BL: Tensor, is_causal: bool = False, window: int | None = None) -> Any:
    """Build a `BlockMask` of flex attention that allows the same attention as the mask of `build_attention_mask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    packs, length = sequence_ids_BL.shape

    def may_attend(pack: Any, head: Any, query: Any, key: Any) -> Any:
        """Return whether a query position may attend to a key position."""
        allowed = sequence_ids_BL[pack, query] == sequence_ids_BL[pack, key]
        if is_causal:
            allowed = allowed & (query >= key)
        if window is not None:
            allowed = allowed & ((query - key).abs() <= window)
        return allowed

    return create_block_mask(may_attend, packs, None, length, length, device=str(sequence_ids_BL.device))


# --- Outputs of packs, by sequence


def upcast_to_float32(tensor: Tensor) -> Tensor:
    """Convert 16-bit floating-point tensors to float32, and return other tensors unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def build_membership_mask(sequence_numbers_BX: Tensor, depth: int) -> Tensor:
    """For each sequence of each pack, return a mask of the positions or slots that belong to it, bool [B, S, X].

    Args:
        sequence_numbers_BX: The number of the sequence of each position or slot, from 1, or 0 if it is unused.
        depth: The number of sequences, S.

    Returns:
        bool [B, S, X].
    """
    numbers_S = torch.arange(1, depth + 1, device=sequence_numbers_BX.device, dtype=sequence_numbers_BX.dtype)
    return numbers_S[:, None] == sequence_numbers_BX[:, None, :]


def pool_sequences(head: VectorHead, hidden_RH: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute one vector for each sequence by pooling the hidden states of its tokens.

    Args:
        head: The kind of pooling, and whether vectors are scaled to length 1.
        hidden_RH: The hidden states of all tokens, or only of the token that represents each sequence.
        batch: The features of the batch.

    Returns:
        [B, S, H]. The vectors of unused sequence slots are undefined.
    """
    packs, depth = batch["sequence_positions"].shape
    if head.positions_feature_name is not None:
        vectors_BSH = hidden_RH.reshape(packs, depth, -1)
    else:
        hidden_BLH = hidden_RH.reshape(*batch["input_ids"].shape, -1)
        if head.pooling == "mean":
            share_BSL = build_membership_mask(batch["input_mask"], depth).to(hidden_RH.dtype)
            vectors_BSH = torch.matmul(share_BSL, hidden_BLH) / share_BSL.sum(-1, keepdim=True).clamp(min=1.0)
        else:
            numbers_BLH = batch["input_mask"].long()[..., None].expand_as(hidden_BLH)
            lowest_BSH = hidden_BLH.new_full((packs, 1 + depth, hidden_BLH.shape[-1]), LOWEST_HIDDEN)
            vectors_BSH = lowest_BSH.scatter_reduce(1, numbers_BLH, hidden_BLH, "amax")[:, 1:]  # index 0 is padding
    return torch.nn.functional.normalize(vectors_BSH, dim=-1, eps=1e-12) if head.normalize else vectors_BSH


def gather_positions(hidden_BLH: Tensor, positions_BP: Tensor) -> Tensor:
    """Return the hidden states of each pack at the given positions, [B, P, H]."""
    return hidden_BLH.gather(1, positions_BP.long()[..., None].expand(-1, -1, hidden_BLH.shape[-1]))
