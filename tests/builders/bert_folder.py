"""A small Hugging Face folder of a BERT: a vocabulary of letters and some words, a tokenizer, seeded random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

TEXT = "the cat sat on mat dog runs over hill river flows north and south un ##able ##s ##ing , . ! ?"
WORDS = TEXT.split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
VOCABULARY = list(dict.fromkeys(VOCABULARY))
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "hidden_act": "gelu",
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


def write_tokenizer(folder: Path, lower_case: bool = True) -> Path:
    """A folder with a vocab.txt and its casing settings."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    casing = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(casing), encoding="utf-8")
    return folder


def write_bert(folder: Path, seed: int = 1, layers: int = 2, positions: int = 64) -> Path:
    """The folder, with the tokenizer and a model whose weights are noise of a size that makes outputs differ."""
    from safetensors.numpy import save_file

    from gaudi_bert.model.config import BertConfig, parameter_specs
    from gaudi_bert.model.huggingface import to_hugging_face

    write_tokenizer(folder)
    config = {**CONFIG, "num_hidden_layers": layers, "max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random = np.random.default_rng(seed)
    values = {
        name: (spec.start == "ones") + random.normal(0, 0.2, spec.shape).astype(np.float32)
        for name, spec in parameter_specs(BertConfig.from_json(config)).items()
        if name.startswith("bert/")
    }
    named = {name.removeprefix("bert."): value for name, value in to_hugging_face(values).items()}
    save_file({name: value.astype(np.float32) for name, value in named.items()}, str(folder / "model.safetensors"))
    return folder
