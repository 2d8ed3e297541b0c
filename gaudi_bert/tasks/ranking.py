"""How good rankings are: accuracy@1, recall@10, MRR@10, nDCG@10, MAP, by query, as sentence-transformers counts them.

A ranking is the gains of its documents, best first: 1 for one that answers, 0 for one that does not, or a grade between. One
of at least a half answers. Documents of equal scores are in the order of their numbers.

Letters: Q queries, K documents of a ranking, N documents in all, H values of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaudi_bert.common.arrays import Float32Array, FloatArray, IntArray

_TOP = 10
_ANSWERS = 0.5
_DISCOUNTS = 1.0 / np.log2(np.arange(2, _TOP + 2))


def _ranking_figures(gains_QK: FloatArray, answers_Q: IntArray, ideal_Q: FloatArray, deepest: int) -> dict[str, float]:
    """The means over all queries; one without an answer counts 0.

    Args:
        gains_QK: best first; 0 where a ranking is shorter.
        answers_Q: how many documents answer, in the ranking or not.
        ideal_Q: the discounted gain of the best ranking (`_best_gain`).
        deepest: how far down average precision looks.
    """
    hits_QK = gains_QK >= _ANSWERS
    top_QK = hits_QK[:, :_TOP]
    first_Q = np.where(top_QK.any(axis=1), top_QK.argmax(axis=1), np.inf)
    divisors = np.maximum(answers_Q, 1)
    gained_Q = gains_QK[:, :_TOP] @ _DISCOUNTS[: gains_QK.shape[1]]
    precisions_QK = np.cumsum(hits_QK, axis=1) / np.arange(1, gains_QK.shape[1] + 1)
    average_Q = (precisions_QK * hits_QK)[:, :deepest].sum(axis=1) / np.minimum(divisors, deepest)
    figures = {
        "accuracy@1": hits_QK[:, 0],
        "recall@10": top_QK.sum(axis=1) / divisors,
        "mrr@10": 1.0 / (first_Q + 1.0),
        "ndcg@10": gained_Q / np.where(ideal_Q > 0, ideal_Q, 1.0),
        "map": average_Q,
    }
    return {name: float(np.mean(values)) for name, values in figures.items()}


# --- the documents of a query, scored for it


def _best_gain(gains: FloatArray) -> float:
    """The discounted gain of the best ranking of documents with these gains."""
    best = np.sort(gains)[::-1][:_TOP]
    return float(best @ _DISCOUNTS[: len(best)])


def figures_of_groups(scores: Float32Array, gains: FloatArray, queries: Sequence[str]) -> dict[str, float]:
    """MRR@10, nDCG@10 and MAP of documents that are scored for their queries; `queries[i]` is that of document i."""
    _, of_document = np.unique(np.asarray(queries, object).astype(str), return_inverse=True)
    order = np.lexsort((-scores, of_document))
    sizes = np.bincount(of_document)
    position = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    gains_QK = np.zeros((len(sizes), int(sizes.max())))
    gains_QK[of_document[order], position] = gains[order]
    ideal_Q = np.array([_best_gain(row) for row in gains_QK])
    answers_Q = (gains_QK >= _ANSWERS).sum(axis=1)
    figures = _ranking_figures(gains_QK, answers_Q, ideal_Q, gains_QK.shape[1])
    return {name: figures[name] for name in ("ndcg@10", "mrr@10", "map")}


# --- search among all documents, by vectors: a block of queries and a block of documents at a time

_DEEPEST = 100
_QUERIES_AT_ONCE, _DOCUMENTS_AT_ONCE = 1024, 8192
_LOW_BITS = np.int64(2**32 - 1)


def search_figures(queries_QH: Float32Array, documents_NH: Float32Array, answers: Sequence[IntArray]) -> dict[str, float]:
    """nDCG@10, MRR@10, accuracy@1, recall@10 and MAP@100 of a search by cosines.

    `answers[q]` are the numbers of the documents that answer query q, each once.
    """
    answers_Q = np.array([len(numbers) for numbers in answers])
    of_query = np.repeat(np.arange(len(answers)), answers_Q) * len(documents_NH)
    right = of_query + np.concatenate(answers)
    nearest_QK = search(queries_QH, documents_NH)
    gains_QK = np.isin(nearest_QK + np.arange(len(answers))[:, np.newaxis] * len(documents_NH), right).astype(np.float64)
    ideal_Q = np.cumsum(_DISCOUNTS)[np.minimum(answers_Q, _TOP) - 1]
    figures = _ranking_figures(gains_QK, answers_Q, ideal_Q, _DEEPEST)
    return {"map@100" if name == "map" else name: value for name, value in figures.items()}


def search(queries_QH: Float32Array, documents_NH: Float32Array) -> IntArray:
    """The numbers of the hundred documents with the largest cosines with each query, as `nearest`."""
    return nearest(_units(queries_QH), _units(documents_NH), _DEEPEST)


def nearest(queries_QH: Float32Array, documents_NH: Float32Array, count: int) -> IntArray:
    """The numbers of the documents with the largest products with each query, best first; the lower number of equals."""
    parts = []
    for first in range(0, len(queries_QH), _QUERIES_AT_ONCE):
        block_QH = queries_QH[first : first + _QUERIES_AT_ONCE]
        best = np.zeros((len(block_QH), 0), np.int64)
        for document in range(0, len(documents_NH), _DOCUMENTS_AT_ONCE):
            scores = block_QH @ documents_NH[document : document + _DOCUMENTS_AT_ONCE].T
            best = np.concatenate([best, _keys(scores, document)], axis=1)
            if best.shape[1] > count:
                best = np.partition(best, best.shape[1] - count, axis=1)[:, -count:]
        parts.append(_LOW_BITS - (np.sort(best, axis=1)[:, ::-1] & _LOW_BITS))
    return np.concatenate(parts)


def _keys(scores: Float32Array, first: int) -> IntArray:
    """An integer for each score and document: larger for larger scores, and of equal ones for lower numbers."""
    bits = (scores + np.float32(0)).astype(np.float32, copy=False).view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys: IntArray = (ordered << 32) + (_LOW_BITS - (first + np.arange(scores.shape[1])))
    return keys


def _units(vectors: Float32Array) -> Float32Array:
    units: Float32Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return units


def cosines(firsts: Float32Array, seconds: Float32Array) -> FloatArray:
    """Of each vector with the one in the same position, float64."""
    products: FloatArray = (_units(firsts).astype(np.float64) * _units(seconds)).sum(axis=1)
    return products


def correlations(guesses: FloatArray, right: FloatArray) -> dict[str, float]:
    """Pearson's and Spearman's; 0 where one side is constant."""
    from scipy.stats import pearsonr, spearmanr

    varies = len(right) > 1 and np.ptp(guesses) > 0 and np.ptp(right) > 0
    return {
        "pearson": float(pearsonr(right, guesses)[0]) if varies else 0.0,
        "spearman": float(spearmanr(right, guesses)[0]) if varies else 0.0,
    }
