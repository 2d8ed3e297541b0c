"""Configurations of small models of `transformers`, some with windows of local attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

VOCABULARY, POSITIONS = 211, 256
_ANY = {"vocab_size": VOCABULARY, "initializer_range": 0.15}  # wide enough for attention to matter
SIZES = {**_ANY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
_DISTIL = {**_ANY, "dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": POSITIONS}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
_GPT2 = {**_ANY, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": POSITIONS, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Any] = {
    "roberta": partial(transformers.RobertaConfig, **SIZES, max_position_embeddings=POSITIONS + 2),
    "distilbert": partial(transformers.DistilBertConfig, **_DISTIL),
    "modernbert": partial(transformers.ModernBertConfig, **SIZES, **_ENDS, max_position_embeddings=POSITIONS),
    "gpt2": partial(transformers.GPT2Config, **_GPT2),
}
