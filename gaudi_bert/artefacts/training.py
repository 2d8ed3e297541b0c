"""Results of training and fine-tuning besides checkpoints: training.json, evaluation.json, metrics.jsonl; of fine-tuning
also metrics.json, written last, and best.json next to the best checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gaudi_bert.artefacts.base import Artefact, Count, Figures, Positive, Share
from gaudi_bert.artefacts.work_folder import FINETUNING_NAME, TRAINING_NAME
from gaudi_bert.common.progress import format_count, format_rate
from gaudi_bert.config.sections import SEARCH_TASKS


class LossFigures(Figures):
    """Losses and accuracies over some sequences."""

    loss: float
    masked_lm_loss: float
    masked_lm_accuracy: Share
    next_sentence_loss: float
    next_sentence_accuracy: Share

    def line(self) -> str:
        """For people."""
        return (
            f"masked-LM loss {self.masked_lm_loss:.3f} accuracy {self.masked_lm_accuracy:.3f}, "
            f"next-sentence loss {self.next_sentence_loss:.3f} accuracy {self.next_sentence_accuracy:.3f}"
        )


class EvaluationFigures(LossFigures):
    """Figures of held-out data.

    Attributes:
        unigram_baseline: masked-LM accuracy of always answering the most frequent masked token.
        next_sentence_baseline: next-sentence accuracy of always answering the more frequent label.
        masked_tokens: masked positions that were evaluated.
    """

    unigram_baseline: Share
    next_sentence_baseline: Share
    sequences: Count
    masked_tokens: Count

    @property
    def accuracy(self) -> float:
        """The figure that a target is set for: the masked-LM accuracy."""
        return self.masked_lm_accuracy

    def line(self) -> str:
        """Return the accuracies of both tasks in percent, each with its baseline of one answer for everything."""
        return (
            f"masked-LM accuracy {100 * self.masked_lm_accuracy:.1f} % "
            f"(the most frequent token: {100 * self.unigram_baseline:.1f} %), "
            f"next-sentence accuracy {100 * self.next_sentence_accuracy:.1f} % "
            f"(the more frequent answer: {100 * self.next_sentence_baseline:.1f} %), loss {self.loss:.3f}, "
            f"over {format_count(self.sequences, 'sequence')}"
        )


class _RunResult(Figures):
    """training.json: how a run ended. The file omits what was not measured."""

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

    def lines(self) -> list[str]:
        """Return for people on how much was trained, how fast, and how good the model is."""
        speed = "" if self.sequences_per_second is None else f", {format_rate(self.sequences_per_second, 'sequences')}"
        line = (
            f"{format_count(self.updates, 'update')} on {format_count(self.sequences, 'sequence')} "
            f"({format_count(self.tokens, 'token')}) by {format_count(self.processes, 'process')}{speed}"
        )
        return [line, *(["target accuracy reached"] if self.reached_target else [])]


class TrainingResult(_RunResult):
    """training.json of a run on records.

    Attributes:
        training: figures of the last updates; None where the run had nothing to do.
        evaluation: the last evaluation, if there was one.
        realized_speedup: packed over unpacked, where it was measured on a machine that was not too busy.
    """

    training: LossFigures | None
    evaluation: EvaluationFigures | None
    realized_speedup: float | None = None

    def lines(self) -> list[str]:
        """Return these of every run, the speedup, and the figures of both tasks."""
        lines = super().lines()
        if self.realized_speedup is not None:
            gain, limit = self.realized_speedup, self.packing_factor
            lines.append(f"{gain:.2f} times as fast as unpacked, measured; {limit:.2f} would be the limit")
        return lines if self.evaluation is None else [*lines, f"held out: {self.evaluation.line()}"]


class WordFigures(Figures):
    """Loss and accuracy of words that are predicted, masked or next ones."""

    loss: float
    accuracy: Share
    perplexity: float

    def line(self) -> str:
        """For people."""
        return f"loss {self.loss:.4f}, accuracy {self.accuracy:.4f}, perplexity {self.perplexity:,.1f}"


class WordEvaluation(WordFigures):
    """Figures of held-out data; the baseline is the accuracy of always answering the most frequent of these words."""

    unigram_baseline: Share
    sequences: Count
    words: Count

    def line(self) -> str:
        """For people."""
        return f"{super().line()} (unigram baseline {self.unigram_baseline:.4f}); over {self.sequences:,} sequences"


class TableTraining(_RunResult):
    """training.json of a run on a packed table; `model` is the class of `transformers` with these weights."""

    task: str
    model: str
    training: WordFigures | None
    evaluation: WordEvaluation | None

    def lines(self) -> list[str]:
        """Return these of every run, and how well words are predicted."""
        lines = super().lines()
        return lines if self.evaluation is None else [*lines, f"held out: {self.evaluation.line()}"]


class _EvaluatedCheckpoint(Figures):
    """The update after which an evaluated checkpoint was written, and which mean its loss is."""

    update: Count
    loss_per: Literal["token", "sequence"]


class EvaluationResult(EvaluationFigures, _EvaluatedCheckpoint):
    """evaluation.json: a checkpoint's figures on held-out data, and those of the same data unpacked.

    It omits what was not measured. The order of the bases is that of the file: the last comes first.
    """

    remedy = "evaluate again"
    omits_defaults = True

    unpacked: EvaluationFigures | None = None
    largest_difference: float | None = None

    def lines(self) -> list[str]:
        """Return the figures for people."""
        lines = [f"after update {self.update:,}: {self.line()}"]
        if self.largest_difference is not None:
            lines.append(f"the same sequences unpacked give the same figures, to {self.largest_difference:.1e}")
        return lines


class FineTuningLine(Figures):
    """A line of metrics.jsonl, of fine-tuning: a report of the last updates, or an evaluation."""

    remedy = "fine-tune again"

    update: Count
    kind: Literal["train", "evaluation"]
    sequences_per_second: float | None = None
    tokens_per_second: float | None = None


class MetricsLine(LossFigures, FineTuningLine):
    """A line of the metrics of pretraining; sequences are counted since the run began."""

    remedy = "train again"

    sequences: Count


# --- fine-tuning


class FineTuning(Figures):
    """metrics.json: what was learnt from how much, and how good it is on the evaluation data.

    Attributes:
        model: where the weights came from: the name of the folder or file.
        sequences: of the training data, per epoch.
        best_metric: the metric that chose the best checkpoint; None without evaluation data.
        best_update: after which it was written: the weights in the folder, with these `metrics`.
        baseline: the metrics of always giving the one answer that suits the training data best, where a task has one.
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

    def lines(self) -> list[str]:
        """Return for people what the model was trained on, and how good it is."""
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
    """best.json: the update whose evaluation was the best so far, and its metrics."""

    remedy = "fine-tune again with --overwrite"

    update: Count
    metric: str
    metrics: dict[str, float]
