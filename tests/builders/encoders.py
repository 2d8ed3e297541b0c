"""Small random encoders of several families, a byte-level tokenizer for them, and texts of very different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

RANDOM = np.random.default_rng(3)
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
TEXTS = [" ".join(RANDOM.choice(WORDS, size)) for size in RANDOM.integers(1, 30, 70)] + ["", "a"]
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
LABELS = {"id2label": {0: "O", 1: "B-x", 2: "I-x"}, "label2id": {"O": 0, "B-x": 1, "I-x": 2}}
SPREAD = {"initializer_range": 0.15}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
EXPERTS |= {"first_k_dense_replace": 1, "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16}
EXPERTS |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
CONFIGS: dict[str, Any] = {
    "roberta": lambda **more: transformers.RobertaConfig(
        **{**SIZES, **SPECIAL, **SPREAD, "max_position_embeddings": 66, **more}
    ),
    "modernbert": lambda **more: transformers.ModernBertConfig(
        **{**SIZES, **SPECIAL, **SPREAD, "max_position_embeddings": 128, **more},
        local_attention=16,
        global_attn_every_n_layers=2,
    ),
    "minilm": lambda **more: transformers.BertConfig(**SIZES, pad_token_id=1, **SPREAD, max_position_embeddings=64, **more),
    "ibert": lambda **more: transformers.IBertConfig(
        **{**SIZES, **SPECIAL, **SPREAD, "max_position_embeddings": 66, **more}
    ),
    "deepseek": lambda **more: transformers.DeepseekV3Config(
        **{**SIZES, **SPECIAL, **SPREAD, **EXPERTS, "max_position_embeddings": 64, **more}
    ),
    "deberta": lambda **more: transformers.DebertaV2Config(
        **SIZES, pad_token_id=1, max_position_embeddings=64, relative_attention=True, pos_att_type=["p2c", "c2p"], **more
    ),
}


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


TOKENIZER = tokenizer()


def model_of(name: str, kind: str = "AutoModel", **more: Any) -> Any:
    torch.manual_seed(5)
    return getattr(transformers, kind).from_config(CONFIGS[name](**more))


def write_encoder(folder: Path, name: str, kind: str = "AutoModel", **more: Any) -> Any:
    """The folder of such a model with its tokenizer; the model."""
    model = model_of(name, kind, **more)
    model.save_pretrained(folder)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    if name == "deberta":  # the class of the type needs a Unigram model
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return model
