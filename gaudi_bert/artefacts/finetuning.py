"""What fine-tuning leaves besides the model: metrics.json, written last, and best.json beside the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gaudi_bert.artefacts.model import Artefact, Count, Figures, Positive, read_artefact, read_lines
from gaudi_bert.common.files import write_json

__all__ = [
    "BestCheckpoint",
    "FineTuning",
    "FineTuningLine",
    "read_best",
    "read_finetuning",
    "read_finetuning_lines",
    "write_best",
    "write_finetuning",
]


class FineTuning(Figures):
    """metrics.json: what was learnt from how much, and how good it is on the evaluation data.

    Attributes:
        task: its name.
        model: where the weights came from: the name of the folder or file.
        labels: of the task.
        sequences: of the training data, an epoch.
        packs: that hold them.
        lower_bound: packs that no packing of this depth can do without.
        depth: most sequences of a pack.
        best_metric: what the best checkpoint was told by; None without evaluation data.
        best_update: after which it was written: the weights in the folder.
        metrics: of those weights, by name.
        baseline: the metrics of one answer for everything, the one that suits the training data best, where a task has one.
    """

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


class BestCheckpoint(Artefact):
    """best.json: the update whose evaluation was the best so far, and what it found."""

    update: Count
    metric: str
    metrics: dict[str, float]


class FineTuningLine(Figures):
    """A line of metrics.jsonl of fine-tuning: a report of the last updates, or an evaluation."""

    update: Count
    kind: Literal["train", "evaluation"]
    sequences_per_second: float | None = None
    tokens_per_second: float | None = None


def read_finetuning(path: Path) -> FineTuning:
    """How fine-tuning ended.

    Raises:
        InputError: metrics.json is missing or damaged.
    """
    return read_artefact(path, FineTuning, "fine-tune again")


def read_finetuning_lines(path: Path) -> tuple[FineTuningLine, ...]:
    """The lines of metrics.jsonl; a last one cut short, as a killed run leaves it, is left out.

    Raises:
        InputError: the file is missing, or one of its lines is not as this version writes it.
    """
    return read_lines(path, FineTuningLine, "fine-tune again")


def write_finetuning(path: Path, content: FineTuning) -> None:
    """Write metrics.json, whole or not at all."""
    write_json(path, content.as_json())


def read_best(path: Path) -> BestCheckpoint | None:
    """The best checkpoint so far; None before the first evaluation.

    Raises:
        InputError: best.json is damaged.
    """
    return read_artefact(path, BestCheckpoint, "fine-tune again with --overwrite") if path.is_file() else None


def write_best(path: Path, content: BestCheckpoint) -> None:
    """Write best.json, whole or not at all."""
    write_json(path, content.as_json())
