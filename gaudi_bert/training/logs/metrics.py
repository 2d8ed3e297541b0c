"""What a run reports about itself: `metrics.jsonl`, TensorBoard, and a line for people.

Every figure is over *real* tokens and sequences, never over slots: a padded row does not count as work. One JSON line is
written for each report, flushed at once. When a run is resumed at an update, later lines are dropped first, so that the
curve has one value per update, whatever was stopped and when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import tensorflow as tf

from gaudi_bert.artefacts.model import whole_lines
from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, write_text
from gaudi_bert.common.progress import human_seconds
from gaudi_bert.training.logs.metrics_server import MetricsServer

__all__ = ["Figures", "MetricsWriter", "ReportFigures", "TaskFigures", "figures_from_sums", "progress_line"]


class ReportFigures(Protocol):
    """Losses and accuracies of a report, whatever is trained."""

    def as_json(self) -> dict[str, float]:
        """By name, as in `metrics.jsonl`."""

    def line(self) -> str:
        """For people."""


@dataclass(frozen=True)
class TaskFigures:
    """Mean loss of a task, and the share of right answers; None where answers are not right or wrong."""

    loss: float
    accuracy: float | None

    def as_json(self) -> dict[str, float]:
        """By name, as in `metrics.jsonl`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def line(self) -> str:
        """For people."""
        return ", ".join(f"{name} {value:.4f}" for name, value in self.as_json().items())


@dataclass(frozen=True)
class Figures:
    """Losses and accuracies over some sequences, each weighted exactly."""

    loss: float
    masked_lm_loss: float
    masked_lm_accuracy: float
    next_sentence_loss: float
    next_sentence_accuracy: float

    def as_json(self) -> dict[str, float]:
        """By name, as in `metrics.jsonl` and `evaluation.json`."""
        return {name: float(value) for name, value in vars(self).items()}

    def line(self) -> str:
        """For people."""
        return (
            f"masked-LM loss {self.masked_lm_loss:.3f} accuracy {self.masked_lm_accuracy:.3f}, "
            f"next-sentence loss {self.next_sentence_loss:.3f} accuracy {self.next_sentence_accuracy:.3f}"
        )


def figures_from_sums(sums: FloatArray) -> Figures:
    """Figures from the eight sums of `gaudi_bert.model.losses.LossSums`, in its order, float64 [8]."""
    masked_sum, masked_weight, next_sum, next_weight, masked_correct, masked_count, next_correct, next_count = sums
    masked_lm_loss = masked_sum / max(masked_weight, 1.0)
    next_sentence_loss = next_sum / max(next_weight, 1.0)
    return Figures(
        loss=masked_lm_loss + next_sentence_loss,
        masked_lm_loss=masked_lm_loss,
        masked_lm_accuracy=min(masked_correct / max(masked_count, 1.0), 1.0),
        next_sentence_loss=next_sentence_loss,
        next_sentence_accuracy=min(next_correct / max(next_count, 1.0), 1.0),
    )


class MetricsWriter:
    """Appends to `metrics.jsonl` and to TensorBoard in one folder; use it as a context.

    Args:
        folder: the folder of the run.
        last_update: lines of later updates, left by a run that was stopped, are removed.

    Attributes:
        evaluated_updates: the updates whose evaluation was there already when this was opened.
    """

    def __init__(self, folder: Path, last_update: int) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        kept = _lines_until(self.path, last_update) if self.path.exists() else []
        self.evaluated_updates = {line["update"] for line in kept if line["kind"] == "evaluation"}
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        with explained_os_errors(self.path, "write"):
            self._handle = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._board = tf.summary.create_file_writer(str(Path(folder) / "tensorboard"))
        self._server: MetricsServer | None = None
        self._kept = kept

    def serve(self, server: MetricsServer) -> None:
        """Also hand every report to `server`, from the newest ones on that are there already."""
        self._server = server
        for line in self._kept:
            values = {name: value for name, value in line.items() if name not in ("kind", "update")}
            server.update(line["kind"], line["update"], values)

    def write(self, kind: str, update: int, values: Mapping[str, float]) -> None:
        """Write one report of `kind` "train" or "evaluation"."""
        line: dict[str, Any] = {"update": update, "kind": kind, **values}
        with explained_os_errors(self.path, "write"):
            self._handle.write(json.dumps(line, allow_nan=False) + "\n")
            self._handle.flush()
        with self._board.as_default():
            for name, value in values.items():
                tf.summary.scalar(f"{kind}/{name}", value, step=update)
        if self._server is not None:
            self._server.update(kind, update, values)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.close()
        self._board.close()


def _lines_until(path: Path, last_update: int) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` that is there, without those of later updates."""
    lines = []
    for number, line in enumerate(whole_lines(path, "train again"), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise InputError(f"{path}: line {number} is not JSON; remove it, or train again with --overwrite") from error
    return [line for line in lines if line["update"] <= last_update]


def progress_line(
    update: int, updates: int, figures: ReportFigures, values: Mapping[str, float], seconds_left: float
) -> str:
    """One line for people about the last few updates: their figures, and what was done a second."""
    return (
        f"train: update {update}/{updates} ({update / updates:.0%}), {figures.line()}, "
        f"{values['tokens_per_second']:,.0f} tokens/s, "
        f"{values['sequences_per_second']:,.0f} sequences/s ({values['packing_factor']:.2f} per pack), "
        f"{human_seconds(seconds_left)} left"
    )
