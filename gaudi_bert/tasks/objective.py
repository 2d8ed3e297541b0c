"""What fine-tuning minimises, and how good a model is at a task.

The loss of a task, like those of pretraining, is a sum and what the sum is divided by (`training.objective`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.rows.packs import lay_out_packs
from gaudi_bert.tasks.kinds.task import EVALUATION_EPOCH, Draw, Task
from gaudi_bert.tasks.task_data import TaskData
from gaudi_bert.training.evaluate import EvaluationBatch
from gaudi_bert.training.input.batches import Batch


@dataclass(frozen=True)
class TaskFigures:
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

    def figures(self, sums: FloatArray) -> TaskFigures:
        """The loss, and the share of right answers where the task has such."""
        loss, _, right = sums / max(sums[1], 1.0)
        return TaskFigures(float(loss), float(right) if self.task.best_metric != "pearson" else None)

    def coupling(self, micro_batches: Sequence[BatchArrays], update: int, communicator: Communicator) -> None:
        """None: losses of micro-batches are added up."""


# --- Evaluation: every sequence once, the same figures packed or not, on any number of processes


@dataclass(frozen=True)
class TaskResult:
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


@dataclass(frozen=True)
class TaskEvaluation:
    """Labelled rows that a model is evaluated on; `seed` is that of masks, where the task draws some."""

    task: Task
    data: TaskData
    batch_packs: int
    seed: int
    best_metric: str

    @property
    def sums(self) -> int:
        """Those of the head."""
        return 3

    def batches(self, rank: int, size: int) -> Iterator[EvaluationBatch]:
        """Every pack once, of each length by itself; the last batch is filled up."""
        data, sequences, draw = self.data, self.data.sequences, Draw(self.seed, EVALUATION_EPOCH)
        for which, (length, packing) in enumerate(zip(data.lengths, data.packings, strict=True)):
            most = self.batch_packs * data.lengths[-1] // length
            shape = data.shape(which, min(most, packing.packs))
            packs = data.packs_of(draw.seed, draw.epoch, which)
            for first in range(rank * shape.packs, len(packs), size * shape.packs):
                chosen = np.arange(first, min(first + shape.packs, len(packs)))
                placed = lay_out_packs(sequences, packs, chosen, shape)
                targets = self.task.target_features(sequences, placed, draw)
                scatter = placed.scatter_tokens if self.task.head.per_token else placed.scatter_sequences
                yield EvaluationBatch({**placed.features(sequences), **cast(Batch, targets)}, scatter)

    def counted(self, batch: Batch) -> FloatArray:
        """Nothing else."""
        return np.zeros(0)

    def outputs(self) -> Float32Array | None:
        """Logits [N, C] or [T, C], of heads that keep them."""
        head, sequences = self.task.head, self.data.sequences
        count = len(sequences.input_ids) if head.per_token else len(sequences)
        return np.zeros((count, self.task.width), np.float32) if head.keeps_outputs else None

    def figures(self, totals: FloatArray, outputs: Float32Array | None) -> TaskResult:
        """The loss, and the metrics of the task."""
        loss, weight, right = totals
        sequences, rows = self.data.sequences, self.data.rows
        figures = {"loss": loss / max(weight, 1.0)}
        if outputs is not None:
            figures.update(self.task.metrics(outputs, sequences, rows))
        else:
            figures.update(accuracy=right / max(weight, 1.0), perplexity=math.exp(min(figures["loss"], 700.0)))
        named = {name: float(value) for name, value in figures.items()}
        return TaskResult(named, self.best_metric, len(sequences), len(rows), outputs)
