"""Validate records (JSON objects or rows of a table), and convert them into typed rows. Also read and collect label names.

`RowParser` checks every value that a task needs. Its errors describe the value and the remedy, and the caller adds the file
and the position of the record. `expand_into_pairs` expands a query with several documents into pairs. `reading.py` and
`formats.py` read the records from files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import MOST_TOKEN_ID, is_integer_in_range
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import read_file
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.rows.types import (
    LABELLED_TEXTS,
    LANGUAGE_MODELLING,
    OUTSIDE,
    TASKS_WITH_LABELS,
    IdsRow,
    PlacedRecord,
    QuestionRow,
    Record,
    Row,
    RowPosition,
    TaggedRow,
    TextRow,
    TupleRow,
)

NAMING_OPTIONS = {"text": "--text-column", "text_pair": "--text-pair-column", "label": "--label-column"}
_INPUT_IDS = "input_ids"
_NEGATIVE_COLUMNS, _NUMBERED_NEGATIVE = ("negative", "negatives"), re.compile("negative_[0-9]{1,6}")
# sentence-transformers reads the score of a row from any column with one of these names, regardless of the column order.
_SCORES = ("label", "labels", "score", "scores")
# A word of plain text is a run of letters, digits and underscores, or any other single character that is not whitespace.
_WORD = re.compile(r"\w+|[^\w\s]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Python's `float` would also accept digits of other scripts and `1_000`, so check the format of a number first.
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"(-?)0*([0-9]+)")
_MOST_DIGITS = 18
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RowParser:
    """Converts records, which are JSON objects or rows of a table, into typed rows for a task.

    Attributes:
        task: The task, or None for plain texts.
        settings: The settings of the task, which name the columns.
        label_names: The names of labels that are numbers in the records.
        labelled: Whether a record without a label is rejected. Otherwise labels are ignored.
        named_by_header: Whether the column names come from the first line of the file. It affects only the remedies in
            messages.
    """

    task: TaskName | None
    settings: TaskSettings
    label_names: tuple[str, ...] | None = None
    labelled: bool = False
    named_by_header: bool = False

    @cached_property
    def _label_name_set(self) -> frozenset[str]:
        """A set of the label names, for fast lookup."""
        return frozenset(self.label_names or ())

    def parse_record(self, position: RowPosition, record: Record) -> Row:
        """Validate a record, and convert it into a row of the type that the task requires.

        Args:
            position: The position of the record in its file.
            record: The record.

        Returns:
            A row of the type that belongs to the task.

        Raises:
            InputError: A value that the task needs is missing or invalid. The message names the column and the value.
        """
        if self.task == "token-classification":
            return self._parse_tagged_row(position, record)
        if self.task == "embedding":
            return self._parse_tuple_row(position, record)
        if self.task == "question-answering":
            return self._parse_question_row(position, record)
        if self.task in LANGUAGE_MODELLING and _INPUT_IDS in record:
            return self._parse_ids_row(position, record)
        return self._parse_text_row(position, record)

    def _missing_value_error(self, record: Record, column: str, setting: str) -> InputError:
        """Return the error for a record that has no value in a required column. The message also names the command-line
        option that sets the name of this column.

        Args:
            record: The record.
            column: The name of the column.
            setting: The key of the `task` settings that contains the name of the column, such as `label`.
        """
        problem = (
            f"{column} is null" if column in record else f"the row has no column {column!r}, only {_list_columns(record)}"
        )
        if self.task == "reranking":
            setting = {"text": "query", "text_pair": "document"}.get(setting, setting)
        remedy = f"name the column with {format_column_option(setting)} (currently {shorten(column)})"
        if self.named_by_header:
            remedy += "; if the file has no header line, name all columns: --columns text,label,id"
        return _row_error(problem, remedy)

    def _parse_text_row(self, position: RowPosition, record: Record) -> TextRow:
        """Parse a record with a text or a pair of texts, and with a label if the task requires one.

        The second text is optional. It is required only for reranking, and if the user named its column.
        """
        settings, pair = self.settings, None
        text = self._read_text(record, settings.text)
        expected = self.task == "reranking" or "text_pair" in settings.keys_set_by_user
        if settings.text_pair != settings.text and (expected or record.get(settings.text_pair) is not None):
            is_none = self.task != "reranking" and settings.text_pair in record and record[settings.text_pair] is None
            pair = None if is_none else self._read_text(record, settings.text_pair, "text_pair")
        label = self._read_label(record) if self.labelled and self.task in LABELLED_TEXTS else None
        return TextRow(position, text, pair, label)

    def _parse_tuple_row(self, position: RowPosition, record: Record) -> TupleRow:
        """Parse a record for training embeddings. It contains an anchor, a positive and any number of negatives, or two
        texts with a similarity score.

        The record is read as two texts with a score if the user named their columns, or if it has a text column but no
        anchor column.
        """
        settings = self.settings
        names_pairs = settings.keys_set_by_user & {"text", "text_pair", "label"}
        names_tuples = settings.keys_set_by_user & {"anchor", "positive", "negative"}
        if names_pairs or (not names_tuples and settings.anchor not in record and settings.text in record):
            texts = self._read_text(record, settings.text), self._read_text(record, settings.text_pair, "text_pair")
            return TupleRow(position, self._check_texts_differ(texts), float(cast(float, self._read_label(record))))
        anchor = self._read_text(record, settings.anchor, "anchor")
        positive = self._read_text(record, settings.positive, "positive")
        score = next((name for name in (settings.label, *_SCORES) if record.get(name) is not None), None)
        if score is not None:
            columns = f"task.text={settings.anchor} --set task.text_pair={settings.positive} --label-column {score}"
            problem = f"the row has a column {score}, but rows with {settings.anchor} and {settings.positive} need no score"
            raise _row_error(problem, f"remove the column, or train with it as the score of pairs: --set {columns}")
        return TupleRow(position, (*self._check_texts_differ((anchor, positive)), *_read_negatives(record, settings)))

    def _check_texts_differ(self, texts: tuple[str, str]) -> tuple[str, str]:
        """Raise an InputError if two texts are equal. Otherwise return the texts."""
        if texts[0] == texts[1]:
            raise _row_error(
                f"both texts are {short_repr(texts[0])}", "remove the row, because nothing can be learned from it"
            )
        return texts

    def _read_text(self, record: Record, column: str, setting: str = "text") -> str:
        """Return the text in a column of a record. In training, an empty text raises an InputError."""
        if column not in record:
            raise self._missing_value_error(record, column, setting)
        value = record[column]
        if not isinstance(value, str):
            raise _row_error(f"{column} is {short_repr(value)}", "it must be a text")
        if not value.strip() and (self.labelled or self.task in LANGUAGE_MODELLING):  # training learns nothing from it
            raise _row_error(f"{column} is empty", "write a text there, or remove the row")
        return self._check_characters(column, value)

    def _check_characters(self, column: str, text: str) -> str:
        """Raise an InputError if a text contains a lone surrogate, which is half of a UTF-16 pair. Otherwise return the
        text.
        """
        half = None if text.isascii() else _LONE_SURROGATE.search(text)
        if half is not None:  # tokenizers reject lone surrogates
            raise _row_error(
                f"{column} contains a lone surrogate, \\u{ord(half[0]):04x}, at character {half.start()}",
                "write both surrogates of the character, or remove it",
            )
        return text

    def _read_label(self, record: Record) -> str | tuple[str, ...] | float:
        """Return the label of a record. Depending on the task, it is a number, a label name or a tuple of label names."""
        column = self.settings.label
        value = record.get(column)
        if value is None:
            raise self._missing_value_error(record, column, "label")
        if self.task in ("regression", "reranking", "embedding"):
            return self._parse_number(value)
        if self.task == "multi-label":
            values = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
            if not isinstance(values, list | tuple):
                raise _row_error(f"{column} is {short_repr(value)}", "it must be a list of names")
            return tuple(dict.fromkeys(self._parse_label_name(column, each) for each in values))
        return self._parse_label_name(column, value)

    def _parse_number(self, value: object) -> float:
        """Parse a numeric label, which is a number or a string with a decimal number. It must be finite in float32."""
        if isinstance(value, str):
            result = float(value) if _DECIMAL.fullmatch(value.strip()) else math.nan
        elif isinstance(value, int) and abs(value) > _LARGEST_FLOAT32:  # `float` would raise an OverflowError
            result = math.inf
        else:
            result = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not abs(result) <= _LARGEST_FLOAT32:
            result = math.nan
        if self.task == "reranking" and not 0 <= result <= 1:
            raise _row_error(
                f"{self.settings.label} is {short_repr(value)}", "labels of reranking must be numbers from 0 to 1"
            )
        if math.isnan(result):
            raise _row_error(
                f"{self.settings.label} is {short_repr(value)}",
                f"a label of {self.task} must be a finite number in the range of float32",
            )
        return result

    def _parse_label_name(self, column: str, value: object) -> str:
        """Return the label name for a value in a record. The value is either the name itself or the number of a label."""
        names = self.label_names
        if isinstance(value, str) and value in self._label_name_set:
            return value
        index = value if isinstance(value, int) and not isinstance(value, bool) else None
        digits = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
        if digits is not None:  # convert only the first digits, because Python refuses to convert very long numbers
            index = int(digits[1] + digits[2][:_MOST_DIGITS])
        if index is not None:
            if names is None:
                raise _row_error(
                    f"{column} is the number {short_repr(value)}", "pass a file with the names of the labels: --labels FILE"
                )
            if not 0 <= index < len(names):
                raise _row_error(
                    f"{column} is {short_repr(value)}", f"the --labels file defines only the labels 0 to {len(names) - 1}"
                )
            return names[index]
        if not isinstance(value, str) or not value.strip():
            raise _row_error(f"{column} is {short_repr(value)}", "it must be the name of a label")
        if names is not None:
            raise _row_error(
                f"{column} is {short_repr(value)}",
                "the --labels file does not contain this name; add the name, or correct the row",
            )
        return self._check_characters(column, value.strip())

    def _parse_tagged_row(self, position: RowPosition, record: Record) -> TaggedRow:
        """Parse a record with a list of words, and with a tag for each word if the rows must be labelled.

        For prediction, the record may contain a plain text instead of words.
        """
        settings = self.settings
        if settings.tokens not in record:
            if self.labelled or settings.text not in record or "tokens" in settings.keys_set_by_user:
                raise self._missing_value_error(record, settings.tokens, "tokens")
            return split_into_words(position, self._read_text(record, settings.text))
        words = record[settings.tokens]
        if not isinstance(words, list | tuple):
            raise _row_error(f"{settings.tokens} is {short_repr(words)}", "it must be a list of words")
        for index, word in enumerate(words):
            if not isinstance(word, str) or not word.strip():
                raise _row_error(f"{settings.tokens}[{index}] is {short_repr(word)}", "each element must be a word")
        tokens = tuple(self._check_characters(settings.tokens, word) for word in words)
        if not self.labelled:
            return TaggedRow(position, tokens)
        if not tokens:
            raise _row_error(f"{settings.tokens} is empty", "write at least one word, or remove the row")
        value = record.get(settings.tags)
        if value is None:
            raise self._missing_value_error(record, settings.tags, "tags")
        if not isinstance(value, list | tuple):
            raise _row_error(f"{settings.tags} is {short_repr(value)}", "it must be a list with one tag for each word")
        tags = tuple(self._parse_label_name(settings.tags, tag) for tag in value)
        if len(tags) != len(tokens):
            raise _row_error(f"the row has {len(tokens)} words and {len(tags)} tags", "write one tag for each word")
        return TaggedRow(position, tokens, tags)

    def _parse_question_row(self, position: RowPosition, record: Record) -> QuestionRow:
        """Parse a record with the keys of a SQuAD question: `question`, `context`, `answers`, `is_impossible` and `id`."""
        for key in ("question", "context"):
            value = record.get(key)
            if not isinstance(value, str) or not value.strip():
                raise _row_error(f"{key} is {short_repr(value)}", "it must be a text that is not empty")
            self._check_characters(key, value)
        answers: tuple[tuple[str, int], ...] | None = None
        if self.labelled:
            given = [] if record.get("is_impossible") is True else record.get("answers")
            if given is None:
                raise _row_error(
                    "the row has no `answers`", "write a list of answers, which is empty if the question has no answer"
                )
            answers = tuple(self._parse_answer(record["context"], answer) for answer in self._list_answers(given))
        return QuestionRow(position, str(record.get("id", position.number)), record["question"], record["context"], answers)

    def _list_answers(self, answers: object) -> list[Any]:
        """Return the answers to a question as a list of `{"text", "answer_start"}` objects.

        The form `{"text": [...], "answer_start": [...]}`, which Hugging Face datasets use, is converted.
        """
        if isinstance(answers, dict):
            texts, starts = answers.get("text"), answers.get("answer_start")
            if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
                return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
        if not isinstance(answers, list):
            raise _row_error(f"answers is {short_repr(answers)}", "it must be a list of objects with text and answer_start")
        return answers

    def _parse_answer(self, context: str, answer: Any) -> tuple[str, int]:
        """Return the text of an answer and the position of its first character in the context. Raise an InputError if the
        context does not contain the answer at this position.
        """
        text, start = (answer.get(key) if isinstance(answer, dict) else None for key in ("text", "answer_start"))
        if not isinstance(text, str) or not text or isinstance(start, bool) or not isinstance(start, int):
            raise _row_error(
                f"an answer is {short_repr(answer)}", "an answer must contain text and the integer answer_start"
            )
        if start < 0 or context[start : start + len(text)] != text:
            actual = context[max(start, 0) : max(start, 0) + len(text)]
            problem = (
                f"expected the answer {short_repr(text)} at character {start} of the context, found {short_repr(actual)}"
            )
            raise _row_error(problem, "correct answer_start")
        return text, start

    def _parse_ids_row(self, position: RowPosition, record: Record) -> IdsRow:
        """Parse a record of token ids. Raise an InputError if a value is not an integer or is out of range."""
        values = record[_INPUT_IDS]
        if not isinstance(values, list | tuple) or not values:
            raise _row_error(f"{_INPUT_IDS} is {short_repr(values)}", "it must be a list of token ids that is not empty")
        for index, value in enumerate(values):
            if not is_integer_in_range(value, 0, MOST_TOKEN_ID):
                raise _row_error(
                    f"{_INPUT_IDS}[{index}] is {short_repr(value)}",
                    f"a token id must be an integer from 0 to {MOST_TOKEN_ID}",
                )
        return IdsRow(position, tuple(values))


def format_column_option(setting: str) -> str:
    """Return the command-line option that names a column, such as `--label-column NAME` for the key `label` of the `task`
    settings.
    """
    return f"{NAMING_OPTIONS[setting]} NAME" if setting in NAMING_OPTIONS else f"--set task.{setting}=NAME"


def split_into_words(position: RowPosition, text: str) -> TaggedRow:
    """Split a text into words and punctuation marks, and return them as a row with the character position of each word."""
    words = list(_WORD.finditer(text))
    return TaggedRow(position, tuple(word[0] for word in words), None, tuple(word.start() for word in words))


def _row_error(problem: str, remedy: str) -> InputError:
    """Return an InputError that states a problem and its remedy. A long problem is shortened."""
    return InputError(f"{shorten(problem, 240)}; {remedy}")


def _list_columns(record: Record) -> str:
    """Return the names of the first eight columns of a record, separated by commas, for an error message."""
    return ", ".join(short_repr(str(name)) for name in list(record)[:8]) or "nothing"


# --- documents of a query


def expand_into_pairs(records: Iterable[PlacedRecord], settings: TaskSettings, *, labelled: bool) -> Iterator[PlacedRecord]:
    """Turn the records of a reranking file into pairs of a query and a document, and yield the pairs. A record that lists
    several documents becomes several pairs.

    A document in `positive` gets the label 1, unless the record contains `label` or `labels`. A document in `negative` gets
    the label 0. Records that already are pairs, and errors, are yielded unchanged.

    Args:
        records: Pairs of a position and a record. An error may take the place of the record.
        settings: The settings of the task, which name the columns.
        labelled: Whether labels are read. Otherwise they are ignored.

    Yields:
        Pairs of a position and a record. A record that cannot be expanded becomes an error.
    """
    names_lists, names_pairs = (
        settings.keys_set_by_user & {"positive", "negative"},
        settings.keys_set_by_user & {"document", "label"},
    )
    for position, record in records:
        if (
            isinstance(record, InputError)
            or names_pairs
            or (not names_lists and (settings.document in record or settings.positive not in record))
        ):
            yield position, record
            continue
        try:
            if settings.positive not in record:
                raise InputError(
                    f"the row has no column {settings.positive!r}; name the column with --set task.positive=NAME"
                )
            documents = _list_labelled_documents(record, settings, labelled=labelled)
        except InputError as error:
            yield position, error
            continue
        query = {settings.query: record[settings.query]} if settings.query in record else {}
        for text, label in documents:
            yield position, {**query, settings.document: text, settings.label: label}


def _list_labelled_documents(record: Record, settings: TaskSettings, *, labelled: bool) -> list[tuple[str, Any]]:
    """Return the documents that a reranking record lists for its query, each with its label. The labels are not validated
    here.

    `label` applies to a single text in `positive`, and `labels` to a list of texts. These are the formats `labeled-pair` and
    `labeled-list` that `mine_hard_negatives` of sentence-transformers writes.
    """
    texts, negatives = _read_texts(record, settings.positive), _read_negatives(record, settings)
    columns = find_label_columns(record) if labelled else []
    if not columns:
        return [*((text, 1.0) for text in texts), *((text, 0.0) for text in negatives)]
    column, labels = columns[0], record[columns[0]]
    if len(columns) > 1 or "score" in column:
        raise _row_error(
            f"the row has {' and '.join(columns)} in addition to {settings.positive}",
            "reranking reads one column, `label` or `labels`, with numbers from 0 to 1; remove the other columns",
        )
    if negatives:
        named = ", ".join(find_negative_columns(record, settings))
        raise _row_error(
            f"the row has {column} in addition to {named}", f"put all documents into {settings.positive}, or remove {column}"
        )
    labels = labels if isinstance(labels, list | tuple) else [labels]
    if len(labels) != len(texts):
        raise _row_error(
            f"the row has {len(texts)} texts in {settings.positive} and {len(labels)} in {column}",
            "write one label for each text",
        )
    return list(zip(texts, labels, strict=True))


def find_label_columns(record: Record) -> list[str]:
    """Return which of the columns `label`, `labels`, `score` and `scores` contain a value in a record."""
    return [name for name in _SCORES if record.get(name) is not None]


def find_negative_columns(record: Record, settings: TaskSettings) -> list[str]:
    """Return the names of the columns with the negatives of a record. Negatives are texts that do not match the query or
    anchor.

    If no column is named in the settings, these are `negative`, `negatives`, and `negative_1`, `negative_2` and so on.
    """
    if settings.negative is not None:
        return [settings.negative]
    numbered = (name for name in record if _NUMBERED_NEGATIVE.fullmatch(name))
    ordered = sorted(numbered, key=lambda name: int(name.rpartition("_")[2]))
    return [name for name in (*_NEGATIVE_COLUMNS, *ordered) if name in record]


def _read_negatives(record: Record, settings: TaskSettings) -> list[str]:
    """Return the negatives of a record. Negatives are texts that do not match the query or anchor, and a record may have
    none.

    Raises:
        InputError: The user named the column of the negatives, and the record lacks it.
    """
    columns = find_negative_columns(record, settings)
    if "negative" in settings.keys_set_by_user and settings.negative is not None and settings.negative not in record:
        raise _row_error(
            f"the row has no column {settings.negative!r}, only {_list_columns(record)}",
            "name the column with --set task.negative=NAME, and write null there in rows without negatives",
        )
    return [text for column in columns if record.get(column) is not None for text in _read_texts(record, column)]


def _read_texts(record: Record, column: str) -> list[str]:
    """Return the texts in a column of a record. The column contains either one text or a list of texts.

    Raises:
        InputError: An element is not a text, or is empty.
    """
    value = record[column]
    texts = list(value) if isinstance(value, list | tuple) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{column} is {short_repr(text)}; it must be a text or a list of texts")
        if not text.strip():
            raise InputError(f"{column} contains an empty text; write a text there, or remove it")
    return texts


# --- names of labels


def read_label_names(path: Path) -> tuple[str, ...]:
    """Read the label names from a file with one name per line, and return them. The number of a label is its line number,
    counted from 0.

    Raises:
        InputError: The file cannot be read, is empty or is not UTF-8, or a line is empty or repeats a name.
    """
    try:
        text = read_file(path).decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the file is not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    if not text:
        raise InputError(f"{path}: the file contains no label; write one label per line")
    names = tuple(line.strip() for line in text.split("\n"))
    known: set[str] = set()
    for number, name in enumerate(names, start=1):
        if not name or name in known:
            problem = f"{short_repr(name)} is listed twice" if name else "the line is empty"
            raise InputError(f"{path}: line {number}: {problem}; write each label once, one per line")
        known.add(name)
    return names


def collect_label_names(rows: Iterable[Row], task: TaskName, labels: str | Path | None = None) -> tuple[str, ...]:
    """Return the label names of a task, read from the file `labels` if it is given, and otherwise collected from the rows.

    Args:
        rows: All rows of the training data. They are read only if `labels` is None.
        task: The task.
        labels: A file of label names.

    Returns:
        The names by number. Names from rows are sorted, with the tag `O` first. Empty for a task without labels.
    """
    if task not in TASKS_WITH_LABELS:
        return ()
    if labels is not None:
        return read_label_names(Path(labels))
    names: set[str] = set()
    for row in rows:
        if isinstance(row, TaggedRow):
            names.update(row.tags or ())
        elif isinstance(row, TextRow):
            names.update((row.label,) if isinstance(row.label, str) else row.label if isinstance(row.label, tuple) else ())
    return tuple(sorted(names, key=lambda name: (name != OUTSIDE, name)))
