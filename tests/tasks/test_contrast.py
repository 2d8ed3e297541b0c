"""Losses of vectors, and their gradients: those of sentence-transformers by torch's autograd, in float64; equal texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gaudi_bert.tasks.contrast import (
    LossAndGradient,
    cosent_loss,
    cosine_error_loss,
    find_forbidden_candidates,
    in_batch_negatives_loss,
    listwise_loss,
    matryoshka_loss,
)
from tests.builders.agree import agree

torch = pytest.importorskip("torch", exc_type=ImportError)

ROWS, WIDTH = 7, 13
RANDOM = np.random.default_rng(5)
VECTORS = RANDOM.normal(size=(4 * ROWS, WIDTH))
# Anchors, positives, and two columns of negatives.
COLUMNS = np.arange(4 * ROWS).reshape(4, ROWS)
SCORES = RANDOM.choice([0.125, 0.5, 0.875], ROWS)  # exact in float32, to which they are cast there
CONTENT = np.arange(4 * ROWS)


def check(ours: LossAndGradient, loss_of: Callable[[Any], Any]) -> None:
    """Ours are the loss and the gradient that torch computes."""
    vectors = torch.tensor(VECTORS, requires_grad=True)
    loss = loss_of(vectors)
    loss.backward()
    agree(ours.loss, float(loss.detach()), 1e-12)
    agree(ours.gradient_NH, vectors.grad.numpy(), 1e-10)


def library_losses() -> Any:
    reason = "SENTENCE-TRANSFORMERS MISSING: install it --no-deps"
    return pytest.importorskip("sentence_transformers.sentence_transformer.losses", reason=reason)


def by_texts(vectors: Any, anchors: Any, candidates: Any, content: Any = CONTENT, symmetric: bool = False) -> Any:
    forbidden = find_forbidden_candidates(content[anchors], content[candidates])
    assert forbidden.any() == (content is not CONTENT)
    return in_batch_negatives_loss(vectors, anchors, candidates, forbidden, 20.0, symmetric)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("negatives", [0, 1, 2])
def test_in_batch_negatives(negatives: int, symmetric: bool) -> None:
    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    library = library_losses().MultipleNegativesRankingLoss(None, directions=directions, partition_mode="per_direction")
    ours = by_texts(VECTORS, COLUMNS[0], COLUMNS[1 : 2 + negatives].ravel(), symmetric=symmetric)
    columns = COLUMNS[: 2 + negatives]
    check(ours, lambda vectors: library.compute_loss_from_embeddings([vectors[column] for column in columns], None))


@pytest.mark.parametrize("name", ["CoSENTLoss", "CosineSimilarityLoss"])
def test_scored_pairs(name: str) -> None:
    library, labels = getattr(library_losses(), name)(None), torch.tensor(SCORES)
    ours = (
        cosent_loss(VECTORS, *COLUMNS[:2], SCORES, 20.0)
        if name == "CoSENTLoss"
        else cosine_error_loss(VECTORS, *COLUMNS[:2], SCORES)
    )
    check(ours, lambda vectors: library.compute_loss_from_embeddings([vectors[each] for each in COLUMNS[:2]], labels))


def test_dimensions() -> None:
    library = library_losses().MultipleNegativesRankingLoss(None)
    ours = matryoshka_loss(VECTORS, lambda vectors: by_texts(vectors, COLUMNS[0], COLUMNS[1:3].ravel()), (13, 8, 3))

    def theirs(vectors: Any) -> Any:
        return sum(
            library.compute_loss_from_embeddings([vectors[column, :width] for column in COLUMNS[:3]], None)
            for width in (13, 8, 3)
        )

    check(ours, theirs)
    whole = by_texts(VECTORS, COLUMNS[0], COLUMNS[1:3].ravel())
    assert matryoshka_loss(VECTORS, lambda _: whole, ()) is whole


def slow_in_batch_negatives(vectors: Any, rows: list[tuple[int, int, list[int]]], content: np.ndarray) -> Any:
    """Row by row, without the candidates that say what the anchor says, or what answers an anchor that says the same."""
    candidates = [(row, positive) for row, (_, positive, _) in enumerate(rows)]
    candidates += [(-1, text) for _, _, negatives in rows for text in negatives]
    losses = []
    for number, (anchor, positive, _) in enumerate(rows):
        right = {content[anchor]} | {content[p] for a, p, _ in rows if content[a] == content[anchor]}
        kept = [text for row, text in candidates if row == number or content[text] not in right]
        scores = torch.stack([20 * torch.cosine_similarity(vectors[anchor], vectors[text], dim=0) for text in kept])
        losses.append(scores.logsumexp(0) - 20 * torch.cosine_similarity(vectors[anchor], vectors[positive], dim=0))
    return torch.stack(losses).mean()


def test_equal_texts_are_no_negatives() -> None:
    """Rows share a positive, an anchor, and a negative that is another row's positive; as documents they are other texts."""
    content = CONTENT.copy()
    content[20] = content[0]  # a negative that says what the anchor of row 0 says
    rows = [(0, 7, [14, 20]), (1, 7, []), (2, 8, [7]), (2, 9, [15, 15]), (3, 10, [8, 16, 17])]
    candidates = np.array([*(row[1] for row in rows), *(text for row in rows for text in row[2])])
    ours = by_texts(VECTORS, np.array([row[0] for row in rows]), candidates, content)
    check(ours, lambda vectors: slow_in_batch_negatives(vectors, rows, content))


def test_listwise() -> None:
    starts, labels = np.array([0, 3, 5, 12, 28]), RANDOM.choice([0.0, 0.0, 0.5, 1.0], 28)
    labels[[0, 3, 4]] = 1.0, 0.0, 0.0  # the second query has no answer
    ours = listwise_loss(VECTORS[:, :1], starts, labels)

    def theirs(vectors: Any) -> Any:
        parts = [(vectors[a:b, 0], torch.tensor(labels[a:b])) for a, b in itertools.pairwise(starts)]
        losses = [torch.nn.functional.cross_entropy(x, y / y.sum()) for x, y in parts if y.sum() > 0]
        assert len(losses) == 3
        return torch.stack(losses).mean()

    check(ours._replace(gradient_NH=np.pad(ours.gradient_NH, [(0, 0), (0, WIDTH - 1)])), theirs)
