"""Five updates of a packed run are those of sentence-transformers' losses on padded batches: losses and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")

import sentence_transformers as library
import torch
from sentence_transformers.sentence_transformer import losses

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.training.loop import compute_learning_rate
from tests.builders.agree import agree
from tests.builders.encoders import write_encoder
from tests.builders.json_lines import losses_of, write_lines
from tests.tasks.conftest import run
from tests.tasks.test_embedding import sentences

pytestmark = pytest.mark.slow

ROWS, UPDATES = 7, 5
# A large epsilon: else the sign of a gradient that is zero but for rounding decides where a weight goes.
LOOP = {"learning_rate": 1e-3, "epsilon": 1e-3, "weight_decay": 0.0, "clip_norm": 0.0}
NEGATIVES = [
    {"anchor": text, "positive": f"{other} . north", "negative": negative}
    for text, other, negative in zip(*(sentences(ROWS, seed) for seed in (3, 8, 4)), strict=True)
]


def write_model(folder: Path) -> Path:
    write_encoder(folder, "roberta", "AutoModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def test_five_updates(tmp_path: Path) -> None:
    """By in-batch negatives; what the other losses and all gradients are is in `test_contrast.py`, to the last digits."""
    model, data = write_model(tmp_path / "m"), write_lines(tmp_path / "x.jsonl", NEGATIVES)
    changes = {**LOOP, "epochs": UPDATES, "batch_sequences": ROWS, "warmup_share": 0.0, "micro_batch_packs": 2}
    run("embedding", data, None, model, tmp_path / "out", finetune={**changes, "engine": "pytorch"})
    opened = library.SentenceTransformer(str(model), device="cpu")
    loss = losses.MultipleNegativesRankingLoss(opened).train()
    optimizer = torch.optim.AdamW(opened.parameters(), eps=LOOP["epsilon"], weight_decay=0.0)
    settings = TrainingSettings(learning_rate=LOOP["learning_rate"], updates=UPDATES, warmup_updates=0)
    columns = [[row[name] for row in NEGATIVES] for name in NEGATIVES[0]]
    expected = []
    for update in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = compute_learning_rate(update, settings)
        value = loss([opened.preprocess(column) for column in columns], None)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    agree(losses_of(tmp_path / "out"), expected, 1e-5)
    ours = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    right = {name: value.detach().numpy() for name, value in opened.named_parameters()}
    agree({name: value.detach().numpy() for name, value in ours.named_parameters()}, right, 1e-5, scale=1.0)
