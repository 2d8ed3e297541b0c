"""Five updates of a packed run are those of sentence-transformers' losses on padded batches: losses and weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")

import sentence_transformers as library
import torch
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer import losses

from gaudi_bert.config.sections import TaskSettings, TrainingSettings
from gaudi_bert.engines.protocol import Communicator, ModelSpec, load_engine
from gaudi_bert.model.huggingface import hugging_face_name
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import RowPosition, TupleRow
from gaudi_bert.tasks.coupled import CoupledData, CoupledObjective
from gaudi_bert.tasks.kinds.embedding import Embedding, texts_of_rows
from gaudi_bert.tasks.models.task_models import start_weights
from gaudi_bert.tasks.update_plan import RowStream, choose_shape
from gaudi_bert.training.loop import learning_rate_at
from tests.builders.agree import agree
from tests.builders.bert_folder import without_dropout, write_bert
from tests.builders.effort import LONG
from tests.builders.encoders import write_encoder
from tests.tasks.conftest import run
from tests.tasks.test_embedding import losses_of, scored, sentences, write

pytestmark = pytest.mark.slow

ROWS, UPDATES = 7, 5
# A large epsilon: else the sign of a gradient that is zero but for rounding decides where a weight goes.
LOOP = {"learning_rate": 1e-3, "epsilon": 1e-3, "weight_decay": 0.0, "clip_norm": 0.0}
TUPLES = [
    {"anchor": text, "positive": f"{other} . north"}
    for text, other in zip(sentences(ROWS, 3), sentences(ROWS, 8), strict=True)
]
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
MODELS += [("trained minilm", case) for case in (CASES if LONG else ["negatives"])]


def write_model(folder: Path, name: str, request: pytest.FixtureRequest) -> Path:
    if name == "trained minilm":
        return without_dropout(request.getfixturevalue("minilm"), folder)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if name != "modernbert" else {}
    write_encoder(folder, name, "AutoModel", **dropout)
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def updated(module: Any, loss_of: Callable[[], Any]) -> list[float]:
    """The losses of the updates."""
    optimizer = torch.optim.AdamW(module.parameters(), eps=LOOP["epsilon"], weight_decay=0.0)
    settings = TrainingSettings(learning_rate=LOOP["learning_rate"], updates=UPDATES, warmup_updates=0)
    losses_of_updates = []
    for update in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = learning_rate_at(update, settings)
        value = loss_of()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses_of_updates.append(float(value.detach()))
    return losses_of_updates


def columns_of(rows: list[dict[str, Any]]) -> tuple[list[list[str]], Any]:
    """The texts by columns, and the labels."""
    columns = [[row[name] for row in rows] for name in rows[0] if name != "label"]
    return columns, torch.tensor([float(row.get("label", 0)) for row in rows])


def weights_of(folder: Path, kind: Any = library.SentenceTransformer) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in kind(str(folder), device="cpu").named_parameters()}


def check_weights(folder: Path, first: dict[str, np.ndarray], expected: Any) -> None:
    """Those of a folder are the expected ones, as far as they moved from the first."""
    right = {name: value.detach().numpy() for name, value in expected.named_parameters()}
    ours = weights_of(folder, type(expected))
    agree(ours, right, 1e-5, scale=1.0)

    def distance(values: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(sum(np.sum(np.square(values[name].astype(np.float64) - right[name])) for name in right)))

    assert distance(ours) <= 1e-4 * distance(first)


@pytest.mark.parametrize(("name", "case"), MODELS)
def test_five_updates(name: str, case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rows, settings, loss_of = CASES[case]
    model, data = write_model(tmp_path / "m", name, request), write(tmp_path / "x.jsonl", rows)
    changes = {**LOOP, "epochs": UPDATES, "batch_sequences": ROWS, "warmup_share": 0.0, "micro_batch_packs": 2}
    run("embedding", data, None, model, tmp_path / "out", finetune={**changes, "engine": "pytorch"}, task_settings=settings)
    opened = library.SentenceTransformer(str(model), device="cpu")
    loss, (columns, labels), first = loss_of(opened).train(), columns_of(rows), weights_of(model)
    expected = updated(opened, lambda: loss([opened.preprocess(column) for column in columns], labels))
    agree(losses_of(tmp_path / "out"), expected, 1e-5)
    check_weights(tmp_path / "out", first, opened)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["updates"] == UPDATES


@pytest.mark.parametrize("case", CASES)
def test_gradients_in_float64(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of a BERT whose variables are float64, by the packs of an update in two micro-batches."""
    rows, settings, loss_of = CASES[case]
    model = write_model(tmp_path / "m", "minilm", request)
    task, names = Embedding(TaskSettings(name="embedding", **settings)), [name for name in rows[0] if name != "label"]
    tuples = tuple(
        TupleRow(RowPosition(number), tuple(row[name] for name in names), row.get("label"))
        for number, row in enumerate(rows, start=1)
    )
    texts = texts_of_rows(task.settings, tuples).texts
    sequences = tokenize_rows(texts, open_tokenizer(model), task=None, settings=task.settings, max_sequence_length=64)
    coupled, start = task.coupled(sequences, tuples), start_weights(model, task)
    stream = RowStream(sequences.lengths, coupled.groups, ROWS, 1, 5)
    shape = choose_shape(stream, most_packs=1, processes=1, hidden_size=24, longest=64)
    data = CoupledData(sequences, coupled, stream, shape)
    batches = list(itertools.islice(data.batches(0, 0), shape.micro_batches))
    ours = load_engine("pytorch").build(ModelSpec(start.config, task.head), seed=None, compute_dtype="float64")
    ours.load_values(start.variables)
    leaves = {name: torch.nn.Parameter(value.detach().double()) for name, value in ours.parameters_by_name.items()}
    ours.parameters_by_name = leaves
    outputs = [ours.training_outputs(ours.tensors(batch), np.zeros(2, np.int32)) for batch in batches]
    coupling = CoupledObjective(task, data).coupling(batches, 1, Communicator())
    sums, gradients = coupling([output.detach().numpy() for output in outputs])
    torch.autograd.backward(outputs, [torch.from_numpy(gradient) for gradient in gradients])
    opened = library.SentenceTransformer(str(model), device="cpu").double()
    columns, labels = columns_of(rows)
    value = loss_of(opened)([opened.preprocess(column) for column in columns], labels.double())
    value.backward()
    assert shape.micro_batches > 1
    agree(sums[0] / sums[1], float(value.detach()), 1e-10)
    theirs = {name: value.grad.numpy() for name, value in opened[0].auto_model.named_parameters() if value.grad is not None}
    for name, leaf in leaves.items():
        right = theirs.get(hugging_face_name(name).removeprefix("bert."), np.zeros(leaf.shape))
        gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)  # a bias of keys has none
        agree(gradient.numpy(), right.T if name.endswith("/kernel") else right, 1e-10)
    assert {hugging_face_name(name).removeprefix("bert.") for name in leaves} >= theirs.keys()


