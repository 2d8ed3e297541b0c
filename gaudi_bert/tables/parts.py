"""List and read the parts of tables, so that memory is bounded by the size of a few parts and not by the size of a file.

A part is a run of rows that the format allows to read separately: a row group of Parquet, a record batch of Arrow, or a
block of lines of JSON. An Arrow file or stream, as written by Hugging Face datasets, is mapped into memory and not copied.
If a row group or batch is larger than requested, it is read in several parts with equal numbers of rows. A gzipped file can
be read only from its beginning, so it is a single part.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gaudi_bert.common.arrow import (
    explain_arrow_errors,
    open_parquet,
    require_pyarrow,
    require_utf8_column_names,
    validate_arrow_buffers,
)
from gaudi_bert.common.errors import InputError, short_repr, shorten
from gaudi_bert.common.files import LONGEST_ROW_BYTES, check_regular_file, explain_os_errors, open_file
from gaudi_bert.corpus.documents import open_decompressed_file
from gaudi_bert.rows.formats import JSON

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
# The memory of a Parquet column is estimated from the width of its type. If the type has no fixed width, assume this many
# bytes per value. Use the size of the encoded column instead if that is larger.
_BYTES_OF_OTHERS = 16
_BLOCK_BYTES = 16 << 20
_ROWS_AT_ONCE = 4096
# To estimate the memory of JSON lines, multiply the size of their text by this number. For example, a number takes 8 bytes
# in memory, and usually at least 4 bytes as text.
_MEMORY_OF_TEXT = 2
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DEEPEST = 64


class TablePart(NamedTuple):
    """Consecutive rows of one table file that are read together.

    Attributes:
        path: The file.
        first_row: The number of its first row in the file.
        rows: The number of rows.
        bytes: The approximate size of the rows in memory.
        position: The number of the row group or batch. For JSON, the first byte of the block.
        start: The number of rows of the row group or batch before this part.
        step: The number of rows in each part of the row group or batch except the last. For JSON, the size of the block in
            bytes.
        table_row: The number of its first row in the table.
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
        """The number of the first row in the table, with leading zeros. `divide_files_into_groups` sorts parts by this name,
        so they keep the order of the table.
        """
        return f"{self.table_row:020d}"

    @property
    def sequences(self) -> int:
        """The number of rows in the part. `divide_files_into_groups` expects this name, because it also divides
        files of sequences into groups.
        """
        return self.rows


def read_table_schema(path: Path) -> Any:
    """Return the pyarrow schema of a table file. For JSON lines, the schema is inferred from the first lines.

    Raises:
        InputError: The file cannot be read, has two columns of the same name, or is JSON without rows.
    """
    if _is_json(path):
        rows = list(_parse_rows(path, next(_read_blocks(path, 0, None), b""), 0))
        if not rows:
            raise InputError(f"{path}: the table contains no rows, so there is nothing to pack; check the path")
        return _build_checked_table(path, rows, 0, None).schema
    with explain_arrow_errors(path):
        if _is_parquet(path):
            from pyarrow import parquet

            return require_utf8_column_names(path, parquet.read_schema(check_regular_file(path)))
        with require_pyarrow().OSFile(str(check_regular_file(path))) as source:
            return require_utf8_column_names(path, _open_arrow(source).schema)


