"""What a type of model needs to be fed packs: positions, inputs, and which token may attend to which.

RoBERTa and its descendants number positions from padding_idx + 1, so the positions of a pack, which begin at 0, are moved;
left at 0 they would select other embeddings than the same sequence gets alone, without an error. ModernBERT's layers with a
window need a mask of their own.

Two tokens of a pack may attend to each other where their sequence numbers are equal (in a causal model: to what is not
later; in a layer with a window: to what is not farther). Padding has the number 0 and attends to padding, so no row of a
mask is empty and no softmax divides by zero; nothing uses what is computed there.

Letters: B packs, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gaudi_bert.common.errors import InputError

_OFFSET_BY_PADDING = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "data2vec-text"}
)
_USUAL_PADDING = 1
_WITHOUT_TOKEN_TYPES = frozenset({"distilbert", "modernbert", "gpt2", "mpnet"}) | _OFFSET_BY_PADDING
_CAUSAL = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "opt", "phi"})
_MODEL_TYPES = tuple(sorted({"bert", "electra", "distilbert", "modernbert"} | _OFFSET_BY_PADDING | _CAUSAL))
"""The types whose feeding is known; the probe shows whether it is right for another."""

_USUAL_WINDOW = 64


@dataclass(frozen=True)
class Feeding:
    """How a type of model is fed.

    Attributes:
        position_offset: the position of a sequence's first token.
        token_types: whether it takes `token_type_ids`.
        causal: whether a token may attend only to what is not later.
        window: how far layers of local attention see; None without such layers.
    """

    position_offset: int = 0
    token_types: bool = True
    causal: bool = False
    window: int | None = None

    @classmethod
    def of_type(cls, model_type: str) -> Feeding:
        """For a `model_type` of `transformers`, with its usual settings.

        Raises:
            InputError: the type is not known.
        """
        if model_type not in _MODEL_TYPES:
            raise InputError(
                f"model type {model_type!r}: known are {', '.join(_MODEL_TYPES)}; give the model's config instead"
            )
        return cls(
            position_offset=_USUAL_PADDING + 1 if model_type in _OFFSET_BY_PADDING else 0,
            token_types=model_type not in _WITHOUT_TOKEN_TYPES | _CAUSAL,
            causal=model_type in _CAUSAL,
            window=_USUAL_WINDOW if model_type == "modernbert" else None,
        )

    @classmethod
    def of_config(cls, config: Any) -> Feeding:
        """For a model's config; of types that are not known, what the config says."""
        kind = config.model_type
        types = getattr(config, "layer_types", None) or ()
        causal = kind in _CAUSAL or getattr(config, "is_decoder", False)
        padding = getattr(config, "pad_token_id", None)
        return cls(
            position_offset=(_USUAL_PADDING if padding is None else padding) + 1 if kind in _OFFSET_BY_PADDING else 0,
            token_types=kind not in _WITHOUT_TOKEN_TYPES and not causal and getattr(config, "type_vocab_size", 0) > 1,
            causal=causal,
            window=config.sliding_window if "sliding_attention" in types else None,
        )


# --- masks


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
        positions_L = torch.arange(sequence_ids_BL.shape[1], device=sequence_ids_BL.device)
        distance_LL = positions_L[:, None] - positions_L[None, :]
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
