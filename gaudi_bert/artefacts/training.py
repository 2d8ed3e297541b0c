"""The files that training and fine-tuning write besides checkpoints.

Pretraining writes training.json, evaluation.json and metrics.jsonl. Fine-tuning writes metrics.jsonl, metrics.json as its
last file, and best.json next to the best checkpoint.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gaudi_bert.artefacts.base import Artefact, Count, ExtensibleArtefact, Positive, Share
from gaudi_bert.artefacts.work_folder import FINETUNING_NAME, TRAINING_NAME
from gaudi_bert.common.progress import format_count, format_rate
from gaudi_bert.config.sections import SEARCH_TASKS


class LossMetrics(ExtensibleArtefact):
    """Losses and accuracies of the two pretraining tasks, masked-LM and next-sentence prediction."""

    loss: float
    masked_lm_loss: float
    masked_lm_accuracy: Share
    next_sentence_loss: float
    next_sentence_accuracy: Share

    def format_line(self) -> str:
        """Return the metrics as one line of text."""
        return (
            f"masked-LM loss {self.masked_lm_loss:.3f}, accuracy {self.masked_lm_accuracy:.3f}; "
            f"next-sentence loss {self.next_sentence_loss:.3f}, accuracy {self.next_sentence_accuracy:.3f}"
        )


class EvaluationMetrics(LossMetrics):
    """Losses, accuracies and baselines of the two pretraining tasks on held-out data.

    Attributes:
        unigram_baseline: The masked-LM accuracy of always predicting the most frequent masked token.
        next_sentence_baseline: The next-sentence accuracy of always predicting the more frequent label.
        sequences: The number of sequences that were evaluated.
        masked_tokens: The number of masked positions that were evaluated.
    """

    unigram_baseline: Share
    next_sentence_baseline: Share
    sequences: Count
    masked_tokens: Count

    @property
    def accuracy(self) -> float:
        """The masked-LM accuracy, which training compares with the target accuracy."""
        return self.masked_lm_accuracy

    def format_line(self) -> str:
        """Return one line of text with the accuracies of both tasks in percent, their baselines, and the loss."""
        return (
            f"masked-LM accuracy {100 * self.masked_lm_accuracy:.1f} % "
            f"(baseline, the most frequent token: {100 * self.unigram_baseline:.1f} %), "
            f"next-sentence accuracy {100 * self.next_sentence_accuracy:.1f} % "
            f"(baseline, the more frequent label: {100 * self.next_sentence_baseline:.1f} %), loss {self.loss:.3f}, "
            f"over {format_count(self.sequences, 'sequence')}"
        )


class _RunResult(ExtensibleArtefact):
    """The keys that training.json contains after any pretraining run. Metrics that were not measured are omitted.

    Attributes:
        updates: The number of updates.
        sequences: The number of sequences in these updates.
        tokens: The number of non-padding tokens in these updates.
        processes: The number of processes.
        sequences_per_second: The throughput in sequences.
        tokens_per_second: The throughput in non-padding tokens.
        slots_per_second: The throughput in token slots, including padding.
        packing_factor: The mean number of sequences per pack.
        sequences_per_update: The mean number of sequences per update.
        reached_target: Whether the run ended because it reached the target accuracy.
    """

    file_name = TRAINING_NAME
    remedy = "train again"
    omits_defaults = True

    updates: Count
    sequences: Count
    tokens: Count
    processes: Positive
    sequences_per_second: float | None = None
    tokens_per_second: float | None = None
    slots_per_second: float | None = None
    packing_factor: float
    sequences_per_update: float
    reached_target: bool

    def format_lines(self) -> list[str]:
        """Return lines of text with the amount of training, the speed, and whether the target accuracy was reached."""
        speed = "" if self.sequences_per_second is None else f", {format_rate(self.sequences_per_second, 'sequences')}"
        return [
            f"{format_count(self.updates, 'update')} on {format_count(self.sequences, 'sequence')} "
            f"({format_count(self.tokens, 'token')}) by {format_count(self.processes, 'process')}{speed}",
            *(["the run reached the target accuracy"] if self.reached_target else []),
        ]


class TrainingResult(_RunResult):
    """The content of training.json after pretraining on TFRecords.

    Attributes:
        training: The metrics of the last updates, or None if the run had nothing to do.
        evaluation: The last evaluation, or None if there was none.
        realized_speedup: The measured speed of training on packed data, divided by the speed on unpacked data. None if it
            was not measured, or the machine was too busy for a reliable measurement.
    """

    training: LossMetrics | None
    evaluation: EvaluationMetrics | None
    realized_speedup: float | None = None

    def format_lines(self) -> list[str]:
        """Return lines of text with the amount of training, the speed, the measured speedup and the last evaluation."""
        lines = super().format_lines()
        if self.realized_speedup is not None:
            lines.append(
                f"{self.realized_speedup:.2f} times as fast as without packing (measured; at most "
                f"{self.packing_factor:.2f} is possible)"
            )
        return lines if self.evaluation is None else [*lines, f"held out: {self.evaluation.format_line()}"]


class WordMetrics(ExtensibleArtefact):
    """Loss, accuracy and perplexity of predicting masked or next tokens."""

    loss: float
    accuracy: Share
    perplexity: float

    def format_line(self) -> str:
        """Return the metrics as one line of text."""
        return f"loss {self.loss:.4f}, accuracy {self.accuracy:.4f}, perplexity {self.perplexity:,.1f}"


class WordEvaluation(WordMetrics):
    """Loss, accuracy and perplexity of predicting masked or next tokens in held-out data.

    Attributes:
        unigram_baseline: The accuracy of always predicting the most frequent token.
        sequences: The number of sequences that were evaluated.
        words: The number of predicted tokens.
    """

    unigram_baseline: Share
    sequences: Count
    words: Count

    def format_line(self) -> str:
        """Return the metrics and the baseline as one line of text."""
        return f"{super().format_line()} (unigram baseline {self.unigram_baseline:.4f}); over {self.sequences:,} sequences"


class TableTraining(_RunResult):
    """The content of training.json after pretraining on a packed table.

    Attributes:
        task: The pretraining task.
        model: The class of `transformers` that loads the weights.
        training: The metrics of the last updates, or None if the run had nothing to do.
        evaluation: The last evaluation, or None if there was none.
    """

    task: str
    model: str
    training: WordMetrics | None
    evaluation: WordEvaluation | None

    def format_lines(self) -> list[str]:
        """Return lines of text with the amount of training, the speed and the last evaluation."""
        lines = super().format_lines()
        return lines if self.evaluation is None else [*lines, f"held out: {self.evaluation.format_line()}"]


class _EvaluatedCheckpoint(ExtensibleArtefact):
    """Which checkpoint was evaluated, and how its loss was averaged.

    Attributes:
        update: The number of updates before the checkpoint was written.
        loss_per: Whether the loss is the mean over tokens or over sequences.
    """

    update: Count
    loss_per: Literal["token", "sequence"]


class EvaluationResult(EvaluationMetrics, _EvaluatedCheckpoint):
    """The content of evaluation.json, which contains the metrics of a checkpoint on held-out data.

    Metrics that were not measured are omitted. The order of the base classes determines the order of the keys in the file.
    The keys of the last base class come first.

    Attributes:
        unpacked: The metrics on the same data without packing.
        largest_difference: The largest difference between the metrics with and without packing.
    """

    remedy = "evaluate again"
    omits_defaults = True

    unpacked: EvaluationMetrics | None = None
    largest_difference: float | None = None

    def format_lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        lines = [f"after update {self.update:,}: {self.format_line()}"]
        if self.largest_difference is not None:
            lines.append(
                f"the metrics of the same sequences without packing differ by at most {self.largest_difference:.1e}"
            )
        return lines


class FineTuningLine(ExtensibleArtefact):
    """A line of metrics.jsonl during fine-tuning.

    Attributes:
        update: The number of updates so far.
        kind: "train" for the metrics of the last updates, "evaluation" for an evaluation.
        sequences_per_second: The throughput in sequences.
        tokens_per_second: The throughput in non-padding tokens.
    """

    remedy = "fine-tune again"

    update: Count
    kind: Literal["train", "evaluation"]
    sequences_per_second: float | None = None
    tokens_per_second: float | None = None


class MetricsLine(LossMetrics, FineTuningLine):
    """A line of metrics.jsonl during pretraining.

    Attributes:
        sequences: The number of sequences since the run began.
    """

    remedy = "train again"

    sequences: Count


# --- fine-tuning


class FineTuning(ExtensibleArtefact):
    """The content of metrics.json, which summarizes fine-tuning and contains the metrics of the best checkpoint.

    Attributes:
        task: The fine-tuning task.
        model: The name of the folder or file from which the weights were loaded.
        labels: The labels of the task.
        max_sequence_length: The number of tokens in the longest rows, including padding.
        sequences: The number of training sequences in an epoch.
        packs: The number of packs in an epoch.
        lower_bound: The proven minimum number of packs.
        packing_factor: The mean number of sequences per pack.
        depth: The largest number of sequences in a pack.
        algorithm: The packing algorithm.
        epochs: The number of epochs.
        updates: The number of updates.
        best_metric: The metric by which the best checkpoint was selected, or None without evaluation data.
        best_update: The number of updates after which the best checkpoint was written. The folder contains its weights.
        evaluated_rows: The number of evaluation rows.
        metrics: The metrics of the best checkpoint.
        baseline: For a search task, the metrics before training. For other tasks, the metrics of always predicting the one
            answer that fits the training data best. Empty if the task has no baseline.
    """

    file_name = FINETUNING_NAME
    remedy = "fine-tune again"

    task: str
    model: str
    labels: tuple[str, ...]
    max_sequence_length: Positive
    sequences: Count
    packs: Count
    lower_bound: Count
    packing_factor: float
    depth: Positive
    algorithm: str
    epochs: Positive
    updates: Count
    best_metric: str | None = None
    best_update: Count
    evaluated_rows: Count = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    baseline: dict[str, float] = Field(default_factory=dict)

    def format_lines(self) -> list[str]:
        """Return lines of text with the training data, the metrics of the best checkpoint, and the baseline."""
        lines = [
            f"{self.task}: {format_count(self.sequences, 'sequence')} in {format_count(self.packs, 'pack')} "
            f"({self.packing_factor:.3f} sequences per pack), {format_count(self.epochs, 'epoch')}, "
            f"{format_count(self.updates, 'update')}"
        ]
        if self.metrics:
            best = f"best by {self.best_metric}, after update {self.best_update:,}"
            baseline = "before training" if self.task in SEARCH_TASKS else "majority baseline"
            for title, values in ((best, self.metrics), (baseline, self.baseline)):
                if values:
                    lines.append(f"{title}: {', '.join(f'{name} {value:.4f}' for name, value in values.items())}")
        return lines


class BestCheckpoint(Artefact):
    """The content of best.json, which describes the checkpoint with the best evaluation so far.

    Attributes:
        update: The number of updates before the checkpoint was written.
        metric: The name of the metric by which checkpoints are compared.
        metrics: All metrics of the evaluation.
    """

    remedy = "fine-tune again with --overwrite"

    update: Count
    metric: str
    metrics: dict[str, float]
