"""The speed-up that packing really brings, measured in the run itself, before its first update.

The same model passes forward and backward over a micro-batch of packs, and over as many rows that hold one sequence each.
With s_packed and s_unpacked seconds per micro-batch, and f sequences per pack,

    realized speed-up = f * s_unpacked / s_packed

which falls short of f by what block masks, gathered positions and the larger heads cost (Krell et al. 2021, table 2). It is
the median over alternating pairs of passes. On a CPU the seconds are those of its cores, which other processes on the
machine change little; on a card they are by the clock. f is the limit: a result well above it was disturbed, and is not
reported as a speed-up. No variable is changed. It takes two more graphs, so it has to be requested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.engines.protocol import Model
from gaudi_bert.model.sequences import join_sequences, split_packs
from gaudi_bert.training.input.batches import Batch

_PAIRS = 5
_TOLERANCE = 1.05


@dataclass(frozen=True)
class Speedup:
    """Seconds of alternating passes, one of each per pair: a micro-batch of packs, and as many rows of one sequence."""

    packing_factor: float
    packed_seconds: tuple[float, ...]
    unpacked_seconds: tuple[float, ...]

    @property
    def measured(self) -> float:
        """Sequences per second, packed over unpacked: the median over the pairs."""
        ratios = np.array(self.unpacked_seconds) / np.array(self.packed_seconds)
        return self.packing_factor * float(np.median(ratios))

    @property
    def realized(self) -> float | None:
        """The speed-up; None where more was measured than is possible."""
        return self.measured if self.measured <= _TOLERANCE * self.packing_factor else None

    def line(self) -> str:
        """For people."""
        if self.realized is None:
            return (
                f"realized speed-up not measurable now: the machine was busy ({self.measured:.2f} measured, "
                f"{self.packing_factor:.2f} is the limit)"
            )
        packed, unpacked = (1000 * np.median(seconds) for seconds in (self.packed_seconds, self.unpacked_seconds))
        return (
            f"realized speed-up {self.realized:.3f} at {self.packing_factor:.3f} sequences per pack "
            f"({self.realized / self.packing_factor:.1%} of it): a micro-batch takes "
            f"{packed:.1f} ms packed, {unpacked:.1f} ms with one sequence per row"
        )


def measure_speedup(
    model: Model, batch: Batch, max_predictions: int, packing_factor: float, clock: Callable[[], float]
) -> Speedup:
    """Time both kinds of passes by `clock`, which returns seconds."""
    rows, length = batch["input_ids"].shape
    singles = [[placed.sequence] for placed in split_packs(batch)][:rows]
    batches = (batch, join_sequences(singles, length, max_predictions, 1))

    def seconds(inputs: BatchArrays) -> float:
        started = clock()
        model.work(inputs)
        return clock() - started

    pairs = [[seconds(each) for each in batches] for _ in range(_PAIRS + 1)]
    packed, unpacked = zip(*pairs[1:], strict=True)  # the first pair builds the graphs
    return Speedup(packing_factor, packed, unpacked)
