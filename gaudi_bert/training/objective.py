"""Training objectives, the computation of one update, and the metrics of the updates between two reports.

The engine computes losses as sums. The denominators of these sums depend only on the data, so that they are known before the
forward pass, and the gradients of micro-batches and processes can simply be added. The engine also does the forward and
backward passes, the sums over processes, clipping and the optimizer (`engines/protocol.py`).

Letters in shapes: B packs, Q masked slots, K sums, M micro-batches, 2 for the masked-LM and the next-sentence loss.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np

from gaudi_bert.artefacts.training import LossMetrics
from gaudi_bert.common.arrays import AnyArray, BatchArrays, FloatArray, Int32Array, draw_random_uint64
from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import format_rate, format_seconds
from gaudi_bert.config.sections import LoopSettings, TrainingSettings
from gaudi_bert.engines.protocol import Communicator, UpdateLoss, Updates, UpdateScalars, WaitForSums
from gaudi_bert.model.heads import Loss
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.training.batches import Batch
from gaudi_bert.training.sources import RecordSource


class ReportMetrics(Protocol):
    """The metrics of a report, such as losses and accuracies. Each objective has its own implementation."""

    def as_json(self) -> dict[str, float]:
        """Return the metrics as a dictionary with the keys used in `metrics.jsonl`."""

    def format_line(self) -> str:
        """Format the metrics as a line for the user."""


class Evaluation(ReportMetrics, Protocol):
    """The metrics of an evaluation. Each objective has its own implementation."""

    @property
    def accuracy(self) -> float:
        """The accuracy that is compared with the target accuracy of the run."""

    @property
    def sequences(self) -> int:
        """The number of sequences that were evaluated."""


class Objective(ABC):
    """The loss that training minimizes, and the metrics that are reported.

    Attributes:
        sums: K, the number of sums that the head computes.
        sequence_feature: The name of the feature that is nonzero exactly for the non-padding sequences.
    """

    sums: ClassVar[int] = 3
    sequence_feature: ClassVar[str] = "sequence_weights"

    @abstractmethod
    def compute_loss_denominators(self, batch: BatchArrays) -> FloatArray:
        """Return the numbers by which the two summed losses of a batch are divided, float64 [2].

        Dividing the loss sums by these numbers gives the mean losses.
        """

    @abstractmethod
    def compute_metrics(self, sums: FloatArray) -> ReportMetrics:
        """Compute the metrics from the sums that the model head returned for one or several batches."""

    def make_update_loss(
        self, micro_batches: Sequence[BatchArrays], update: int, communicator: Communicator
    ) -> UpdateLoss | None:
        """Return the loss function of a complete weight update, or None if the losses of its micro-batches are simply added.

        Args:
            micro_batches: The micro-batches of this process.
            update: The number of the update, from 1.
            communicator: The processes of the run.

        Returns:
            The loss function, or None, which is the default.
        """
        return None


@dataclass(frozen=True)
class PretrainingObjective(Objective):
    """The training objective of BERT, which is the sum of the masked-LM loss and the next-sentence loss.

    The losses and accuracies are computed from 8 sums, which `model.heads.PretrainingHead` defines.

    Attributes:
        masked_lm_loss: Whether the masked-LM loss is a mean over masked tokens ("token") or over sequences ("sequence").
    """

    masked_lm_loss: Loss = "token"
    sums = 8
    sequence_feature = "next_sentence_weights"

    def compute_loss_denominators(self, batch: BatchArrays) -> FloatArray:
        """Return the numbers by which the summed masked-LM and next-sentence losses of a batch are divided, float64 [2].

        The masked-LM denominator is the number of masked tokens (`loss: token`) or of sequences that contain at least one
        (`loss: sequence`). The next-sentence denominator is the number of sequences.
        """
        masked_weight = _count_masked_tokens_or_sequences(batch["masked_lm_weights"], self.masked_lm_loss)
        return np.array([masked_weight, np.count_nonzero(batch["next_sentence_weights"])], np.float64)

    def compute_metrics(self, sums: FloatArray) -> LossMetrics:
        """Compute the losses and accuracies of both pretraining tasks from values that were summed over one or several
        batches.
        """
        values = sums.tolist()
        masked_sum, masked_weight, next_sum, next_weight, masked_correct, masked_count, next_correct, next_count = values
        masked_lm_loss = masked_sum / max(masked_weight, 1.0)
        next_sentence_loss = next_sum / max(next_weight, 1.0)
        return LossMetrics(
            loss=masked_lm_loss + next_sentence_loss,
            masked_lm_loss=masked_lm_loss,
            masked_lm_accuracy=min(masked_correct / max(masked_count, 1.0), 1.0),
            next_sentence_loss=next_sentence_loss,
            next_sentence_accuracy=min(next_correct / max(next_count, 1.0), 1.0),
        )


def _count_masked_tokens_or_sequences(sequence_numbers_BQ: AnyArray, loss: Loss) -> int:
    """Count the masked tokens in a batch of packs. For a loss per sequence, count the sequences that contain masked tokens.

    This number is the weight of the masked-LM loss.

    Args:
        sequence_numbers_BQ: For each masked slot, the number of its sequence from 1, or 0 for an unused slot.
        loss: "token" to count tokens, "sequence" to count sequences.
    """
    if loss == "token":
        return int(np.count_nonzero(sequence_numbers_BQ))
    depth = int(sequence_numbers_BQ.max(initial=0))
    return sum(int(np.any(sequence_numbers_BQ == number, axis=1).sum()) for number in range(1, depth + 1))


# --- The denominators for the two loss sums of a micro-batch
#
# W_i is the masked-LM weight of micro-batch i, N_i its number of sequences. Each of R processes has M micro-batches.
#
# - `global` divides by the sums of W_i and of N_i over the complete update. The gradient is exactly that of one large batch,
#   and every masked token has the same weight.
# - `balanced` (Krell et al. 2021, appendix T.6, equations 25 and 26) divides by the expected weights of M R micro-batches of
#   b packs each. These are constants, so the processes need not communicate before the backward pass. The expected number of
#   masked tokens per pack is measured on the first records of the data.
# - `local` divides by W_i and N_i, and takes the mean over all micro-batches. A masked token therefore has more weight in a
#   micro-batch that contains few of them.

_SAMPLE = 1000


@dataclass(frozen=True)
class LossDenominators:
    """The rule that determines by which numbers the summed losses of one weight update are divided.

    Attributes:
        kind: One of the three rules described above.
        expected_weights: For `balanced`, the mean masked-LM weight and the mean number of sequences of a pack.
    """

    kind: Literal["global", "balanced", "local"] = "global"
    expected_weights: tuple[float, float] = (1.0, 1.0)

    def compute_loss_factors(self, weights_M2: FloatArray, packs: int, communicator: Communicator) -> FloatArray:
        """Return the factors by which the two summed losses of each micro-batch on this process are multiplied.

        Every process calls this at the same time.

        Args:
            weights_M2: The denominators of each micro-batch, float64 [M, 2].
            packs: The number of packs in a micro-batch.
            communicator: The processes of the run.

        Returns:
            float64 [M, 2].
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


