"""Figures of rankings are those of scikit-learn and of a slow count; equal scores count by the mean over their orders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, ndcg_score

from gaudi_bert.tasks import ranking
from gaudi_bert.tasks.ranking import compute_grouped_ranking_metrics, compute_search_metrics, find_nearest
from tests.builders.agree import agree


def of_order(gains: list[float], max_rank: int) -> list[float]:
    """accuracy@1, recall@10, MRR@10, nDCG@10, MAP of one ranking."""
    ranks = [rank for rank, gain in enumerate(gains, start=1) if gain >= 0.5]
    gained = sum(gain / np.log2(rank + 1) for rank, gain in enumerate(gains[:10], start=1))
    best = sum(gain / np.log2(rank + 1) for rank, gain in enumerate(sorted(gains, reverse=True)[:10], start=1))
    precisions = [number / rank for number, rank in enumerate(ranks, start=1) if rank <= max_rank]
    return [
        float(gains[0] >= 0.5),
        sum(rank <= 10 for rank in ranks) / max(1, len(ranks)),
        1 / ranks[0] if ranks and ranks[0] <= 10 else 0.0,
        gained / best if best else 0.0,
        sum(precisions) / max(1, min(len(ranks), max_rank)),
    ]


def counted(scores: list[float], gains: list[float], max_rank: int = 10**9) -> np.ndarray:
    """The same of one query, the mean over all orders of documents with equal scores."""
    ties = [[gain for score, gain in zip(scores, gains, strict=True) if score == tie] for tie in sorted(set(scores))[::-1]]
    orders = itertools.product(*map(itertools.permutations, ties))
    return np.mean([of_order(list(itertools.chain(*order)), max_rank) for order in orders], axis=0)


DOCUMENTS = st.lists(
    st.tuples(st.sampled_from(["a", "a\0", "b"]), st.integers(-2, 2), st.sampled_from([0, 0.2, 0.5, 1])),
    min_size=1,
    max_size=12,
)


@given(DOCUMENTS)
def test_rankings_of_queries_that_lie_anywhere(documents: list[tuple[str, int, float]]) -> None:
    queries, scores, gains = zip(*documents, strict=True)
    ours = compute_grouped_ranking_metrics(np.array(scores, np.float32), np.array(gains, np.float64), queries)
    rows = [
        counted(*zip(*[(score, gain) for name, score, gain in documents if name == query], strict=True))
        for query in set(queries)
    ]
    agree([ours[name] for name in ("mrr@10", "ndcg@10", "map")], np.mean(rows, axis=0)[2:], 1e-12, scale=1.0)


def test_figures_of_scikit_learn() -> None:
    random = np.random.default_rng(5)
    scores, gains = random.permutation(23).astype(np.float32), (random.random(23) < 0.3).astype(np.float64)
    ours = compute_grouped_ranking_metrics(scores, gains, ["q"] * 23)
    agree(ours["map"], average_precision_score(gains, scores), 1e-12, scale=1.0)
    agree(ours["ndcg@10"], ndcg_score([gains], [scores], k=10), 1e-12, scale=1.0)


def test_a_long_query_costs_what_it_holds() -> None:
    """An array of equal cells, one for each row, would take 12 GB."""
    queries = ["q" * 30_000, *(str(number) for number in range(99_999))]
    assert compute_grouped_ranking_metrics(np.zeros(100_000, np.float32), np.ones(100_000), queries)["map"] == 1.0


# --- search by vectors


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 9))
def test_nearest(documents: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    queries, found = (random.integers(-2, 3, (size, 3)).astype(np.float32) for size in (5, documents))
    expected = np.argsort(-(queries @ found.T), axis=1, kind="stable")[:, :count]
    ours, _, as_last = find_nearest(queries, found, count)
    assert ours.tolist() == expected.tolist()
    products = queries @ found.T
    last = np.take_along_axis(products, expected[:, -1:], axis=1)
    assert as_last.tolist() == (products == last).sum(axis=1).tolist()


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_a_search_among_equal_vectors(documents: int, at_once: int, max_rank: int, seed: int) -> None:
    """Also where those of one cosine are cut in two at the end of the ranking, or by blocks."""
    random = np.random.default_rng(seed)
    found = np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32)[random.integers(0, 3, documents)]
    queries = random.normal(size=(3, 2)).astype(np.float32)
    answers = [np.sort(random.choice(documents, random.integers(1, documents + 1), replace=False)) for _ in queries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "_DOCUMENTS_AT_ONCE", at_once)
        patch.setattr(ranking, "_MAX_RANK", max_rank)
        ours = compute_search_metrics(queries, found, answers)
    cosines = np.round(queries @ found.T / np.linalg.norm(queries, axis=1, keepdims=True), 5)
    gains = [np.isin(np.arange(documents), own).astype(float).tolist() for own in answers]
    theirs = np.mean([counted(row, own, max_rank) for row, own in zip(cosines.tolist(), gains, strict=True)], axis=0)
    names = ["accuracy@1", "recall@10", "mrr@10", "ndcg@10", "map@100"]
    compared = [0, 4] if max_rank < documents else range(5)
    agree([ours[names[index]] for index in compared], theirs[list(compared)], 1e-5, scale=1.0)
