"""Retrieval: embeddings that are close for texts that belong together (a bi-encoder), and scores of pairs (a cross-encoder).

Embedding: a row is an anchor, its positive and any number of negatives, or two texts with a score. Each distinct text is one
sequence, which includes the prompt of its role. The losses are in `tasks/contrast.py`. Rows with an anchor are evaluated by
a search, in which the queries are the distinct anchors and the documents are all other texts. For rows with a score, the
metrics are correlations of cosines with scores.

Reranking: a row is a query, a document and a label from 0 to 1. Both texts are read together. The loss is the binary
cross-entropy of a single logit. With `task.loss: listwise`, it is a loss over all documents of a query, which then stay in
one update. The metrics, by query, are MRR@10, nDCG@10 and MAP. Rows with the same query text belong to the same query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.model.heads import Activation, VectorHead
from gaudi_bert.rows.packs import PackBatch
from gaudi_bert.rows.types import Row, Sequences, TextRow, TupleRow
from gaudi_bert.tasks.contrast import (
    LossAndGradient,
    LossOfVectors,
    RowGroups,
    cosent_loss,
    cosine_error_loss,
    find_forbidden_candidates,
    in_batch_negatives_loss,
    listwise_loss,
    matryoshka_loss,
)
from gaudi_bert.tasks.ranking import (
    compute_correlations,
    compute_cosines,
    compute_grouped_ranking_metrics,
    compute_search_metrics,
    factorize_values,
    search_documents,
)
from gaudi_bert.tasks.task import MaskKey, SequenceTask, Task
from gaudi_bert.tasks.update_plan import SequenceGroups

# The metrics of embeddings if the evaluation rows have scores. Otherwise, search metrics such as nDCG@10 are computed.
CORRELATIONS = ("spearman", "pearson")
_SHOWN = 3


class TextTable(NamedTuple):
    """The distinct texts of some rows, with their prompts, in order of first appearance.

    Attributes:
        texts: The texts.
        rows: The texts of each row.
        content: int64 [texts], equal for texts that are equal without their prompts.
    """

    texts: list[TextRow]
    rows: SequenceGroups
    content: IntArray


class Embedding(Task):
    """The task of computing embeddings that are close to each other if their texts belong together."""

    name = "embedding"
    architecture = "BertModel"
    best_metric = "ndcg@10"
    metric_names = ("ndcg@10", "mrr@10", "accuracy@1", "recall@10", "map@100", *CORRELATIONS)

    @property
    def head(self) -> VectorHead:
        """A head that returns one pooled vector per text. The vectors are not normalized, because the losses and metrics
        normalize them.
        """
        return VectorHead(self.settings.pooling or "mean", normalize=False)

    def make_targets_and_weights(self, batch: PackBatch, mask_key: MaskKey) -> BatchArrays:
        """Return no targets, because the loss is computed from all rows of a weight update together (see
        `group_rows_for_loss`).
        """
        return {}

    def group_rows_for_loss(self, sequences: Sequences, rows: Sequence[Row]) -> RowGroups:
        """Return the texts of each row, and a loss function that compares each text with all texts of the same weight
        update.
        """
        table, scores = collect_distinct_texts(self.settings, rows), _get_row_scores(rows)
        return RowGroups(
            table.rows, partial(_compute_loss_across_rows, self.settings, table, scores), has_answers=scores is None
        )

    def compute_metrics(self, vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return the metrics of a search among the texts. If the rows have scores, return the Pearson and Spearman
        correlations instead.

        `vectors` are the embeddings of the distinct texts.
        """
        table, scores = collect_distinct_texts(self.settings, rows), _get_row_scores(rows)
        if scores is not None:
            return compute_correlations(_compute_row_cosines(vectors, table), scores)
        queries, documents, query_of_row, answer_of_row = _build_retrieval_evaluation(table)
        pairs = np.unique(query_of_row * len(documents) + answer_of_row)
        bounds = np.searchsorted(pairs, np.arange(1, len(queries)) * len(documents))
        return compute_search_metrics(vectors[queries], vectors[documents], np.split(pairs % len(documents), bounds))

    def make_labelled_predictions(
        self, vectors: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterator[dict[str, Any]]:
        """Yield an object with the `cosine` of the first two texts for each row.

        If the row is an anchor with its positive, the object also contains the `rank` of the positive and the `nearest`
        texts. The rank is None if a hundred other texts are nearer.
        """
        table = collect_distinct_texts(self.settings, rows)
        alike = _compute_row_cosines(vectors, table)
        if _get_row_scores(rows) is not None:
            yield from ({"cosine": float(cosine)} for cosine in alike)
            return
        queries, documents, query_of_row, answer_of_row = _build_retrieval_evaluation(table)
        texts = chain.from_iterable(cast(TupleRow, row).texts for row in rows)
        text_of = dict(zip(table.rows.members.tolist(), texts, strict=True))
        nearest_QK = search_documents(vectors[queries], vectors[documents])
        for cosine, query, answer in zip(alike, query_of_row, answer_of_row, strict=True):
            above = np.flatnonzero(nearest_QK[query] == answer)
            best = documents[nearest_QK[query][:_SHOWN]]
            yield {
                "cosine": float(cosine),
                "rank": int(above[0]) + 1 if len(above) else None,
                "nearest": [text_of[document] for document in best.tolist()],
            }


class _RetrievalEvaluation(NamedTuple):
    """The queries, documents and correct answers of a search that evaluates embeddings.

    Attributes:
        queries: int64, the distinct anchors.
        documents: int64, the distinct other texts.
        query_of_row: int64, for each row, the index of its anchor in `queries`.
        answer_of_row: int64, for each row, the index of its positive in `documents`.
    """

    queries: IntArray
    documents: IntArray
    query_of_row: IntArray
    answer_of_row: IntArray


def _build_retrieval_evaluation(table: TextTable) -> _RetrievalEvaluation:
    """Collect the queries, the documents and the correct answers of a search that evaluates embeddings."""
    members, firsts = table.rows.members, table.rows.starts[:-1]
    anchors, positives = members[firsts], members[firsts + 1]
    queries, query_of_row = np.unique(anchors, return_inverse=True)
    documents = np.unique(np.delete(members, firsts))
    return _RetrievalEvaluation(queries, documents, query_of_row, np.searchsorted(documents, positives))


def _compute_loss_across_rows(
    settings: TaskSettings,
    table: TextTable,
    scores: FloatArray | None,
    outputs_NC: FloatArray,
    sequences_N: IntArray,
    rows: IntArray,
) -> LossAndGradient:
    """Return the loss of all rows in one weight update, and its gradient. The loss function depends on the settings and on
    whether the rows have scores.

    Args:
        settings: The settings of the task.
        table: The texts of all rows.
        scores: The scores of all rows, or None.
        outputs_NC: The embeddings of the texts `sequences_N`.
        sequences_N: The distinct texts of the rows, ascending.
        rows: The rows of the update.
    """
    texts = np.searchsorted(sequences_N, table.rows.select_sequences(rows))
    sizes = table.rows.starts[rows + 1] - table.rows.starts[rows]
    first = np.cumsum(sizes) - sizes
    anchors, positives = texts[first], texts[first + 1]
    of_vectors: LossOfVectors
    if scores is None:
        candidates = np.concatenate([positives, np.delete(texts, np.concatenate([first, first + 1]))])
        content = table.content[sequences_N]
        of_vectors = partial(
            in_batch_negatives_loss,
            anchors_M=anchors,
            candidates_C=candidates,
            forbidden_MC=find_forbidden_candidates(content[anchors], content[candidates]),
            scale=settings.scale,
            symmetric=settings.symmetric,
        )
    elif settings.loss == "cosine":
        of_vectors = partial(cosine_error_loss, first_texts_M=anchors, second_texts_M=positives, scores_M=scores[rows])
    else:
        of_vectors = partial(
            cosent_loss, first_texts_M=anchors, second_texts_M=positives, scores_M=scores[rows], scale=settings.scale
        )
    return matryoshka_loss(outputs_NC, of_vectors, settings.dimensions)


def collect_distinct_texts(settings: TaskSettings, rows: Sequence[Row]) -> TextTable:
    """Return the distinct texts of some rows, and the indices of the texts that each row contains.

    The first text of a row gets the prompt for queries, and its other texts get the prompt for documents.
    """
    query_prompt, document_prompt = settings.query_prompt or "", settings.document_prompt or ""
    numbers: dict[str, int] = {}
    contents: dict[str, int] = {}
    texts: list[TextRow] = []
    members, content = [], []
    for row in cast(Sequence[TupleRow], rows):
        for position, text in enumerate(row.texts):
            prompted = (query_prompt if position == 0 else document_prompt) + text
            number = numbers.setdefault(prompted, len(texts))
            members.append(number)
            if number == len(texts):
                texts.append(TextRow(row.position, prompted))
                content.append(contents.setdefault(text, len(contents)))
    sizes = np.fromiter((len(cast(TupleRow, row).texts) for row in rows), np.int64, len(rows))
    grouped = SequenceGroups(np.array(members, np.int64), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))
    return TextTable(texts, grouped, np.array(content, np.int64))


