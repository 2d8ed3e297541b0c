"""What `finetune` writes computes the same in sentence-transformers as here, for every kind of tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")

import sentence_transformers as library
import torch
import transformers

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.tasks.predict import EmbedOptions, embed, predict
from gaudi_bert.tasks.prediction_files import PredictOptions
from tests.builders.agree import agree
from tests.builders.json_lines import write_lines
from tests.builders.reporters import QUIET
from tests.builders.tokenizer_folders import KINDS, TEXTS
from tests.tasks.conftest import run

QUICK, SLOW = (
    ["vocab-decoder", "json-left"],
    ["vocab-strip", "json-lower", "json-no-segments", "bpe-prefix", "albert", "esm"],
)
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
MOST = 13
DOCUMENTS = [*TEXTS, " ".join(TEXTS), " ".join(reversed(TEXTS)), "LAGV the cat " * 9]


def write_model(folder: Path, name: str) -> Path:
    """A small random model of the kind's type, in the folder of its tokenizer."""
    kind = KINDS[name]
    if kind.model_type != "bert" and transformers.__version__.startswith("4."):
        pytest.skip(f"{kind.model_type} of transformers {transformers.__version__} takes no packs")
    kind.write(folder)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40}
    more: dict[str, Any] = {"max_position_embeddings": 68, "initializer_range": 0.2, "hidden_dropout_prob": 0.0}
    more |= {"type_vocab_size": 2} if kind.model_type in ("bert", "albert") else {}
    more |= {"embedding_size": 24} if kind.model_type == "albert" else {}
    more |= {"position_embedding_type": "rotary", "mask_token_id": 32} if kind.model_type == "esm" else {}
    pad = {"roberta": 1, "albert": 1, "esm": 1}.get(kind.model_type or "", 0)
    config = transformers.AutoConfig.for_model(kind.model_type, vocab_size=400, pad_token_id=pad, **sizes, **more)
    torch.manual_seed(5)
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_vectors(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", name)
    rows = [{"anchor": text, "positive": other} for text, other in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    changes = {"epochs": 1, "batch_sequences": 3, "learning_rate": 1e-3, "max_sequence_length": MOST}
    run("embedding", write_lines(tmp_path / "x.jsonl", rows), None, model, tmp_path / "out", finetune=changes)
    data = write_lines(tmp_path / "t.jsonl", [{"text": text} for text in DOCUMENTS])
    embed(tmp_path / "out", str(data), str(tmp_path / "v.npy"), EmbedOptions(), TaskSettings(), reporter=QUIET)
    opened = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert opened.max_seq_length == MOST
    agree(np.load(tmp_path / "v.npy"), opened.encode(DOCUMENTS), 1e-5, scale=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_pairs(name: str, tmp_path: Path) -> None:
    """Pairs are cut at the length that they were learned with, not at the base model's."""
    model = write_model(tmp_path / "m", name)
    texts = [text[:5] for text in DOCUMENTS] if name == "esm" else DOCUMENTS  # pairs of its tokenizer in Python are not cut
    rows = [
        {"query": text, "document": other, "label": n % 2}
        for n, (text, other) in enumerate(zip(texts, texts[::-1], strict=True))
    ]
    changes = {"epochs": 1, "batch_sequences": 3, "learning_rate": 1e-2, "max_sequence_length": MOST}
    run("reranking", write_lines(tmp_path / "x.jsonl", rows), None, model, tmp_path / "out", finetune=changes)
    pairs = list(zip(DOCUMENTS, DOCUMENTS[::-1], strict=True))
    data = write_lines(tmp_path / "t.jsonl", [{"query": query, "document": document} for query, document in pairs])
    predict(tmp_path / "out", str(data), str(tmp_path / "a.jsonl"), PredictOptions(), {}, reporter=QUIET)
    found = [json.loads(line)["score"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    opened = library.CrossEncoder(str(tmp_path / "out"), device="cpu")
    agree(np.array(found), opened.predict(pairs), 1e-5, scale=1.0)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == MOST
