"""Records of files of rows, whatever format they are in: the one reader behind every command that takes rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

from gaudi_bert.common.arrow import opened_parquet, validated
from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.corpus.python_texts import documentation_documents, python_texts
from gaudi_bert.rows.cells import read_table
from gaudi_bert.rows.parts import TABLES, Line, RowPart
from gaudi_bert.rows.types import Place, PlacedRecord, Record

# Of a task's records besides the columns that settings name.
_OTHER_COLUMNS = ("input_ids", "question", "context", "answers", "is_impossible", "id")
_PARQUET_ROWS_AT_ONCE = 256


def read_records(part: RowPart, settings: TaskSettings) -> Iterator[PlacedRecord]:
    """The records of a part with their places; one that cannot be read is an error in its position."""
    if part.kind == "built-in":
        documents = documentation_documents(python_texts(part.name))
        yield from ((Place(number), {settings.text: "\n".join(lines)}) for number, lines in enumerate(documents, start=1))
    elif part.kind == "parquet":
        yield from _parquet(part, settings)
    else:
        with part.lines() as lines:
            if part.kind in TABLES:
                with closing(read_table(part, settings, lines)) as records:
                    yield from records
            else:
                yield from _lines_as_records(part, settings, lines)


def _lines_as_records(part: RowPart, settings: TaskSettings, lines: Iterator[tuple[int, Line]]) -> Iterator[PlacedRecord]:
    """A record for each line that is not blank: an object of JSON, or a text."""
    row = count(1)
    for number, line in lines:
        if isinstance(line, UnicodeDecodeError):
            place = Place(next(row), number)
            yield place, part.not_text(part.location(place), line)
        elif line.strip():
            place, text = Place(next(row), number), line.removesuffix("\n").removesuffix("\r")
            yield place, _json_record(text, part, place) if part.kind == "jsonl" else {settings.text: text}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key is twice: JSON leaves open which one counts."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in record if keys.count(key) > 1)
        raise InputError(f"has the key {shown(twice)} twice; leave one out")
    return record


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _json_record(line: str, part: RowPart, place: Place) -> Record | InputError:
    try:
        record = _JSON.decode(line)
    except InputError as error:
        return InputError(f"{part.location(place)}: {error}")
    except (ValueError, RecursionError) as error:
        return InputError(f"{part.location(place)}: not JSON ({shortened(str(error))}); write one object per line")
    if not isinstance(record, dict):
        return InputError(f'{part.location(place)}: {shortened(line)} is not an object; write for example {{"text": "..."}}')
    return record


def _parquet(part: RowPart, settings: TaskSettings) -> Iterator[PlacedRecord]:
    """The columns that a task may need; all, where that of the text is missing."""
    if part.path is None:
        raise InputError("standard input: Parquet cannot be read as it comes; give the name of the file")
    known = (settings.text, settings.text_pair, settings.label, settings.tokens, settings.tags, *_OTHER_COLUMNS)
    with opened_parquet(part.path) as table:
        names = table.schema_arrow.names
        columns = [name for name in names if name in known] if settings.text in names else None
        groups = None if part.end is None else list(range(part.start, part.end))
        batches = table.iter_batches(_PARQUET_ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False)
        rows = (row for batch in batches for row in validated(part.path, batch).to_pylist())
        yield from ((Place(number), row) for number, row in enumerate(rows, start=1))
