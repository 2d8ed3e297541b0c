"""Parts of tables: the runs of rows that are read at once, so that memory is bounded by a few parts and not by a file.

A part is what the format itself can read alone: a row group of Parquet, a record batch of Arrow (a file, or a stream as
Hugging Face datasets write it; both are mapped into memory and not copied), a block of lines of JSON. One that is larger
than requested is read in equal runs of rows; those of a row group are decoded from its front. A gzipped file can be read
from its front only, so it is one part. What parts there are is told by the footer or by the heads of batches, without
reading a value; lines of JSON are counted.
"""

from __future__ import annotations

import bisect
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import explained_os_errors

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_BYTES_OF_OTHERS = 16
"""Of a value whose type has no fixed width, besides what the format says."""


class TablePart(NamedTuple):
    """A run of rows of one file.

    Attributes:
        path: the file.
        first_row: number of its first row in the file.
        rows: how many there are.
        bytes: about what they take in memory.
        position: number of the row group or the batch; for JSON, the byte at which the block begins.
        start: rows of the row group or the batch before this part.
        step: rows of each part of the row group or the batch but the last; for JSON, bytes of the block.
    """

    path: Path
    first_row: int
    rows: int
    bytes: int
    position: int
    start: int
    step: int


def _is_json(path: Path) -> bool:
    """Whether a file holds JSON lines, by its ending."""
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def table_schema(path: Path) -> Any:
    """The pyarrow schema of a table; that of JSON lines is what its first block shows."""
    pyarrow = require_pyarrow()
    if _is_json(path):
        return _json_schema(path)
    with explained_arrow_errors(path):
        if _is_parquet(path):
            from pyarrow import parquet

            return parquet.read_schema(path)
        with pyarrow.OSFile(str(path)) as source:
            return _open_arrow(source).schema


