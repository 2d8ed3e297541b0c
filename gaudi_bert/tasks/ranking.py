"""Metrics of rankings: accuracy@1, recall@10, MRR@10, nDCG@10 and MAP, as means over queries, as in sentence-transformers.

A ranking is given by the gains of its documents, with the best-scored document first. A relevant document has a gain of 1,
an irrelevant document has a gain of 0, and other gains lie in between. A document counts as relevant if its gain is at least
one half. Documents with equal scores have no defined order, so every metric is its mean over all their orders (McSherry and
Najork, 2008; nDCG as in scikit-learn). A model that gives every document the same score therefore gets the metrics of a
random order.

Letters:
    R: ranked documents of all queries.
    Q: queries.
    K: documents of a ranking.
    N: all documents.
    H: values of an embedding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Float32Array, FloatArray, IntArray

_TOP = 10
_MIN_RELEVANT_GAIN = 0.5
_DISCOUNTS = 1.0 / np.log2(np.arange(2, _TOP + 2))


def _compute_ranking_metrics(
    query_R: IntArray,
    scores_R: AnyArray,
    gains_R: FloatArray,
    answers_Q: IntArray,
    ideal_Q: FloatArray,
    max_rank: int | None = None,
    beyond: tuple[IntArray, IntArray] | None = None,
) -> dict[str, float]:
    """Return accuracy@1, recall@10, MRR@10, nDCG@10 and MAP by name, as means over all queries. A query without relevant
    documents counts as 0.

    Args:
        query_R: The query of each ranked document, ascending. Every query has at least one document.
        scores_R: The score of each document, descending within a query.
        gains_R: The gain of each document.
        answers_Q: The number of relevant documents of each query, whether they are in the ranking or not.
        ideal_Q: The discounted gain of the best possible ranking.
        max_rank: The number of ranks that average precision covers. None for the complete ranking.
        beyond: For each query, the number of documents after the end of the ranking that have the same score as its last
            document, and how many of them are relevant.
    """
    queries, hits_R = len(answers_Q), (gains_R >= _MIN_RELEVANT_GAIN).astype(np.float64)
    first_Q = np.searchsorted(query_R, np.arange(queries))
    rank_R = np.arange(len(query_R)) - first_Q[query_R]
    begins_R = (rank_R == 0) | (scores_R != np.roll(scores_R, 1))
    tie_R, first_of_tie = np.cumsum(begins_R) - 1, np.flatnonzero(begins_R)
    size, gained = np.bincount(tie_R).astype(np.float64), np.bincount(tie_R, gains_R)
    hits = np.bincount(tie_R, hits_R)
    hits_before = (np.cumsum(hits_R) - hits_R)[first_of_tie]
    hits_before -= hits_before[tie_R[first_Q]][query_R[first_of_tie]]
    if beyond is not None:
        last_tie_Q = tie_R[np.append(first_Q[1:], len(tie_R)) - 1]
        size[last_tie_Q] += beyond[0]
        hits[last_tie_Q] += beyond[1]
        gained[last_tie_Q] += beyond[1]
    # Documents with equal scores form a tie, and are assumed to be in random order. share_R is the probability that the
    # document at a rank is relevant. If it is relevant, others_R is the expected number of relevant documents before it in
    # the same tie.
    share_R, in_tie_R = (hits / size)[tie_R], rank_R - rank_R[first_of_tie][tie_R]
    others_R = in_tie_R * ((hits - 1) / np.maximum(size - 1, 1))[tie_R]
    precision_R = (hits_before[tie_R] + 1 + others_R) / (rank_R + 1)
    averaged_R = share_R * precision_R * (rank_R < (max_rank or len(rank_R)))
    is_top_R = rank_R < _TOP
    discounted_R = (gained / size)[tie_R] * np.where(is_top_R, _DISCOUNTS[np.minimum(rank_R, _TOP - 1)], 0.0)
    reciprocal_Q, none_Q = np.zeros(queries), np.ones(queries)
    for rank in range(_TOP):  # none_Q is the probability that all documents above this rank are irrelevant
        here = np.flatnonzero(rank_R == rank)
        query, tie, remaining = query_R[here], tie_R[here], size[tie_R[here]] - in_tie_R[here]
        reciprocal_Q[query] += none_Q[query] * np.minimum(hits[tie] / remaining, 1.0) / (rank + 1)
        none_Q[query] *= np.maximum(1.0 - hits[tie] / remaining, 0.0)
    answers_Q = np.maximum(answers_Q, 1)

    def sums(values_R: FloatArray) -> FloatArray:
        """For each query, add up the values of its documents."""
        return np.bincount(query_R, values_R, queries).astype(np.float64)

    figures = {
        "accuracy@1": share_R[first_Q],
        "recall@10": sums(share_R * is_top_R) / answers_Q,
        "mrr@10": reciprocal_Q,
        "ndcg@10": sums(discounted_R) / np.where(ideal_Q > 0, ideal_Q, 1.0),
        "map": sums(averaged_R) / (answers_Q if max_rank is None else np.minimum(answers_Q, max_rank)),
    }
    return {name: float(np.mean(values)) for name, values in figures.items()}


# --- documents that were scored for their query


def factorize_values(values: Iterable[Hashable]) -> IntArray:
    """Number the distinct values 0, 1, 2, ... in order of first appearance, and return the number of each given value,
    int64.
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)


