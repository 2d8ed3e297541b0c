"""Reranking: how well a document answers a query, read together, as one number (a cross-encoder).

A row is a query, a document and a label of 0 to 1. Loss: binary cross-entropy of one logit. Metrics, by query: MRR@10,
nDCG@10, MAP; rows of one text of the query belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.rows.answers import score_answers
from gaudi_bert.rows.types import Row, Sequences, TextRow
from gaudi_bert.tasks.kinds.classification import TextTask
from gaudi_bert.tasks.ranking import figures_of_groups


class Reranking(TextTask):
    """A score of a document for a query."""

    name = "reranking"
    best_metric = "ndcg@10"
    metric_names = ("loss", "ndcg@10", "mrr@10", "map")

    @property
    def width(self) -> int:
        """One value."""
        return 1

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """ndcg@10, mrr@10, map."""
        queries = [cast(TextRow, row).text for row in rows]
        return figures_of_groups(logits[:, 0], np.asarray(sequences.target, np.float64), queries)

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"score"}`, 0 to 1."""
        return score_answers(logits)

    def config_json(self) -> dict[str, Any]:
        """With one unnamed class, as transformers counts it, and what `CrossEncoder` does with it."""
        return {
            **super().config_json(),
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"},
        }
