"""Five updates of a packed run are those of sentence-transformers' losses on padded batches: losses and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")

import sentence_transformers as library
import torch
from sentence_transformers.sentence_transformer import losses

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.training.loop import learning_rate_at
from tests.builders.agree import agree
from tests.builders.effort import LONG
from tests.builders.encoders import write_encoder
from tests.tasks.conftest import run
from tests.tasks.test_embedding import losses_of, scored, sentences, write

pytestmark = pytest.mark.slow

ROWS, UPDATES = 7, 5
# A large epsilon: else the sign of a gradient that is zero but for rounding decides where a weight goes.
LOOP = {"learning_rate": 1e-3, "epsilon": 1e-3, "weight_decay": 0.0, "clip_norm": 0.0}
TUPLES = [{"anchor": text, "positive": f"{text} . north"} for text in sentences(ROWS, 3)]
NEGATIVES = [{**row, "negative": text} for row, text in zip(TUPLES, sentences(ROWS, 4), strict=True)]
# Exact in float32, to which they are cast there.
SCORED = [{**row, "label": round(8 * row["label"]) / 8} for row in scored(ROWS, 3)]

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], Any]] = {
    "pairs": (TUPLES, {}, losses.MultipleNegativesRankingLoss),
    "negatives": (NEGATIVES, {}, losses.MultipleNegativesRankingLoss),
    "symmetric": (
        NEGATIVES,
        {"symmetric": True},
        lambda model: losses.MultipleNegativesRankingLoss(
            model, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
    ),
    "cosent": (SCORED, {}, losses.CoSENTLoss),
    "cosine": (SCORED, {"loss": "cosine"}, losses.CosineSimilarityLoss),
    "matryoshka": (
        TUPLES,
        {"dimensions": [32, 16, 8]},
        lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [32, 16, 8]),
    ),
}
MODELS = [("roberta", case) for case in CASES] + [("modernbert", "negatives"), ("minilm", "negatives")]
MODELS += [(name, case) for name in ("modernbert", "minilm") for case in CASES if case != "negatives"] if LONG else []


def write_model(folder: Path, name: str) -> Path:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if name != "modernbert" else {}
    write_encoder(folder, name, "AutoModel", **dropout)
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def theirs(model: Path, rows: list[dict[str, Any]], loss_of: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of the updates, and the weights after them."""
    opened = library.SentenceTransformer(str(model), device="cpu")
    loss = loss_of(opened).train()
    columns = [[row[name] for row in rows] for name in rows[0] if name != "label"]
    labels = torch.tensor([float(row.get("label", 0)) for row in rows])
    optimizer = torch.optim.AdamW(opened.parameters(), eps=LOOP["epsilon"], weight_decay=0.0)
    settings = TrainingSettings(learning_rate=LOOP["learning_rate"], updates=UPDATES, warmup_updates=0)
    found = []
    for update in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = learning_rate_at(update, settings)
        value = loss([opened.preprocess(column) for column in columns], labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found, {name: value.detach().numpy() for name, value in opened[0].auto_model.named_parameters()}


@pytest.mark.parametrize(("name", "case"), MODELS)
def test_five_updates(name: str, case: str, tmp_path: Path) -> None:
    rows, settings, loss_of = CASES[case]
    model, data = write_model(tmp_path / "m", name), write(tmp_path / "x.jsonl", rows)
    changes = {**LOOP, "epochs": UPDATES, "batch_sequences": ROWS, "warmup_share": 0.0, "micro_batch_packs": 2}
    run("embedding", data, None, model, tmp_path / "out", finetune={**changes, "engine": "pytorch"}, task_settings=settings)
    expected, weights = theirs(model, rows, loss_of)
    agree(losses_of(tmp_path / "out"), expected, 1e-5)
    ours = dict(library.SentenceTransformer(str(tmp_path / "out"), device="cpu")[0].auto_model.named_parameters())
    moved = apart = 0.0
    first = dict(library.SentenceTransformer(str(model), device="cpu")[0].auto_model.named_parameters())
    for key, right in weights.items():
        apart += float(np.sum(np.square(ours[key].detach().numpy().astype(np.float64) - right)))
        moved += float(np.sum(np.square(first[key].detach().numpy().astype(np.float64) - right)))
    assert np.sqrt(apart) <= 1e-4 * np.sqrt(moved)
    agree({key: value.detach().numpy() for key, value in ours.items()}, weights, 1e-5, scale=1.0)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["updates"] == UPDATES