def compute_grouped_ranking_metrics(scores: Float32Array, gains: FloatArray, queries: Sequence[str]) -> dict[str, float]:
    """Return the mean MRR@10, nDCG@10 and MAP over queries. Each query has its own list of scored documents.

    Args:
        scores: The score of each document.
        gains: The gain of each document.
        queries: The query of each document.
    """
    query_of = factorize_values(queries)
    order, best = np.lexsort((-scores, query_of)), np.lexsort((-gains, query_of))
    query_R = query_of[order]
    rank_R = np.arange(len(order)) - np.searchsorted(query_R, query_R)
    discounts_R = np.where(rank_R < _TOP, _DISCOUNTS[np.minimum(rank_R, _TOP - 1)], 0.0)
    ideal_Q = np.bincount(query_R, gains[best] * discounts_R).astype(np.float64)
    answers_Q = np.bincount(query_of, gains >= _MIN_RELEVANT_GAIN)
    figures = _compute_ranking_metrics(query_R, scores[order], gains[order], answers_Q, ideal_Q)
    return {name: figures[name] for name in ("ndcg@10", "mrr@10", "map")}


# --- search among all documents by embeddings, with a block of queries and a block of documents at a time

_MAX_RANK = 100
_QUERIES_AT_ONCE, _DOCUMENTS_AT_ONCE = 1024, 8192
_LOW_BITS = np.int64(2**32 - 1)
# Cosines are rounded to multiples of 1 / _STEPS_PER_UNIT, and are equal if they round to the same multiple. This step is
# about as large as the float32 rounding error of a dot product of several hundred values.
_STEPS_PER_UNIT = 2.0**20


def compute_search_metrics(
    queries_QH: Float32Array, documents_NH: Float32Array, answers: Sequence[IntArray]
) -> dict[str, float]:
    """Search for the nearest documents of each query by cosine, and return the metrics nDCG@10, MRR@10, accuracy@1,
    recall@10 and MAP@100.

    Args:
        queries_QH: The embeddings of the queries.
        documents_NH: The embeddings of the documents.
        answers: For each query, the numbers of its relevant documents, without duplicates.
    """
    queries, documents = _normalize(queries_QH), _normalize(documents_NH)
    nearest_QK, steps_QK, as_last_Q = find_nearest(queries, documents, _MAX_RANK)
    answers_Q = np.array([len(numbers) for numbers in answers])
    of_query = np.repeat(np.arange(len(answers)), answers_Q) * len(documents)
    of_queries = np.arange(len(answers))[:, np.newaxis] * len(documents)
    is_right_QK = np.isin(nearest_QK + of_queries, of_query + np.concatenate(answers))
    beyond_Q = as_last_Q - (steps_QK == steps_QK[:, -1:]).sum(axis=1)
    beyond_answers_Q = np.zeros(len(answers), np.int64)
    for query in np.flatnonzero(beyond_Q):
        others = np.setdiff1d(answers[query], nearest_QK[query])
        # A dot product may change slightly if it is computed as part of a matrix of another shape. It may then round to the
        # neighbouring multiple, so allow a difference of one.
        right = (np.abs(_quantize_products(documents[others] @ queries[query]) - steps_QK[query, -1]) <= 1).sum()
        beyond_answers_Q[query] = min(right, beyond_Q[query])
    figures = _compute_ranking_metrics(
        np.repeat(np.arange(len(answers)), nearest_QK.shape[1]),
        steps_QK.reshape(-1),
        is_right_QK.reshape(-1).astype(np.float64),
        answers_Q,
        np.cumsum(_DISCOUNTS)[np.minimum(answers_Q, _TOP) - 1],
        _MAX_RANK,
        (beyond_Q, beyond_answers_Q),
    )
    return {"map@100" if name == "map" else name: value for name, value in figures.items()}


