"""What happened since the last report: sums of losses, work done, time taken.

The time is that of the clock, from the first update's wait for its data until the device is done with the last one, so it
tells the same of a device that runs ahead of the host as of one that does not. Checkpoints, evaluations and what came before
a resume lie between intervals. The first update of a process builds the graph: the clock starts anew after it, unless it is
alone in its interval.

Sums stay where the device left them until the report, so that a device that runs ahead of the host is not waited for at
every update. Then every update is looked at on its own: the first one whose loss or gradient is not finite is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.common.errors import FailedError
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.input.batches import Batch
from gaudi_bert.training.logs.metrics import ReportFigures, figures_from_sums

__all__ = ["Interval", "IntervalReport"]


@dataclass(frozen=True)
class IntervalReport:
    """One report over all processes.

    Attributes:
        figures: losses and accuracies over the updates of the interval.
        gradient_norm: mean over the updates, before clipping.
        sequences: real sequences trained on.
        tokens: real tokens trained on.
        packing_factor: real sequences per pack, of this interval.
        seconds_per_update: of the updates that count for the speed.
        sequences_per_second: real sequences per second.
        tokens_per_second: real tokens per second.
        slots_per_second: slots per second, padding too.
    """

    figures: ReportFigures
    gradient_norm: float
    sequences: int
    tokens: int
    packing_factor: float
    seconds_per_update: float
    sequences_per_second: float
    tokens_per_second: float
    slots_per_second: float

    def speed(self) -> dict[str, float]:
        """What was done per second, by name, as in `metrics.jsonl`."""
        names = ("sequences_per_second", "tokens_per_second", "slots_per_second", "packing_factor")
        return {name: getattr(self, name) for name in names}


@dataclass
class Interval:
    """The updates since the last report.

    Args:
        first_update: its first update.
        has_cold_start: whether that is the first one of this process.
        clock: seconds.
        sum_count: sums that an update gives, beside the norm of its gradient (K).
        to_figures: makes figures of those of all updates.
        sequence_feature: the feature that is not 0 for every real sequence.
    """

    first_update: int
    has_cold_start: bool
    clock: Callable[[], float] = time.perf_counter
    sum_count: int = 8
    to_figures: Callable[[FloatArray], ReportFigures] = figures_from_sums
    sequence_feature: str = "next_sentence_weights"
    _sums: list[tf.Tensor] = field(default_factory=list)
    _work: list[tuple[int, int, int, int]] = field(default_factory=list)
    _began: float | None = None

    def begin(self) -> None:
        """An update begins: from the first one on, time counts."""
        if self._began is None:
            self._began = self.clock()
        elif self.has_cold_start and len(self._sums) == 1:
            self._sums[0].numpy()  # until the device is done with it
            self._began = self.clock()

    def add(self, sums: tf.Tensor, batches: list[Batch]) -> None:
        """Add one update: what `TrainingStep.run` returned, and what it was fed."""
        sequences = sum(int(np.count_nonzero(batch[self.sequence_feature])) for batch in batches)
        tokens = sum(int(np.count_nonzero(batch["input_mask"])) for batch in batches)
        packs = sum(len(batch["input_mask"]) for batch in batches)
        self._sums.append(sums)
        self._work.append((sequences, tokens, packs, sum(batch["input_mask"].size for batch in batches)))

    def __len__(self) -> int:
        return len(self._sums)

    def close(self, communicator: Communicator) -> IntervalReport:
        """Report; every process must close its interval at the same time.

        Raises:
            FailedError: the loss or the gradient of an update is not finite.
        """
        sums = np.array([each.numpy() for each in self._sums], np.float64)
        seconds = max(self.clock() - (self._began or 0.0), 1e-9)
        self._check_finite(sums)
        work = np.array(self._work, np.float64)
        measured = work[1:] if self.has_cold_start and len(work) > 1 else work
        count = self.sum_count
        local = np.concatenate([sums[:, :count].sum(axis=0), work.sum(axis=0), measured.sum(axis=0)])
        total = communicator.sum_array(local)
        sequences, tokens, packs, _ = total[count : count + 4]
        speed = total[count + 4 :] / seconds
        return IntervalReport(
            figures=self.to_figures(total[:count]),
            gradient_norm=float(sums[:, count].mean()),
            sequences=int(sequences),
            tokens=int(tokens),
            packing_factor=float(sequences / packs),
            seconds_per_update=seconds / len(measured),
            sequences_per_second=float(speed[0]),
            tokens_per_second=float(speed[1]),
            slots_per_second=float(speed[3]),
        )

    def _check_finite(self, sums: FloatArray) -> None:
        finite = np.isfinite(sums).all(axis=1)
        if finite.all():
            return
        number = int(np.argmin(finite))
        what = "the loss" if not np.isfinite(sums[number, : self.sum_count]).all() else "the gradient"
        raise FailedError(
            f"update {self.first_update + number}: {what} is not finite (nan or infinite), nothing was saved after it; "
            "lower training.learning_rate or lengthen training.warmup_updates, then train again with --overwrite"
        )
