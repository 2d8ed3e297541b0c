"""What fine-tuning minimises, and how good a model is at a task.

The loss of a task, like those of pretraining, is a sum and what the sum is divided by (`training.objective`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray
from gaudi_bert.engines.protocol import Communicator, Model
from gaudi_bert.rows.packs import lay_out_packs
from gaudi_bert.tasks.kinds.task import Draw, Task
from gaudi_bert.tasks.task_data import EVALUATION_EPOCH, TaskData


@dataclass(frozen=True)
class _TaskFigures:
    """Mean loss of a task, and the share of right answers; None where answers are not right or wrong."""

    loss: float
    accuracy: float | None

    def as_json(self) -> dict[str, float]:
        """By name, as in `metrics.jsonl`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def line(self) -> str:
        """For people."""
        return ", ".join(f"{name} {value:.4f}" for name, value in self.as_json().items())


@dataclass(frozen=True)
class TaskObjective:
    """The loss of a task; the sums are those of `model.heads.TaskHead`."""

    task: Task
    sums: int = 3
    sequence_feature: str = "sequence_weights"

    def weights(self, batch: BatchArrays) -> FloatArray:
        """What the loss is a mean of, the only loss."""
        return np.array([batch["target_weights"].sum(dtype=np.float64), 1.0])

    def figures(self, sums: FloatArray) -> _TaskFigures:
        """The loss, and the share of right answers where the task has such."""
        loss, _, right = sums / max(sums[1], 1.0)
        return _TaskFigures(float(loss), float(right) if self.task.best_metric != "pearson" else None)

    def coupling(self, micro_batches: Sequence[BatchArrays], update: int, communicator: Communicator) -> None:
        """None: losses of micro-batches are added up."""


# --- Evaluation: every sequence once, the same figures packed or not, on any number of processes
#
# The processes share the batches. The model's outputs for each sequence (or token) are put back into the order of the data,
# added up over the processes, where all but one hold zeros, and only then measured. So no figure is a mean of means.


@dataclass(frozen=True)
class _TaskEvaluation:
    """The result.

    `sequences` counts windows of long rows each; `logits`, [N, C] or [T, C], are in the order of the data, and None for a
    task without answers.
    """

    figures: Mapping[str, float]
    best_metric: str
    sequences: int
    rows: int
    logits: Float32Array | None = field(repr=False)

    @property
    def accuracy(self) -> float:
        """The metric that tells the best checkpoint."""
        return self.figures[self.best_metric]

    def as_json(self) -> dict[str, float]:
        """By name, as in `metrics.json` and `metrics.jsonl`."""
        return {**self.figures, "evaluated_rows": self.rows, "evaluated_sequences": self.sequences}

    def line(self) -> str:
        """For people."""
        figures = ", ".join(f"{name} {value:.4f}" for name, value in self.figures.items())
        return f"{figures}; over {self.rows:,} rows"


class TaskEvaluator:
    """Evaluates one model on one set.

    `seed` is that of masks, where the task draws some.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        data: TaskData,
        communicator: Communicator,
        *,
        batch_packs: int,
        seed: int,
        best_metric: str,
    ) -> None:
        self._model, self._task, self._data, self._communicator = model, task, data, communicator
        self._shape = data.shape(min(batch_packs, max(1, data.packing.packs)))
        self._draw, self._best_metric = Draw(seed, EVALUATION_EPOCH), best_metric

    def run(self) -> _TaskEvaluation:
        """Evaluate; every process calls it at the same time."""
        data, task, head, communicator = self._data, self._task, self._task.head, self._communicator
        sequences = data.sequences
        packs = data.packs_of(self._draw.seed, self._draw.epoch)
        count = len(sequences.input_ids) if head.per_token else len(sequences)
        logits = np.zeros((count, head.width), np.float32) if head.keeps_outputs else None
        sums = np.zeros(3, np.float64)
        batch_packs = self._shape.packs
        for first in range(communicator.rank * batch_packs, len(packs), communicator.size * batch_packs):
            communicator.note("an evaluation", slow=first < communicator.size * batch_packs)
            chosen = np.arange(first, min(first + batch_packs, len(packs)))
            placed = lay_out_packs(sequences, packs, chosen, self._shape)
            batch = {**placed.features(sequences), **task.target_features(sequences, placed, self._draw)}
            values, batch_sums = self._model.evaluate(batch)
            sums += batch_sums.astype(np.float64)
            if logits is not None and values is not None:
                scatter = placed.scatter_tokens if head.per_token else placed.scatter_sequences
                scatter(values, logits)
        loss, weight, right = communicator.sum_array(sums)
        figures = {"loss": loss / max(weight, 1.0)}
        if logits is not None:
            if communicator.size > 1:
                logits = communicator.sum_array(logits).astype(np.float32)
            figures.update(task.metrics(logits, sequences, data.rows))
        else:
            figures.update(accuracy=right / max(weight, 1.0), perplexity=math.exp(min(figures["loss"], 700.0)))
        rows = len(data.rows)
        return _TaskEvaluation({n: float(v) for n, v in figures.items()}, self._best_metric, len(sequences), rows, logits)
