"""What a run minimises, one update of it, and the figures of several: weights, denominators, dropout's seeds, reports.

Losses are sums, which the engine computes, and what the sums are divided by is known from the data alone, so that
micro-batches and processes add up exactly. The rest, forward and backward passes, sums over processes, clipping, the
optimizer, is the engine's (`engines/protocol.py`).

Letters: B packs, Q masked slots, K sums, M micro-batches; 2 for the masked-LM and the next-sentence loss.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np

from gaudi_bert.artefacts.training import LossFigures
from gaudi_bert.common.arrays import AnyArray, BatchArrays, FloatArray, Int32Array, random_words
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import format_rate, format_seconds
from gaudi_bert.config.sections import LoopSettings, TrainingSettings
from gaudi_bert.engines.protocol import Communicator, Sums, UpdateLoss, Updates, UpdateScalars
from gaudi_bert.model.heads import Loss
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.training.input import Batch, DataSource


class _ReportFigures(Protocol):
    """Losses and accuracies of a report, whatever is trained."""

    def as_json(self) -> dict[str, float]:
        """Return the figures by name, as in `metrics.jsonl`."""

    def line(self) -> str:
        """For people."""


class Evaluation(_ReportFigures, Protocol):
    """The result of an evaluation, whatever is trained."""

    @property
    def accuracy(self) -> float:
        """The figure that a target is set for."""

    @property
    def sequences(self) -> int:
        """Sequences evaluated."""


class Objective(ABC):
    """The loss that a run minimises, and its figures.

    Attributes:
        sums: how many its head gives (K).
        sequence_feature: the feature that is not 0 for every real sequence.
    """

    sums: ClassVar[int] = 3
    sequence_feature: ClassVar[str] = "sequence_weights"

    @abstractmethod
    def denominators(self, batch: BatchArrays) -> FloatArray:
        """Return what the first and the second loss of one batch are divided by, float64 [2]."""

    @abstractmethod
    def figures(self, sums: FloatArray) -> _ReportFigures:
        """Figures from the K sums over any number of batches."""

    def update_loss(
        self, micro_batches: Sequence[BatchArrays], update: int, communicator: Communicator
    ) -> UpdateLoss | None:
        """The loss of update `update`, where it is not a sum of losses of micro-batches; these are of this process."""
        return None


@dataclass(frozen=True)
class PretrainingObjective(Objective):
    """The masked-LM and the next-sentence loss; its sums are those of `model.heads.PretrainingHead`."""

    masked_lm_loss: Loss = "token"
    sums = 8
    sequence_feature = "next_sentence_weights"

    def denominators(self, batch: BatchArrays) -> FloatArray:
        """Masked tokens (`loss: token`) or sequences that have one (`loss: sequence`); and sequences."""
        masked = _masked_weight(batch["masked_lm_weights"], self.masked_lm_loss)
        return np.array([masked, np.count_nonzero(batch["next_sentence_weights"])], np.float64)

    def figures(self, sums: FloatArray) -> LossFigures:
        """Both losses and accuracies."""
        values = sums.tolist()
        masked_sum, masked_weight, next_sum, next_weight, masked_correct, masked_count, next_correct, next_count = values
        masked_lm_loss = masked_sum / max(masked_weight, 1.0)
        next_sentence_loss = next_sum / max(next_weight, 1.0)
        return LossFigures(
            loss=masked_lm_loss + next_sentence_loss,
            masked_lm_loss=masked_lm_loss,
            masked_lm_accuracy=min(masked_correct / max(masked_count, 1.0), 1.0),
            next_sentence_loss=next_sentence_loss,
            next_sentence_accuracy=min(next_correct / max(next_count, 1.0), 1.0),
        )


def _masked_weight(numbers_BQ: AnyArray, loss: Loss) -> int:
    """Masked tokens of some packs, or sequences that have one; the numbers are those of sequences, 0 for none."""
    if loss == "token":
        return int(np.count_nonzero(numbers_BQ))
    depth = int(numbers_BQ.max(initial=0))
    return sum(int(np.any(numbers_BQ == number, axis=1).sum()) for number in range(1, depth + 1))


# --- The denominators: what the two losses of a micro-batch are divided by before their gradients are added up
#
# With W_i and N_i the masked-LM weight and the sequences of micro-batch i, M micro-batches on each of R processes:
#
# - `global`: by the sums of W_i and of N_i over all of the update. M micro-batches on R processes give exactly the gradient
#   of one big batch, and every masked token counts the same.
# - `balanced` (Krell et al. 2021, appendix T.6, equations 25 and 26): by what M R micro-batches of b packs hold on average.
#   A constant: nothing needs to travel first. The masked tokens of a pack are counted in the data, not estimated.
# - `local` (the predecessor's): by W_i and N_i, and the mean over all micro-batches, so that a masked token counts for more
#   in a micro-batch that has few of them.

_SAMPLE = 1000


@dataclass(frozen=True)
class LossDenominators:
    """The divisors of the loss sums; `balanced` has expected weights: masked-LM weight and sequences per pack on average."""

    kind: Literal["global", "balanced", "local"] = "global"
    expected_weights: tuple[float, float] = (1.0, 1.0)

    def factors(self, weights_M2: FloatArray, packs: int, communicator: Communicator) -> FloatArray:
        """Return the factors of the loss sums of each micro-batch of this process, float64 [M, 2]; all call it together."""
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
    """Return what the losses of a run are divided by, with what its data holds on average."""
    if settings.loss_normalization != "balanced":
        return LossDenominators(settings.loss_normalization)
    each = -(-_SAMPLE // len(source.files))  # the first records of each file, about `_SAMPLE` in all
    weights = [
        _masked_weight(decode_example(record)["masked_lm_weights"][np.newaxis], settings.loss)
        for number in range(len(source.files))
        for record in itertools.islice(source.records_of(number), each)
    ]
    return LossDenominators("balanced", (float(np.mean(weights)), source.packing_factor))


# --- One update. Dropout has no state: its seed is a function of (seed, update, micro-batch, process), so a resumed run
# draws the same masks.


def dropout_seed(seed: int, update: int, micro_batch: int, rank: int) -> Int32Array:
    """Seed of one forward pass, int32 [2]."""
    return random_words(1, seed, "dropout", update, micro_batch, rank).view(np.int32)


@dataclass(frozen=True)
class TrainingStep:
    """Runs updates of one model."""

    updates: Updates
    communicator: Communicator
    settings: LoopSettings
    objective: Objective
    denominators: LossDenominators = GLOBAL

    def run(self, micro_batches: Sequence[BatchArrays], update: int, learning_rate: float) -> Sums:
        """Do update number `update` (from 1).

        float32 [K + 1]: the sums of the objective over this process's micro-batches, and the gradient's norm over all
        processes before clipping.
        """
        weights_M2 = np.array([self.objective.denominators(batch) for batch in micro_batches])
        packs = len(micro_batches[0]["input_ids"])
        factors_M2 = self.denominators.factors(weights_M2, packs, self.communicator)
        seed, rank = self.settings.seed, self.communicator.rank
        seeds_M2 = np.stack([dropout_seed(seed, update, number, rank) for number in range(len(micro_batches))])
        corrections = (1.0 / (1.0 - beta**update) for beta in (self.settings.beta_1, self.settings.beta_2))
        scalars = UpdateScalars(learning_rate, *corrections)
        update_loss = self.objective.update_loss(micro_batches, update, self.communicator)
        return self.updates.run(micro_batches, seeds_M2, factors_M2, scalars, update, update_loss)


# --- The interval since the last report: sums of losses, work done, time taken
#
# Figures are over *real* tokens and sequences: padding is no work. Time is from the first update's wait for its data until
# the device is done with the last one; the first update of a process builds the graph, so the clock restarts after it,
# unless it is alone. Sums stay on the device until the report, so the host does not wait for it at every update.


@dataclass(frozen=True)
class IntervalReport:
    """A report over all processes; the gradient's norm is a mean, before clipping, and `slots_per_second` counts padding."""

    figures: _ReportFigures
    gradient_norm: float
    sequences: int
    tokens: int
    packing_factor: float
    seconds_per_update: float
    sequences_per_second: float
    tokens_per_second: float
    slots_per_second: float

    def speed(self) -> dict[str, float]:
        """Return what was done per second, by name, as in `metrics.jsonl`."""
        names = ("sequences_per_second", "tokens_per_second", "slots_per_second", "packing_factor")
        return {name: getattr(self, name) for name in names}

    def line(self, update: int, updates: int) -> str:
        """For people, after so many of all updates."""
        return (
            f"update {update}/{updates} ({update / updates:.0%}), {self.figures.line()}, "
            f"{self.tokens_per_second:,.0f} tokens/s, {format_rate(self.sequences_per_second, 'sequences')} "
            f"({self.packing_factor:.2f} per pack), {format_seconds((updates - update) * self.seconds_per_update)} left"
        )


