"""Reranking: how well a document answers a query, read together, as one number (a cross-encoder).

A row is a query, a document and a label of 0 to 1. Loss: binary cross-entropy of one logit, or over
the documents of a query (`task.loss: listwise`), which then stay in one update. Metrics, by query: MRR@10,
nDCG@10, MAP; rows of one text of the query belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import Float32Array, FloatArray, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import count_of
from gaudi_bert.rows.answers import score_answers
from gaudi_bert.rows.types import Row, Sequences, TextRow
from gaudi_bert.tasks.contrast import LossAndGradient, PairedRows, listwise
from gaudi_bert.tasks.kinds.task import TextTask
from gaudi_bert.tasks.ranking import figures_of_groups, numbered
from gaudi_bert.tasks.update_plan import GroupedRows


class Reranking(TextTask):
    """A score of a document for a query."""

    name = "reranking"
    best_metric = "ndcg@10"
    metric_names = ("loss", "ndcg@10", "mrr@10", "map")

    @property
    def width(self) -> int:
        """One value."""
        return 1

    def note(self, rows: Sequence[Row]) -> str | None:
        """Note pairs that have several labels."""
        labels: dict[tuple[str, str | None], Any] = {}
        pairs = [(row, (row.text, row.text_pair)) for row in cast(Sequence[TextRow], rows)]
        other = [row.position for row, pair in pairs if labels.setdefault(pair, row.label) != row.label]
        if not other:
            return None
        return (
            f"note: {count_of(len(other), 'pair')} of a query and a document had another label before, the first in "
            f"{other[0]}: all are learnt"
        )

    def paired(self, sequences: Sequences, rows: Sequence[Row]) -> PairedRows | None:
        """Return the documents of each query, where the loss is `listwise`."""
        return _lists(sequences, rows) if self.settings.loss == "listwise" else None

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return ndcg@10, mrr@10 and map; with `listwise` also its loss, instead of the cross-entropy."""
        queries = [cast(TextRow, row).text for row in rows]
        figures = figures_of_groups(logits[:, 0], np.asarray(sequences.target, np.float64), queries)
        if self.settings.loss == "listwise":
            lists, documents = _lists(sequences, rows), np.arange(len(logits))
            figures["loss"] = lists.loss(logits.astype(np.float64), documents, np.arange(len(lists.groups))).loss
        return figures

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


def _lists(sequences: Sequences, rows: Sequence[Row]) -> PairedRows:
    """Return the documents of each query; a row is answered right where its best document is first."""
    of_row = numbered(cast(TextRow, row).text for row in rows)
    labels, documents = np.asarray(sequences.target, np.float64), np.bincount(of_row)
    if not ((documents > 1) & (np.bincount(of_row, labels) > 0)).any():
        raise InputError(
            "task.loss = listwise: no query has several documents, one of them with a label above 0; leave it out"
        )
    groups = GroupedRows(np.argsort(of_row, kind="stable"), np.concatenate([np.zeros(1, np.int64), np.cumsum(documents)]))

    def loss(outputs_NC: FloatArray, sequences_N: IntArray, queries: IntArray) -> LossAndGradient:
        chosen = groups.of(queries)
        indices = np.searchsorted(sequences_N, chosen)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents[queries])])
        result = listwise(outputs_NC[indices], starts, labels[chosen])
        gradient = np.zeros_like(outputs_NC)
        gradient[indices] = result.gradient_NH
        return result._replace(gradient_NH=gradient)

    return PairedRows(groups, loss)
