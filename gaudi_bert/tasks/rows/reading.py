"""Rows of a task's data, whatever file they are in, one after the other in bounded memory.

JSON lines, CSV, TSV, Parquet and plain lines hold records; CoNLL (a word and its tag per line, a blank line after each
sentence) and SQuAD (versions 1.1 and 2.0) have their own forms.

A line ends at a line feed and nowhere else: people's comments hold carriage returns and other characters that Python would
also take for the end of a line. TSV is split at tabs, with no quoting, as GLUE and GoEmotions are written; CSV is quoted.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.files import open_file, regular
from gaudi_bert.config.sections import RowFormat, TaskName, TaskSettings
from gaudi_bert.records.tables.arrow import explained_arrow_errors, require_pyarrow, validated
from gaudi_bert.tasks.rows.fields import Record, RowReader, half_character, read_label_names
from gaudi_bert.tasks.rows.types import STANDARD_INPUT, BadRow, QuestionRow, Row, source_name

_ENDINGS: dict[str, RowFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".json": "squad",
    ".txt": "txt",
}
_Row = TypeVar("_Row")
_LARGEST_FIELD = 2**31 - 1
_PARQUET_ROWS = 1024
_DOCUMENT_LINE = "-DOCSTART-"


def read_rows(path: str | Path, task: TaskName | None, settings: TaskSettings, *, labelled: bool = False) -> Iterator[Row]:
    """The rows of a file, in its order, in bounded memory (SQuAD's JSON is read whole).

    `path` may be `-` for standard input; `task` is None for plain texts. With `labelled`, a row without labels, tags or
    answers is refused; else they are ignored.
    """
    for row in read_all_rows(path, task, settings, labelled=labelled):
        if isinstance(row, BadRow):
            raise InputError(row.problem)
        yield row


def read_all_rows(
    path: str | Path, task: TaskName | None, settings: TaskSettings, *, labelled: bool = False
) -> Iterator[Row | BadRow]:
    """As `read_rows`, but a row that cannot be read is a `BadRow` in its place, where the file can be read on after it."""
    name = source_name(path)
    kind = _format_of(path, settings.format)
    if kind == "squad" and task != "question-answering":
        others = "plain texts need" if task is None else f"{task} needs"
        raise InputError(f"{name}: SQuAD's JSON is for question-answering, {others} JSON lines (.jsonl) or a table")
    if kind == "conll" and task != "token-classification":
        raise InputError(f"{name}: CoNLL is for token-classification; give JSON lines (.jsonl) or a table")
    label_names = read_label_names(Path(settings.labels)) if settings.labels is not None else None
    named_by_header = kind in ("csv", "tsv") and settings.columns is None
    reader = RowReader(name, task, settings, label_names, labelled, named_by_header)
    records: Iterator[tuple[int, Record | InputError]]
    if kind == "squad":
        records = _read_squad(path)
    elif kind == "conll":
        records = _read_conll(path, settings.tokens, settings.tags, labelled)
    else:
        records = _read_records(path, kind, settings.columns, settings.text)
    for number, record in records:
        try:
            if isinstance(record, InputError):
                raise record
            is_question = task == "question-answering"
            yield _question_of_record(name, number, record, labelled) if is_question else reader.row(number, record)
        except InputError as error:
            yield BadRow(number, str(error))


def windows(rows: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    """The rows in lists of `size`; the last one may be shorter."""
    while window := list(islice(rows, size)):
        yield window


# --- files of records


def _format_of(path: str | Path, given: RowFormat | None) -> RowFormat:
    """The format of a file: the given one, or by its ending; standard input holds JSON lines."""
    if given is not None:
        return given
    if str(path) == STANDARD_INPUT:
        return "jsonl"
    name = Path(path).name.lower().removesuffix(".gz")
    ending = Path(name).suffix
    if ending not in _ENDINGS:
        known = ", ".join(_ENDINGS)
        raise InputError(f"{path}: unknown ending; known are {known} (and .gz), or name the format: --set task.format=jsonl")
    return _ENDINGS[ending]


@contextmanager
def _open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file (plain or gzip, by its first bytes) or standard input."""
    name = source_name(path)
    if str(path) == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    try:
        with open_file(path) as plain:
            is_gzip = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            if is_gzip:
                with gzip.open(plain) as unpacked:
                    yield io.BufferedReader(unpacked)  # type: ignore[type-var]
            else:
                yield plain
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{name}: is damaged gzip ({shortened(str(error))}); compress it again") from error
    except OSError as error:
        raise InputError(f"{name}: cannot read: {error.strerror or error}; check the path") from error


def _text_lines(handle: BinaryIO, name: str) -> Iterator[tuple[int, str | InputError]]:
    """The lines of a UTF-8 file with their numbers from 1, without their ends and without a byte-order mark.

    One that is not UTF-8 is an error in its place.
    """
    for number, line in enumerate(handle, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield number, line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 at its byte {error.start}; save the file as UTF-8"
            yield number, InputError(f"{name}: row {number}: {reason}")


def _read_records(
    path: str | Path, kind: RowFormat, header: Sequence[str] | None, text_column: str
) -> Iterator[tuple[int, Record | InputError]]:
    """The records of a file with their numbers; one that cannot be read is an error in its place.

    `header` names the columns of a table without a header line, `text_column` is what a line of a plain text is called.
    """
    if header is not None and kind not in ("csv", "tsv"):
        raise InputError(f"{source_name(path)}: --columns is for CSV and TSV; a file of the format {kind} names its own")
    if kind == "parquet":
        yield from _parquet(path)
        return
    name = source_name(path)
    with _open_bytes(path) as handle:
        if kind == "jsonl":
            yield from _json_lines(handle, name)
        elif kind == "txt":
            for number, line in _text_lines(handle, name):
                if isinstance(line, InputError) or line.strip():
                    yield number, line if isinstance(line, InputError) else {text_column: line}
        else:
            yield from _table(handle, name, kind, header, text_column)


def _json_lines(handle: BinaryIO, name: str) -> Iterator[tuple[int, Record | InputError]]:
    for number, line in _text_lines(handle, name):
        if isinstance(line, InputError):
            yield number, line
        elif line.strip():
            yield number, _json_record(line, f"{name}: row {number}")


def _json_record(line: str, row: str) -> Record | InputError:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return InputError(f"{row}: not JSON ({shortened(str(error))}); write one object per line")
    if not isinstance(record, dict):
        return InputError(f'{row}: {shortened(line)} is not an object; write for example {{"text": "..."}}')
    return record


def _table(
    handle: BinaryIO, name: str, kind: RowFormat, header: Sequence[str] | None, text_column: str
) -> Iterator[tuple[int, Record | InputError]]:
    """An empty cell is no value, but for that of the text, which is then empty."""
    columns = None if header is None else list(header)
    for number, cells in _tab_cells(handle, name) if kind == "tsv" else _comma_cells(handle, name):
        if isinstance(cells, InputError):
            if columns is None:
                raise cells
            yield number, cells
            continue
        if columns is None:
            columns = [cell.strip() for cell in cells]
            twice = [column for column in columns if columns.count(column) > 1]
            if twice:
                raise InputError(f"{name}: two columns are called {shown(twice[0])}; name them apart, or pass --columns")
        elif len(cells) != len(columns):
            problem = f"has {len(cells)} cells, the columns are {len(columns)} ({', '.join(columns)[:80]})"
            yield number, InputError(f"{name}: row {number}: {problem}; fix the row")
        else:
            named = zip(columns, cells, strict=True)
            yield number, {column: cell for column, cell in named if cell != "" or column == text_column}


def _tab_cells(handle: BinaryIO, name: str) -> Iterator[tuple[int, list[str] | InputError]]:
    for number, line in _text_lines(handle, name):
        if isinstance(line, InputError) or line:
            yield number, line if isinstance(line, InputError) else line.split("\t")


def _comma_cells(handle: BinaryIO, name: str) -> Iterator[tuple[int, list[str] | InputError]]:
    csv.field_size_limit(_LARGEST_FIELD)
    lines = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: row {reader.line_num + 1}: not UTF-8; save the file as UTF-8") from error
    except csv.Error as error:
        raise InputError(f"{name}: row {reader.line_num}: not CSV ({error}); fix its quotes") from error
    finally:
        lines.detach()


def _parquet(path: str | Path) -> Iterator[tuple[int, Record]]:
    if str(path) == STANDARD_INPUT:
        raise InputError("standard input: Parquet cannot be read as it comes; give the name of the file")
    require_pyarrow()
    from pyarrow import parquet

    number = 0
    with explained_arrow_errors(Path(path)), parquet.ParquetFile(regular(path)) as table:
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, use_threads=False):
            for record in validated(Path(path), batch).to_pylist():
                number += 1
                yield number, record


# --- CoNLL and SQuAD


def _read_conll(path: str | Path, tokens: str, tags: str, labelled: bool) -> Iterator[tuple[int, Record]]:
    """The sentences of a CoNLL file as records; the word is the first column of a line, the tag the last.

    With `labelled`, lines without a tag are refused.
    """
    name = source_name(path)
    first = 0
    words: list[str] = []
    tag_names: list[str] = []
    with _open_bytes(path) as handle:
        for number, line in _text_lines(handle, name):
            if isinstance(line, InputError):
                raise line
            cells = line.split("\t") if "\t" in line else line.split()
            if not line.strip() or cells[0] == _DOCUMENT_LINE:
                if words:
                    yield first, _sentence(name, first, words, tag_names, tokens, tags)
                words, tag_names = [], []
                continue
            if not cells[0].strip():
                raise InputError(f"{name}: row {number}: has no word before its tag; write WORD, a tab, TAG")
            if labelled and len(cells) < 2:
                raise InputError(f"{name}: row {number}: the word {shown(cells[0])} has no tag; write WORD, a tab, TAG")
            first = first if words else number
            words.append(cells[0].strip())
            tag_names += [cells[-1].strip()] if len(cells) > 1 else []
        if words:
            yield first, _sentence(name, first, words, tag_names, tokens, tags)


def _sentence(name: str, number: int, words: list[str], tag_names: list[str], tokens: str, tags: str) -> Record:
    if tag_names and len(tag_names) != len(words):
        raise InputError(
            f"{name}: row {number}: a sentence of {len(words)} words has {len(tag_names)} tags; give each word one"
        )
    return {tokens: words, tags: tag_names} if tag_names else {tokens: words}


def _read_squad(path: str | Path) -> Iterator[tuple[int, Record | InputError]]:
    """The questions of a SQuAD file with their contexts, in its order."""
    name = source_name(path)
    with _open_bytes(path) as handle:
        content = handle.read()
    try:
        articles = json.loads(content)["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        questions = [(paragraph["context"], question) for paragraph in paragraphs for question in paragraph["qas"]]
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{name}: not JSON ({shortened(str(error))}); give a SQuAD file, or JSON lines as .jsonl"
        ) from error
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{name}: is not SQuAD's JSON, {shown(error)} is missing or wrong; it is data / paragraphs / qas"
        ) from error
    for number, (context, question) in enumerate(questions, start=1):
        if isinstance(question, dict):
            yield number, {"context": context, **question}
        else:
            yield number, InputError(f"{name}: row {number}: {shown(question)} is not a question; it must be an object")


def _question_of_record(name: str, number: int, record: Record, labelled: bool) -> QuestionRow:
    """A question with the keys of SQuAD: `question`, `context`, `answers`, `is_impossible`, `id`.

    `answers` is a list of `{"text", "answer_start"}`, or `{"text": [], "answer_start": []}` as in Hugging Face datasets.
    """
    row = f"{name}: row {number}"
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
        raise InputError(f"{row}: an answer is {shown(answer)}; it must have a text and answer_start, a whole number")
    if start < 0 or context[start : start + len(text)] != text:
        actual = context[max(start, 0) : max(start, 0) + len(text)]
        raise InputError(f"{row}: the answer {shown(text)} is not at {start}, {shown(actual)} is; correct answer_start")
    return text, start