@dataclass
class Interval:
    """The updates since the last report; with `has_cold_start` the first one is that of this process, too."""

    objective: Objective
    first_update: int
    has_cold_start: bool
    section: str = "training"
    clock: Callable[[], float] = time.perf_counter
    _sums: list[Sums] = field(default_factory=list)
    _work: list[tuple[int, int, int, int]] = field(default_factory=list)
    _began: float | None = None

    def begin(self) -> None:
        """An update begins: from the first one on, time counts."""
        if self._began is None:
            self._began = self.clock()
        elif self.has_cold_start and len(self._sums) == 1:
            self._sums[0]()  # until the device is done with it
            self._began = self.clock()

    def add(self, sums: Sums, batches: list[Batch]) -> None:
        """Add one update: what `TrainingStep.run` returned, and what it was fed."""
        sequences = sum(int(np.count_nonzero(batch[self.objective.sequence_feature])) for batch in batches)
        tokens = sum(int(np.count_nonzero(batch["input_mask"])) for batch in batches)
        packs = sum(len(batch["input_mask"]) for batch in batches)
        self._sums.append(sums)
        self._work.append((sequences, tokens, packs, sum(batch["input_mask"].size for batch in batches)))

    def close(self, communicator: Communicator) -> IntervalReport:
        """Report; every process must close its interval at the same time."""
        sums = np.array([each() for each in self._sums], np.float64)
        seconds = max(self.clock() - (self._began or 0.0), 1e-9)
        is_finite = np.isfinite(sums).all(axis=1)
        if not is_finite.all():
            number = int(np.argmin(is_finite))
            what = "the gradient" if np.isfinite(sums[number, : self.objective.sums]).all() else "the loss"
            raise FailedError(
                f"update {self.first_update + number}: {what} is not finite (nan or infinite), nothing was saved after it; "
                f"lower {self.section}.learning_rate or lengthen the warm-up, then run it again with --overwrite"
            )
        work = np.array(self._work, np.float64)
        measured = work[1:] if self.has_cold_start and len(work) > 1 else work
        count = self.objective.sums
        local = np.concatenate([sums[:, :count].sum(axis=0), work.sum(axis=0), measured.sum(axis=0)])
        total = communicator.sum_array(local)
        sequences, tokens, packs, _ = total[count : count + 4]
        speed = total[count + 4 :] / seconds
        return IntervalReport(
            figures=self.objective.figures(total[:count]),
            gradient_norm=float(sums[:, count].mean()),
            sequences=int(sequences),
            tokens=int(tokens),
            packing_factor=float(sequences / packs),
            seconds_per_update=seconds / len(measured),
            sequences_per_second=float(speed[0]),
            tokens_per_second=float(speed[1]),
            slots_per_second=float(speed[3]),
        )
