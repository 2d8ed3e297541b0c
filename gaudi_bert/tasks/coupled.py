"""Training on rows whose loss is one of all rows of an update: its batches, its objective, its evaluation.

A batch holds, besides the features of the encoder, `text_numbers` [B, S]: the number of each sequence among those of its
update, -1 for none. With it the outputs of all micro-batches and processes are put side by side.

Letters: B packs of a batch, S depth, N sequences of an update, C values of an output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray, IntArray
from gaudi_bert.engines.protocol import Communicator, Coupling
from gaudi_bert.rows.packs import Packs, Placement, lay_out_packs
from gaudi_bert.rows.types import Sequences
from gaudi_bert.tasks.contrast import CoupledRows
from gaudi_bert.tasks.kinds.task import Task
from gaudi_bert.tasks.objective import TaskEvaluation, TaskFigures, TaskResult
from gaudi_bert.tasks.update_plan import RowStream, UpdateShape
from gaudi_bert.training.input.batches import Batch


@dataclass(frozen=True)
class CoupledData:
    """Tokenized rows, the stream of them, and the shape of its updates."""

    sequences: Sequences
    rows: CoupledRows
    stream: RowStream
    shape: UpdateShape

    @cached_property
    def most_sequences(self) -> int:
        """Of an update: so many are enough for all of its packs."""
        return self.shape.packs * self.shape.batch.depth

    def batches(self, first_update: int, rank: int) -> Iterator[Batch]:
        """The micro-batches of one process from an update on, counted from 0; after the last update, empty ones."""
        shape, batch_packs = self.shape, self.shape.batch.packs
        for update in itertools.count(first_update):
            packs, sequences = Packs(np.zeros(0, np.int64), np.zeros(1, np.int64)), np.zeros(0, np.int64)
            if update < self.stream.updates:
                packs, sequences = self.stream.packs_of(update, shape.batch)
            for number in range(shape.micro_batches):
                chosen = rank + shape.processes * (number * batch_packs + np.arange(batch_packs))
                yield self._batch(packs, sequences, chosen[chosen < len(packs)])

    def _batch(self, packs: Packs, sequences: IntArray, chosen: IntArray) -> Batch:
        of_data = Packs(sequences[packs.members], packs.starts)
        placed = lay_out_packs(self.sequences, of_data, chosen, self.shape.batch)
        return {**placed.features(self.sequences), **coupled_features(placed, sequences)}


def coupled_features(placed: Placement, sequences: IntArray) -> Batch:
    """`text_numbers`; the sequences are those of the update, sorted."""
    return {"text_numbers": placed.each(np.searchsorted(sequences, placed.sequences).astype(np.int32), -1)}


@dataclass(frozen=True)
class VectorEvaluation(TaskEvaluation):
    """Rows whose texts are embedded; vectors have `hidden_size` values."""

    hidden_size: int = 0

    @property
    def sums(self) -> int:
        """A text alone has no loss."""
        return 1

    def counted(self, batch: Batch) -> FloatArray:
        """Packs."""
        return np.ones(1)

    def outputs(self) -> Float32Array:
        """Vectors [N, H] of all texts."""
        return np.zeros((len(self.data.sequences), self.hidden_size), np.float32)

    def figures(self, totals: FloatArray, outputs: Float32Array | None) -> TaskResult:
        """The metrics of the task."""
        sequences, rows = self.data.sequences, self.data.rows
        figures = self.task.metrics(cast(Float32Array, outputs), sequences, rows)
        return TaskResult(figures, self.best_metric, len(sequences), len(rows), outputs)


@dataclass(frozen=True)
class CoupledObjective:
    """One loss of all rows of an update; sums: the loss times the rows, the rows, and those that are answered right."""

    task: Task
    data: CoupledData
    sums: int = 3
    sequence_feature: str = "sequence_weights"

    def weights(self, batch: BatchArrays) -> FloatArray:
        """Nothing is divided."""
        return np.ones(2)

    def figures(self, sums: FloatArray) -> TaskFigures:
        """The mean loss of a row, and the share of rows that are answered right where rows can be."""
        loss, _, right = sums / max(sums[1], 1.0)
        return TaskFigures(float(loss), float(right) if self.data.rows.has_answers else None)

    def coupling(self, micro_batches: Sequence[BatchArrays], update: int, communicator: Communicator) -> Coupling:
        """The loss of an update, counted from 1."""
        stream, numbers = self.data.stream, [batch["text_numbers"] for batch in micro_batches]
        sequences = stream.distinct(update - 1, update)[0]
        rows = stream.rows_of(update - 1, update)

        def coupled(outputs: Sequence[NDArray[Any]]) -> tuple[FloatArray, list[FloatArray]]:
            together_NC = np.zeros((self.data.most_sequences, outputs[0].shape[-1]))
            for numbers_BS, output_BSC in zip(numbers, outputs, strict=True):
                together_NC[numbers_BS[numbers_BS >= 0]] = output_BSC[numbers_BS >= 0]
            together_NC = communicator.sum_array(together_NC)[: len(sequences)]
            result = self.data.rows.loss(together_NC, sequences, rows)
            gradients = [np.where(each[..., np.newaxis] >= 0, result.gradient_NH[each], 0.0) for each in numbers]
            sums = np.array([result.loss * len(rows), len(rows), result.right], np.float64)
            return sums * communicator.is_first, gradients

        return coupled
