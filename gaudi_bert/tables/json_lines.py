"""Lines of JSON as Arrow tables, a block of lines at a time.

A block is cut behind a newline. The first block shows the columns and their types, and every line of the data must follow
them. Python's own reader takes the lines: pyarrow's ends the process on some, reads others as several rows, and rounds
integers in a column with fractions.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gaudi_bert.common.arrow import require_pyarrow
from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.files import LONGEST_ROW_BYTES
from gaudi_bert.corpus.documents import opened_text
from gaudi_bert.rows.formats import JSON

_BLOCK_BYTES = 16 << 20
_ROWS_AT_ONCE = 4096
_MEMORY_OF_TEXT = 2
"""A number takes 8 bytes in memory, and about half as many or more as text."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DEEPEST = 64


def is_json(path: Path) -> bool:
    """Whether a file holds JSON lines, by its ending."""
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def json_parts(path: Path) -> list[tuple[int, int, int, int]]:
    """(start, end, rows, bytes in memory) of each block; a gzipped file is one block."""
    parts, end = [], 0
    for block in _blocks(path, 0, None):
        parts.append((end, end + len(block), len(_lines(block)), _MEMORY_OF_TEXT * len(block)))
        end += len(block)
    if path.suffix != ".gz" or not parts:
        return parts
    return [(0, end, sum(part[2] for part in parts), sum(part[3] for part in parts))]


def json_schema(path: Path) -> Any:
    """The columns and types that the first block shows."""
    rows = list(_rows(path, next(_blocks(path, 0, None), b""), 0))
    if not rows:
        raise InputError(f"{path}: the table holds no row; there is nothing to pack")
    return _checked_table(path, rows, 0, None).schema


def read_json_lines(path: Path, start: int, end: int, first_row: int, schema: Any) -> Any:
    """The lines between two bytes of a file (of its text, where it is gzipped) as a pyarrow Table of `schema`."""
    tables = [schema.empty_table()]
    for block in _blocks(path, start, end):
        rows = _rows(path, block, first_row)
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            tables.append(_checked_table(path, some, first_row, schema))
            first_row += len(some)
    return require_pyarrow().concat_tables(tables)


def _blocks(path: Path, start: int, end: int | None) -> Iterator[bytes]:
    """The text from byte `start` on, cut behind newlines; the last line may lack one."""
    with opened_text(path, "gzip" if path.suffix == ".gz" else None) as handle:
        handle.seek(start)
        remaining = None if end is None else end - start
        rest = b""
        while piece := handle.read(_BLOCK_BYTES if remaining is None else min(_BLOCK_BYTES, remaining)):
            remaining = None if remaining is None else remaining - len(piece)
            cut = piece.rfind(b"\n") + 1
            if cut:
                yield rest + piece[:cut]
                rest = piece[cut:]
            else:
                rest += piece
            if len(rest) > LONGEST_ROW_BYTES:
                raise InputError(
                    f"{path}: a line is longer than {LONGEST_ROW_BYTES >> 20} MiB; write one JSON object on each"
                )
        if rest:
            yield rest


def _lines(block: bytes) -> list[bytes]:
    """The lines of a block that are not blank."""
    return [line for line in block.removeprefix(_BYTE_ORDER_MARK).split(b"\n") if line.strip()]


def _rows(path: Path, block: bytes, first_row: int) -> Iterator[dict[str, Any]]:
    """The object of each line; the first line that is none is refused."""
    for number, line in enumerate(_lines(block), start=first_row):
        problem = "is not one JSON object"
        try:
            row = JSON.decode(line.decode("utf-8"))
            # What is nested so deep ends the process where Arrow makes a type of it.
            if isinstance(row, dict) and (line.count(b"[") + line.count(b"{") <= _DEEPEST or _depth(row) <= _DEEPEST):
                yield row
                continue
            problem = f"is nested deeper than {_DEEPEST} levels" if isinstance(row, dict) else problem
        except (ValueError, RecursionError, InputError) as error:
            problem = f"is not JSON in UTF-8 ({shortened(str(error))})"
        beginning = shown(line[:40].decode("utf-8", "replace"))
        raise InputError(f"{path}: row {number}: {beginning} {problem}; write one JSON object on each line")


def _depth(value: Any) -> int:
    """Return the most lists and objects that are inside one another."""
    depth, values = 0, [value]
    while values := [one for one in values if isinstance(one, dict | list)]:
        depth, values = depth + 1, [each for one in values for each in (one.values() if isinstance(one, dict) else one)]
    return depth


def _checked_table(path: Path, rows: Sequence[Mapping[str, Any]], first_row: int, schema: Any) -> Any:
    """The rows as a table; the first one that does not go with the rows before it, or with the schema, is refused."""

    def problem(count: int) -> Exception | None:
        try:
            _table(rows[:count], schema)
        except (require_pyarrow().ArrowException, ValueError, OverflowError) as error:
            return error
        return None

    try:
        return _table(rows, schema)
    except (require_pyarrow().ArrowException, ValueError, OverflowError) as error:
        row = bisect.bisect_left(range(1, len(rows)), True, key=lambda count: problem(count) is not None)
        reason = shortened(str(problem(row + 1) or error), 160)
        remedy = (
            "give every row the same columns, and a column one type that holds each value exactly; else write it as text"
        )
        raise InputError(f"{path}: row {first_row + row}: {reason}; {remedy}") from error


def _table(rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    """The rows as a pyarrow Table of `schema`; None for the columns and types that they show.

    Raises:
        ValueError, OverflowError, pyarrow.ArrowException: some value does not fit, or is not exact in its type.
    """
    pyarrow = require_pyarrow()
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else schema.names
    unknown = next((name for row in rows for name in row if name not in names), None)
    if unknown is not None:
        raise ValueError(f"has a column {shown(unknown)}, which the first rows lack")
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = pyarrow.array(values)
        kind = columns[name].type if schema is None else schema.field(name).type
        if columns[name].type != kind:
            if not _fits(columns[name].type, kind):
                raise ValueError(f"column {shown(name)} holds {columns[name].type}, in the first rows {kind}")
            columns[name] = pyarrow.array(values, kind)
        if "double" in str(kind) and any(_holds_truth(value, kind) for value in values):
            raise ValueError(f"column {shown(name)} holds true or false among numbers")
    return pyarrow.table(columns, schema)


def _fits(found: Any, kind: Any) -> bool:
    """Whether every value of one type is one of the other; of integers in a column of fractions pyarrow decides itself."""
    types = require_pyarrow().types
    if found == kind or types.is_null(found):
        return True
    if types.is_list(found) and types.is_list(kind):
        return _fits(found.value_type, kind.value_type)
    if types.is_struct(found) and types.is_struct(kind):
        return all(kind.get_field_index(own.name) >= 0 and _fits(own.type, kind.field(own.name).type) for own in found)
    return bool(types.is_int64(found) and types.is_float64(kind))


def _holds_truth(value: Any, kind: Any) -> bool:
    """Whether a truth is where its type has fractions; pyarrow takes it for 0 or 1."""
    if isinstance(value, list):
        return any(_holds_truth(each, kind.value_type) for each in value)
    if isinstance(value, dict):
        return any(_holds_truth(each, kind.field(name).type) for name, each in value.items())
    return isinstance(value, bool) and bool(require_pyarrow().types.is_floating(kind))
