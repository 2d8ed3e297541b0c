"""Records of queries with the documents that answer them and those that do not, as the pairs that a reranker reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.rows.parts import RowPart
from gaudi_bert.rows.types import Place, PlacedRecord, Record

_NEGATIVE_COLUMNS = ("negative", "negatives")


def reading_settings(task: TaskName | None, settings: TaskSettings) -> TaskSettings:
    """The settings by which the texts of a row are read: those of a pair are a query and a document, for reranking."""
    if task != "reranking":
        return settings
    named = {"text": settings.query, "text_pair": settings.document}
    return TaskSettings.model_construct(_fields_set={*settings.model_fields_set, *named}, **{**dict(settings), **named})


def ranked_pairs(part: RowPart, records: Iterable[PlacedRecord], settings: TaskSettings) -> Iterator[PlacedRecord]:
    """The records; one with `positive` and `negatives` becomes a record for each of its documents."""
    for place, record in records:
        if isinstance(record, InputError) or settings.document in record or settings.positive not in record:
            yield place, record
            continue
        try:
            documents = [(text, 1.0) for text in texts_of(part, place, record, settings.positive)]
            documents += [(text, 0.0) for text in negatives_of(part, place, record, settings)]
        except InputError as error:
            yield place, error
            continue
        query = {settings.query: record[settings.query]} if settings.query in record else {}
        for text, label in documents:
            yield place, {**query, settings.document: text, settings.label: label}


def negatives_of(part: RowPart, place: Place, record: Record, settings: TaskSettings) -> list[str]:
    """The texts that do not answer; none where there is no such column."""
    columns = _NEGATIVE_COLUMNS if settings.negative is None else (settings.negative,)
    return [text for column in columns if record.get(column) is not None for text in texts_of(part, place, record, column)]


def texts_of(part: RowPart, place: Place, record: Record, column: str) -> list[str]:
    """The texts of a column that holds one, or a list of them."""
    value = record[column]
    texts = list(value) if isinstance(value, list | tuple) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{part.location(place)}: {column} is {shown(text)}; it must be a text, or a list of texts")
        if not text.strip():
            raise InputError(f"{part.location(place)}: {column} is empty; give it a text, or leave it out")
    return texts
