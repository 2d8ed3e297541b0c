"""Read CSV and TSV as records, and the questions of SQuAD files. JSON lines and Parquet are read in `reading.py`.

TSV is split at tabs without any quoting, which is how GLUE and GoEmotions are written. CSV is parsed with quoting. The names
of the columns come from the header or from the settings. If the header seems to use another separator, the error names the
option that sets it.
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
from gaudi_bert.rows.parts import BYTE_ORDER_MARK, Line, RowPart, format_max_row_size
from gaudi_bert.rows.types import PlacedRecord, RowPosition

_CellRows: TypeAlias = Iterator[tuple[int, list[str] | UnicodeDecodeError]]

_MAX_CELLS = 1 << 20
_AFTER_RETURN = re.compile("(?<=\r)(?!\n)")  # old spreadsheets end their lines with a carriage return
_SEPARATORS = (";", "\t", ",", "|")
_EXAMINED_ROWS, _EXAMINED_LINES = 20, 1000
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
    part: RowPart,
    settings: TaskSettings,
    lines: Iterator[tuple[int, Line]],
    find_remedies: Callable[[Sequence[str]], list[str]],
) -> Generator[PlacedRecord, None, None]:
    """Yield each row of a CSV or TSV table as a record, which maps column names to cells.

    An empty cell becomes None, except that an empty text stays an empty text. A row with more or fewer cells than the header
    is yielded as an error.

    Args:
        part: The table.
        settings: The settings of the task, which name the columns and the separator.
        lines: The numbered lines of the table.
        find_remedies: A function that takes the column names, and returns one remedy for each column that the task needs but
            the table lacks.

    Yields:
        Pairs of a position and a record. If a row is invalid, an error takes the place of the record.

    Raises:
        InputError: The header cannot be used, or the file is not CSV. No further row can be read.
    """
    separator = "\t" if part.kind == "tsv" else ","
    if settings.delimiter is not None and (part.kind == "csv" or "delimiter" in settings.keys_set_by_user):
        separator = settings.delimiter  # a separator from the model's training data applies only to CSV
    rows = _split_unquoted_lines(part, lines, separator) if part.kind == "tsv" else _parse_csv_rows(part, lines, separator)
    columns = list(settings.columns) if settings.columns is not None else None
    if columns is None and settings.no_header:
        raise InputError(f"{part.name}: --no-header requires the column names; pass, for example, --columns text,label,id")
    if columns is not None and not settings.no_header:
        columns, rows = _resolve_configured_columns(part, settings, columns, rows)
    columns = columns or _read_header(part, settings, rows, separator, find_remedies)
    for number, (line, cells) in enumerate(rows, start=1):
        position = RowPosition(number, line)
        if isinstance(cells, UnicodeDecodeError):
            yield position, part.decoding_error(cells)
        elif len(cells) != len(columns):
            names = ", ".join(columns[:99])[:80]
            problem = f"the row has {len(cells):,} cells, but the table has {len(columns):,} columns ({names})"
            remedy = _separator_remedy(cells, separator, len(columns)) or "correct the row"
            yield position, InputError(f"{problem}; {remedy}")
        else:
            yield (
                position,
                {
                    name: cell if cell != "" or name == settings.text else None
                    for name, cell in zip(columns, cells, strict=True)
                },
            )


def _read_header(
    part: RowPart,
    settings: TaskSettings,
    rows: _CellRows,
    separator: str,
    find_remedies: Callable[[Sequence[str]], list[str]],
) -> list[str]:
    """Read the header line of a table, and return the column names. Return an empty list if the table is empty.

    Raises:
        InputError: The encoding, the separator or the columns are wrong. The message states all problems together.
    """
    line, cells, remedies = *_read_first_row(part, rows), []
    if isinstance(cells, UnicodeDecodeError):
        remedies.append(part.encoding_remedy(cells))
        cells = cells.object.decode("latin-1").rstrip("\r\n").split(separator)
    columns = [cell.strip() for cell in cells]
    other = _separator_remedy(columns, separator)
    if other is not None and columns != [settings.text]:
        remedies.append(other)
        columns = [cell.strip().strip('"') for cell in columns[0].split(_guess_other_separator(columns, separator))]
    twice = next((column for column, times in Counter(columns).items() if times > 1), None)
    if twice is not None and not remedies:
        raise InputError(f"{part.name}: two columns are called {short_repr(twice)}; rename one of them, or pass --columns")
    missing = find_remedies(columns) if columns else []
    if not remedies and not missing:
        return columns
    if missing:
        missing.append("if the file has no header line, name all columns: --columns text,label,id")
    if part.path is not None and len(remedies) == (other is not None):
        with part.open_lines() as lines:
            wrong = next((each for _, each in islice(lines, _EXAMINED_LINES) if isinstance(each, UnicodeDecodeError)), None)
        remedies += [part.encoding_remedy(wrong)] if wrong is not None else []
    raise InputError(
        f"{part.name}: line {line:,}: the header is {short_repr(', '.join(columns))}; {'; '.join([*remedies, *missing])}"
    )


def _read_first_row(part: RowPart, rows: _CellRows) -> tuple[int, list[str] | UnicodeDecodeError]:
    """Read the first row of a table, and return its line number and its cells. If the line cannot be decoded, return the
    decoding error in place of the cells.

    If the CSV parser fails, the first line is read again, so that a wrong encoding is reported together with other problems.
    """
    try:
        return next(rows, (0, []))
    except InputError:
        if part.path is None:  # standard input cannot be read a second time
            raise
        with part.open_lines() as lines:
            number, line = next(lines)
        if isinstance(line, UnicodeDecodeError) and b"\x00" not in line.object:
            return number, line
        raise


def _guess_other_separator(cells: Sequence[str], current_separator: str, column_count: int | None = None) -> str | None:
    """Guess the cell separator of a table if a row was read as a single cell. Return None if the row has several cells, or
    if no other separator fits.

    Args:
        cells: The cells of the row.
        current_separator: The separator with which the row was read.
        column_count: The expected number of cells, if it is known.
    """
    if len(cells) != 1:
        return None
    others = (other for other in _SEPARATORS if other != current_separator)
    return next(
        (other for other in others if (cells[0].count(other) == column_count - 1 if column_count else other in cells[0])),
        None,
    )


def _separator_remedy(cells: Sequence[str], current_separator: str, column_count: int | None = None) -> str | None:
    """Return the remedy for a table that seems to use another cell separator, or None if the current separator seems
    correct.
    """
    other = _guess_other_separator(cells, current_separator, column_count)
    if other is None:
        return None
    return f"the cells seem to be separated by {other!r}: pass --delimiter {'TAB' if other == chr(9) else repr(other)}"


def _resolve_configured_columns(
    part: RowPart, settings: TaskSettings, configured_columns: list[str], rows: _CellRows
) -> tuple[list[str] | None, _CellRows]:
    """Return the column names from the settings and all rows of the table. Raise an InputError if the first row looks like a
    header, because it would be read as data.

    If the user did not name the columns, they come from a model's training data. In this case a header takes precedence, and
    None is returned in place of the column names.
    """
    beginning = list(islice(rows, _EXAMINED_ROWS))
    (line, first), *next_rows = beginning or [(0, [])]
    if isinstance(first, list) and _is_likely_header(
        first, configured_columns, [cells for _, cells in next_rows if isinstance(cells, list)]
    ):
        if "columns" not in settings.keys_set_by_user:
            return None, chain(beginning, rows)
        raise InputError(
            f"{part.format_location(RowPosition(1, line))}: {short_repr(first)} looks like a header line; remove --columns, "
            "or pass --no-header if it is data"
        )
    return configured_columns, chain(beginning, rows)


def _is_likely_header(first: Sequence[str], columns: Sequence[str], next_rows: Iterable[Sequence[str]]) -> bool:
    """Return whether the first row of a table looks like a header and not like data.

    In a header, every cell looks like a name. In addition, one of the cells is a common column name, is listed in `columns`,
    or has only numbers below it.
    """
    names = [cell.strip() for cell in first if cell.strip()]
    if len(set(names)) < len(names) or not all(len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) for name in names):
        return False
    known = _USUAL_NAMES.union(map(str.lower, columns))
    if any(name.lower() in known for name in names):
        return True
    below = zip(*(cells for cells in next_rows if len(cells) == len(first)), strict=True)
    return any(name.strip() and all(map(_NUMBER.fullmatch, cells)) for name, cells in zip(first, below, strict=False))


def _split_unquoted_lines(part: RowPart, lines: Iterator[tuple[int, Line]], separator: str) -> _CellRows:
    """Split each line of a TSV file at the separator, and yield the line number and the cells. Quotes have no special
    meaning, and empty lines are skipped.
    """
    for number, line in lines:
        if isinstance(line, UnicodeDecodeError):
            yield number, line
        elif text := line.removesuffix("\n").removesuffix("\r"):
            _check_cell_count(part, number, text, separator)
            yield number, text.split(separator)


def _parse_csv_rows(part: RowPart, lines: Iterator[tuple[int, Line]], separator: str) -> _CellRows:
    """Parse lines as CSV. For each row that is not empty, yield the number of its first line and its cells."""
    row_size = 0  # the number of characters that were read of the current row

    def iterate_checked_lines() -> Iterator[str]:
        """Check the encoding and the length of each line, and yield the line. A line that contains carriage returns is split
        at them.
        """
        nonlocal row_size
        for number, line in lines:
            if isinstance(line, UnicodeDecodeError):
                raise InputError(f"{part.name}: line {number:,}: {part.decoding_error(line)}")
            row_size += len(line)
            if row_size > files.LONGEST_ROW_BYTES:
                raise InputError(
                    f"{part.name}: line {number:,}: the row that ends here is longer than {format_max_row_size()}; add "
                    "the closing quote if it is missing"
                )
            _check_cell_count(part, number, line, separator)
            yield from _AFTER_RETURN.split(line) if "\r" in line[:-2] else [line]

    csv.field_size_limit(files.LONGEST_ROW_BYTES)
    reader = csv.reader(iterate_checked_lines(), strict=True, delimiter=separator)
    try:
        first = 1
        for cells in reader:
            row_size = 0
            if cells:
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{part.name}: line {reader.line_num:,}: the row is not valid CSV ({error}); correct the quotes, or pass the "
            "cell separator with --delimiter"
        ) from error


def _check_cell_count(part: RowPart, number: int, line: str, separator: str) -> None:
    """Raise an InputError if a line has more than _MAX_CELLS cells. Such a file is probably not a table."""
    if line.count(separator) > _MAX_CELLS:
        raise InputError(
            f"{part.name}: line {number:,}: the row has more than {_MAX_CELLS:,} cells; pass a table with fewer columns"
        )


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the key-value pairs of a JSON object as a dict. Raise an InputError if a key occurs twice.

    JSON does not define which value of a duplicate key applies.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise InputError(f"the object has the key {short_repr(twice)} twice; remove one of them")
    return record


# Python's default decoder would silently keep only the last value of a duplicate key, so raise an error instead.
JSON = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys)


# --- SQuAD's JSON (versions 1.1 and 2.0): the file is a single JSON value

# The maximum size of a SQuAD file, as a multiple of the maximum size of a row. The size is limited because the whole file is
# decoded in memory at once.
_MAX_SQUAD_ROWS = 4


def read_squad_questions(part: RowPart) -> Iterator[PlacedRecord]:
    """Yield the questions of a SQuAD file with their contexts, in the order of the file.

    Yields:
        Pairs of a position and a record with the keys of a SQuAD question and `context`, or an error instead of the record.

    Raises:
        InputError: The file is too large, is not JSON, or does not have the structure of SQuAD.
    """
    most, number = _MAX_SQUAD_ROWS * files.LONGEST_ROW_BYTES, 0
    with part.open_bytes() as handle:
        data = handle.read(most + 1)
    if len(data) > most:
        raise InputError(
            f"{part.name}: the file is longer than {most / 2**20:g} MiB; write its questions as JSON lines (.jsonl)"
        )
    try:
        content = JSON.decode(data.decode(part.encoding).removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise InputError(f"{part.name}: the file is not {part.encoding}; pass its encoding with --encoding") from error
    except InputError as error:
        raise InputError(f"{part.name}: {error}") from error
    except (ValueError, RecursionError) as error:
        problem = shorten(str(error))
        raise InputError(
            f"{part.name}: the file is not valid JSON ({problem}); pass a SQuAD file, or a .jsonl file of JSON lines"
        ) from error
    for article in _read_list(part, content, "data", "the file"):
        for paragraph in _read_list(part, article, "paragraphs", "an article"):
            for question in _read_list(part, paragraph, "qas", "a paragraph"):
                if "context" not in paragraph:
                    raise _squad_format_error(part, "a paragraph has no key `context`")
                number += 1
                if isinstance(question, dict):
                    yield RowPosition(number), {"context": paragraph["context"], **question}
                else:
                    problem = f"each question must be an object, but one is {short_repr(question)}; correct it"
                    yield RowPosition(number), InputError(problem)


def _read_list(part: RowPart, value: Any, key: str, owner: str) -> list[Any]:
    """Return the list that is stored under a key of a JSON object in a SQuAD file.

    If there is no such list, raise an InputError in which `owner` describes the object.
    """
    entries = value.get(key) if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise _squad_format_error(part, f"{owner} contains no list `{key}`")
    return entries


def _squad_format_error(part: RowPart, problem: str) -> InputError:
    """Return the error for a file that does not have the structure of SQuAD."""
    form = '{"data": [{"paragraphs": [{"context": "...", "qas": [...]}]}]}'
    return InputError(f"{part.name}: the file does not have the structure of SQuAD, because {problem}; expected {form}")