def test_five_updates_of_a_cross_encoder(tmp_path: Path) -> None:
    """Of binary cross-entropy."""
    rows = [
        {"query": query, "document": document, "label": number / (ROWS - 1)}
        for number, (query, document) in enumerate(zip(sentences(ROWS, 3), sentences(ROWS, 4), strict=True))
    ]
    model, data = without_dropout(write_bert(tmp_path / "m", layers=1), tmp_path), write(tmp_path / "x.jsonl", rows)
    # The same head to begin with.
    first = {**LOOP, "learning_rate": 1e-30, "epochs": 1, "batch_sequences": ROWS, "warmup_share": 0.0}
    run("reranking", data, None, model, tmp_path / "first", finetune={**first, "engine": "pytorch"})
    opened = library.CrossEncoder(str(tmp_path / "first"), device="cpu")
    changes = {**first, "learning_rate": LOOP["learning_rate"], "epochs": UPDATES, "engine": "pytorch"}
    run("reranking", data, None, tmp_path / "first", tmp_path / "out", finetune=changes)
    loss = BinaryCrossEntropyLoss(opened).train()
    agree(losses_of(tmp_path / "out"), updated(opened, lambda: loss(*columns_of(rows))), 1e-5)
    check_weights(tmp_path / "out", weights_of(tmp_path / "first", library.CrossEncoder), opened)
