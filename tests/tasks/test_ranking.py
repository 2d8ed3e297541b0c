"""Figures of rankings are those of scikit-learn and of a slow count; equal scores in the order of the documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, ndcg_score

from gaudi_bert.tasks import ranking
from gaudi_bert.tasks.ranking import figures_of_groups, nearest, search_figures
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


# --- search by vectors


def counted_search(queries: np.ndarray, documents: np.ndarray, answers: list[set[int]]) -> dict[str, float]:
    """As sentence-transformers' InformationRetrievalEvaluator."""
    evaluation = pytest.importorskip(
        "sentence_transformers.sentence_transformer.evaluation", reason="SENTENCE-TRANSFORMERS MISSING: install it --no-deps"
    )
    torch = pytest.importorskip("torch")
    from sentence_transformers.util import cos_sim

    named = [f"{number:06}" for number in range(len(documents))]
    evaluator = evaluation.InformationRetrievalEvaluator(
        {str(number): str(number) for number in range(len(queries))},
        dict(zip(named, named, strict=True)),
        {str(number): {named[place] for place in own} for number, own in enumerate(answers)},
        corpus_chunk_size=97,
        score_functions={"cosine": cos_sim},
        write_csv=False,
    )

    def embed(_: object, texts: list[str], **options: object) -> object:
        of_queries = options["encode_fn_name"] == "query"
        return torch.tensor((queries if of_queries else documents)[[int(text) for text in texts]])

    evaluator.embed_inputs = embed
    scores = evaluator.compute_all_metrics(None)["cosine"]
    return {
        "ndcg@10": scores["ndcg@k"][10],
        "mrr@10": scores["mrr@k"][10],
        "accuracy@1": scores["accuracy@k"][1],
        "recall@10": scores["recall@k"][10],
        "map@100": scores["map@k"][100],
    }


@pytest.mark.slow
@pytest.mark.parametrize("documents", [7, 61, 211])
def test_search_figures_are_those_of_sentence_transformers(documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With documents that are equal, so that scores are, and blocks that do not divide anything."""
    monkeypatch.setattr(ranking, "_QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(ranking, "_DOCUMENTS_AT_ONCE", 13)
    random = np.random.default_rng(documents)
    found = random.normal(size=(documents, 3)).astype(np.float32)[random.integers(0, documents, documents)]
    queries = random.normal(size=(17, 3)).astype(np.float32)
    answers = [set(random.choice(documents, random.integers(1, 5), replace=False).tolist()) for _ in queries]
    ours = search_figures(queries, found, [np.array(sorted(own)) for own in answers])
    agree(ours, counted_search(queries, found, answers), 1e-6, scale=1.0)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 9))
def test_nearest(documents: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    queries, found = (random.integers(-2, 3, (size, 3)).astype(np.float32) for size in (5, documents))
    expected = np.argsort(-(queries @ found.T), axis=1, kind="stable")[:, :count]
    assert nearest(queries, found, count).tolist() == expected.tolist()
