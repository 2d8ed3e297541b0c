"""Lines of JSON as Arrow tables, a block of lines at a time.

A block is cut behind a newline. The first block shows the columns and their types, and every line of the data must follow
them. pyarrow trusts a line to be an object of moderate depth (it ends the process on others), so the bytes are checked
first. Once it has refused a block, the invalid line is searched for, to name it.
"""

from __future__ import annotations

import bisect
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.arrow import require_pyarrow, validated
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.errors import InputError, shortened, shown
from gaudi_bert.common.files import LONGEST_ROW_BYTES
from gaudi_bert.common.memory import as_word
from gaudi_bert.corpus.documents import opened_text

_BLOCK_BYTES = 16 << 20
_MEMORY_OF_TEXT = 2
"""A number takes 8 bytes in memory, and about half as many or more as text."""


def is_json(path: Path) -> bool:
    """Whether a file holds JSON lines, by its ending."""
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def json_parts(path: Path) -> list[tuple[int, int, int, int]]:
    """(start, end, rows, bytes in memory) of each block; a gzipped file is one block."""
    parts, end = [], 0
    for block in _blocks(path, 0, None):
        parts.append((end, end + len(block), _count_lines(block), _MEMORY_OF_TEXT * len(block)))
        end += len(block)
    if path.suffix != ".gz" or not parts:
        return parts
    return [(0, end, sum(part[2] for part in parts), sum(part[3] for part in parts))]


def json_schema(path: Path) -> Any:
    """The columns and types that the first block shows."""
    block = next(_blocks(path, 0, None), b"")
    if not _count_lines(block):
        raise InputError(f"{path}: the table holds no row; there is nothing to pack")
    pyarrow = require_pyarrow()
    fields = _parsed(path, block, 0, None).schema
    return pyarrow.schema([pyarrow.field(field.name, _as_written(field.type)) for field in fields])


def _as_written(kind: Any) -> Any:
    """The type that pyarrow infers, but that a text stays a text, though it may look like a date."""
    pyarrow = require_pyarrow()
    if pyarrow.types.is_temporal(kind):
        return pyarrow.string()
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_as_written(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([pyarrow.field(field.name, _as_written(field.type)) for field in kind])
    return kind


def read_json_lines(path: Path, start: int, end: int, first_row: int, schema: Any) -> Any:
    """The lines between two bytes of a file (of its text, where it is gzipped) as a pyarrow Table of `schema`."""
    pyarrow = require_pyarrow()
    tables = []
    for block in _blocks(path, start, end):
        tables.append(_parsed(path, block, first_row, schema))
        first_row += tables[-1].num_rows
    return pyarrow.concat_tables(tables)


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


def _count_lines(block: bytes) -> int:
    """Lines that are not empty."""
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == _NEWLINE)
    if not text.size or text[-1] != _NEWLINE:
        ends = np.append(ends, text.size)
    return int(np.count_nonzero(np.diff(ends, prepend=-1) > 1))


def _parsed(path: Path, block: bytes, first_row: int, schema: Any) -> Any:
    pyarrow = require_pyarrow()
    _refuse_lines(path, block, first_row)
    try:
        table = validated(path, _parse(block, schema))
    except pyarrow.ArrowInvalid as error:
        raise InputError(_bad_line(path, block, first_row, schema, str(error))) from error
    _refuse_rounded(path, block, first_row, table.schema)
    return table


def _parse(block: bytes, schema: Any) -> Any:
    from pyarrow import json as arrow_json

    reading = arrow_json.ReadOptions(use_threads=False, block_size=max(len(block), 1))
    unexpected = "infer" if schema is None else "error"
    parsing = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    return arrow_json.read_json(io.BytesIO(block), reading, parsing)


def _bad_line(path: Path, block: bytes, first_row: int, schema: Any, reason: str) -> str:
    """The row of the first invalid line, by bisection, because each line before it is valid."""
    lines = [line for line in block.split(b"\n") if line.strip()]
    counts = range(1, len(lines))
    fault = bisect.bisect_left(counts, True, key=lambda count: not _is_sound(b"\n".join(lines[:count]), schema))
    location = f"{path}: row {first_row + fault}"
    try:
        value = json.loads(lines[fault])
    except (ValueError, RecursionError) as error:
        return f"{location}: is not JSON ({shortened(str(error))}); write one JSON object on each line"
    unknown = [name for name in value if schema is not None and name not in schema.names]
    if unknown:
        return f"{location}: has a column {shown(unknown[0])}, which the first rows lack; give every row the same columns"
    return f"{location}: {shortened(reason, 160)}; give a column the same type in every row"


def _is_sound(block: bytes, schema: Any) -> bool:
    try:
        _parse(block, schema)
    except require_pyarrow().ArrowInvalid:
        return False
    return True


# --- integers in columns that hold fractions too

_LONG_NUMBER = re.compile(rb"[0-9]{16}")
"""Integers of fewer digits are exact as float64."""


def _refuse_rounded(path: Path, block: bytes, first_row: int, schema: Any) -> None:
    """Refuse the first line with an integer that its column, of float64, would round."""
    if not any("double" in str(kind) for kind in schema.types) or not _has_long_number(block):
        return
    end = 0
    for match in _LONG_NUMBER.finditer(block):
        if match.start() < end:
            continue
        begin = block.rfind(b"\n", 0, match.start()) + 1
        end = block.find(b"\n", match.start()) % (len(block) + 1)
        for name, value in json.loads(block[begin:end].removeprefix(_BYTE_ORDER_MARK)).items():
            number = _rounded_number(value, schema.field(name).type)
            if number is not None:
                problem = f"column {shown(name)} holds {number}, which is {int(float(number))} in a column with fractions"
                row = first_row + _count_lines(block[:begin])
                raise InputError(f"{path}: row {row}: {problem}; write the column as text, or leave it out")


