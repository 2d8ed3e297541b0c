"""What happened since the last report: sums of losses, work done, time taken.

Sums stay where the device left them until the report, so that a device that runs ahead of the host is not waited for at
every update. Then every update is looked at on its own: the first one whose loss or gradient is not finite is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from gaudi_bert.common.errors import FailedError
from gaudi_bert.training.distributed import Communicator
from gaudi_bert.training.input import Batch
from gaudi_bert.training.metrics import Figures, figures_from_sums

__all__ = ["Window", "WindowReport"]


@dataclass(frozen=True)
class WindowReport:
    """One report over all processes.

    Attributes:
        figures: losses and accuracies over the updates of the window.
        gradient_norm: mean over the updates, before clipping.
        sequences: real sequences trained on.
        tokens: real tokens trained on.
        seconds_per_update: of the updates that count for the speed.
        sequences_per_second: real sequences a second.
        tokens_per_second: real tokens a second.
    """

    figures: Figures
    gradient_norm: float
    sequences: int
    tokens: int
    seconds_per_update: float
    sequences_per_second: float
    tokens_per_second: float


@dataclass
class Window:
    """The updates since the last report. The first update of a process traces the graph; it does not count for the speed
    unless it is alone in its window.
    """

    first_update: int
    has_cold_start: bool
    _sums: list[tf.Tensor] = field(default_factory=list)
    _work: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, sums: tf.Tensor, batches: list[Batch], seconds: float) -> None:
        """Add one update: what `TrainingStep.run` returned, what it was fed, and the time it took."""
        sequences = sum(int(np.count_nonzero(batch["next_sentence_weights"])) for batch in batches)
        tokens = sum(int(np.count_nonzero(batch["input_mask"])) for batch in batches)
        self._sums.append(sums)
        self._work.append((sequences, tokens, seconds))

    def __len__(self) -> int:
        return len(self._sums)

    def close(self, communicator: Communicator) -> WindowReport:
        """Report.

        Raises:
            FailedError: the loss or the gradient of an update is not finite.
        """
        sums = np.array([each.numpy() for each in self._sums], np.float64)
        self._check_finite(sums)
        work = np.array(self._work, np.float64)
        measured = work[1:] if self.has_cold_start and len(work) > 1 else work
        local = np.concatenate([sums[:, :8].sum(axis=0), work[:, :2].sum(axis=0), measured[:, :2].sum(axis=0)])
        total = communicator.sum_array(local)
        seconds = max(float(measured[:, 2].sum()), 1e-9)
        return WindowReport(
            figures=figures_from_sums(total[:8]),
            gradient_norm=float(sums[:, 8].mean()),
            sequences=int(total[8]),
            tokens=int(total[9]),
            seconds_per_update=seconds / len(measured),
            sequences_per_second=float(total[10] / seconds),
            tokens_per_second=float(total[11] / seconds),
        )

    def _check_finite(self, sums: np.ndarray) -> None:
        finite = np.isfinite(sums).all(axis=1)
        if finite.all():
            return
        number = int(np.argmin(finite))
        what = "the loss" if not np.isfinite(sums[number, :8]).all() else "the gradient"
        raise FailedError(
            f"update {self.first_update + number}: {what} is not finite (nan or infinite), nothing was saved after it; "
            "lower training.learning_rate or lengthen training.warmup_updates, then train again with --resume or --overwrite"
        )
