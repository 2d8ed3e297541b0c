"""Rows of a task's data, whatever file they are in, one after the other.

JSON lines, CSV, TSV, Parquet and plain lines hold records (`records`); CoNLL and SQuAD have their own forms (`documents`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.tasks import TaskName, TaskSettings
from gaudi_bert.tasks.rows.documents import question_of_record, read_conll, read_squad
from gaudi_bert.tasks.rows.fields import RowReader
from gaudi_bert.tasks.rows.labels import read_label_names
from gaudi_bert.tasks.rows.records import format_of, read_records
from gaudi_bert.tasks.rows.types import Row, source_name

__all__ = ["read_rows", "windows"]


def read_rows(path: str | Path, task: TaskName | None, settings: TaskSettings, *, labelled: bool = False) -> Iterator[Row]:
    """The rows of a file, in its order, in bounded memory (SQuAD's JSON is read whole).

    Args:
        path: a file, or `-` for standard input.
        task: what they are for; None for plain texts.
        settings: names of columns, format, names of labels.
        labelled: read labels, tags or answers, and refuse a row without; else they are passed over.

    Raises:
        InputError: the file cannot be read, does not fit the task, or a row is wrong; one line with file, row and remedy.
    """
    name = source_name(path)
    kind = format_of(path, settings.format)
    if kind == "squad":
        if task != "question-answering":
            wanted = "plain texts need" if task is None else f"{task} needs"
            raise InputError(f"{name}: SQuAD's JSON is for question-answering, {wanted} JSON lines (.jsonl) or a table")
        yield from read_squad(path, labelled)
        return
    if kind == "conll" and task != "token-classification":
        raise InputError(f"{name}: CoNLL is for token-classification; give JSON lines (.jsonl) or a table")
    label_names = read_label_names(Path(settings.labels)) if settings.labels is not None else None
    named_by_header = kind in ("csv", "tsv") and settings.columns is None
    reader = RowReader(name, task, settings, label_names, labelled, named_by_header)
    if kind == "conll":
        records = read_conll(path, settings.tokens, settings.tags, labelled)
    else:
        records = read_records(path, kind, settings.columns, settings.text)
    for number, record in records:
        if task == "question-answering":
            yield question_of_record(name, number, record, labelled)
        else:
            yield reader.row(number, record)


def windows(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """The rows in lists of `size`; the last one may be shorter."""
    while window := list(islice(rows, size)):
        yield window