def make_loss_denominators(settings: TrainingSettings, source: RecordSource) -> LossDenominators:
    """Return the rule that the settings of a run specify for dividing the summed losses of each weight update.

    For `loss_normalization: balanced`, the expected weights of a pack are measured on about 1,000 records.
    """
    if settings.loss_normalization != "balanced":
        return LossDenominators(settings.loss_normalization)
    each = -(-_SAMPLE // len(source.files))  # records to read at the beginning of each file, about `_SAMPLE` in total
    weights = [
        _count_masked_tokens_or_sequences(decode_example(record)["masked_lm_weights"][np.newaxis], settings.loss)
        for number in range(len(source.files))
        for record in itertools.islice(source.read_file_records(number), each)
    ]
    return LossDenominators("balanced", (float(np.mean(weights)), source.packing_factor))


# --- One update
#
# Dropout has no state, because a resumed run must draw the same masks. Its seed depends only on the seed of the run, the
# update, the micro-batch and the process.


def draw_dropout_seed(seed: int, update: int, micro_batch: int, rank: int) -> Int32Array:
    """Return the random seed for dropout in one forward pass, int32 [2].

    Args:
        seed: The seed of the run.
        update: The number of the update, from 1.
        micro_batch: The number of the micro-batch in the update, from 0.
        rank: The number of the process, from 0.
    """
    return draw_random_uint64(1, seed, "dropout", update, micro_batch, rank).view(np.int32)


@dataclass(frozen=True)
class TrainingStep:
    """Computes the dropout seeds and the loss factors of one weight update, and runs this update on the engine.

    Attributes:
        updates: The updates of the engine.
        communicator: The processes of the run.
        settings: The seed and the betas.
        objective: The loss.
        denominators: The rule for the denominators of the loss sums.
    """

    updates: Updates
    communicator: Communicator
    settings: LoopSettings
    objective: Objective
    denominators: LossDenominators = GLOBAL

    def run_update(self, micro_batches: Sequence[BatchArrays], update: int, learning_rate: float) -> WaitForSums:
        """Update the weights of the model once.

        Every process calls this at the same time.

        Args:
            micro_batches: The micro-batches of this process.
            update: The number of the update, from 1.
            learning_rate: The learning rate of this update.

        Returns:
            A function that waits for the device and returns float32 [K + 1]: the K sums of the objective over the
            micro-batches of this process, and the gradient norm over all processes before clipping.
        """
        weights_M2 = np.array([self.objective.compute_loss_denominators(batch) for batch in micro_batches])
        factors_M2 = self.denominators.compute_loss_factors(
            weights_M2, len(micro_batches[0]["input_ids"]), self.communicator
        )
        seed, rank = self.settings.seed, self.communicator.rank
        seeds_M2 = np.stack([draw_dropout_seed(seed, update, number, rank) for number in range(len(micro_batches))])
        corrections = (1.0 / (1.0 - beta**update) for beta in (self.settings.beta_1, self.settings.beta_2))
        scalars = UpdateScalars(learning_rate, *corrections)
        update_loss = self.objective.make_update_loss(micro_batches, update, self.communicator)
        return self.updates.run_update(micro_batches, seeds_M2, factors_M2, scalars, update, update_loss)


# --- The interval since the last report: loss sums, work done, and time
#
# Tokens and sequences are counted without padding. The time begins when the first update of the interval requests its data,
# and ends when the device has finished the last update. The first update of a process builds the graph, so the clock is
# restarted after it, unless the interval contains no other update. Reading the sums after every update would make the host
# wait for the device, so the sums stay on the device until the report.


@dataclass(frozen=True)
class IntervalReport:
    """The metrics and the speed of the updates since the previous report, over all processes.

    Attributes:
        metrics: The losses and accuracies.
        gradient_norm: The mean over the updates of the gradient norm before clipping.
        sequences: The number of sequences in the interval.
        tokens: The number of non-padding tokens in the interval.
        packing_factor: The mean number of sequences per pack.
        seconds_per_update: The mean time of an update.
        sequences_per_second: Sequences per second.
        tokens_per_second: Non-padding tokens per second.
        slots_per_second: Tokens per second, including padding.
    """

    metrics: ReportMetrics
    gradient_norm: float
    sequences: int
    tokens: int
    packing_factor: float
    seconds_per_update: float
    sequences_per_second: float
    tokens_per_second: float
    slots_per_second: float

    def collect_throughput(self) -> dict[str, float]:
        """Return the throughput and the packing factor, with the keys used in `metrics.jsonl`."""
        return {
            "sequences_per_second": self.sequences_per_second,
            "tokens_per_second": self.tokens_per_second,
            "slots_per_second": self.slots_per_second,
            "packing_factor": self.packing_factor,
        }

    def format_line(self, update: int, total_updates: int) -> str:
        """Format the report as a line for the user.

        Args:
            update: The number of updates that are done.
            total_updates: The number of updates of the run.
        """
        remaining = format_seconds((total_updates - update) * self.seconds_per_update)
        return (
            f"update {update}/{total_updates} ({update / total_updates:.0%}), {self.metrics.format_line()}, "
            f"{self.tokens_per_second:,.0f} tokens/s, {format_rate(self.sequences_per_second, 'sequences')} "
            f"({self.packing_factor:.2f} per pack), {remaining} left"
        )


@dataclass
class ReportInterval:
    """Collects the losses, token counts and duration of the updates since the last report.

    Attributes:
        objective: Computes the metrics.
        first_update: The number of the first update in the interval.
        has_cold_start: Whether the first update in the interval is also the first update of this process, which builds the
            graph.
        section: The settings section of the run, for error messages.
        clock: Returns the time in seconds.
    """

    objective: Objective
    first_update: int
    has_cold_start: bool
    section: str = "training"
    clock: Callable[[], float] = time.perf_counter
    _sums: list[WaitForSums] = field(default_factory=list)
    _work: list[tuple[int, int, int, int]] = field(default_factory=list)
    _began: float | None = None

    def start_clock_if_due(self) -> None:
        """Start the clock before the first update of an interval. If that update built the graph, restart the clock before
        the second update.
        """
        if self._began is None:
            self._began = self.clock()
        elif self.has_cold_start and len(self._sums) == 1:
            self._sums[0]()  # wait until the device has finished the first update
            self._began = self.clock()

    def record_update(self, wait_for_sums: WaitForSums, micro_batches: list[Batch]) -> None:
        """Record the summed losses and the numbers of tokens of a weight update. The device may still be computing the
        update.

        Args:
            wait_for_sums: The return value of `TrainingStep.run_update`.
            micro_batches: The micro-batches of this process.
        """
        sequences = sum(int(np.count_nonzero(batch[self.objective.sequence_feature])) for batch in micro_batches)
        tokens = sum(int(np.count_nonzero(batch["input_mask"])) for batch in micro_batches)
        packs = sum(len(batch["input_mask"]) for batch in micro_batches)
        self._sums.append(wait_for_sums)
        self._work.append((sequences, tokens, packs, sum(batch["input_mask"].size for batch in micro_batches)))

    def make_report(self, communicator: Communicator) -> IntervalReport:
        """Wait until the device has finished all updates of the interval, and return a report on these updates.

        Every process calls this at the same time.

        Raises:
            FailedError: A loss or a gradient is not finite. The error names the first such update.
        """
        sums = np.array([each() for each in self._sums], np.float64)
        seconds = max(self.clock() - (self._began or 0.0), 1e-9)
        is_finite = np.isfinite(sums).all(axis=1)
        if not is_finite.all():
            number = int(np.argmin(is_finite))
            what = "the gradient" if np.isfinite(sums[number, : self.objective.sums]).all() else "the loss"
            raise FailedError(
                f"update {self.first_update + number}: {what} is not finite (nan or infinite), so training has stopped; "
                f"lower {self.section}.learning_rate or lengthen the warm-up, and run the command again with --overwrite"
            )
        work = np.array(self._work, np.float64)
        measured = work[1:] if self.has_cold_start and len(work) > 1 else work
        count = self.objective.sums
        total = communicator.sum_array(np.concatenate([sums[:, :count].sum(axis=0), work.sum(axis=0), measured.sum(axis=0)]))
        sequences, tokens, packs, _ = total[count : count + 4]
        speed = total[count + 4 :] / seconds
        return IntervalReport(
            metrics=self.objective.compute_metrics(total[:count]),
            gradient_norm=float(sums[:, count].mean()),
            sequences=int(sequences),
            tokens=int(tokens),
            packing_factor=float(sequences / packs),
            seconds_per_update=seconds / len(measured),
            sequences_per_second=float(speed[0]),
            tokens_per_second=float(speed[1]),
            slots_per_second=float(speed[3]),
        )
