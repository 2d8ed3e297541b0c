"""Small random models of `transformers`, whose sequences can be longer than a window of local attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY, POSITIONS = 211, 256
SPREAD = 0.15  # of weights: wide enough for attention to matter
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": SPREAD,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertModel, lambda: transformers.BertConfig(**_SIZES, max_position_embeddings=POSITIONS)),
    "roberta": (
        transformers.RobertaModel,
        lambda: transformers.RobertaConfig(**_SIZES, max_position_embeddings=POSITIONS + 2),
    ),
    "distilbert": (
        transformers.DistilBertModel,
        lambda: transformers.DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=3,
            n_heads=2,
            hidden_dim=48,
            max_position_embeddings=POSITIONS,
            initializer_range=SPREAD,
        ),
    ),
    "modernbert": (
        transformers.ModernBertModel,
        lambda: transformers.ModernBertConfig(
            **_SIZES,
            max_position_embeddings=POSITIONS,
            pad_token_id=0,
            bos_token_id=1,
            cls_token_id=1,
            eos_token_id=2,
            sep_token_id=2,
        ),
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=3,
            n_head=2,
            n_positions=POSITIONS,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=SPREAD,
        ),
    ),
}


def small_model(name: str, attention: str) -> Any:
    """A model of a type, with seeded random weights, that computes attention as `attention` says."""
    torch.manual_seed(7)
    kind, config = MODELS[name]
    model = kind(config()).eval()
    model.set_attn_implementation(attention)
    return model