def _compute_row_cosines(vectors: Float32Array, table: TextTable) -> FloatArray:
    """Return the cosine between the embeddings of the first two texts in each row."""
    members, firsts = table.rows.members, table.rows.starts[:-1]
    return compute_cosines(vectors[members[firsts]], vectors[members[firsts + 1]])


def _get_row_scores(rows: Sequence[Row]) -> FloatArray | None:
    """Return the score of each row, or None if the rows have no scores."""
    scores = [cast(TupleRow, row).score for row in rows]
    return None if scores[0] is None else np.array(scores, np.float64)


# --- pairs of a query and a document


class Reranking(SequenceTask):
    """The task of scoring how well a document answers a query."""

    name = "reranking"
    best_metric = "ndcg@10"
    metric_names = ("loss", "ndcg@10", "mrr@10", "map")

    def describe_unusual_data(self, rows: Sequence[Row]) -> str | None:
        """If the same pair of a query and a document occurs with different labels, return a note for the user."""
        labels: dict[tuple[str, str | None], Any] = {}
        pairs = [(row, (row.text, row.text_pair)) for row in cast(Sequence[TextRow], rows)]
        other = [row.position for row, pair in pairs if labels.setdefault(pair, row.label) != row.label]
        if not other:
            return None
        return (
            f"note: {format_count(len(other), 'pair')} of a query and a document repeat an earlier pair with another"
            f" label, first in {other[0]}; training uses all of these rows"
        )

    def group_rows_for_loss(self, sequences: Sequences, rows: Sequence[Row]) -> RowGroups | None:
        """Return the documents of each query as a group, together with the listwise loss function. Return None if another
        loss is used.
        """
        return _group_documents_by_query(sequences, rows) if self.settings.loss == "listwise" else None

    def compute_metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return the metrics ndcg@10, mrr@10 and map. If the listwise loss is used, also return it, because it replaces the
        cross-entropy.
        """
        queries = [cast(TextRow, row).text for row in rows]
        figures = compute_grouped_ranking_metrics(logits[:, 0], np.asarray(sequences.target, np.float64), queries)
        if self.settings.loss == "listwise":
            lists, documents = _group_documents_by_query(sequences, rows), np.arange(len(logits))
            figures["loss"] = lists.loss(logits.astype(np.float64), documents, np.arange(len(lists.groups))).loss
        return figures

    def make_predictions(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Yield the probability that the document of a pair answers the query, as `{"score"}`.

        If the model has another activation than the sigmoid, the score is the result of this activation.
        """
        return ({"score": score} for score in apply_activation(logits[:, 0], self.activation).tolist())

    def make_config_json(self) -> dict[str, Any]:
        """Return what config.json contains about the head, including the activation that `CrossEncoder` applies to the
        logit.
        """
        activation = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}
        return {**super().make_config_json(), "sentence_transformers": activation}