def search_documents(queries_QH: Float32Array, documents_NH: Float32Array) -> IntArray:
    """Return the indices of the 100 documents with the largest cosines for each query, best first, int64 [Q, K]."""
    return find_nearest(_normalize(queries_QH), _normalize(documents_NH), _MAX_RANK)[0]


class NearestDocuments(NamedTuple):
    """The documents that are nearest to each query.

    Attributes:
        documents_QK: int64, the numbers of the documents, nearest first.
        steps_QK: int64, the dot products of the documents with the query, in steps of 2^-20.
        as_last_Q: int64, the number of documents whose product equals that of the last listed document.
    """

    documents_QK: IntArray
    steps_QK: IntArray
    as_last_Q: IntArray


def find_nearest(queries_QH: Float32Array, documents_NH: Float32Array, count: int) -> NearestDocuments:
    """Find the `count` documents with the largest dot products for each query, best first.

    Of documents with equal products, those with lower numbers come first.

    Args:
        queries_QH: The embeddings of the queries.
        documents_NH: The embeddings of the documents.
        count: The largest number of documents per query.

    Returns:
        The numbers of the documents [Q, K], their products in steps of 2^-20 [Q, K], and the number of documents whose
        product equals that of the last listed document [Q].
    """
    parts = []
    for first in range(0, len(queries_QH), _QUERIES_AT_ONCE):
        block_QH = queries_QH[first : first + _QUERIES_AT_ONCE]
        best, last_Q = np.zeros((len(block_QH), 0), np.int64), np.zeros(len(block_QH), np.int64)
        as_last_Q = np.zeros(len(block_QH), np.int64)
        for document in range(0, len(documents_NH), _DOCUMENTS_AT_ONCE):
            steps = _quantize_products(block_QH @ documents_NH[document : document + _DOCUMENTS_AT_ONCE].T)
            # Combine each dot product and its document number into one integer, so that a single sort orders by both. The
            # integer is larger if the product is larger or, for equal products, if the document number is lower.
            keys = (steps << 32) + (_LOW_BITS - (document + np.arange(steps.shape[1])))
            before, best = best, np.concatenate([best, keys], axis=1)
            if best.shape[1] > count:
                best = np.partition(best, best.shape[1] - count, axis=1)[:, -count:]
            now_Q = best.min(axis=1) >> 32
            was_as_last_Q = np.where(now_Q == last_Q, as_last_Q, 0) if before.shape[1] == count else 0
            held_Q = ((before >> 32) == now_Q[:, np.newaxis]).sum(axis=1)
            as_last_Q = np.maximum(was_as_last_Q, held_Q) + (steps == now_Q[:, np.newaxis]).sum(axis=1)
            last_Q = now_Q
        best = np.sort(best, axis=1)[:, ::-1]
        parts.append((_LOW_BITS - (best & _LOW_BITS), best >> 32, as_last_Q))
    documents_QK, steps_QK, as_last = (np.concatenate(each) for each in zip(*parts, strict=True))
    return NearestDocuments(documents_QK, steps_QK, as_last)


def _quantize_products(products: Float32Array) -> IntArray:
    """Express dot products as int64 multiples of 2^-20, rounded to the nearest. NaN is treated as -2, which is less than any
    cosine.
    """
    steps: IntArray = np.rint(np.nan_to_num(products, nan=-2.0) * _STEPS_PER_UNIT).astype(np.int64)
    return steps


def _normalize(vectors: Float32Array) -> Float32Array:
    """Scale each embedding to norm 1."""
    units: Float32Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return units


def compute_cosines(firsts: Float32Array, seconds: Float32Array) -> FloatArray:
    """Return the cosine between the embeddings at the same index of both arrays, float64."""
    products: FloatArray = (_normalize(firsts).astype(np.float64) * _normalize(seconds)).sum(axis=1)
    return products


def compute_correlations(predictions: FloatArray, targets: FloatArray) -> dict[str, float]:
    """Return the Pearson and Spearman correlations of predictions with targets. Both are 0 if all predictions or all targets
    are equal.
    """
    from scipy.stats import pearsonr, spearmanr

    varies = len(targets) > 1 and np.ptp(predictions) > 0 and np.ptp(targets) > 0
    return {
        "pearson": float(pearsonr(targets, predictions)[0]) if varies else 0.0,
        "spearman": float(spearmanr(targets, predictions)[0]) if varies else 0.0,
    }