def _has_long_number(block: bytes) -> bool:
    """Whether 16 digits follow one another."""
    digits = np.frombuffer(block, np.uint8) - np.uint8(_ZERO) <= 9
    for step in (1, 2, 4, 8):
        digits = digits[step:] & digits[:-step]
    return bool(digits.any())


def _rounded_number(value: Any, kind: Any) -> int | None:
    """The first integer in a value that its type stores as float64, but not exactly."""
    types = require_pyarrow().types
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list):
        parts = ((each, kind.value_type) for each in value)
    elif isinstance(value, dict):
        parts = ((each, kind.field(name).type) for name, each in value.items())
    elif type(value) is int and types.is_floating(kind) and int(float(value)) != value:
        return value
    return next((number for each, of_type in parts if (number := _rounded_number(each, of_type)) is not None), None)


# --- what every line must be before pyarrow may see it

_NEWLINE, _QUOTE, _BACKSLASH, _POINT, _ZERO = map(ord, '\n"\\.0')
_OPEN_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = map(ord, "[{}")
_OTHER_CASE = _OPEN_OBJECT - _OPEN_LIST
"""The difference between the brackets of an object and of a list, and of no other bytes."""
_SPACE, _TAB, _RETURN = map(ord, " \t\r")
_DEEPEST = 64
_BYTES_SHOWN = 40
_SAFE_DIGITS = 18
"""An integer of so many digits fits into int64."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SOUND, _NOT_ONE_OBJECT, _CUT_SHORT, _TOO_DEEP, _TOO_LARGE = range(5)
_REASONS = {
    _NOT_ONE_OBJECT: "is not one JSON object; write one on each line",
    _CUT_SHORT: "is not JSON, it ends too soon; write one JSON object on each line",
    _TOO_DEEP: f"is nested deeper than {_DEEPEST} levels; leave the column out",
    _TOO_LARGE: "holds an integer that does not fit into 64 bits; write it as text, or leave the column out",
}


def _refuse_lines(path: Path, block: bytes, first_row: int) -> None:
    """Refuse the first line of a block that pyarrow may not see."""
    if not block.isascii():
        try:
            block.decode("utf-8")
        except UnicodeDecodeError as error:
            row = first_row + _count_lines(block[: block.rfind(b"\n", 0, error.start) + 1])
            raise InputError(f"{path}: row {row}: is not UTF-8; save the file as UTF-8") from error
    text = np.frombuffer(block, np.uint8)
    at, reason = _first_fault(text, len(_BYTE_ORDER_MARK) if block.startswith(_BYTE_ORDER_MARK) else 0)
    if reason != _SOUND:
        begin = block.rfind(b"\n", 0, at) + 1
        line = block[begin : at + _BYTES_SHOWN].split(b"\n", 1)[0].decode("utf-8", "replace")
        row = first_row + _count_lines(block[:begin])
        raise InputError(f"{path}: row {row}: {shown(line)} {_REASONS[reason]}")


@borrowing_kernel
def _first_fault(text: ByteArray, start: int) -> tuple[int, int]:
    """Return where the first line is that is not one object, and why; brackets are counted outside of strings."""
    depth = 0
    digits_from = start  # of the number that is being read; behind its point, beyond all digits that are looked at
    in_string = escaped = closed = False
    for at in range(start, text.size):
        byte = text[at]
        if in_string:
            if byte == _NEWLINE:
                return at, _CUT_SHORT
            in_string = byte != _QUOTE or escaped
            escaped = byte == _BACKSLASH and not escaped
        elif _ZERO <= byte <= _ZERO + 9:
            if at - digits_from >= _SAFE_DIGITS and (at - digits_from > _SAFE_DIGITS or _wraps(text, digits_from)):
                return at, _TOO_LARGE
            if depth == 0:
                return at, _NOT_ONE_OBJECT
        else:
            digits_from = text.size if byte == _POINT else at + 1
            if byte == _QUOTE:
                if depth == 0:
                    return at, _NOT_ONE_OBJECT
                in_string = True
            elif byte | _OTHER_CASE == _OPEN_OBJECT:
                if depth == 0 and (closed or byte == _OPEN_LIST):
                    return at, _NOT_ONE_OBJECT
                depth += 1
                if depth > _DEEPEST:
                    return at, _TOO_DEEP
            elif byte == _NEWLINE:
                if depth:
                    return at, _CUT_SHORT
                closed = False
            elif depth == 0:
                if byte != _SPACE and byte != _TAB and byte != _RETURN:
                    return at, _NOT_ONE_OBJECT
            elif byte | _OTHER_CASE == _CLOSE_OBJECT:
                depth -= 1
                closed = depth == 0
    return (text.size, _CUT_SHORT) if in_string or depth else (-1, _SOUND)


@borrowing_kernel
def _wraps(text: ByteArray, start: int) -> bool:
    """Whether the 19 digits from `start` on are more than fits into int64: it wraps to a negative number."""
    number = as_word(0)
    for at in range(start, start + _SAFE_DIGITS + 1):
        number = 10 * number + as_word(text[at] - _ZERO)
    return number < 0
