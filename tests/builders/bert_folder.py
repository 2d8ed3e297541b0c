"""A small Hugging Face folder of a BERT (letters and some words, seeded random weights), and labelled rows of its words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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
    from gaudi_bert.training.weights import convert_to_hugging_face

    write_tokenizer(folder)
    config = {**CONFIG, "num_hidden_layers": layers, "max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random = np.random.default_rng(seed)
    values = {
        name: (spec.start == "ones") + random.normal(0, 0.2, spec.shape).astype(np.float32)
        for name, spec in parameter_specs(BertConfig.from_json(config)).items()
        if name.startswith("bert/")
    }
    named = {name.removeprefix("bert."): value for name, value in convert_to_hugging_face(values).items()}
    save_file({name: value.astype(np.float32) for name, value in named.items()}, str(folder / "model.safetensors"))
    return folder


def shift_logits(model: Path, folder: Path, bias: float) -> Path:
    """A copy of the folder of a model with one logit, to which `bias` is added."""
    from safetensors.numpy import load_file, save_file

    copied = Path(shutil.copytree(model, folder))
    tensors = load_file(copied / "model.safetensors")
    (name,) = (name for name in tensors if name.startswith("classifier") and tensors[name].shape == (1,))
    tensors[name] = tensors[name] + np.float32(bias)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    return copied


def write_tokenizer_without_special_tokens(folder: Path) -> Path:
    """A tokenizer of which an empty text has no token."""
    from gaudi_bert.rows.tokenizer import open_tokenizer

    content = json.loads(open_tokenizer(folder).tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>" if "<pad>" in json.dumps(content) else "[PAD]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def without_dropout(model: Path, folder: Path) -> Path:
    """A copy of a model in a folder, which drops nothing."""
    copy = shutil.copytree(model, folder / f"still-{model.name}", dirs_exist_ok=True)
    config = copy / "config.json"
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps({**json.loads(config.read_text()), **rates}))
    return copy


# --- labelled rows


NOUNS = ("cat", "dog", "hill", "river", "mat")


def sentence(random: np.random.Generator, longest: int = 12) -> list[str]:
    return [str(word) for word in random.choice(WORDS[:16], random.integers(2, longest))]


def make_row(task: str, random: np.random.Generator) -> dict[str, Any]:
    words = sentence(random)
    nouns = sorted(set(words) & set(NOUNS))
    if task == "classification":
        return {
            "text": " ".join(words),
            "text_pair": "the cat",
            "label": "animal" if "cat" in words or "dog" in words else "none",
        }
    if task == "multi-label":
        return {"text": " ".join(words), "label": nouns}
    if task == "regression":
        return {"text": " ".join(words), "label": len(words) / 10}
    if task == "reranking":
        return {"query": words[0], "document": " ".join(words[1:]), "label": int("cat" in words)}
    if task == "embedding":
        return {"anchor": words[0], "positive": " ".join(words[1:]) + " ."}
    if task == "token-classification":
        return {"tokens": words, "tags": ["B-noun" if word in NOUNS else "O" for word in words]}
    if task == "question-answering":
        context = " ".join([*words, "cat", *sentence(random)])
        start = context.index("cat")
        return {"question": "the cat ?", "context": context, "answers": [{"text": "cat", "answer_start": start}]}
    return {"text": " ".join(words)}


def write_rows(path: Path, task: str, count: int, seed: int) -> Path:
    """A file of JSON lines."""
    random = np.random.default_rng(seed)
    rows = [make_row(task, random) for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def good_folder(folder: Path) -> Path:
    """An encoder that says it is a classifier, with all files that `predict` and `embed` look at."""
    from gaudi_bert.rows.tokenizer import open_tokenizer

    write_bert(folder, layers=1)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(open_tokenizer(folder).tokenizer.to_str(), encoding="utf-8")
    modules = [
        {"type": "sentence_transformers.Transformer", "path": ""},
        {"type": "sentence_transformers.Pooling", "path": "1_Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}', encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', encoding="utf-8")
    return folder
