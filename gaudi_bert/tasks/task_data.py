"""Sequences of a task to batches of packs: planned once, paired differently each epoch, every sequence once an epoch.

The plan states how many packs hold which lengths; which sequences share a pack, and the order of the packs, are seeded
permutations of (seed, epoch). Packs are numbered through all epochs, and batch k of process r of R takes the packs
k R b + r, k R b + r + R, ...: so an update holds the same packs whatever the number of processes, nothing is dropped at the
end of an epoch, and a position is one number. After the last epoch come empty packs, which fill up the last update.

Letters: b packs of a batch, R processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np

from gaudi_bert.common.arrays import IntArray, random_words
from gaudi_bert.common.dealing import deal_sequences
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import Packing
from gaudi_bert.rows.packs import BatchShape, Packs, lay_out_packs
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.tasks.kinds.task import Draw, Task
from gaudi_bert.training.input.batches import Batch, TrainingOrder

EVALUATION_EPOCH = -1


@dataclass(frozen=True)
class TaskData:
    """Tokenized sequences and how they are packed.

    `rows` are those that the sequences come from, where answers are needed; else ().
    """

    path: Path
    identity: str
    rows: tuple[Row, ...] = field(repr=False)
    sequences: Sequences = field(repr=False)
    packing: Packing = field(repr=False)

    @classmethod
    def planned(
        cls,
        path: Path,
        identity: str,
        rows: tuple[Row, ...],
        sequences: Sequences,
        *,
        max_sequence_length: int,
        algorithm: str,
        depth: int | str,
    ) -> TaskData:
        """Plan the packs of `sequences`."""
        counts = np.bincount(sequences.lengths, minlength=max_sequence_length + 1)[1:]
        packing = pack_histogram(Histogram(max_sequence_length, counts), algorithm, depth)
        return cls(path, identity, rows, sequences, packing)

    @property
    def length(self) -> int:
        """Positions of a pack."""
        return self.packing.histogram.max_sequence_length

    def shape(self, batch_packs: int) -> BatchShape:
        """The static shape of a batch of so many packs."""
        return BatchShape(batch_packs, self.length, self.packing.depth_used)

    def packs_of(self, seed: int, epoch: int) -> Packs:
        """Which sequences share a pack in an epoch, and the order of the packs."""
        epoch_seed = int(random_words(1, seed, "task epoch", epoch + 1)[0])
        lengths = self.sequences.lengths.astype(np.int32)
        assignment = deal_sequences(lengths, list(self.packing.mixture.items()), epoch_seed, 0)
        return Packs(assignment.members.astype(np.int64), assignment.starts)


def _task_batch(data: TaskData, task: Task, packs: Packs, chosen: IntArray, shape: BatchShape, draw: Draw) -> Batch:
    """The features of some packs, [b, ...]; those that are missing are empty."""
    placed = lay_out_packs(data.sequences, packs, chosen, shape)
    return {**placed.features(data.sequences), **cast(Batch, task.target_features(data.sequences, placed, draw))}


def task_batches(data: TaskData, task: Task, batch_packs: int, epochs: int, order: TrainingOrder) -> Iterator[Batch]:
    """Batches of the packs of all epochs, and then empty ones without end."""
    shape, each = data.shape(batch_packs), data.packing.packs
    shuffled = lru_cache(maxsize=2)(lambda epoch: data.packs_of(order.seed, epoch))
    for number in itertools.count(order.packs_done // (batch_packs * order.size)):
        packs = order.rank + order.size * (number * batch_packs + np.arange(batch_packs))
        packs = packs[packs < epochs * each]
        parts = [
            (int(epoch), _task_batch(data, task, shuffled(int(epoch)), packs[packs // each == epoch] % each, shape, draw))
            for epoch in np.unique(packs // each)
            for draw in [Draw(order.seed, int(epoch))]
        ]
        if len(parts) == 1:
            yield parts[0][1]
            continue
        batch = _task_batch(data, task, shuffled(0), packs[:0], shape, Draw(order.seed, 0))
        for epoch, part in parts:
            here = packs // each == epoch
            for name, values in part.items():
                batch[name][: len(packs)][here] = values[: int(here.sum())]
        yield batch
