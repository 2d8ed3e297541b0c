"""What a type of model wants besides the mask: where its positions begin, which inputs it has, whether it is causal.

RoBERTa and its descendants number positions from padding_idx + 1, so the positions of a pack, which begin at 0, are moved;
left at 0 they are other embeddings than the same sequence gets alone, and nothing says so. ModernBERT's layers with a window
need a mask of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gaudi_bert.common.errors import InputError

__all__ = ["MODEL_TYPES", "Feeding"]

_OFFSET_BY_PADDING = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "data2vec-text"}
)
_USUAL_PADDING = 1
_WITHOUT_TOKEN_TYPES = frozenset({"distilbert", "modernbert", "gpt2", "mpnet"}) | _OFFSET_BY_PADDING
_CAUSAL = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "opt", "phi"})
MODEL_TYPES = tuple(sorted({"bert", "electra", "distilbert", "modernbert"} | _OFFSET_BY_PADDING | _CAUSAL))
"""The types whose feeding is known; the probe says whether it is right for another."""

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
        if model_type not in MODEL_TYPES:
            raise InputError(
                f"model type {model_type!r}: known are {', '.join(MODEL_TYPES)}; give the model's config instead"
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
