"""Stage predict: the answers of a fine-tuned model, one JSON line per row, in the order of the rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.stages.tasks.answer_rows import OnBadRow, Precision, RowModel, answer_rows, check_choice, chosen_length
from gaudi_bert.stages.tasks.answer_stream import StreamResult
from gaudi_bert.tasks.rows.types import Row, Sequences
from gaudi_bert.training.prediction import Compute
from gaudi_bert.training.weights.sources import Weights, read_weights
from gaudi_bert.training.weights.task_models import open_task_model, read_task_folder


@dataclass(frozen=True)
class PredictOptions:
    """How rows are answered.

    Attributes:
        max_sequence_length: most tokens of a sequence; None for what the model was trained with.
        precision: of the matrix products.
        packed: False gives each sequence a row of its own.
        on_bad_row: what becomes of a row that cannot be read.
    """

    max_sequence_length: int | None = None
    precision: Precision = "float32"
    packed: bool = True
    on_bad_row: OnBadRow = "stop"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("on-bad-row", self.on_bad_row, get_args(OnBadRow))


def predict(
    model: Path,
    data: str,
    out: str,
    options: PredictOptions,
    changes: Mapping[str, Any],
    *,
    reporter: Reporter,
    overwrite: bool = False,
    store: StoreSettings | None = None,
) -> StreamResult:
    """Answer the rows of a file; see `answer_rows`.

    Args:
        model: a folder that `finetune`, or transformers for one of its `BertFor...`, wrote; with its tokenizer.
        data: a file of rows.
        out: a file for JSON lines.
        options: how.
        changes: of the task settings that the model was trained with, by name.
        reporter, overwrite, store: as everywhere.
    """
    return answer_rows(
        lambda folder: (_TaskModel(folder, options, changes), read_weights(folder)),
        model,
        data,
        out,
        reporter=reporter,
        overwrite=overwrite,
        store=store,
    )


class _TaskModel(RowModel):
    """A fine-tuned model."""

    stage = "predict"

    def __init__(self, path: Path, options: PredictOptions, changes: Mapping[str, Any]) -> None:
        self._folder = folder = read_task_folder(path)
        name = changes.get("name", folder.task)
        if name != folder.task:
            raise InputError(f"task.name = {name}: {path} is a model of {folder.task}; leave it out, or fine-tune another")
        settings = folder.settings.model_copy(update=dict(changes))
        positions = folder.config.max_position_embeddings
        length = chosen_length(options.max_sequence_length, positions, folder.max_sequence_length)
        super().__init__(
            path, folder.config.hidden_size, settings, length, options.precision, options.packed, options.on_bad_row
        )
        self.task, self.labels, self._options = folder.task, folder.labels, options
        self._task = folder.make_task(settings)

    def options(self) -> dict[str, Any]:
        """Those of the command, settled."""
        chosen = self._options
        return {"max_sequence_length": self.max_sequence_length, "precision": chosen.precision, "packed": chosen.packed}

    def open(self, weights: Weights, compute_dtype: Precision) -> tuple[Compute, Literal["sequence", "token"], int]:
        """BERT with the head of the task."""
        task = self._task
        if not task.keeps_logits:
            raise InputError(
                f"{self.folder}: {task.name} has no answers to predict; embed its texts, or fine-tune another task"
            )
        model = open_task_model(self._folder, task, compute_dtype=compute_dtype, weights=weights)
        return model, "token" if task.per_token else "sequence", task.width

    def encode(self, values: Float32Array, sequences: Sequences, rows: list[Row]) -> list[bytes]:
        """One JSON line per row."""
        return list(map(_json_line, self._task.answers(values, sequences, rows)))

    def encode_problem(self, problem: str) -> bytes:
        """A line that says what is wrong with the row."""
        return _json_line({"error": problem})


def _json_line(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, ensure_ascii=False, allow_nan=False)}\n".encode("utf-8", "backslashreplace")
