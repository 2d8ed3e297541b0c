"""Texts of a search: the pairs that a reranker reads, and the distinct texts of rows to be embedded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.rows.types import PlacedRecord, Record, TextRow, TupleRow

_NEGATIVE_COLUMNS, _NUMBERED_NEGATIVE = ("negative", "negatives"), re.compile("negative_[0-9]{1,6}")


def reading_settings(task: TaskName | None, settings: TaskSettings) -> TaskSettings:
    """The settings by which the texts of a row are read: those of a pair are a query and a document, for reranking."""
    if task != "reranking":
        return settings
    return settings.model_copy(update={"text": settings.query, "text_pair": settings.document})


def ranked_pairs(records: Iterable[PlacedRecord], settings: TaskSettings) -> Iterator[PlacedRecord]:
    """Return the records; one with `positive` and `negatives` becomes a record for each of its documents."""
    names_lists, names_pairs = settings.named & {"positive", "negative"}, settings.named & {"document", "label"}
    for position, record in records:
        if isinstance(record, InputError) or names_pairs:
            yield position, record
            continue
        if not names_lists and (settings.document in record or settings.positive not in record):
            yield position, record
            continue
        try:
            if settings.positive not in record:
                raise InputError(f"has no {settings.positive!r}; name it: --set task.positive=NAME")
            documents = [(text, 1.0) for text in _texts_of(record, settings.positive)]
            documents += [(text, 0.0) for text in negatives_of(record, settings)]
        except InputError as error:
            yield position, error
            continue
        query = {settings.query: record[settings.query]} if settings.query in record else {}
        for text, label in documents:
            yield position, {**query, settings.document: text, settings.label: label}


def negative_columns(record: Record, settings: TaskSettings) -> list[str]:
    """Return the columns of texts that do not answer: the named one, else `negative`, `negatives`, `negative_1`, ..."""
    if settings.negative is not None:
        return [settings.negative]
    numbered = (name for name in record if _NUMBERED_NEGATIVE.fullmatch(name))
    ordered = sorted(numbered, key=lambda name: int(name.rpartition("_")[2]))
    return [name for name in (*_NEGATIVE_COLUMNS, *ordered) if name in record]


def negatives_of(record: Record, settings: TaskSettings) -> list[str]:
    """Return the texts that do not answer; none without such a column, unless one is named."""
    columns = negative_columns(record, settings)
    if "negative" in settings.named and settings.negative is not None and settings.negative not in record:
        known = ", ".join(shown(name) for name in list(record)[:8])
        remedy = "--set task.negative=NAME (a row without negatives has null there)"
        raise InputError(f"has no {settings.negative!r}, only {known}; name the column: {remedy}")
    return [text for column in columns if record.get(column) is not None for text in _texts_of(record, column)]


def _texts_of(record: Record, column: str) -> list[str]:
    """The texts of a column that holds one, or a list of them."""
    value = record[column]
    texts = list(value) if isinstance(value, list | tuple) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{column} is {shown(text)}; it must be a text, or a list of texts")
        if not text.strip():
            raise InputError(f"{column} is empty; give it a text, or leave it out")
    return texts


# --- rows to be embedded: each distinct text once


class TextTable(NamedTuple):
    """The distinct texts of rows, with their prompts, in the order in which they appear; those of row i are
    `members[starts[i] : starts[i + 1]]`.

    `content` [texts]: equal for texts that are equal without their prompts.
    """

    texts: list[TextRow]
    members: IntArray
    starts: IntArray
    content: IntArray


def text_table(
    rows: Sequence[TupleRow], query_prompt: str = "", document_prompt: str = "", *, lower_case: bool = False
) -> TextTable:
    """The texts of rows; the first of a row is a query, all others are documents."""
    numbers: dict[str, int] = {}
    contents: dict[str, int] = {}
    texts: list[TextRow] = []
    members, content = [], []
    for row in rows:
        for position, text in enumerate(row.texts):
            prompted = (query_prompt if position == 0 else document_prompt) + text
            number = numbers.setdefault(prompted, len(texts))
            members.append(number)
            if number == len(texts):
                texts.append(TextRow(row.position, prompted.lower() if lower_case else prompted))
                content.append(contents.setdefault(text, len(contents)))
    sizes = np.fromiter((len(row.texts) for row in rows), np.int64, len(rows))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return TextTable(texts, np.array(members, np.int64), starts, np.array(content, np.int64))
