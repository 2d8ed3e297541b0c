"""Parts of tables: the runs of rows that are read at once, so that memory is bounded by a few parts and not by a file.

A part is what the format itself can read alone: a row group of Parquet, a record batch of Arrow (a file, or a stream as
Hugging Face datasets write it; both are mapped into memory and not copied), a block of lines of JSON. One that is larger
than requested is read in equal runs of rows; those of a row group are decoded from its front. A gzipped file can be read
from its front only, so it is one part. The parts are listed from the footer or the heads of batches, without reading
more than the first page of a column; lines of JSON are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gaudi_bert.common.arrow import explained_arrow_errors, named, opened_parquet, require_pyarrow, validated
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, open_file, regular
from gaudi_bert.tables.json_lines import is_json, json_parts, json_schema, read_json_lines

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_BYTES_OF_OTHERS = 16
"""Of a value whose type has no fixed width, in addition to its encoded bytes."""


class TablePart(NamedTuple):
    """A run of rows of one file.

    Attributes:
        first_row: number of its first row in the file.
        bytes: about what they take in memory.
        position: number of the row group or the batch; for JSON, the byte at which the block begins.
        start: rows of the row group or the batch before this part.
        step: rows of each part of the row group or the batch but the last; for JSON, bytes of the block.
        table_row: number of its first row in the table.
    """

    path: Path
    first_row: int
    rows: int
    bytes: int
    position: int
    start: int
    step: int
    table_row: int = 0

    @property
    def name(self) -> str:
        """Key that sorts parts in the order of the table."""
        return f"{self.table_row:020d}"

    @property
    def sequences(self) -> int:
        """Rows of the part."""
        return self.rows


def table_schema(path: Path) -> Any:
    """The pyarrow schema of a table; that of JSON lines is what its first block shows."""
    pyarrow = require_pyarrow()
    if is_json(path):
        return json_schema(path)
    with explained_arrow_errors(path):
        if _is_parquet(path):
            from pyarrow import parquet

            return named(path, parquet.read_schema(regular(path)))
        with pyarrow.OSFile(str(regular(path))) as source:
            return named(path, _open_arrow(source).schema)


def list_parts(path: Path, columns: Collection[str], most_rows: int, most_bytes: int) -> list[TablePart]:
    """The parts of a table, in order, without empty ones.

    Only `columns` will be read. A part has at most `most_rows` and `most_bytes`, where the format can read so little.
    """
    parts: list[TablePart] = []
    first_row = 0
    if is_json(path):
        for start, end, rows, size in json_parts(path):
            if rows:
                parts.append(TablePart(path, first_row, rows, size, start, 0, end - start))
            first_row += rows
        return parts
    with explained_arrow_errors(path):
        if _is_parquet(path):
            sizes = list(_parquet_sizes(path, columns))
        else:
            sizes = [(batch.num_rows, batch.nbytes) for batch in _arrow_batches(path, columns)]
    for position, (whole_rows, size) in enumerate(sizes):
        pieces = max(1, -(-whole_rows // most_rows), -(-size // most_bytes))
        step = max(1, -(-whole_rows // pieces))
        for start in range(0, whole_rows, step):
            rows = min(step, whole_rows - start)
            parts.append(TablePart(path, first_row + start, rows, size * rows // whole_rows, position, start, step))
        first_row += whole_rows
    return parts


def read_parts(parts: Sequence[TablePart], columns: Sequence[str], schema: Any, threads: bool = True) -> Iterator[Any]:
    """The rows of these parts of one file, in order, as a pyarrow Table each, with these columns in this order.

    Lines of JSON must follow `schema`, that of the table; with `threads`, several decode.
    """
    if not parts:
        return
    path = parts[0].path
    if is_json(path):
        for part in parts:
            table = read_json_lines(path, part.position, part.position + part.step, part.first_row, schema)
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
    with explained_os_errors(path, "read"), open_file(path) as handle:
        return handle.read(4) == b"PAR1"


def _parquet_sizes(path: Path, columns: Collection[str]) -> Iterator[tuple[int, int]]:
    """(rows, bytes in memory) of each row group."""
    with opened_parquet(path) as table:
        metadata = table.metadata
        names = [metadata.schema.column(leaf).path.split(".", 1)[0] for leaf in range(metadata.num_columns)]
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            # Of a damaged chunk, `group.column` ends the process; a reader reports what is wrong with it, at its first page.
            next(table.iter_batches(1, row_groups=[number], columns=[name for name in columns if name in names]), None)
            chunks = [group.column(leaf) for leaf, name in enumerate(names) if name in columns]
            values = [_WIDTHS.get(chunk.physical_type, _BYTES_OF_OTHERS) * chunk.num_values for chunk in chunks]
            encoded = [chunk.total_uncompressed_size for chunk in chunks]
            yield group.num_rows, sum(map(max, encoded, values))


def _read_parquet(path: Path, parts: Sequence[TablePart], columns: Sequence[str], threads: bool) -> Iterator[Any]:
    pyarrow = require_pyarrow()
    with opened_parquet(path) as table:
        for number, group in itertools.groupby(parts, key=lambda part: part.position):
            by_start = {part.start: part for part in group}
            step = next(iter(by_start.values())).step
            if table.metadata.row_group(number).num_rows <= step:
                whole = table.read_row_group(number, columns=list(columns), use_threads=threads)
                yield _checked(by_start[0], validated(path, whole))
                continue
            batches = table.iter_batches(step, row_groups=[number], columns=list(columns), use_threads=threads)
            for start, batch in zip(range(0, max(by_start) + 1, step), batches, strict=False):
                if start in by_start:
                    yield _checked(by_start[start], pyarrow.Table.from_batches([validated(path, batch)]))


def _open_arrow(source: Any) -> Any:
    """A reader of an Arrow file or, as Hugging Face datasets writes, an Arrow stream."""
    ipc = require_pyarrow().ipc
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


def _arrow_batches(path: Path, columns: Collection[str]) -> Iterator[Any]:
    """All record batches, of these columns: views of the file, of which only what is looked at is read."""
    pyarrow = require_pyarrow()
    with pyarrow.memory_map(str(regular(path))) as source:
        reader = _open_arrow(source)
        is_file = hasattr(reader, "num_record_batches")
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield validated(path, batch.select(list(columns)))


def _read_arrow(path: Path, parts: Sequence[TablePart], columns: Sequence[str]) -> Iterator[Any]:
    pyarrow = require_pyarrow()
    by_batch = {number: list(group) for number, group in itertools.groupby(parts, key=lambda part: part.position)}
    for number, batch in enumerate(_arrow_batches(path, columns)):
        for part in by_batch.get(number, ()):
            yield _checked(part, pyarrow.Table.from_batches([batch.slice(part.start, part.rows)]))
        if number >= parts[-1].position:
            return
