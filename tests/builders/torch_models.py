"""Small random models of `transformers`, some with windows of local attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

VOCABULARY, POSITIONS = 211, 256
SPREAD = 0.15  # of weights: wide enough for attention to matter
_ANY = {"vocab_size": VOCABULARY, "initializer_range": SPREAD}
_SIZES = {**_ANY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
_DISTIL = {**_ANY, "dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
_GPT2 = {**_ANY, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": POSITIONS, "bos_token_id": 1, "eos_token_id": 2}
_LONG = {"max_position_embeddings": POSITIONS}
MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertModel, partial(transformers.BertConfig, **_SIZES, **_LONG)),
    "roberta": (
        transformers.RobertaModel,
        partial(transformers.RobertaConfig, **_SIZES, max_position_embeddings=POSITIONS + 2),
    ),
    "distilbert": (transformers.DistilBertModel, partial(transformers.DistilBertConfig, **_DISTIL, **_LONG)),
    "modernbert": (transformers.ModernBertModel, partial(transformers.ModernBertConfig, **_SIZES, **_LONG, **_ENDS)),
    "gpt2": (transformers.GPT2LMHeadModel, partial(transformers.GPT2Config, **_GPT2)),
}


def small_model(name: str, attention: str) -> Any:
    """A model of a type, with seeded random weights, that computes attention as `attention` says."""
    torch.manual_seed(7)
    kind, config = MODELS[name]
    model = kind(config()).eval()
    model.set_attn_implementation(attention)
    return model
