"""Lines of JSON as Arrow tables, a block of lines at a time; pyarrow's parser does the work.

A block is cut behind a newline. The first block shows the columns and their types, and every line of the data must follow
them. A line that is no such object is looked for once pyarrow has refused its block, so that it can be named.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import explained_os_errors
from gaudi_bert.records.tables.arrow import require_pyarrow

__all__ = ["json_parts", "json_schema", "read_json_lines"]

BLOCK_BYTES = 16 << 20
_NEWLINE = ord("\n")
_MEMORY_OF_TEXT = 2
"""A number takes 8 bytes in memory, and about half as many or more as text."""


def json_parts(path: Path) -> list[tuple[int, int, int, int]]:
    """(start, end, rows, bytes in memory) of each block; a gzipped file is one block.

    Raises:
        InputError: the file is no text, or damaged.
    """
    parts = []
    start = 0
    for block in _blocks(path, 0, None):
        parts.append((start, start + len(block), _count_lines(block), _MEMORY_OF_TEXT * len(block)))
        start += len(block)
    if path.suffix != ".gz" or not parts:
        return parts
    return [(0, start, sum(part[2] for part in parts), sum(part[3] for part in parts))]


def json_schema(path: Path) -> Any:
    """The columns and types that the first block shows.

    Raises:
        InputError: it is empty, or holds a line that is no JSON object.
    """
    block = next(_blocks(path, 0, None), b"")
    if not _count_lines(block):
        raise InputError(f"{path}: the table holds no row; there is nothing to pack")
    return _parsed(path, block, 0, None).schema


def read_json_lines(path: Path, start: int, end: int, first_row: int, schema: Any) -> Any:
    """The lines between two bytes of a file (of its text, where it is gzipped) as a pyarrow Table of `schema`.

    Raises:
        InputError: a line does not fit `schema`; it is named by its row.
    """
    pyarrow = require_pyarrow()
    tables = []
    for block in _blocks(path, start, end):
        tables.append(_parsed(path, block, first_row, schema))
        first_row += tables[-1].num_rows
    return pyarrow.concat_tables(tables)


def _open(path: Path) -> BinaryIO:
    opened: BinaryIO = gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[assignment]
    return opened


def _blocks(path: Path, start: int, end: int | None) -> Iterator[bytes]:
    """The text from byte `start` on, cut behind newlines; the last line may lack one."""
    with explained_os_errors(path, "read"):
        try:
            with _open(path) as handle:
                handle.seek(start)
                left = None if end is None else end - start
                rest = b""
                while piece := handle.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
                    left = None if left is None else left - len(piece)
                    cut = piece.rfind(b"\n") + 1
                    if cut:
                        yield rest + piece[:cut]
                        rest = piece[cut:]
                    else:
                        rest += piece
                if rest:
                    yield rest
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path}: is damaged or cut short ({error}); write it again") from error


def _count_lines(block: bytes) -> int:
    """Lines that are not empty."""
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == _NEWLINE)
    if not text.size or text[-1] != _NEWLINE:
        ends = np.append(ends, text.size)
    return int(np.count_nonzero(np.diff(ends, prepend=-1) > 1))


def _parsed(path: Path, block: bytes, first_row: int, schema: Any) -> Any:
    pyarrow = require_pyarrow()
    try:
        return _parse(block, schema)
    except pyarrow.ArrowInvalid as error:
        raise InputError(_bad_line(path, block, first_row, schema, str(error))) from error


def _parse(block: bytes, schema: Any) -> Any:
    from pyarrow import json as arrow_json

    reading = arrow_json.ReadOptions(use_threads=False, block_size=max(len(block), 1))
    unexpected = "infer" if schema is None else "error"
    parsing = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    return arrow_json.read_json(io.BytesIO(block), reading, parsing)


def _bad_line(path: Path, block: bytes, first_row: int, schema: Any, reason: str) -> str:
    """The first line that is at fault, by its row; found by halving, because each line before it is sound."""
    lines = [line for line in block.split(b"\n") if line.strip()]
    sound, at_fault = 0, len(lines)
    while at_fault - sound > 1:
        middle = (sound + at_fault) // 2
        if _is_sound(b"\n".join(lines[:middle]), schema):
            sound = middle
        else:
            at_fault = middle
    place = f"{path}: row {first_row + sound}"
    try:
        value = json.loads(lines[sound])
    except (ValueError, RecursionError) as error:
        return f"{place}: is no JSON ({shortened(str(error))}); write one JSON object on each line"
    if not isinstance(value, dict):
        return f"{place}: is {shortened(str(value), 40)}; write one JSON object on each line"
    unknown = [name for name in value if schema is not None and name not in schema.names]
    if unknown:
        return f"{place}: has a column {unknown[0]}, which the first rows lack; give every row the same columns"
    return f"{place}: {shortened(reason, 160)}; give a column the same type in every row"


def _is_sound(block: bytes, schema: Any) -> bool:
    try:
        _parse(block, schema)
    except require_pyarrow().ArrowInvalid:
        return False
    return True
