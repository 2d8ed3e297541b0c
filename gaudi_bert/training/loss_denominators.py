"""What the two losses of a micro-batch are divided by before their gradients are added up.

With W_i and N_i the masked-LM weight and the sequences of micro-batch i, M micro-batches on each of R processes:

- `global`: by the sums of W_i and of N_i over the whole update. M micro-batches on R processes give exactly the gradient of
  one big batch, and every masked token counts the same.
- `balanced` (Krell et al. 2021, appendix T.6, equations 25 and 26): by what M R micro-batches of b packs hold on average:
  b m e masked tokens and b p sequences each, with m the most masked tokens of a sequence, e the share of slots that hold
  tokens, and p the packing factor. A constant: nothing needs to travel first.
- `local` (the predecessor's): by W_i and N_i, and the mean over all micro-batches, so that a masked token counts for more in
  a micro-batch that has few of them.

Letters: M micro-batches; 2 for the masked-LM and the next-sentence loss.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.config import TrainingSettings
from gaudi_bert.records.wire.example import decode_example
from gaudi_bert.records.wire.framing import read_records
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.input.source import DataSource

__all__ = ["GLOBAL", "LossDenominators", "denominators_for"]

SAMPLE = 1000


@dataclass(frozen=True)
class LossDenominators:
    """What the loss sums of micro-batches are divided by.

    Attributes:
        kind: one of the three ways.
        expected_weights: masked-LM weight and sequences per pack on average; used by `balanced` alone.
    """

    kind: Literal["global", "balanced", "local"] = "global"
    expected_weights: tuple[float, float] = (1.0, 1.0)

    def factors(self, weights_M2: FloatArray, packs: int, communicator: Communicator) -> FloatArray:
        """What the loss sums of each micro-batch of this process are multiplied by, float64 [M, 2].

        Args:
            weights_M2: masked-LM weight and sequences of each micro-batch.
            packs: of each micro-batch.
            communicator: the processes; every one must call this at the same time.
        """
        micro_batches = len(weights_M2) * communicator.size
        if self.kind == "local":
            return 1.0 / (np.maximum(weights_M2, 1.0) * micro_batches)
        if self.kind == "balanced":
            totals_2 = np.array(self.expected_weights) * packs * micro_batches
        else:
            totals_2 = np.maximum(communicator.sum_array(weights_M2.sum(axis=0)), 1.0)
        return np.broadcast_to(1.0 / totals_2, weights_M2.shape)


GLOBAL = LossDenominators()


def denominators_for(settings: TrainingSettings, source: DataSource) -> LossDenominators:
    """What the losses of a run are divided by, with what its data holds on average.

    Raises:
        InputError: the data says nothing of its efficiency, and cannot be read.
    """
    if settings.loss_normalization != "balanced":
        return LossDenominators(settings.loss_normalization)
    masked = source.packing_factor
    if settings.loss == "token":
        efficiency = source.efficiency if source.efficiency is not None else _sampled_efficiency(source)
        masked = source.schema.max_predictions * efficiency
    return LossDenominators("balanced", (masked, source.packing_factor))


def _sampled_efficiency(source: DataSource) -> float:
    """Real tokens per slot in the first records of each file, about `SAMPLE` in all."""
    each = -(-SAMPLE // len(source.files))
    lengths = [
        np.count_nonzero(decode_example(record)["input_mask"])
        for file in source.files
        for record in itertools.islice(read_records(source.local(file)), each)
    ]
    return float(np.mean(lengths)) / source.schema.max_sequence_length