def list_parts(path: Path, columns: Collection[str], most_rows: int, most_bytes: int) -> list[TablePart]:
    """The parts of a table, in order; empty ones are left out.

    Args:
        path: the file.
        columns: those that will be read: only they take memory.
        most_rows, most_bytes: of a part, where the format can read less at once.
    """
    parts: list[TablePart] = []
    first_row = 0
    if _is_json(path):
        for start, end, rows, size in _json_parts(path):
            if rows:
                parts.append(TablePart(path, first_row, rows, size, start, 0, end - start))
            first_row += rows
        return parts
    with explained_arrow_errors(path):
        sizes = list(_parquet_sizes(path, columns) if _is_parquet(path) else _arrow_sizes(path, columns))
    for position, (whole_rows, size) in enumerate(sizes):
        pieces = max(1, -(-whole_rows // most_rows), -(-size // most_bytes))
        step = max(1, -(-whole_rows // pieces))
        for start in range(0, whole_rows, step):
            rows = min(step, whole_rows - start)
            parts.append(TablePart(path, first_row + start, rows, size * rows // whole_rows, position, start, step))
        first_row += whole_rows
    return parts


def read_parts(parts: Sequence[TablePart], columns: Sequence[str], schema: Any, threads: bool = True) -> Iterator[Any]:
    """The rows of these parts of one file, as a pyarrow Table each.

    Args:
        parts: of one file, in order.
        columns: their names; the tables hold them in this order.
        schema: that of the table, which lines of JSON must follow.
        threads: several threads may decode.
    """
    if not parts:
        return
    path = parts[0].path
    if _is_json(path):
        for part in parts:
            table = _read_json_lines(path, part.position, part.position + part.step, part.first_row, schema)
            yield _checked(part, table.select(list(columns)))
        return
    with explained_arrow_errors(path):
        tables = _read_parquet(path, parts, columns, threads) if _is_parquet(path) else _read_arrow(path, parts, columns)
    while True:
        with explained_arrow_errors(path):  # not around the caller's work between two parts
            table = next(tables, None)
        if table is None:
            return
        yield table


def _checked(part: TablePart, table: Any) -> Any:
    if table.num_rows != part.rows:
        raise InputError(
            f"{part.path}: {table.num_rows} rows from row {part.first_row}, {part.rows} were there before; "
            "let nobody write the table meanwhile, and put one JSON object on each line"
        )
    return table


def _is_parquet(path: Path) -> bool:
    with explained_os_errors(path, "read"), path.open("rb") as handle:
        return handle.read(4) == b"PAR1"


def _parquet_sizes(path: Path, columns: Collection[str]) -> Iterator[tuple[int, int]]:
    """(rows, bytes in memory) of each row group."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        metadata = table.metadata
        names = [metadata.schema.column(leaf).path.split(".", 1)[0] for leaf in range(metadata.num_columns)]
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(leaf) for leaf, name in enumerate(names) if name in columns]
            values = [_WIDTHS.get(chunk.physical_type, _BYTES_OF_OTHERS) * chunk.num_values for chunk in chunks]
            encoded = [chunk.total_uncompressed_size for chunk in chunks]
            yield group.num_rows, sum(map(max, encoded, values))


def _read_parquet(path: Path, parts: Sequence[TablePart], columns: Sequence[str], threads: bool) -> Iterator[Any]:
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        for number, group in itertools.groupby(parts, key=lambda part: part.position):
            by_start = {part.start: part for part in group}
            step = next(iter(by_start.values())).step
            if table.metadata.row_group(number).num_rows <= step:
                yield _checked(by_start[0], table.read_row_group(number, columns=list(columns), use_threads=threads))
                continue
            batches = table.iter_batches(step, row_groups=[number], columns=list(columns), use_threads=threads)
            for start, batch in zip(range(0, max(by_start) + 1, step), batches, strict=False):
                if start in by_start:
                    yield _checked(by_start[start], pyarrow.Table.from_batches([batch]))


def _open_arrow(source: Any) -> Any:
    """A reader of an Arrow file or, as Hugging Face datasets writes, an Arrow stream."""
    ipc = require_pyarrow().ipc
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """All record batches: views of the file, of which only what is looked at is read."""
    pyarrow = require_pyarrow()
    with pyarrow.memory_map(str(path)) as source:
        reader = _open_arrow(source)
        if hasattr(reader, "num_record_batches"):
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        else:
            yield from reader


def _arrow_sizes(path: Path, columns: Collection[str]) -> Iterator[tuple[int, int]]:
    """(rows, bytes) of each batch."""
    for batch in _arrow_batches(path):
        yield batch.num_rows, batch.select([name for name in batch.schema.names if name in columns]).nbytes


def _read_arrow(path: Path, parts: Sequence[TablePart], columns: Sequence[str]) -> Iterator[Any]:
    pyarrow = require_pyarrow()
    by_batch = {number: list(group) for number, group in itertools.groupby(parts, key=lambda part: part.position)}
    for number, batch in enumerate(_arrow_batches(path)):
        for part in by_batch.get(number, ()):
            rows = batch.select(list(columns)).slice(part.start, part.rows)
            yield _checked(part, pyarrow.Table.from_batches([rows]))
        if number >= parts[-1].position:
            return


# --- pyarrow, which is optional, and its errors


def require_pyarrow() -> Any:
    """The module pyarrow."""
    try:
        import pyarrow
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"Parquet, Arrow and JSON lines need pyarrow ({reason}); install it: pip install 'gaudi-bert[parquet]'"
        ) from error
    return pyarrow


@contextmanager
def explained_arrow_errors(path: Path) -> Iterator[None]:
    """Turn what pyarrow says of a file that it cannot read into one line."""
    pyarrow = require_pyarrow()
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        reason = shortened(str(error), 200)
        raise InputError(f"{path}: cannot be read as a Parquet or Arrow table: {reason}; write it again") from error


# --- lines of JSON as Arrow tables, a block of lines at a time
#
# A block is cut behind a newline. The first block shows the columns and their types, and every line of the data must follow
# them. Once pyarrow has refused a block, the line at fault is looked for, so that it can be named.

_BLOCK_BYTES = 16 << 20
_NEWLINE = ord("\n")
_MEMORY_OF_TEXT = 2
"""A number takes 8 bytes in memory, and about half as many or more as text."""


def _json_parts(path: Path) -> list[tuple[int, int, int, int]]:
    """(start, end, rows, bytes in memory) of each block; a gzipped file is one block."""
    parts, end = [], 0
    for block in _blocks(path, 0, None):
        parts.append((end, end + len(block), _count_lines(block), _MEMORY_OF_TEXT * len(block)))
        end += len(block)
    if path.suffix != ".gz" or not parts:
        return parts
    return [(0, end, sum(part[2] for part in parts), sum(part[3] for part in parts))]


def _json_schema(path: Path) -> Any:
    """The columns and types that the first block shows."""
    block = next(_blocks(path, 0, None), b"")
    if not _count_lines(block):
        raise InputError(f"{path}: the table holds no row; there is nothing to pack")
    return _parsed(path, block, 0, None).schema


def _read_json_lines(path: Path, start: int, end: int, first_row: int, schema: Any) -> Any:
    """The lines between two bytes of a file (of its text, where it is gzipped) as a pyarrow Table of `schema`."""
    pyarrow = require_pyarrow()
    tables = []
    for block in _blocks(path, start, end):
        tables.append(_parsed(path, block, first_row, schema))
        first_row += tables[-1].num_rows
    return pyarrow.concat_tables(tables)


def _blocks(path: Path, start: int, end: int | None) -> Iterator[bytes]:
    """The text from byte `start` on, cut behind newlines; the last line may lack one."""
    with explained_os_errors(path, "read"):
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as handle:
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
    counts = range(1, len(lines))
    fault = bisect.bisect_left(counts, True, key=lambda count: not _is_sound(b"\n".join(lines[:count]), schema))
    location = f"{path}: row {first_row + fault}"
    try:
        value = json.loads(lines[fault])
    except (ValueError, RecursionError) as error:
        return f"{location}: is not JSON ({shortened(str(error))}); write one JSON object on each line"
    if not isinstance(value, dict):
        return f"{location}: is {shortened(str(value), 40)}; write one JSON object on each line"
    unknown = [name for name in value if schema is not None and name not in schema.names]
    if unknown:
        return f"{location}: has a column {unknown[0]}, which the first rows lack; give every row the same columns"
    return f"{location}: {shortened(reason, 160)}; give a column the same type in every row"


def _is_sound(block: bytes, schema: Any) -> bool:
    try:
        _parse(block, schema)
    except require_pyarrow().ArrowInvalid:
        return False
    return True
