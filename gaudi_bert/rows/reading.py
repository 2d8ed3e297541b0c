"""Rows of a task's data, whatever file they are in, one after the other in bounded memory.

`records.py` reads the files of records; CoNLL (a word and its tag per line, a blank line after each sentence) and SQuAD
(versions 1.1 and 2.0) have their own forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.rows.fields import RowReader, half_character, read_label_names
from gaudi_bert.rows.records import TABLES, NumberedRecord, Record, RowPart, complete_file, read_records, text_lines
from gaudi_bert.rows.retrieval import ranked_pairs, reading_settings
from gaudi_bert.rows.types import BadRow, QuestionRow, Row, TaggedRow, TextRow

_Row = TypeVar("_Row")
_DOCUMENT_LINE = "-DOCSTART-"
_FORMATS = {"jsonl": "JSON lines", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet", "conll": "CoNLL", "squad": "SQuAD"}
_OPTIONS = {"text": "--text-column", "text_pair": "--text-pair-column", "label": "--label-column"}
_COLUMNS = ("text", "text_pair", "label", "tokens", "tags", "query", "document", "positive", "negative")
_MOST_SHOWN = 60


def read_rows(
    path: str | Path,
    task: TaskName | None,
    settings: TaskSettings,
    *,
    labelled: bool = False,
    say: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """The rows of a file, in its order, in bounded memory (SQuAD's JSON is read at once).

    `path` may be `-` for standard input; `task` is None for plain texts. With `labelled`, a row without labels, tags or
    answers is refused; else they are ignored. `say` gets a line on the columns and the first row, once that is read.
    """
    part = complete_file(path, settings.format)
    return good_rows(rows_of_part(part, task, settings, labelled=labelled, say=say))


def good_rows(rows: Iterator[Row | BadRow]) -> Iterator[Row]:
    """The rows; one that cannot be read is refused."""
    for row in rows:
        if isinstance(row, BadRow):
            raise InputError(row.problem)
        yield row


def rows_of_part(
    part: RowPart,
    task: TaskName | None,
    settings: TaskSettings,
    *,
    labelled: bool = False,
    say: Callable[[str], None] | None = None,
) -> Iterator[Row | BadRow]:
    """The same of a part of a file; a row that cannot be read is a `BadRow`, where the next ones can be read."""
    _check_applies(part, task, settings, labelled)
    label_names = read_label_names(Path(settings.labels)) if settings.labels is not None else None
    reading = reading_settings(task, settings)
    reader = RowReader(part, task, reading, label_names, labelled, part.kind in TABLES and settings.columns is None)
    records: Iterator[NumberedRecord]
    if part.kind == "squad":
        records = _read_squad(part)
    elif part.kind == "conll":
        records = _read_conll(part, settings.tokens, settings.tags, labelled)
    else:
        records = read_records(part, settings)
    if task == "reranking":
        records = ranked_pairs(part, records, settings)
    for number, record in records:
        try:
            if isinstance(record, InputError):
                raise record
            is_question = task == "question-answering"
            row = _question_of_record(part, number, record, labelled) if is_question else reader.row(number, record)
        except InputError as error:
            yield BadRow(number, str(error))
            continue
        if say is not None:
            say(_described(part, settings, row, task))
            say = None
        yield row


def windows(rows: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    """The rows in lists of `size`; the last one may be shorter."""
    while window := list(islice(rows, size)):
        yield window


def sized_batches(
    rows: Iterable[_Row], size_of: Callable[[_Row], int], enough: int, most_rows: int | None = None
) -> Iterator[list[_Row]]:
    """The rows in lists that end with the row that makes them large enough, or with the row `most_rows`."""
    batch: list[_Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += size_of(row)
        if size >= enough or len(batch) == most_rows:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_applies(part: RowPart, task: TaskName | None, settings: TaskSettings, labelled: bool) -> None:
    """Refuse a format that the task does not read, and columns that are named but are not read."""
    if part.kind == "squad" and task != "question-answering":
        others = "plain texts need" if task is None else f"{task} needs"
        raise InputError(f"{part.name}: SQuAD's JSON is for question-answering, {others} JSON lines (.jsonl) or a table")
    if part.kind == "conll" and task != "token-classification":
        raise InputError(f"{part.name}: CoNLL is for token-classification; give JSON lines (.jsonl) or a table")
    if part.kind not in TABLES and (settings.columns is not None or settings.no_header):
        option = "--no-header" if settings.columns is None else "--columns"
        raise InputError(f"{part.name}: {option} is for CSV and TSV, this is {part.kind}; leave it out")
    has_columns = part.kind in (*TABLES, "jsonl", "parquet")
    columns = {"text", "text_pair", "label"}
    if task == "token-classification":
        columns = {"text", "tokens", "tags"}
    elif task is not None and task.endswith("-language-modelling"):
        columns = {"text"}
    elif task == "question-answering":
        columns = set()
    elif task == "reranking":
        columns = {"query", "document", "positive", "negative", "label"}
    columns -= set() if labelled else {"label", "tags"}
    for key in _COLUMNS:
        if key in settings.model_fields_set and not (has_columns and key in columns):
            option = f"{_OPTIONS[key]} (task.{key})" if key in _OPTIONS else f"task.{key}"
            reason = f"no {key} is read here" if has_columns else "this file has no named columns"
            raise InputError(f"{part.name}: {option} does not apply, {reason}; leave it out")


def _described(part: RowPart, settings: TaskSettings, row: Row, task: TaskName | None) -> str:
    """What is read of a file, and how its first row begins."""
    if isinstance(row, TextRow):
        keys = ["query", "document", "label"] if task == "reranking" else ["text", "text_pair", "label"]
        values = zip(keys, (row.text, row.text_pair, row.label), strict=True)
        columns, text = _named(settings, [key for key, value in values if value is not None]), row.text
    elif isinstance(row, TaggedRow):
        keys = ["text"] if row.starts is not None else ["tokens", "tags"][: 1 + (row.tags is not None)]
        columns, text = _named(settings, keys), " ".join(row.tokens[:_MOST_SHOWN])
    elif isinstance(row, QuestionRow):
        columns, text = "question, context", row.question
    else:
        columns, text = "input_ids", str(list(row.input_ids[:_MOST_SHOWN]))
    begins = " ".join(text[: 4 * _MOST_SHOWN].split())
    begins = begins if len(begins) <= _MOST_SHOWN else f"{begins[:_MOST_SHOWN]}..."
    kind = f"{_FORMATS[part.kind]}, {columns}" if part.kind in _FORMATS else "plain text"
    return f"{part.name}: reads {kind}; row {row.number} begins {begins!r}"


def _named(settings: TaskSettings, keys: list[str]) -> str:
    """The columns that settings name, with what they hold where that is not their name."""
    columns = {key: getattr(settings, key) for key in keys}
    return ", ".join(column if column == key else f"{column} ({key})" for key, column in columns.items())


# --- CoNLL and SQuAD


def _read_conll(part: RowPart, tokens: str, tags: str, labelled: bool) -> Iterator[tuple[int, Record]]:
    """The sentences of a CoNLL file as records; the word is the first column of a line, the tag the last.

    With `labelled`, lines without a tag are refused.
    """
    first = 0
    words: list[str] = []
    tag_names: list[str] = []
    with part.opened() as handle:
        for number, line in text_lines(part, handle):
            if isinstance(line, InputError):
                raise line
            cells = line.split("\t") if "\t" in line else line.split()
            if not line.strip() or cells[0] == _DOCUMENT_LINE:
                if words:
                    yield first, _sentence(part, first, words, tag_names, tokens, tags)
                words, tag_names = [], []
                continue
            if not cells[0].strip():
                raise InputError(f"{part.location(number)}: has no word before its tag; write WORD, a tab, TAG")
            if labelled and len(cells) < 2:
                raise InputError(f"{part.location(number)}: the word {shown(cells[0])} has no tag; write WORD, a tab, TAG")
            first = first if words else number
            words.append(cells[0].strip())
            tag_names += [cells[-1].strip()] if len(cells) > 1 else []
        if words:
            yield first, _sentence(part, first, words, tag_names, tokens, tags)


def _sentence(part: RowPart, number: int, words: list[str], tag_names: list[str], tokens: str, tags: str) -> Record:
    if tag_names and len(tag_names) != len(words):
        raise InputError(
            f"{part.location(number)}: a sentence of {len(words)} words has {len(tag_names)} tags; give each word one"
        )
    return {tokens: words, tags: tag_names} if tag_names else {tokens: words}


def _read_squad(part: RowPart) -> Iterator[NumberedRecord]:
    """The questions of a SQuAD file with their contexts, in its order."""
    with part.opened() as handle:
        content = handle.read()
    try:
        articles = json.loads(content)["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        questions = [(paragraph["context"], question) for paragraph in paragraphs for question in paragraph["qas"]]
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{part.name}: not JSON ({shortened(str(error))}); give a SQuAD file, or JSON lines as .jsonl"
        ) from error
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{part.name}: is not SQuAD's JSON, {shown(error)} is missing or wrong; it is data / paragraphs / qas"
        ) from error
    for number, (context, question) in enumerate(questions, start=1):
        if isinstance(question, dict):
            yield number, {"context": context, **question}
        else:
            yield number, InputError(f"{part.location(number)}: {shown(question)} is not a question; it must be an object")


def _question_of_record(part: RowPart, number: int, record: Record, labelled: bool) -> QuestionRow:
    """A question with the keys of SQuAD: `question`, `context`, `answers`, `is_impossible`, `id`.

    `answers` is a list of `{"text", "answer_start"}`, or `{"text": [], "answer_start": []}` as in Hugging Face datasets.
    """
    row = part.location(number)
    for key in ("question", "context"):
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{row}: {key} is {shown(value)}; it must be a text that is not empty")
        problem = half_character(value)
        if problem:
            raise InputError(f"{row}: {key} {problem}; write the other half too, or leave it out")
    answers: tuple[tuple[str, int], ...] | None = None
    if labelled:
        given = [] if record.get("is_impossible") is True else record.get("answers")
        if given is None:
            raise InputError(f"{row}: has no `answers`; give some, an empty list where there is none")
        answers = tuple(_answer(row, record["context"], answer) for answer in _answer_list(row, given))
    return QuestionRow(number, str(record.get("id", number)), record["question"], record["context"], answers)


def _answer_list(row: str, answers: Any) -> list[Any]:
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        raise InputError(f"{row}: answers is {shown(answers)}; it must be a list of text and answer_start")
    return answers


def _answer(row: str, context: str, answer: Any) -> tuple[str, int]:
    text = answer.get("text") if isinstance(answer, dict) else None
    start = answer.get("answer_start") if isinstance(answer, dict) else None
    if not isinstance(text, str) or not text or isinstance(start, bool) or not isinstance(start, int):
        raise InputError(f"{row}: an answer is {shown(answer)}; it must have a text and answer_start, an integer")
    if start < 0 or context[start : start + len(text)] != text:
        actual = context[max(start, 0) : max(start, 0) + len(text)]
        raise InputError(f"{row}: the answer {shown(text)} is not at {start}, {shown(actual)} is; correct answer_start")
    return text, start
