"""Losses of all rows of an update together, and their gradients by the vectors of its texts: numpy, in float64.

An engine computes vectors and takes back their gradients (`engines.protocol.UpdateLoss`), so these serve every engine: an
update does not depend on micro-batches and processes. The formulas are those of sentence-transformers 5 and 6:

- `in_batch_negatives` (MultipleNegativesRankingLoss, InfoNCE): for every anchor the cross-entropy of its positive among the
  positives and negatives of all rows, by scaled cosines; mean over anchors.
- `cosent`: log(1 + sum of exp(s_i - s_j)) over all pairs i, j of rows where i is to be less alike than j, by scaled cosines.
- `cosine_error`: (cosine - score) squared, mean over rows.
- `listwise`: for every query the cross-entropy of its documents' labels, as shares, among its documents.

Letters: M rows, C candidates, N texts, H values of a vector, D documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.tasks.update_plan import GroupedRows

_LEAST_NORM = 1e-12


class LossAndGradient(NamedTuple):
    """A loss, its gradient by the vectors [N, H], and how many rows are answered right; of k equal answers, 1 / k."""

    loss: float
    gradient_NH: FloatArray
    right: float = 0.0


class PairedRows(NamedTuple):
    """Rows of several sequences that stay in one update; `has_answers`: whether a row can be answered right.

    `loss` of some rows is by the outputs [N, C] for their sequences, these sequences, sorted, and the rows.
    """

    groups: GroupedRows
    loss: Callable[[FloatArray, IntArray, IntArray], LossAndGradient]
    has_answers: bool = True


LossOfVectors: TypeAlias = Callable[[FloatArray], LossAndGradient]


def forbidden_candidates(anchors_M: IntArray, candidates_C: IntArray) -> NDArray[np.bool_]:
    """Return which candidates are not negatives of an anchor, [M, C]; texts of one content have the same number.

    The candidates are the positives of the anchors, in their order, and behind them the negatives. One is forbidden if its
    content is that of the anchor, or of a positive of an anchor with the same content, but for the anchor's own.
    """
    same_MM = anchors_M[:, np.newaxis] == anchors_M
    positives_M = candidates_C[: len(anchors_M)]
    answers_MC = (same_MM.astype(np.float32) @ (positives_M[:, np.newaxis] == candidates_C).astype(np.float32)) > 0
    forbidden_MC: NDArray[np.bool_] = answers_MC | (anchors_M[:, np.newaxis] == candidates_C)
    own = np.arange(len(anchors_M))
    forbidden_MC[own, own] = False
    return forbidden_MC


def in_batch_negatives(
    vectors_NH: FloatArray,
    anchors_M: IntArray,
    candidates_C: IntArray,
    forbidden_MC: NDArray[np.bool_],
    scale: float,
    symmetric: bool,
) -> LossAndGradient:
    """The positive of each anchor among all candidates; `symmetric`: and the anchor among all anchors, the mean of both."""
    units_NH, norms_N = _units(vectors_NH)
    anchors_MH, candidates_CH = units_NH[anchors_M], units_NH[candidates_C]
    scores_MC = np.where(forbidden_MC, -np.inf, scale * anchors_MH @ candidates_CH.T)
    rows = len(anchors_MH)
    own = np.arange(rows)
    is_best_MC = scores_MC == scores_MC.max(axis=1, keepdims=True)
    right = float((is_best_MC[own, own] / is_best_MC.sum(axis=1)).sum())
    loss, by_scores_MC = _cross_entropy(scores_MC)
    if symmetric:
        # A positive that may not be a negative of an anchor may not have that anchor as a negative either.
        backward_scores_MM = scores_MC[:, :rows].T
        backward, by_backward_MM = _cross_entropy(backward_scores_MM)
        loss, by_scores_MC = 0.5 * (loss + backward), 0.5 * by_scores_MC
        by_scores_MC[:, :rows] += 0.5 * by_backward_MM.T
    by_units_NH = np.zeros_like(units_NH)
    np.add.at(by_units_NH, anchors_M, scale * by_scores_MC @ candidates_CH)
    np.add.at(by_units_NH, candidates_C, scale * by_scores_MC.T @ anchors_MH)
    return LossAndGradient(loss, _by_vectors(by_units_NH, units_NH, norms_N), right)


def cosent(
    vectors_NH: FloatArray, firsts_M: IntArray, seconds_M: IntArray, scores_M: FloatArray, scale: float
) -> LossAndGradient:
    """Pairs in the order of their scores."""

    def of_cosines(cosines_M: FloatArray) -> tuple[float, FloatArray]:
        scaled_M = scale * cosines_M
        differences_MM = np.where(scores_M[:, np.newaxis] < scores_M, scaled_M[:, np.newaxis] - scaled_M, -np.inf)
        highest = max(0.0, float(differences_MM.max()))
        shares_MM = np.exp(differences_MM - highest)
        total = shares_MM.sum() + np.exp(-highest)
        shares_MM /= total
        return float(np.log(total) + highest), scale * (shares_MM.sum(axis=1) - shares_MM.sum(axis=0))

    return _loss_of_cosines(vectors_NH, firsts_M, seconds_M, of_cosines)


def cosine_error(vectors_NH: FloatArray, firsts_M: IntArray, seconds_M: IntArray, scores_M: FloatArray) -> LossAndGradient:
    """Cosines that are the scores."""

    def of_cosines(cosines_M: FloatArray) -> tuple[float, FloatArray]:
        errors_M = cosines_M - scores_M
        return float(np.mean(errors_M**2)), 2.0 * errors_M / len(errors_M)

    return _loss_of_cosines(vectors_NH, firsts_M, seconds_M, of_cosines)


def listwise(logits_D1: FloatArray, starts: IntArray, labels_D: FloatArray) -> LossAndGradient:
    """The documents of query i are `starts[i] : starts[i + 1]`; mean over the queries that have a label above 0."""
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


def by_dimensions(vectors_NH: FloatArray, loss: LossOfVectors, dimensions: Sequence[int]) -> LossAndGradient:
    """The sum of a loss over the first so many values of each vector (Matryoshka); over all values where none are named."""
    if not dimensions:
        return loss(vectors_NH)
    total, gradient_NH, parts = 0.0, np.zeros_like(vectors_NH), []
    for width in dimensions:
        parts.append(loss(vectors_NH[:, :width]))
        total += parts[-1].loss
        gradient_NH[:, :width] += parts[-1].gradient_NH
    return LossAndGradient(total, gradient_NH, parts[int(np.argmax(dimensions))].right)


def _cross_entropy(scores_MC: FloatArray) -> tuple[float, FloatArray]:
    """Mean negative log likelihood of the i-th candidate for row i, and its gradient by the scores."""
    own = np.arange(len(scores_MC))
    highest_M1 = scores_MC.max(axis=1, keepdims=True)
    shares_MC = np.exp(scores_MC - highest_M1)
    totals_M1 = shares_MC.sum(axis=1, keepdims=True)
    loss = float(np.mean(highest_M1[:, 0] + np.log(totals_M1[:, 0]) - scores_MC[own, own]))
    shares_MC /= totals_M1
    shares_MC[own, own] -= 1.0
    return loss, shares_MC / len(scores_MC)


def _loss_of_cosines(
    vectors_NH: FloatArray,
    firsts_M: IntArray,
    seconds_M: IntArray,
    of_cosines: Callable[[FloatArray], tuple[float, FloatArray]],
) -> LossAndGradient:
    units_NH, norms_N = _units(vectors_NH)
    first_MH, second_MH = units_NH[firsts_M], units_NH[seconds_M]
    loss, by_cosines_M = of_cosines((first_MH * second_MH).sum(axis=1))
    by_units_NH = np.zeros_like(units_NH)
    np.add.at(by_units_NH, firsts_M, by_cosines_M[:, np.newaxis] * second_MH)
    np.add.at(by_units_NH, seconds_M, by_cosines_M[:, np.newaxis] * first_MH)
    return LossAndGradient(loss, _by_vectors(by_units_NH, units_NH, norms_N))


def _units(vectors_NH: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The vectors with the length 1, and their lengths [N, 1]."""
    norms_N1 = np.maximum(np.sqrt(np.square(vectors_NH).sum(axis=1, keepdims=True)), _LEAST_NORM)
    return vectors_NH / norms_N1, norms_N1


def _by_vectors(by_units_NH: FloatArray, units_NH: FloatArray, norms_N1: FloatArray) -> FloatArray:
    """The gradient by vectors, from that by the same of length 1."""
    along_N1 = (by_units_NH * units_NH).sum(axis=1, keepdims=True)
    gradient_NH: FloatArray = (by_units_NH - along_N1 * units_NH) / norms_N1
    return gradient_NH
