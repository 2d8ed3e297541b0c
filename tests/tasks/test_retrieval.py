"""Retrieval: what is written of held-out rows whose texts are equally near, and pairs that have two labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import RowPosition, TextRow, TupleRow
from gaudi_bert.tasks.retrieval import Embedding, Reranking


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