def apply_activation(logits_N: Float32Array, activation: Activation) -> Float32Array:
    """Apply an activation function to the logits of pairs, and return the scores, float32 [N].

    Different logits may have equal scores, so documents must be ranked by their logits.
    """
    if activation == "Identity":
        return logits_N
    wide = logits_N.astype(np.float64)
    return (np.tanh(wide) if activation == "Tanh" else 1.0 / (1.0 + np.exp(-wide))).astype(np.float32)


def _group_documents_by_query(sequences: Sequences, rows: Sequence[Row]) -> RowGroups:
    """Group the documents by query, and return the groups with a function that computes the listwise loss.

    A query counts as right if one of its best documents is ranked first.

    Raises:
        InputError: No query has several documents of which at least one has a label above 0.
    """
    of_row = factorize_values(cast(TextRow, row).text for row in rows)
    labels, documents = np.asarray(sequences.target, np.float64), np.bincount(of_row)
    if not ((documents > 1) & (np.bincount(of_row, labels) > 0)).any():
        raise InputError("task.loss = listwise: no query has several documents and a label above 0; remove the setting")
    groups = SequenceGroups(np.argsort(of_row, kind="stable"), np.concatenate([np.zeros(1, np.int64), np.cumsum(documents)]))

    def loss(outputs_NC: FloatArray, sequences_N: IntArray, queries: IntArray) -> LossAndGradient:
        """Return the listwise loss of the documents of some queries, and its gradient."""
        chosen = groups.select_sequences(queries)
        indices = np.searchsorted(sequences_N, chosen)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents[queries])])
        result = listwise_loss(outputs_NC[indices], starts, labels[chosen])
        gradient = np.zeros_like(outputs_NC)
        gradient[indices] = result.gradient_NH
        return result._replace(gradient_NH=gradient)

    return RowGroups(groups, loss)
