"""Stage predict: the answers of a fine-tuned model, one JSON line per row, in the order of the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import check_policy
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.rows.window_plan import Runner
from gaudi_bert.tasks.answer_rows import ModelRows, PredictOptions, local_files
from gaudi_bert.tasks.answer_stream import AnswerStream, StreamResult, open_answers, shown_progress
from gaudi_bert.tasks.models.model_folders import open_task_folder


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
        model: a folder that `finetune`, or transformers for one of its `BertFor...`, wrote, with its tokenizer; or its URL
            in an object store.
        data: a file of rows, or its URL, or `-`.
        out: the file of JSON lines, or its URL, or `-` for standard output, which cannot be resumed.
        options: how.
        changes: of the task settings that the model was trained with, by name.
        reporter: where progress goes.
        overwrite: replace the answers of other settings.
        store: how object stores are reached.
    """
    with (
        local_files(model, data, out, store) as (path, rows_file, answers_file),
        shown_progress("predict", rows_file, reporter) as task,
    ):
        folder = open_task_folder(path)
        name = changes.get("name", folder.task)
        if name != folder.task:
            raise InputError(f"task.name = {name}: {path} is a model of {folder.task}; leave it out, or fine-tune another")
        # The columns that the model was trained on are defaults: those that are named here must apply.
        settings = TaskSettings.model_construct(_fields_set=set(changes), **{**dict(folder.settings), **changes})
        length = options.sequence_length(folder.positions, folder.usual_length)
        tokenizer = open_tokenizer(path)
        folder.check_fits(tokenizer)
        rows = ModelRows(rows_file, settings, tokenizer, length, options.on_bad_row, folder.task, folder.labels)
        chosen = {"max_sequence_length": length, "precision": options.precision, "packed": options.packed}
        signature = rows.signature("predict", chosen, folder.identity)
        check_policy(folder.task, settings)
        runner = folder.answerer(settings, options.precision, length)

        def lines(outputs: Float32Array, sequences: Sequences, answered: Sequence[Row]) -> list[bytes]:
            return list(map(_json_line, folder.answers(settings, outputs, sequences, answered)))

        with open_answers(answers_file, signature, rows, reporter, overwrite=overwrite, task=task) as answers:
            if not answers.finished:
                answer_windows(rows, runner, answers, options.packed, lines, _problem_line)
                answers.finish()
        return answers.result()


def answer_windows(
    rows: ModelRows,
    runner: Runner,
    answers: AnswerStream,
    packed: bool,
    encode: Callable[[Float32Array, Sequences, Sequence[Row]], list[bytes]],
    encode_problem: Callable[[str], bytes],
) -> None:
    """Answer all rows that have no answer yet, a window at a time.

    `encode` turns the outputs for the sequences of rows into what is written for each row, `encode_problem` what is wrong
    with a row that cannot be read.
    """
    for window in answers.windows():
        good, sequences, problems = rows.tokenized(window)
        plan, encoded = None, []
        if sequences is not None:
            plan = runner.plan(sequences, packed)
            outputs = runner.run(sequences, plan, partial(_advance, answers, len(window) / plan.slots))
            encoded = encode(outputs, sequences, good)
        else:
            answers.advance(len(window))
        following = iter(encoded)
        all_rows = (encode_problem(problems[row]) if row in problems else next(following) for row in range(len(window)))
        answers.append(window, b"".join(all_rows), sequences, plan, len(problems))


def _advance(answers: AnswerStream, rows_per_slot: float, slots: int) -> None:
    answers.advance(slots * rows_per_slot)


def _problem_line(problem: str) -> bytes:
    return _json_line({"error": problem})


def _json_line(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, ensure_ascii=False, allow_nan=False)}\n".encode("utf-8", "backslashreplace")
