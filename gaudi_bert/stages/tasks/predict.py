"""Stage predict: the answers of a fine-tuned model, one JSON line a row, in the order of the rows, whatever the packing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings, TaskSettings
from gaudi_bert.config.tasks import TaskName
from gaudi_bert.stages.tasks.at_hand import at_hand
from gaudi_bert.stages.tasks.row_windows import (
    STANDARD,
    Answered,
    Destination,
    StreamResult,
    answer_stream,
    check_apart,
    reading_signature,
)

if TYPE_CHECKING:
    from gaudi_bert.tasks.rows.types import Row
    from gaudi_bert.training.weights.task_models import TaskFolder

__all__ = ["PredictOptions", "predict"]

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class PredictOptions:
    """How rows are answered.

    Attributes:
        max_sequence_length: most tokens of a sequence; None for what the model was trained with.
        precision: of the matrix products.
        packed: False gives each sequence a row of its own.
    """

    max_sequence_length: int | None = None
    precision: Precision = "float32"
    packed: bool = True

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise InputError(f"--precision {self.precision}: choose one of {', '.join(get_args(Precision))}")


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
    """Answer the rows of a file.

    Args:
        model: a folder that `finetune`, or transformers for one of its `BertFor...`, wrote; with its tokenizer; or its URL.
        data: a file of rows, or its URL, or `-`.
        out: a file for JSON lines, or its URL, or `-`.
        options: how.
        changes: of the task settings that the model was trained with, by name.
        reporter: where progress goes.
        overwrite: replace what other settings made.
        store: how object stores are reached.

    Raises:
        InputError: the model, a setting or a row is wrong.
    """
    with at_hand(model, data, out, store) as (folder, rows, answers):
        return _predict(folder, rows, answers, options, changes, reporter, overwrite)


def _predict(
    model: Path,
    data: str,
    out: str,
    options: PredictOptions,
    changes: Mapping[str, Any],
    reporter: Reporter,
    overwrite: bool,
) -> StreamResult:
    from gaudi_bert.tasks.rows.reading import read_rows
    from gaudi_bert.training.weights.sources import read_weights
    from gaudi_bert.training.weights.task_models import read_task_folder

    check_apart(data, out)
    folder = read_task_folder(model)
    used = folder.settings.model_copy(update=dict(changes))
    length = _length(folder, options)
    stored = {**asdict(options), "max_sequence_length": length}
    signature = reading_signature("predict", stored, used, read_weights(model), model, data)
    answer = _answers(folder, used, length, options, data)
    destination = Destination(out, signature, lambda stream: stream.finish(), overwrite, from_pipe=data == STANDARD)
    return answer_stream(read_rows(data, cast(TaskName, folder.task), used), answer, destination, reporter)


def _length(folder: TaskFolder, options: PredictOptions) -> int:
    asked, positions = options.max_sequence_length, folder.config.max_position_embeddings
    if asked is not None and not 3 <= asked <= positions:
        raise InputError(f"--max-sequence-length {asked}: the model has {positions} positions; give 3 to {positions}")
    return asked or folder.max_sequence_length


def _answers(
    folder: TaskFolder, settings: TaskSettings, length: int, options: PredictOptions, data: str
) -> Callable[[list[Row]], Answered]:
    """What turns a window of rows into lines."""
    from gaudi_bert.tasks.rows.tokenizer import open_tokenizer
    from gaudi_bert.tasks.rows.tokenizing import tokenize_rows
    from gaudi_bert.training.device import open_device
    from gaudi_bert.training.prediction.runner import PackRunner
    from gaudi_bert.training.prediction.shapes import plan_window
    from gaudi_bert.training.weights.task_models import open_task_model

    task = folder.make_task(settings)
    if not task.keeps_logits:
        raise InputError(f"{folder.path}: {task.name} has no answers to predict; embed its texts, or fine-tune another task")
    tokenizer = open_tokenizer(folder.path)
    device = open_device("auto", options.precision)
    model = open_task_model(folder, task, compute_dtype=device.compute_dtype)
    one_shape = device.kind == "hpu"
    per: Literal["token", "sequence"] = "token" if task.per_token else "sequence"
    runner = PackRunner(model, per=per, width=task.width, device=device.name, one_shape=one_shape)

    def answer(rows: list[Row]) -> Answered:
        sequences = tokenize_rows(
            rows,
            tokenizer,
            task=cast(TaskName, folder.task),
            settings=settings,
            max_sequence_length=length,
            labels=folder.labels,
            file=data,
        )
        plan = plan_window(
            sequences.lengths,
            hidden_size=folder.config.hidden_size,
            packed=options.packed,
            one_length=length if one_shape else None,
        )
        answers = task.answers(runner.run(sequences, plan), sequences, rows)
        lines = "".join(f"{json.dumps(line, ensure_ascii=False, allow_nan=False)}\n" for line in answers)
        return Answered(lines.encode("utf-8", "backslashreplace"), sequences.cut_rows, plan.tokens, plan.slots, plan.gain)

    return answer
