"""Embedding: vectors of texts that are near for texts that belong together (a bi-encoder).

A row is an anchor, its positive and any number of negatives; or two texts and a score. Each distinct text is one sequence,
with the prompt of its role. Losses: `tasks/contrast.py`. Metrics of the first kind are those of a search: the queries are
the distinct anchors of the rows, the documents all their other texts; of the second, correlations of cosines with scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray, IntArray
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.model.heads import VectorHead
from gaudi_bert.rows.packs import Placement
from gaudi_bert.rows.retrieval import TextTable, text_table
from gaudi_bert.rows.types import Row, Sequences, TupleRow
from gaudi_bert.tasks.contrast import (
    LossAndGradient,
    LossOfVectors,
    PairedRows,
    by_dimensions,
    contrast_of,
    cosent,
    cosine_error,
    in_batch_negatives,
)
from gaudi_bert.tasks.kinds.task import Draw, Task
from gaudi_bert.tasks.ranking import correlations, cosines, search, search_figures
from gaudi_bert.tasks.update_plan import GroupedRows

CORRELATIONS = ("spearman", "pearson")
"""Metrics of pairs with a score; the others are those of a search."""
_SHOWN = 3


class Embedding(Task):
    """A vector for each text."""

    name = "embedding"
    architecture = "BertModel"
    best_metric = "ndcg@10"
    metric_names = ("ndcg@10", "mrr@10", "accuracy@1", "recall@10", "map@100", *CORRELATIONS)

    @property
    def head(self) -> VectorHead:
        """The pooled vectors as they are: losses and cosines take them with the length 1."""
        return VectorHead(self.settings.pooling or "mean", normalize=False)

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """None: what is learnt is in the rows."""
        return {}

    def paired(self, sequences: Sequences, rows: Sequence[Row]) -> PairedRows:
        """Every text is compared with those of all rows."""
        table, scores = texts_of_rows(self.settings, rows), _scores(rows)
        groups = GroupedRows(table.members, table.starts)
        return PairedRows(groups, partial(_loss, self.settings, table, groups, scores), has_answers=scores is None)

    def metrics(self, vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return those of a search, or pearson and spearman; `vectors` are of the distinct texts."""
        table, scores = texts_of_rows(self.settings, rows), _scores(rows)
        if scores is not None:
            return correlations(_cosines(vectors, table), scores)
        queries, documents, query_of_row, answer_of_row = _search_of(table)
        pairs = np.unique(query_of_row * len(documents) + answer_of_row)
        bounds = np.arange(1, len(queries)) * len(documents)
        answers = np.split(pairs % len(documents), np.searchsorted(pairs, bounds))
        return search_figures(vectors[queries], vectors[documents], answers)

    def predictions(self, vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"cosine"}` of the two texts; of an anchor and its positive also its `rank` and the nearest texts.

        The rank is None where a hundred texts are nearer.
        """
        table = texts_of_rows(self.settings, rows)
        alike = _cosines(vectors, table)
        if _scores(rows) is not None:
            yield from ({"cosine": float(cosine)} for cosine in alike)
            return
        queries, documents, query_of_row, answer_of_row = _search_of(table)
        texts = chain.from_iterable(cast(TupleRow, row).texts for row in rows)
        text_of = dict(zip(table.members.tolist(), texts, strict=True))
        nearest_QK = search(vectors[queries], vectors[documents])
        for cosine, query, answer in zip(alike, query_of_row, answer_of_row, strict=True):
            above = np.flatnonzero(nearest_QK[query] == answer)
            best = documents[nearest_QK[query][:_SHOWN]]
            yield {
                "cosine": float(cosine),
                "rank": int(above[0]) + 1 if len(above) else None,
                "nearest": [text_of[document] for document in best.tolist()],
            }


def _search_of(table: TextTable) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """The distinct anchors, the distinct other texts, and which of both are the anchor and the positive of each row."""
    anchors, positives = table.members[table.starts[:-1]], table.members[table.starts[:-1] + 1]
    queries, query_of_row = np.unique(anchors, return_inverse=True)
    documents = np.unique(np.delete(table.members, table.starts[:-1]))
    return queries, documents, query_of_row, np.searchsorted(documents, positives)


def _loss(
    settings: TaskSettings,
    table: TextTable,
    groups: GroupedRows,
    scores: FloatArray | None,
    outputs_NC: FloatArray,
    sequences_N: IntArray,
    rows: IntArray,
) -> LossAndGradient:
    """In-batch negatives, or of pairs with a score."""
    texts = np.searchsorted(sequences_N, groups.of(rows))
    sizes = groups.starts[rows + 1] - groups.starts[rows]
    first = np.cumsum(sizes) - sizes
    anchors, positives = texts[first], texts[first + 1]
    of_vectors: LossOfVectors
    if scores is None:
        negatives = np.delete(texts, np.concatenate([first, first + 1]))
        contrast = contrast_of(anchors, positives, negatives, table.content[sequences_N])
        of_vectors = partial(in_batch_negatives, contrast=contrast, scale=settings.scale, symmetric=settings.symmetric)
    elif settings.loss == "cosine":
        of_vectors = partial(cosine_error, firsts_M=anchors, seconds_M=positives, scores_M=scores[rows])
    else:
        of_vectors = partial(cosent, firsts_M=anchors, seconds_M=positives, scores_M=scores[rows], scale=settings.scale)
    return by_dimensions(outputs_NC, of_vectors, settings.dimensions)


def texts_of_rows(settings: TaskSettings, rows: Sequence[Row], *, lower_case: bool = False) -> TextTable:
    """The distinct texts of rows, with the prompts that the settings name."""
    prompts = settings.query_prompt or "", settings.document_prompt or ""
    return text_table(cast(Sequence[TupleRow], rows), *prompts, lower_case=lower_case)


def _cosines(vectors: Float32Array, table: TextTable) -> FloatArray:
    """Return the cosine of the first two texts of each row."""
    firsts = table.starts[:-1]
    return cosines(vectors[table.members[firsts]], vectors[table.members[firsts + 1]])


def _scores(rows: Sequence[Row]) -> FloatArray | None:
    scores = [cast(TupleRow, row).score for row in rows]
    return None if scores[0] is None else np.array(scores, np.float64)
