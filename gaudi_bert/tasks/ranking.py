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


def ranking_figures(gains_QK: FloatArray, answers_Q: IntArray, ideal_Q: FloatArray, deepest: int) -> dict[str, float]:
    """The means over all queries; one without an answer counts 0.

    Args:
        gains_QK: best first; 0 where a ranking is shorter.
        answers_Q: how many documents answer, in the ranking or not.
        ideal_Q: the discounted gain of the best ranking (`best_gain`).
        deepest: how far down average precision looks.
    """
    hits_QK = gains_QK >= _ANSWERS
    top_QK = hits_QK[:, :_TOP]
    first_Q = np.where(top_QK.any(axis=1), top_QK.argmax(axis=1), np.inf)
    found = np.maximum(answers_Q, 1)
    gained_Q = gains_QK[:, :_TOP] @ _DISCOUNTS[: gains_QK.shape[1]]
    precisions_QK = np.cumsum(hits_QK, axis=1) / np.arange(1, gains_QK.shape[1] + 1)
    average_Q = (precisions_QK * hits_QK)[:, :deepest].sum(axis=1) / np.minimum(found, deepest)
    figures = {
        "accuracy@1": hits_QK[:, 0],
        "recall@10": top_QK.sum(axis=1) / found,
        "mrr@10": 1.0 / (first_Q + 1.0),
        "ndcg@10": gained_Q / np.where(ideal_Q > 0, ideal_Q, 1.0),
        "map": average_Q,
    }
    return {name: float(np.mean(values)) for name, values in figures.items()}


def best_gain(gains: FloatArray) -> float:
    """The discounted gain of the best ranking of documents with these gains."""
    best = np.sort(gains)[::-1][:_TOP]
    return float(best @ _DISCOUNTS[: len(best)])


def figures_of_groups(scores: Float32Array, gains: FloatArray, queries: Sequence[str]) -> dict[str, float]:
    """MRR@10, nDCG@10 and MAP of documents that are scored for their queries; `queries[i]` is that of document i."""
    _, of_document = np.unique(np.asarray(queries, object).astype(str), return_inverse=True)
    order = np.lexsort((-scores, of_document))
    sizes = np.bincount(of_document)
    place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    gains_QK = np.zeros((len(sizes), int(sizes.max())))
    gains_QK[of_document[order], place] = gains[order]
    ideal_Q = np.array([best_gain(row) for row in gains_QK])
    answers_Q = (gains_QK >= _ANSWERS).sum(axis=1)
    figures = ranking_figures(gains_QK, answers_Q, ideal_Q, gains_QK.shape[1])
    return {name: figures[name] for name in ("ndcg@10", "mrr@10", "map")}
