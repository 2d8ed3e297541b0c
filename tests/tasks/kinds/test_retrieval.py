"""Embedding: what is written of held-out rows whose texts are equally near."""

from __future__ import annotations

import numpy as np

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import RowPosition, TupleRow
from gaudi_bert.tasks.kinds.retrieval import Embedding


def test_equally_near_texts_rank_in_the_order_of_the_file_and_count_by_their_mean() -> None:
    """A dead model: all vectors are equal. The distinct texts are a, p, q, b, r, and all but a and b are documents."""
    position = RowPosition(1)
    rows = [TupleRow(position, ("a", "p", "q")), TupleRow(position, ("b", "r"))]
    task = Embedding(TaskSettings(name="embedding"))
    vectors = np.ones((5, 4), np.float32)
    lines = list(task.predictions(vectors, None, rows))
    assert [line["rank"] for line in lines] == [1, 3]
    assert [line["nearest"] for line in lines] == [["p", "q", "r"]] * 2
    assert abs(task.metrics(vectors, None, rows)["mrr@10"] - (1 + 1 / 2 + 1 / 3) / 3) < 1e-12
