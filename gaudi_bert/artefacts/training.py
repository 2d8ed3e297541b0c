"""What a training run leaves besides its checkpoints: training.json, evaluation.json, and the lines of metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gaudi_bert.artefacts.model import Count, Figures, Positive, Share, read_artefact, read_lines
from gaudi_bert.common.files import write_json

__all__ = [
    "EvaluatedCheckpoint",
    "EvaluationFigures",
    "EvaluationResult",
    "LossFigures",
    "MetricsLine",
    "TrainingResult",
    "read_evaluation",
    "read_metrics",
    "read_training",
    "write_evaluation",
    "write_training",
]


class LossFigures(Figures):
    """Losses and accuracies over some sequences."""

    loss: float
    masked_lm_loss: float
    masked_lm_accuracy: Share
    next_sentence_loss: float
    next_sentence_accuracy: Share


class EvaluationFigures(LossFigures):
    """The same of held-out data.

    Attributes:
        unigram_baseline: masked-LM accuracy of always answering the most frequent masked token.
        next_sentence_baseline: next-sentence accuracy of always answering the more frequent label; None in older files.
        masked_tokens: masked positions that were evaluated.
    """

    unigram_baseline: Share
    next_sentence_baseline: Share | None = None
    sequences: Count
    masked_tokens: Count


class TrainingResult(Figures):
    """training.json: how a run ended.

    Attributes:
        training: figures of the last updates; None where the run had nothing left to do.
        evaluation: the last evaluation, if there was one.
        realized_speedup: packed over unpacked, where it was measured.
    """

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
    training: LossFigures | None
    evaluation: EvaluationFigures | None
    realized_speedup: float | None = None


class EvaluatedCheckpoint(Figures):
    """What was evaluated: the update after which the checkpoint was written, and which mean its loss is."""

    update: Count
    loss_per: Literal["token", "sequence"]


class EvaluationResult(EvaluationFigures, EvaluatedCheckpoint):
    """evaluation.json: a checkpoint's figures on held-out data, and those of the same data unpacked.

    The order of the bases is that of the file: the last comes first.
    """

    unpacked: EvaluationFigures | None = None
    largest_difference: float | None = None


class MetricsLine(LossFigures):
    """A line of metrics.jsonl: a report of the last updates, or an evaluation.

    Attributes:
        sequences: since the beginning of the run.
    """

    update: Count
    kind: Literal["train", "evaluation"]
    sequences: Count
    sequences_per_second: float | None = None
    tokens_per_second: float | None = None


def read_training(path: Path) -> TrainingResult:
    """How a run ended.

    Raises:
        InputError: training.json is missing or damaged.
    """
    return read_artefact(path, TrainingResult, "train again")


def write_training(path: Path, content: TrainingResult) -> None:
    """Write training.json, whole or not at all; what was not measured is left out."""
    write_json(path, content.model_dump(mode="json", exclude_defaults=True))


def read_evaluation(path: Path) -> EvaluationResult:
    """What an evaluation found.

    Raises:
        InputError: evaluation.json is missing or damaged.
    """
    return read_artefact(path, EvaluationResult, "evaluate again")


def write_evaluation(path: Path, content: EvaluationResult) -> None:
    """Write evaluation.json, whole or not at all; what was not measured is left out."""
    write_json(path, content.model_dump(mode="json", exclude_defaults=True))


def read_metrics(path: Path) -> tuple[MetricsLine, ...]:
    """The lines of metrics.jsonl; a last one cut short, as a killed run leaves it, is left out.

    Raises:
        InputError: the file is missing, or one of its lines is not as this version writes it.
    """
    return read_lines(path, MetricsLine, "train again")
