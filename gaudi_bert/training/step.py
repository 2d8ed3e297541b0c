"""One update as the host sees it: what each micro-batch's losses are multiplied by, the seeds of dropout, the corrections.

The rest, forward and backward passes, sums over processes, clipping, the optimizer, is the engine's (`engines/protocol.py`).
Dropout has no state: its seed is a function of (seed, update, micro-batch, process), so a resumed run draws the same masks.

Letters: M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Int32Array, random_words
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.protocol import Communicator, Sums, Updates, UpdateScalars
from gaudi_bert.training.objective import GLOBAL, LossDenominators, Objective


def dropout_seed(seed: int, update: int, micro_batch: int, rank: int) -> Int32Array:
    """Seed of one forward pass, int32 [2]."""
    return random_words(1, seed, "dropout", update, micro_batch, rank).view(np.int32)


@dataclass(frozen=True)
class TrainingStep:
    """Runs updates of one model, each of `accumulation_steps` micro-batches on this process."""

    updates: Updates
    communicator: Communicator
    settings: TrainingSettings
    objective: Objective
    accumulation_steps: int
    denominators: LossDenominators = GLOBAL

    def run(self, micro_batches: Sequence[BatchArrays], update: int, learning_rate: float) -> Sums:
        """Do update number `update` (from 1).

        float32 [K + 1]: the sums of the objective over this process's micro-batches, and the gradient's norm over all
        processes before clipping.
        """
        if len(micro_batches) != self.accumulation_steps:
            raise ValueError(f"{len(micro_batches)} micro-batches given, {self.accumulation_steps} make an update")
        weights_M2 = np.array([self.objective.weights(batch) for batch in micro_batches])
        packs = len(micro_batches[0]["input_ids"])
        factors_M2 = self.denominators.factors(weights_M2, packs, self.communicator)
        seeds_M2 = np.stack(
            [
                dropout_seed(self.settings.seed, update, number, self.communicator.rank)
                for number in range(self.accumulation_steps)
            ]
        )
        corrections = (1.0 / (1.0 - beta**update) for beta in (self.settings.beta_1, self.settings.beta_2))
        scalars = UpdateScalars(learning_rate, *corrections)
        return self.updates.run(micro_batches, seeds_M2, factors_M2, scalars, update)
