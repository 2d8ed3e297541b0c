"""What a run minimises: the losses of pretraining, or that of a task.

Both are sums over whatever counts, and what the sums are divided by is known from the data alone, so that micro-batches and
processes add up exactly (`loss_denominators.py`).

Letters: B packs, Q masked slots, K sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, FloatArray
from gaudi_bert.model.losses import pretraining_sums
from gaudi_bert.tasks.task import Task
from gaudi_bert.training.logs.metrics import ReportFigures, TaskFigures, figures_from_sums

__all__ = ["Loss", "Objective", "PretrainingObjective", "TaskObjective", "loss_weights"]

Loss = Literal["token", "sequence"]


class Objective(Protocol):
    """What a run minimises."""

    @property
    def sums(self) -> int:
        """How many sums `loss` gives (K)."""

    @property
    def sequence_feature(self) -> str:
        """The feature that is not 0 for every real sequence."""

    def weights(self, batch: BatchArrays) -> FloatArray:
        """What the first and the second loss of one batch are divided by, float64 [2]."""

    def loss(
        self, outputs: Any, batch: Mapping[str, tf.Tensor], factors: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """The loss, its sums multiplied by `factors` [2], and K scalars that `figures` understands."""

    def figures(self, sums: FloatArray) -> ReportFigures:
        """Figures from the K sums over any number of batches."""


@dataclass(frozen=True)
class PretrainingObjective:
    """The masked-LM and the next-sentence loss."""

    masked_lm_loss: Loss
    sums: int = 8
    sequence_feature: str = "next_sentence_weights"

    def weights(self, batch: BatchArrays) -> FloatArray:
        """As `loss_weights`."""
        return loss_weights(batch, self.masked_lm_loss)

    def loss(
        self, outputs: Any, batch: Mapping[str, tf.Tensor], factors: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """The eight sums of `LossSums`."""
        sums = pretraining_sums(outputs, batch, self.masked_lm_loss)
        return sums.masked_lm_sum * factors[0] + sums.next_sentence_sum * factors[1], sums

    def figures(self, sums: FloatArray) -> ReportFigures:
        """Both losses and accuracies."""
        return figures_from_sums(sums)


@dataclass(frozen=True)
class TaskObjective:
    """The loss of a task."""

    task: Task
    sums: int = 3
    sequence_feature: str = "sequence_weights"

    def weights(self, batch: BatchArrays) -> FloatArray:
        """What the loss is a mean of; there is no second loss."""
        return np.array([batch["target_weights"].sum(dtype=np.float64), 1.0])

    def loss(
        self, outputs: Any, batch: Mapping[str, tf.Tensor], factors: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """The three sums of `Weighed`."""
        weighed = self.task.loss(outputs, batch)
        return weighed.loss * factors[0], weighed

    def figures(self, sums: FloatArray) -> ReportFigures:
        """The loss, and the share of right answers where the task has such."""
        loss, _, right = sums / max(sums[1], 1.0)
        return TaskFigures(float(loss), float(right) if self.task.best_metric != "pearson" else None)


def loss_weights(batch: BatchArrays, loss: Loss) -> FloatArray:
    """What the masked-LM and the next-sentence sums of one batch are divided by, float64 [2].

    Masked tokens (`loss: token`) or sequences that have one (`loss: sequence`); and sequences.
    """
    numbers_BQ = batch["masked_lm_weights"]
    if loss == "token":
        masked = np.count_nonzero(numbers_BQ)
    else:
        depth = int(numbers_BQ.max(initial=0))
        masked = sum(int(np.any(numbers_BQ == number, axis=1).sum()) for number in range(1, depth + 1))
    return np.array([masked, np.count_nonzero(batch["next_sentence_weights"])], np.float64)