def list_parts(path: Path, columns: Collection[str], max_rows: int, max_bytes: int) -> list[TablePart]:
    """Divide a table file into parts, and return the parts that contain rows, in order.

    Args:
        path: The file.
        columns: The columns that will be read. Only their sizes count.
        max_rows: The largest number of rows in a part, as far as the format permits.
        max_bytes: The largest size of a part in memory, as far as the format permits.

    Raises:
        InputError: The file cannot be read.
    """
    parts: list[TablePart] = []
    first_row = 0
    if _is_json(path):
        return [part for part in _list_json_parts(path) if part.rows]
    with explain_arrow_errors(path):
        if _is_parquet(path):
            sizes = list(_list_row_group_sizes(path, columns))
        else:
            sizes = [(batch.num_rows, batch.nbytes) for batch in _read_arrow_batches(path, columns)]
    for position, (whole_rows, size) in enumerate(sizes):
        pieces = max(1, -(-whole_rows // max_rows), -(-size // max_bytes))
        step = max(1, -(-whole_rows // pieces))
        for start in range(0, whole_rows, step):
            rows = min(step, whole_rows - start)
            parts.append(TablePart(path, first_row + start, rows, size * rows // whole_rows, position, start, step))
        first_row += whole_rows
    return parts


def read_parts(parts: Sequence[TablePart], columns: Sequence[str], schema: Any, threads: bool = True) -> Iterator[Any]:
    """Read the given parts of a table file, and yield each as a pyarrow Table, in order.

    Args:
        parts: The parts, all of the same file.
        columns: The columns, in the order that they have in the result.
        schema: The schema of the table, which JSON lines have to follow.
        threads: Whether several threads decode Parquet.

    Raises:
        InputError: The file cannot be read, or has changed since its parts were listed.
    """
    if not parts:
        return
    path = parts[0].path
    if _is_json(path):
        for part in parts:
            table = _read_json_lines(path, part.position, part.position + part.step, part.first_row, schema)
            yield _check_row_count(part, table.select(list(columns)))
        return
    with explain_arrow_errors(path):
        tables = (
            _read_parquet_parts(path, parts, columns, threads)
            if _is_parquet(path)
            else _read_arrow_parts(path, parts, columns)
        )
    while True:
        with explain_arrow_errors(path):  # exceptions of the caller between two parts must not be converted
            table = next(tables, None)
        if table is None:
            return
        yield table


def _check_row_count(part: TablePart, arrow_table: Any) -> Any:
    """Return the rows of a part, after checking that their number is still the same as when the parts were listed."""
    if arrow_table.num_rows != part.rows:
        raise InputError(
            f"{part.path}: the file changed while it was read: expected {part.rows} rows from row {part.first_row} on, "
            f"found {arrow_table.num_rows}; do not write the table while it is read, and write one JSON object per line"
        )
    return arrow_table


def _is_parquet(path: Path) -> bool:
    """Return whether a file begins with the magic bytes of Parquet."""
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return handle.read(4) == b"PAR1"


def _list_row_group_sizes(path: Path, columns: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield (number of rows, estimated bytes in memory) for each row group of a Parquet file."""
    with open_parquet(path) as table:
        metadata = table.metadata
        names = [metadata.schema.column(leaf).path.split(".", 1)[0] for leaf in range(metadata.num_columns)]
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            # If the metadata of a column is damaged, `group.column` crashes the process. Reading a row raises an exception
            # instead, so read one row first.
            next(table.iter_batches(1, row_groups=[number], columns=[name for name in columns if name in names]), None)
            chunks = [group.column(leaf) for leaf, name in enumerate(names) if name in columns]
            values = [_WIDTHS.get(chunk.physical_type, _BYTES_OF_OTHERS) * chunk.num_values for chunk in chunks]
            yield group.num_rows, sum(map(max, [chunk.total_uncompressed_size for chunk in chunks], values))


def _read_parquet_parts(path: Path, parts: Sequence[TablePart], columns: Sequence[str], threads: bool) -> Iterator[Any]:
    """Read the given parts of a Parquet file, and yield each as a pyarrow Table."""
    pyarrow = require_pyarrow()
    with open_parquet(path) as table:
        for number, group in itertools.groupby(parts, key=lambda part: part.position):
            by_start = {part.start: part for part in group}
            step = next(iter(by_start.values())).step
            if table.metadata.row_group(number).num_rows <= step:
                whole = table.read_row_group(number, columns=list(columns), use_threads=threads)
                yield _check_row_count(by_start[0], validate_arrow_buffers(path, whole))
                continue
            batches = table.iter_batches(step, row_groups=[number], columns=list(columns), use_threads=threads)
            for start, batch in zip(range(0, max(by_start) + 1, step), batches, strict=False):
                if start in by_start:
                    yield _check_row_count(
                        by_start[start], pyarrow.Table.from_batches([validate_arrow_buffers(path, batch)])
                    )


def _open_arrow(source: Any) -> Any:
    """Open a reader for an Arrow file, or for an Arrow stream, which is the format of Hugging Face datasets."""
    ipc = require_pyarrow().ipc
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


def _read_arrow_batches(path: Path, columns: Collection[str]) -> Iterator[Any]:
    """Yield all record batches of an Arrow file or stream, with only the given columns.

    The batches are views of the mapped file, so only the values that are used are read from the disk.
    """
    with require_pyarrow().memory_map(str(check_regular_file(path))) as source:
        reader = _open_arrow(source)
        is_file = hasattr(reader, "num_record_batches")
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield validate_arrow_buffers(path, batch.select(list(columns)))


def _read_arrow_parts(path: Path, parts: Sequence[TablePart], columns: Sequence[str]) -> Iterator[Any]:
    """Read the given parts of an Arrow file, and yield each as a pyarrow Table."""
    pyarrow = require_pyarrow()
    by_batch = {number: list(group) for number, group in itertools.groupby(parts, key=lambda part: part.position)}
    for number, batch in enumerate(_read_arrow_batches(path, columns)):
        for part in by_batch.get(number, ()):
            yield _check_row_count(part, pyarrow.Table.from_batches([batch.slice(part.start, part.rows)]))
        if number >= parts[-1].position:
            return


# --- JSON lines, one block at a time
#
# A block ends after a line feed. The first block determines the columns and their types, and all lines have to follow them.
# Lines are parsed by Python, because pyarrow's parser crashes the process on some lines, reads others as several rows, and
# rounds integers in a column that contains fractions.


def _is_json(path: Path) -> bool:
    """Return whether a file contains JSON lines, according to its extension."""
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _list_json_parts(path: Path) -> list[TablePart]:
    """Return the blocks of lines in a JSON lines file as parts, including blocks without rows. A gzipped file is a single
    part.
    """
    parts, first_row, end = list[TablePart](), 0, 0
    for block in _read_blocks(path, 0, None):
        rows = len(_split_lines(block))
        parts.append(TablePart(path, first_row, rows, _MEMORY_OF_TEXT * len(block), end, 0, len(block)))
        first_row, end = first_row + rows, end + len(block)
    return [TablePart(path, 0, first_row, _MEMORY_OF_TEXT * end, 0, 0, end)] if path.suffix == ".gz" else parts


def _read_json_lines(path: Path, start_byte: int, end_byte: int, first_row: int, schema: Any) -> Any:
    """Parse the JSON lines between two byte positions of a file, and return them as a pyarrow Table with the given schema.

    For a gzipped file, the positions count decompressed bytes.
    """
    tables = [schema.empty_table()]
    for block in _read_blocks(path, start_byte, end_byte):
        rows = _parse_rows(path, block, first_row)
        while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            tables.append(_build_checked_table(path, some, first_row, schema))
            first_row += len(some)
    return require_pyarrow().concat_tables(tables)


def _read_blocks(path: Path, start_byte: int, end_byte: int | None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in blocks of complete lines.

    Args:
        path: The file.
        start_byte: The first byte to read. It must begin a line.
        end_byte: The end of the bytes to read, or None to read to the end of the file. The last block ends there, even
            within a line.

    Raises:
        InputError: A line is too long.
    """
    with open_decompressed_file(path, "gzip" if path.suffix == ".gz" else None) as handle:
        handle.seek(start_byte)
        remaining = None if end_byte is None else end_byte - start_byte
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
                    f"{path}: a line is longer than {LONGEST_ROW_BYTES >> 20} MiB; write one JSON object per line"
                )
        if rest:
            yield rest


def _split_lines(block: bytes) -> list[bytes]:
    """Return the lines of a block that are not blank."""
    return [line for line in block.removeprefix(_BYTE_ORDER_MARK).split(b"\n") if line.strip()]


def _parse_rows(path: Path, block: bytes, first_row: int) -> Iterator[dict[str, Any]]:
    """Parse each line of a block, and yield its JSON object.

    Raises:
        InputError: A line is not an object, or is nested too deeply.
    """
    for number, line in enumerate(_split_lines(block), start=first_row):
        problem = "is not a JSON object"
        try:
            row = JSON.decode(line.decode("utf-8"))
            # Arrow crashes the process if it infers the type of a very deeply nested value, so reject such values.
            if isinstance(row, dict) and (
                line.count(b"[") + line.count(b"{") <= _DEEPEST or _nesting_depth(row) <= _DEEPEST
            ):
                yield row
                continue
            problem = f"is nested more than {_DEEPEST} levels deep" if isinstance(row, dict) else problem
        except (ValueError, RecursionError, InputError) as error:
            problem = f"is not valid JSON in UTF-8 ({shorten(str(error))})"
        beginning = short_repr(line[:40].decode("utf-8", "replace"))
        raise InputError(f"{path}: row {number}: {beginning} {problem}; write one JSON object per line")


def _nesting_depth(value: Any) -> int:
    """Return how deeply lists and objects are nested in a JSON value. A number has depth 0, and `[1]` has depth 1."""
    depth, values = 0, [value]
    while values := [one for one in values if isinstance(one, dict | list)]:
        depth, values = depth + 1, [each for one in values for each in (one.values() if isinstance(one, dict) else one)]
    return depth


def _build_checked_table(path: Path, rows: Sequence[Mapping[str, Any]], first_row: int, schema: Any) -> Any:
    """Convert rows of a JSON lines file to a pyarrow Table. If this fails, raise an InputError that names the first invalid
    row.

    Raises:
        InputError: A row contradicts the schema, or the rows before it. The message names the first such row.
    """

    def problem(count: int) -> Exception | None:
        """Convert the first `count` rows, and return the exception that is raised, or None."""
        try:
            _build_table(rows[:count], schema)
        except (require_pyarrow().ArrowException, ValueError, OverflowError) as error:
            return error
        return None

    try:
        return _build_table(rows, schema)
    except (require_pyarrow().ArrowException, ValueError, OverflowError) as error:
        row = bisect.bisect_left(range(1, len(rows)), True, key=lambda count: problem(count) is not None)
        raise InputError(
            f"{path}: row {first_row + row}: {shorten(str(problem(row + 1) or error), 160)}; all rows must have the same "
            "columns, and all values of a column the same type; write the values as text if no other type fits"
        ) from error


def _build_table(rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    """Convert rows to a pyarrow Table. If `schema` is None, the columns and their types are inferred from the rows.

    Raises:
        ValueError, OverflowError, pyarrow.ArrowException: A value does not fit its type, or cannot be represented exactly.
    """
    pyarrow = require_pyarrow()
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else schema.names
    unknown = next((name for row in rows for name in row if name not in names), None)
    if unknown is not None:
        raise ValueError(f"column {short_repr(unknown)} does not exist in the first rows")
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = pyarrow.array(values)
        kind = columns[name].type if schema is None else schema.field(name).type
        if columns[name].type != kind:
            if not _can_store_type(columns[name].type, kind):
                raise ValueError(f"column {short_repr(name)} has type {columns[name].type}, but {kind} in the first rows")
            columns[name] = pyarrow.array(values, kind)
        if "double" in str(kind) and any(_contains_bool(value, kind) for value in values):
            raise ValueError(f"column {short_repr(name)} contains both numbers and true or false")
    return pyarrow.table(columns, schema)


def _can_store_type(value_type: Any, column_type: Any) -> bool:
    """Return whether a column of `column_type` can store all values of `value_type`.

    A column of floating-point numbers can store integers. If an integer would be rounded, pyarrow itself raises an
    exception.
    """
    types = require_pyarrow().types
    if value_type == column_type or types.is_null(value_type):
        return True
    if types.is_list(value_type) and types.is_list(column_type):
        return _can_store_type(value_type.value_type, column_type.value_type)
    if types.is_struct(value_type) and types.is_struct(column_type):
        return all(
            column_type.get_field_index(own.name) >= 0 and _can_store_type(own.type, column_type.field(own.name).type)
            for own in value_type
        )
    return bool(types.is_int64(value_type) and types.is_float64(column_type))


def _contains_bool(value: Any, arrow_type: Any) -> bool:
    """Return whether a value contains a bool where a floating-point number is expected. pyarrow would store the bool as 0 or
    1.
    """
    if isinstance(value, list):
        return any(_contains_bool(each, arrow_type.value_type) for each in value)
    if isinstance(value, dict):
        return any(_contains_bool(each, arrow_type.field(name).type) for name, each in value.items())
    return isinstance(value, bool) and bool(require_pyarrow().types.is_floating(arrow_type))
