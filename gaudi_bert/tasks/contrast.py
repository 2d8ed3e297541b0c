"""Losses over all rows of an update together, and their gradients with respect to the embeddings, computed in float64.

An engine computes the embeddings, and receives their gradients (`engines.protocol.UpdateLoss`). Therefore the losses work
with every engine, and an update does not depend on how it is divided into micro-batches and processes. Everything is
computed with numpy. The formulas are those of sentence-transformers 5 and 6:

- `in_batch_negatives_loss` (MultipleNegativesRankingLoss, InfoNCE): for every anchor, the cross-entropy of its positive
  among the positives and negatives of all rows, with scaled cosines as logits. The loss is the mean over anchors.
- `cosent_loss`: log(1 + sum of exp(s_i - s_j)), with the scaled cosines s, over all pairs of rows (i, j) in which row i has
  a lower score than row j.
- `cosine_error_loss`: (cosine - score) squared, as the mean over rows.
- `listwise_loss`: for every query, the cross-entropy between the labels of its documents, divided by their sum, and the
  softmax of their logits.

Letters:
    M: rows.
    C: candidates.
    N: texts.
    H: values of an embedding.
    D: documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.tasks.update_plan import SequenceGroups

_LEAST_NORM = 1e-12


class LossAndGradient(NamedTuple):
    """The value of a loss, and its gradient with respect to the outputs of the model.

    Attributes:
        loss: The loss.
        gradient_NH: The gradient with respect to the outputs [N, H].
        right: The number of rows for which the correct candidate is best. If k candidates are equally good, the row counts 1
            / k.
    """

    loss: float
    gradient_NH: FloatArray
    right: float = 0.0


class RowGroups(NamedTuple):
    """Training rows that consist of several sequences each, and a loss that is computed from all rows of one weight update
    together.

    Attributes:
        groups: The sequences of each row.
        loss: `loss(outputs, sequences, rows)` returns the loss of some rows. `outputs` [N, C] belong to `sequences`, which
            are the sequences of the rows in ascending order.
        has_answers: Whether a prediction for a row is right or wrong, so that an accuracy exists.
    """

    groups: SequenceGroups
    loss: Callable[[FloatArray, IntArray, IntArray], LossAndGradient]
    has_answers: bool = True


LossOfVectors: TypeAlias = Callable[[FloatArray], LossAndGradient]


def find_forbidden_candidates(anchors_M: IntArray, candidates_C: IntArray) -> NDArray[np.bool_]:
    """For each anchor text, return which candidate texts must not count as wrong answers in the loss, bool [M, C].

    A candidate is forbidden if it has the same content as the anchor, or the same content as a positive of any anchor that
    is equal to this anchor. The anchor's own positive is never forbidden.

    Args:
        anchors_M: The content of each anchor as a number. Equal texts have equal numbers.
        candidates_C: The content of each candidate: first the positives in the order of the anchors, then the negatives.
    """
    same_MM = anchors_M[:, np.newaxis] == anchors_M
    positives_M = candidates_C[: len(anchors_M)]
    answers_MC = (same_MM.astype(np.float32) @ (positives_M[:, np.newaxis] == candidates_C).astype(np.float32)) > 0
    forbidden_MC: NDArray[np.bool_] = answers_MC | (anchors_M[:, np.newaxis] == candidates_C)
    own = np.arange(len(anchors_M))
    forbidden_MC[own, own] = False
    return forbidden_MC


def in_batch_negatives_loss(
    vectors_NH: FloatArray,
    anchors_M: IntArray,
    candidates_C: IntArray,
    forbidden_MC: NDArray[np.bool_],
    scale: float,
    symmetric: bool,
) -> LossAndGradient:
    """Return the InfoNCE loss and its gradient. The loss is small if each anchor text is closer to its matching candidate
    text than to all other candidates.

    Args:
        vectors_NH: The embeddings of the texts.
        anchors_M: The text of each anchor.
        candidates_C: The text of each candidate: first the positives in the order of the anchors, then the negatives.
        forbidden_MC: Candidates that must not serve as negatives of an anchor.
        scale: The factor of the cosines.
        symmetric: Whether the loss of finding the anchor of each positive among all anchors is included, as the mean of both
            losses.
    """
    units_NH, norms_N = _normalize(vectors_NH)
    anchors_MH, candidates_CH = units_NH[anchors_M], units_NH[candidates_C]
    scores_MC = np.where(forbidden_MC, -np.inf, scale * anchors_MH @ candidates_CH.T)
    rows = len(anchors_MH)
    own = np.arange(rows)
    is_best_MC = scores_MC == scores_MC.max(axis=1, keepdims=True)
    right = float((is_best_MC[own, own] / is_best_MC.sum(axis=1)).sum())
    loss, by_scores_MC = _cross_entropy_of_diagonal(scores_MC)
    if symmetric:
        # The symmetric loss also compares each positive with all anchors. If a positive must not be a negative of an anchor,
        # the anchor must not be a negative of this positive either. So use the same scores in both directions.
        backward, by_backward_MM = _cross_entropy_of_diagonal(scores_MC[:, :rows].T)
        loss, by_scores_MC = 0.5 * (loss + backward), 0.5 * by_scores_MC
        by_scores_MC[:, :rows] += 0.5 * by_backward_MM.T
    unit_gradient_NH = np.zeros_like(units_NH)
    np.add.at(unit_gradient_NH, anchors_M, scale * by_scores_MC @ candidates_CH)
    np.add.at(unit_gradient_NH, candidates_C, scale * by_scores_MC.T @ anchors_MH)
    return LossAndGradient(loss, _backpropagate_normalization(unit_gradient_NH, units_NH, norms_N), right)


def cosent_loss(
    vectors_NH: FloatArray, first_texts_M: IntArray, second_texts_M: IntArray, scores_M: FloatArray, scale: float
) -> LossAndGradient:
    """Return the CoSENT loss and its gradient. The loss is small if the cosines of all pairs are in the same order as their
    scores.

    Args:
        vectors_NH: The embeddings of the texts.
        first_texts_M: The first text of each pair.
        second_texts_M: The second text of each pair.
        scores_M: The score of each pair.
        scale: The factor of the cosines.
    """

    def loss_of_cosines(cosines_M: FloatArray) -> tuple[float, FloatArray]:
        """Return the CoSENT loss of the pairs with these cosines, and its gradient with respect to the cosines."""
        scaled_M = scale * cosines_M
        differences_MM = np.where(scores_M[:, np.newaxis] < scores_M, scaled_M[:, np.newaxis] - scaled_M, -np.inf)
        highest = max(0.0, float(differences_MM.max()))
        shares_MM = np.exp(differences_MM - highest)
        total = shares_MM.sum() + np.exp(-highest)
        shares_MM /= total
        return float(np.log(total) + highest), scale * (shares_MM.sum(axis=1) - shares_MM.sum(axis=0))

    return _compute_loss_from_cosines(vectors_NH, first_texts_M, second_texts_M, loss_of_cosines)


def cosine_error_loss(
    vectors_NH: FloatArray, first_texts_M: IntArray, second_texts_M: IntArray, scores_M: FloatArray
) -> LossAndGradient:
    """Return the mean squared difference between the cosines of pairs and their scores, and its gradient.

    Args:
        vectors_NH: The embeddings of the texts.
        first_texts_M: The first text of each pair.
        second_texts_M: The second text of each pair.
        scores_M: The score of each pair.
    """

    def loss_of_cosines(cosines_M: FloatArray) -> tuple[float, FloatArray]:
        """Return the mean squared error of these cosines, and its gradient with respect to the cosines."""
        errors_M = cosines_M - scores_M
        return float(np.mean(errors_M**2)), 2.0 * errors_M / len(errors_M)

    return _compute_loss_from_cosines(vectors_NH, first_texts_M, second_texts_M, loss_of_cosines)


def listwise_loss(logits_D1: FloatArray, starts: IntArray, labels_D: FloatArray) -> LossAndGradient:
    """Return the ListNet loss and its gradient. Both are means over the queries that have a document with a label above 0.

    Args:
        logits_D1: The logits of the documents, query by query.
        starts: int64 [queries + 1]. The documents of query i are `[starts[i] : starts[i + 1]]`.
        labels_D: The labels of the documents.
    """
    gradient_D1 = np.zeros_like(logits_D1)
    losses, right = [], 0.0
    for first, last in itertools.pairwise(starts):
        logits, labels = logits_D1[first:last, 0], labels_D[first:last]
        if labels.sum() > 0:
            shares = labels / labels.sum()
            likelihoods = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            losses.append(-float(shares @ likelihoods))
            right += float(np.mean(labels[logits == logits.max()] == labels.max()))
            gradient_D1[first:last, 0] = np.exp(likelihoods) - shares
    return LossAndGradient(float(np.sum(losses)) / max(1, len(losses)), gradient_D1 / max(1, len(losses)), right)


def matryoshka_loss(vectors_NH: FloatArray, loss: LossOfVectors, dimensions: Sequence[int]) -> LossAndGradient:
    """Compute a loss on several prefixes of the embeddings, such as their first 64 and 256 values, and return the sum.

    Embeddings that are trained with this loss are known as Matryoshka embeddings.

    Args:
        vectors_NH: The embeddings of the texts.
        loss: The loss of embeddings of any width.
        dimensions: The number of values in each prefix. If empty, the loss of the complete embeddings is returned.
    """
    if not dimensions:
        return loss(vectors_NH)
    total, gradient_NH, parts = 0.0, np.zeros_like(vectors_NH), []
    for width in dimensions:
        parts.append(loss(vectors_NH[:, :width]))
        total += parts[-1].loss
        gradient_NH[:, :width] += parts[-1].gradient_NH
    return LossAndGradient(total, gradient_NH, parts[int(np.argmax(dimensions))].right)


def _cross_entropy_of_diagonal(scores_MC: FloatArray) -> tuple[float, FloatArray]:
    """Return the mean cross-entropy of the rows of a score matrix, and its gradient. The correct candidate of row i is
    candidate i.
    """
    own = np.arange(len(scores_MC))
    highest_M1 = scores_MC.max(axis=1, keepdims=True)
    shares_MC = np.exp(scores_MC - highest_M1)
    totals_M1 = shares_MC.sum(axis=1, keepdims=True)
    loss = float(np.mean(highest_M1[:, 0] + np.log(totals_M1[:, 0]) - scores_MC[own, own]))
    shares_MC /= totals_M1
    shares_MC[own, own] -= 1.0
    return loss, shares_MC / len(scores_MC)


def _compute_loss_from_cosines(
    vectors_NH: FloatArray,
    first_texts_M: IntArray,
    second_texts_M: IntArray,
    loss_of_cosines: Callable[[FloatArray], tuple[float, FloatArray]],
) -> LossAndGradient:
    """Compute the cosine of each pair of embeddings. Return the loss that `loss_of_cosines` computes from them, and its
    gradient with respect to the embeddings.

    `loss_of_cosines` returns the loss of the cosines and its gradient with respect to them.
    """
    units_NH, norms_N = _normalize(vectors_NH)
    first_MH, second_MH = units_NH[first_texts_M], units_NH[second_texts_M]
    loss, by_cosines_M = loss_of_cosines((first_MH * second_MH).sum(axis=1))
    unit_gradient_NH = np.zeros_like(units_NH)
    np.add.at(unit_gradient_NH, first_texts_M, by_cosines_M[:, np.newaxis] * second_MH)
    np.add.at(unit_gradient_NH, second_texts_M, by_cosines_M[:, np.newaxis] * first_MH)
    return LossAndGradient(loss, _backpropagate_normalization(unit_gradient_NH, units_NH, norms_N))


def _normalize(vectors_NH: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Scale the embeddings to norm 1, and return them [N, H] with their original norms [N, 1]."""
    norms_N1 = np.maximum(np.sqrt(np.square(vectors_NH).sum(axis=1, keepdims=True)), _LEAST_NORM)
    return vectors_NH / norms_N1, norms_N1


def _backpropagate_normalization(unit_gradient_NH: FloatArray, units_NH: FloatArray, norms_N1: FloatArray) -> FloatArray:
    """Convert a gradient with respect to normalized embeddings into the gradient with respect to the embeddings
    themselves.
    """
    along_N1 = (unit_gradient_NH * units_NH).sum(axis=1, keepdims=True)
    gradient_NH: FloatArray = (unit_gradient_NH - along_N1 * units_NH) / norms_N1
    return gradient_NH
