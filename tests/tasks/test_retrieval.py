"""Retrieval: what is written of held-out rows whose texts are equally near, and pairs that have two labels; rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import RowPosition, TextRow, TupleRow
from gaudi_bert.tasks.predict import predict
from gaudi_bert.tasks.prediction_files import PredictOptions
from gaudi_bert.tasks.retrieval import Embedding, Reranking
from tests.builders.agree import agree
from tests.builders.bert_folder import shift_logits
from tests.builders.bert_folder import without_dropout as still
from tests.builders.json_lines import lines_of, losses_of, write_lines
from tests.builders.reporters import QUIET
from tests.tasks.conftest import run


def test_equally_near_texts_rank_in_the_order_of_the_file_and_count_by_their_mean() -> None:
    """A dead model: all vectors are equal. The distinct texts are a, p, q, b, r, and all but a and b are documents."""
    position = RowPosition(1)
    rows = [TupleRow(position, ("a", "p", "q")), TupleRow(position, ("b", "r"))]
    task = Embedding(TaskSettings(name="embedding"))
    vectors = np.ones((5, 4), np.float32)
    lines = list(task.make_labelled_predictions(vectors, None, rows))
    assert [line["rank"] for line in lines] == [1, 3]
    assert [line["nearest"] for line in lines] == [["p", "q", "r"]] * 2
    assert abs(task.compute_metrics(vectors, None, rows)["mrr@10"] - (1 + 1 / 2 + 1 / 3) / 3) < 1e-12
    scored = [TupleRow(position, ("a", "p"), 0.5), TupleRow(position, ("b", "p"), 0.25)]
    vectors = np.array([[1, 0], [0, 1], [0, -2]], np.float32)
    assert list(task.make_labelled_predictions(vectors, None, scored)) == [{"cosine": 0.0}, {"cosine": -1.0}]


@pytest.mark.parametrize(("loss", "expected"), [(None, None), ("listwise", np.log(2))])
def test_the_loss_of_an_evaluation_is_the_one_that_is_trained(loss: Any, expected: float | None) -> None:
    """Documents of equal scores rank by chance: the mean of the first and the second place."""
    rows = [TextRow(RowPosition(1), "q", text) for text in ("a", "b")]
    sequences = SimpleNamespace(target=np.array([1.0, 0.0], np.float32))
    found = Reranking(TaskSettings(name="reranking", loss=loss)).compute_metrics(
        np.zeros((2, 1), np.float32), sequences, rows
    )
    assert (found["mrr@10"], found.get("loss")) == (0.75, expected)


def test_pairs_with_several_labels_are_named() -> None:
    """The same label twice is nothing to speak of."""
    rows = [TextRow(RowPosition(number), "q", text, label=label) for number, (text, label) in enumerate(PAIRS, 1)]
    task = Reranking(TaskSettings(name="reranking"))
    assert task.describe_unusual_data(rows[:3]) is None
    assert "1 pair " in (task.describe_unusual_data(rows) or "")


PAIRS = (("a", 1.0), ("b", 0.0), ("b", 0.0), ("a", 0.0))


# --- rerankers: rows in both forms, the folder as `CrossEncoder` opens it, answers by row and by query

QUERIES = ("the cat", "a hill and the river", "mat")
DOCUMENTS = ("the cat sat", "over the hill", "the river flows north", "dogs runs", "on the mat")


def scored_rows() -> list[dict[str, Any]]:
    return [
        {"query": query, "document": document, "label": float(bool(set(query.split()) & set(document.split())))}
        for document in DOCUMENTS
        for query in QUERIES
    ]


def answers_of(model: Path, data: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    predict(model, str(data), str(out), PredictOptions(**options), {}, reporter=QUIET)
    return lines_of(out)


def test_a_reranker_is_a_cross_encoder(finished: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")
    out = finished("reranking").out
    rows = scored_rows()
    answers = answers_of(out, write_lines(tmp_path / "x.jsonl", rows), tmp_path / "y.jsonl")
    cross_encoder = library.CrossEncoder(str(out), device="cpu")
    theirs = cross_encoder.predict([(row["query"], row["document"]) for row in rows])
    agree([answer["score"] for answer in answers], theirs, 1e-5, scale=1.0)
    assert np.ptp(theirs) > 0
    # The folder as sentence-transformers writes it is a reranker here too.
    cross_encoder.save_pretrained(str(tmp_path / "theirs"))
    again = answers_of(tmp_path / "theirs", tmp_path / "x.jsonl", tmp_path / "z.jsonl")
    agree([answer["score"] for answer in again], theirs, 1e-5, scale=1.0)


def test_documents_ranked_by_query(finished: Any, tmp_path: Path) -> None:
    out, data = finished("reranking").out, write_lines(tmp_path / "x.jsonl", scored_rows())
    scores = [answer["score"] for answer in answers_of(out, data, tmp_path / "y.jsonl")]
    groups = answers_of(out, data, tmp_path / "z.jsonl", group_by="query")
    assert [group["query"] for group in groups] == list(QUERIES)
    for place, group in enumerate(groups):
        own = sorted(zip(scores[place :: len(QUERIES)], DOCUMENTS, strict=True), key=lambda pair: -pair[0])
        assert [document["document"] for document in group["documents"]] == [text for _, text in own]
        agree([document["score"] for document in group["documents"]], [score for score, _ in own], 1e-5, scale=1.0)
    with pytest.raises(InputError, match="--group-by cannot be combined with --out -"):
        predict(out, str(data), "-", PredictOptions(group_by="query"), {}, reporter=QUIET)
    with pytest.raises(InputError, match=r"--group-by query: the option applies only to reranking, not to classification;"):
        answers_of(finished("classification").out, data, tmp_path / "a.jsonl", group_by="query")


def test_documents_of_equal_scores_stay_in_the_order_of_their_rows(finished: Any, tmp_path: Path) -> None:
    out, texts = finished("reranking").out, ["mat", "the cat", "mat", "the cat"]
    data = write_lines(tmp_path / "x.jsonl", [{"query": "cat", "document": text} for text in [*texts, *texts]])
    (group,) = answers_of(out, data, tmp_path / "y.jsonl", group_by="query")
    found = [document["document"] for document in group["documents"]]
    assert found in (["mat"] * 4 + ["the cat"] * 4, ["the cat"] * 4 + ["mat"] * 4)


def test_ranked_by_logits_whose_scores_are_equal(finished: Any, tmp_path: Path) -> None:
    """Beyond a logit of 17 every score is 1 in float32."""
    model, data = finished("reranking").out, write_lines(tmp_path / "x.jsonl", scored_rows())
    expected = answers_of(model, data, tmp_path / "y.jsonl", group_by="query")
    found = answers_of(shift_logits(model, tmp_path / "m", 20), data, tmp_path / "z.jsonl", group_by="query")
    assert {document["score"] for group in found for document in group["documents"]} == {1.0}
    for before, after in zip(expected, found, strict=True):
        assert [each["document"] for each in after["documents"]] == [each["document"] for each in before["documents"]]
        assert all(each.keys() == {"document", "score"} for each in after["documents"])


@pytest.mark.parametrize("activation", ["Sigmoid", "Tanh", "Identity"])
def test_prompts_and_activations_of_a_cross_encoder(finished: Any, tmp_path: Path, activation: str) -> None:
    import torch

    library = pytest.importorskip("sentence_transformers", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps")
    chosen = {
        "activation_fn": getattr(torch.nn, activation)(),
        "prompts": {"ask": "the hill "},
        "default_prompt_name": "ask",
    }
    cross_encoder = library.CrossEncoder(str(finished("reranking").out), device="cpu", **chosen)
    cross_encoder.save_pretrained(str(tmp_path / "m"))
    if not (tmp_path / "m" / "modules.json").is_file():
        pytest.skip("SENTENCE-TRANSFORMERS TOO OLD: before 5.3 it stores no prompts of a CrossEncoder")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config.pop("sentence_transformers", None)  # as in a folder that version 6 made of a plain model
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    rows = scored_rows()
    theirs = library.CrossEncoder(str(tmp_path / "m"), device="cpu").predict(
        [(row["query"], row["document"]) for row in rows]
    )
    data = write_lines(tmp_path / "x.jsonl", rows)
    answers = answers_of(tmp_path / "m", data, tmp_path / "y.jsonl")
    agree([answer["score"] for answer in answers], theirs, 1e-5, scale=1.0)
    (group, *_) = answers_of(tmp_path / "m", data, tmp_path / "z.jsonl", group_by="query")
    assert group["query"] == QUERIES[0], "without the prompt"
    best = max(range(len(DOCUMENTS)), key=lambda number: theirs[number * len(QUERIES)])
    assert group["documents"][0]["document"] == DOCUMENTS[best]


def test_listwise(model: Path, tmp_path: Path) -> None:
    """The documents of a query are learnt together, whatever the micro-batches."""
    rows = [
        {**row, "query": f"{row['query']} {number}"} for number in range(4) for row in scored_rows() if row["query"] != "mat"
    ]
    data = write_lines(tmp_path / "x.jsonl", rows)
    changes = {"batch_sequences": 3, "epochs": 4, "engine": "pytorch", "log_every_updates": 1}
    for packs in (16, 1):
        finetune, out = {**changes, "micro_batch_packs": packs}, tmp_path / f"{packs}"
        run("reranking", data, data, still(model, tmp_path), out, finetune=finetune, task_settings={"loss": "listwise"})
    losses = losses_of(tmp_path / "16")
    assert len(losses) == 11
    assert losses[-1] < losses[0]
    agree(losses_of(tmp_path / "1"), losses, 1e-5)


@pytest.mark.parametrize(
    ("loss", "rows", "message"),
    [
        ("cosent", scored_rows(), "task.loss = cosent: only listwise is supported for reranking; remove the setting"),
        ("listwise", [{**row, "label": 0} for row in scored_rows()], "no query has several documents and a label"),
        (
            "listwise",
            [{"query": str(n), "document": "cat", "label": 1} for n in range(15)],
            "no query has several documents",
        ),
    ],
)
def test_losses_that_do_not_fit(loss: str, rows: list[dict[str, Any]], message: str, model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "x.jsonl", rows)
    with pytest.raises(InputError, match=message):
        run("reranking", data, None, model, tmp_path / "o", finetune={"batch_sequences": 2}, task_settings={"loss": loss})
