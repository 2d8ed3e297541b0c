"""Files that are neither JSON lines nor Parquet: CSV and TSV as records, and the questions of SQuAD.

TSV is split at tabs, with no quoting, as GLUE and GoEmotions are written; CSV is quoted. Columns are known by their header,
or by the names that settings give; a header with another separator is refused with the option that names it.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

from gaudi_bert.common import files
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.parts import BYTE_ORDER_MARK, Line, RowPart, longest_row
from gaudi_bert.rows.types import PlacedRecord, RowPosition

_CellRows: TypeAlias = Iterator[tuple[int, list[str] | UnicodeDecodeError]]

_MOST_CELLS = 1 << 20
_AFTER_RETURN = re.compile("(?<=\r)(?!\n)")  # where lines of old spreadsheets end
_SEPARATORS = (";", "\t", ",", "|")
_ROWS_LOOKED_AT, _LINES_LOOKED_AT = 20, 1000
_LONGEST_NAME = 40
_NAME = re.compile(r"[^\W\d]\w*(?:[ ._-]\w+){0,2}")
_NUMBER = re.compile(r"[+-]?[0-9]*\.?[0-9]+")
_USUAL_NAMES = frozenset(
    {"text", "text_pair", "text1", "text2", "text_a", "text_b", "sentence", "sentence1", "sentence2", "comment", "review"}
    | {"comment_text", "title", "body", "content", "message", "tweet", "question", "question1", "question2", "answer"}
    | {"premise", "hypothesis", "query", "passage", "document", "label", "labels", "class", "category", "target"}
    | {"sentiment", "emotion", "score", "rating", "stars", "similarity", "id", "idx", "index"}
)


def read_table(
    part: RowPart, settings: TaskSettings, lines: Iterator[tuple[int, Line]], needed: Callable[[Sequence[str]], list[str]]
) -> Generator[PlacedRecord, None, None]:
    """Read the rows of a table; an empty cell means that the value is missing, that of the text is an empty text.

    `needed(columns)` are the remedies for columns that are needed and are not there.
    """
    separator = "\t" if part.kind == "tsv" else ","
    if settings.delimiter is not None and (part.kind == "csv" or "delimiter" in settings.named):
        separator = settings.delimiter  # one that nobody named is that of a model's training data, and for CSV alone
    rows = _tab_cells(part, lines, separator) if part.kind == "tsv" else _comma_cells(part, lines, separator)
    columns = list(settings.columns) if settings.columns is not None else None
    if columns is None and settings.no_header:
        raise InputError(f"{part.name}: without a header, name the columns too: --columns text,label,id")
    if columns is not None and not settings.no_header:
        columns, rows = _without_header(part, settings, columns, rows)
    columns = columns or _header(part, settings, rows, separator, needed)
    for number, (line, cells) in enumerate(rows, start=1):
        position = RowPosition(number, line)
        if isinstance(cells, UnicodeDecodeError):
            yield position, part.not_text(cells)
        elif len(cells) != len(columns):
            problem = f"has {len(cells):,} cells, the columns are {len(columns):,} ({', '.join(columns[:99])[:80]})"
            remedy = _other_separator(cells, separator, len(columns)) or "fix the row"
            yield position, InputError(f"{problem}; {remedy}")
        else:
            named = zip(columns, cells, strict=True)
            yield position, {name: cell if cell != "" or name == settings.text else None for name, cell in named}


def _header(
    part: RowPart,
    settings: TaskSettings,
    rows: _CellRows,
    separator: str,
    needed: Callable[[Sequence[str]], list[str]],
) -> list[str]:
    """Return the names of the columns, which the first line holds; [] of a file without any line.

    Refuses a table with all that is wrong with it: its encoding, its separator, its columns.
    """
    line, cells, remedies = *_first_line(part, rows), []
    if isinstance(cells, UnicodeDecodeError):
        remedies.append(part.encoding_remedy(cells))
        cells = cells.object.decode("latin-1").rstrip("\r\n").split(separator)
    columns = [cell.strip() for cell in cells]
    other = _other_separator(columns, separator)
    if other is not None and columns != [settings.text]:
        remedies.append(other)
        columns = [cell.strip().strip('"') for cell in columns[0].split(_separator_in(columns, separator))]
    twice = next((column for column, times in Counter(columns).items() if times > 1), None)
    if twice is not None and not remedies:
        raise InputError(f"{part.name}: two columns are called {short_repr(twice)}; name them apart, or pass --columns")
    missing = needed(columns) if columns else []
    if not remedies and not missing:
        return columns
    if missing:
        missing.append("without a header line, name all: --columns text,label,id")
    if part.path is not None and len(remedies) == (other is not None):
        with part.lines() as lines:
            wrong = next((each for _, each in islice(lines, _LINES_LOOKED_AT) if isinstance(each, UnicodeDecodeError)), None)
        remedies += [part.encoding_remedy(wrong)] if wrong is not None else []
    problem = f"its header is {short_repr(', '.join(columns))}"
    raise InputError(f"{part.name}: line {line:,}: {problem}; {'; '.join([*remedies, *missing])}")


def _first_line(part: RowPart, rows: _CellRows) -> tuple[int, list[str] | UnicodeDecodeError]:
    """Return the first line in cells, or what is wrong with its bytes where they are of one byte a character."""
    try:
        return next(rows, (0, []))
    except InputError:
        if part.path is None:  # which is read once only
            raise
        with part.lines() as lines:
            number, line = next(lines)
        if isinstance(line, UnicodeDecodeError) and b"\x00" not in line.object:
            return number, line
        raise


def _separator_in(cells: Sequence[str], separator: str, columns: int | None = None) -> str | None:
    """Return what separates the cells of a row that is one cell; `columns` that it should have."""
    if len(cells) != 1:
        return None
    others = (other for other in _SEPARATORS if other != separator)
    return next(
        (other for other in others if (cells[0].count(other) == columns - 1 if columns else other in cells[0])), None
    )


def _other_separator(cells: Sequence[str], separator: str, columns: int | None = None) -> str | None:
    """Return the remedy for a row that is one cell because other characters separate its cells."""
    other = _separator_in(cells, separator, columns)
    if other is None:
        return None
    return f"its cells are separated by {other!r}: pass --delimiter {'TAB' if other == chr(9) else repr(other)}"


def _without_header(
    part: RowPart, settings: TaskSettings, columns: list[str], rows: _CellRows
) -> tuple[list[str] | None, _CellRows]:
    """Return the columns and the rows of a table whose columns are named; a first row that names them too is refused.

    Where nobody named them, they are those of a model's training data, and a header counts: None and all rows.
    """
    beginning = list(islice(rows, _ROWS_LOOKED_AT))
    (line, first), *following = beginning or [(0, [])]
    if isinstance(first, list) and _is_header(first, columns, [cells for _, cells in following if isinstance(cells, list)]):
        if "columns" not in settings.named:
            return None, chain(beginning, rows)
        where = part.location(RowPosition(1, line))
        raise InputError(f"{where}: {short_repr(first)} looks like a header; leave --columns out, or pass --no-header")
    return columns, chain(beginning, rows)


def _is_header(first: Sequence[str], columns: Sequence[str], following: Iterable[Sequence[str]]) -> bool:
    """Whether each cell is a name, and one is a usual or a given name, or has nothing but numbers below it."""
    names = [cell.strip() for cell in first if cell.strip()]
    if len(set(names)) < len(names) or not all(len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) for name in names):
        return False
    known = _USUAL_NAMES.union(map(str.lower, columns))
    if any(name.lower() in known for name in names):
        return True
    below = zip(*(cells for cells in following if len(cells) == len(first)), strict=True)
    return any(name.strip() and all(map(_NUMBER.fullmatch, cells)) for name, cells in zip(first, below, strict=False))


def _tab_cells(part: RowPart, lines: Iterator[tuple[int, Line]], separator: str) -> _CellRows:
    for number, line in lines:
        if isinstance(line, UnicodeDecodeError):
            yield number, line
        elif text := line.removesuffix("\n").removesuffix("\r"):
            _check_cells(part, number, text, separator)
            yield number, text.split(separator)


def _comma_cells(part: RowPart, lines: Iterator[tuple[int, Line]], separator: str) -> _CellRows:
    csv.field_size_limit(files.LONGEST_ROW_BYTES)
    quoted = _QuotedLines(part, lines, separator)
    reader = csv.reader(quoted, strict=True, delimiter=separator)
    try:
        first = 1
        for cells in reader:
            quoted.row_size = 0
            if cells:
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        problem = f"not CSV ({error}); fix its quotes, or name what separates its cells with --delimiter"
        raise InputError(f"{part.name}: line {reader.line_num:,}: {problem}") from error


class _QuotedLines:
    """The lines of CSV as Python's reader takes them, which asks for more until a row is complete.

    `row_size` counts the characters of the row that is being read.
    """

    def __init__(self, part: RowPart, lines: Iterator[tuple[int, Line]], separator: str) -> None:
        self._part, self._separator, self.row_size = part, separator, 0
        self._pieces = chain.from_iterable(map(self._checked, lines))

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def _checked(self, numbered: tuple[int, Line]) -> list[str]:
        number, line = numbered
        if isinstance(line, UnicodeDecodeError):
            raise InputError(f"{self._part.name}: line {number:,}: {self._part.not_text(line)}")
        self.row_size += len(line)
        if self.row_size > files.LONGEST_ROW_BYTES:
            problem = f"the row that ends here is longer than {longest_row()}; is a quote missing?"
            raise InputError(f"{self._part.name}: line {number:,}: {problem}")
        _check_cells(self._part, number, line, self._separator)
        return _AFTER_RETURN.split(line) if "\r" in line[:-2] else [line]


def _check_cells(part: RowPart, number: int, line: str, separator: str) -> None:
    if line.count(separator) > _MOST_CELLS:
        raise InputError(f"{part.name}: line {number:,}: has more than {_MOST_CELLS:,} cells; is this a table?")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, in which no key is twice: JSON leaves open which one counts."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in record if keys.count(key) > 1)
        raise InputError(f"has the key {short_repr(twice)} twice; leave one out")
    return record


JSON = json.JSONDecoder(object_pairs_hook=_object)
"""Refuses a key that is there twice."""


# --- SQuAD's JSON (versions 1.1 and 2.0), which is one value

_MOST_ROWS = 4
"""Times the longest row that a file may be long: it is decoded as a whole."""


def read_squad(part: RowPart) -> Iterator[PlacedRecord]:
    """The questions of a SQuAD file with their contexts, in its order."""
    most, number = _MOST_ROWS * files.LONGEST_ROW_BYTES, 0
    with part.opened() as handle:
        data = handle.read(most + 1)
    if len(data) > most:
        raise InputError(f"{part.name}: is longer than {most / 2**20:g} MiB; write its questions as JSON lines (.jsonl)")
    try:
        content = JSON.decode(data.decode(part.encoding).removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise InputError(f"{part.name}: not {part.encoding}; name its encoding with --encoding") from error
    except InputError as error:
        raise InputError(f"{part.name}: {error}") from error
    except (ValueError, RecursionError) as error:
        problem = shorten(str(error))
        raise InputError(f"{part.name}: not JSON ({problem}); give a SQuAD file, or JSON lines as .jsonl") from error
    for article in _listed(part, content, "data", "it"):
        for paragraph in _listed(part, article, "paragraphs", "an article"):
            for question in _listed(part, paragraph, "qas", "a paragraph"):
                if "context" not in paragraph:
                    raise _not_squad(part, "a paragraph has no `context`")
                number += 1
                position = RowPosition(number)
                if isinstance(question, dict):
                    yield position, {"context": paragraph["context"], **question}
                else:
                    problem = f"{short_repr(question)} is not a question; it must be an object"
                    yield position, InputError(problem)


def _listed(part: RowPart, value: Any, key: str, what: str) -> list[Any]:
    entries = value.get(key) if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise _not_squad(part, f"{what} has no list `{key}`")
    return entries


def _not_squad(part: RowPart, problem: str) -> InputError:
    form = '{"data": [{"paragraphs": [{"context": "...", "qas": [...]}]}]}'
    return InputError(f"{part.name}: is not SQuAD's JSON, {problem}; it is {form}")
