"""Stage predict: the answers of a fine-tuned model, one JSON line per row, in the order of the rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.tasks.answer_rows import OnBadRow, Precision, RowModel, Runner, answer_rows, check_choice, chosen_length
from gaudi_bert.tasks.answer_stream import StreamResult
from gaudi_bert.tasks.models.model_folders import open_task_folder


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
        lambda folder: _TaskModel(folder, options, changes),
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
        self._folder = folder = open_task_folder(path)
        name = changes.get("name", folder.task)
        if name != folder.task:
            raise InputError(f"task.name = {name}: {path} is a model of {folder.task}; leave it out, or fine-tune another")
        # The columns that the model was trained on are defaults: those that are named here must apply.
        settings = TaskSettings.model_construct(_fields_set=set(changes), **{**dict(folder.settings), **changes})
        length = chosen_length(options.max_sequence_length, folder.positions, folder.usual_length)
        super().__init__(path, folder, settings, length, options.precision, options.packed, options.on_bad_row)
        self.task, self.labels, self._options = folder.task, folder.labels, options

    def options(self) -> dict[str, Any]:
        """Those of the command, settled."""
        chosen = self._options
        return {"max_sequence_length": self.max_sequence_length, "precision": chosen.precision, "packed": chosen.packed}

    def open(self) -> Runner:
        """The model with the head of the task."""
        return self._folder.answerer(self.settings, self.precision, self.max_sequence_length)

    def encode(self, values: Float32Array, sequences: Sequences, rows: list[Row]) -> list[bytes]:
        """One JSON line per row."""
        return list(map(_json_line, self._folder.answers(self.settings, values, sequences, rows)))

    def encode_problem(self, problem: str) -> bytes:
        """A line that says what is wrong with the row."""
        return _json_line({"error": problem})


def _json_line(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, ensure_ascii=False, allow_nan=False)}\n".encode("utf-8", "backslashreplace")
