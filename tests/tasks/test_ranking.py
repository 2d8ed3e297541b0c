"""Figures of rankings are those of scikit-learn and of a slow count; equal scores in the order of the documents."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, ndcg_score

from gaudi_bert.tasks.ranking import figures_of_groups
from tests.builders.agree import agree


def counted(scores: list[float], gains: list[float]) -> tuple[float, float, float]:
    """nDCG@10, MRR@10, MAP of one query."""
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    ranks = [rank for rank, place in enumerate(order, start=1) if gains[place] >= 0.5]
    gained = sum(gains[place] / np.log2(rank + 1) for rank, place in enumerate(order[:10], start=1))
    best = sum(gain / np.log2(rank + 1) for rank, gain in enumerate(sorted(gains, reverse=True)[:10], start=1))
    mean = np.mean([number / rank for number, rank in enumerate(ranks, start=1)]) if ranks else 0.0
    first = ranks[0] if ranks else 11
    return gained / best if best else 0.0, 1 / first if first <= 10 else 0.0, float(mean)


DOCUMENTS = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-3, 3), st.sampled_from([0, 0.5, 1])), min_size=1)


@given(DOCUMENTS)
def test_rankings_of_queries_that_lie_anywhere(documents: list[tuple[str, int, float]]) -> None:
    queries, scores, gains = zip(*documents, strict=True)
    ours = figures_of_groups(np.array(scores, np.float32), np.array(gains, np.float64), queries)
    rows = [
        counted(*zip(*[(score, gain) for name, score, gain in documents if name == query], strict=True))
        for query in set(queries)
    ]
    agree([ours[name] for name in ("ndcg@10", "mrr@10", "map")], np.mean(rows, axis=0), 1e-12, scale=1.0)


def test_figures_of_scikit_learn() -> None:
    random = np.random.default_rng(5)
    scores, gains = random.permutation(23).astype(np.float32), (random.random(23) < 0.3).astype(np.float64)
    ours = figures_of_groups(scores, gains, ["q"] * 23)
    agree(ours["map"], average_precision_score(gains, scores), 1e-12, scale=1.0)
    agree(ours["ndcg@10"], ndcg_score([gains], [scores], k=10), 1e-12, scale=1.0)
