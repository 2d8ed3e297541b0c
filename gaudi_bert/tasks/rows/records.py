"""Files of records, read one after the other in bounded memory: JSON lines, CSV, TSV, Parquet, plain lines.

A line ends at a line feed and nowhere else: people's comments hold carriage returns and other signs that Python would also
take for the end of a line. TSV is split at tabs, with no quoting, as GLUE and GoEmotions are written; CSV is quoted.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.config.tasks import RowFormat
from gaudi_bert.tasks.rows.fields import Record
from gaudi_bert.tasks.rows.types import STANDARD_INPUT, source_name

__all__ = ["format_of", "open_bytes", "read_records", "text_lines"]

ENDINGS: dict[str, RowFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".json": "squad",
    ".txt": "txt",
}
LARGEST_FIELD = 2**31 - 1
PARQUET_ROWS = 1024


def format_of(path: str | Path, given: RowFormat | None) -> RowFormat:
    """How a file is written: as said, or by its ending; standard input holds JSON lines.

    Raises:
        InputError: the ending is not known.
    """
    if given is not None:
        return given
    if str(path) == STANDARD_INPUT:
        return "jsonl"
    name = Path(path).name.lower().removesuffix(".gz")
    ending = Path(name).suffix
    if ending not in ENDINGS:
        known = ", ".join(ENDINGS)
        raise InputError(
            f"{path}: its ending says no format; known are {known} (and .gz), or say it: --set task.format=jsonl"
        )
    return ENDINGS[ending]


@contextmanager
def open_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file (plain or gzip, by its first bytes) or standard input.

    Raises:
        InputError: it is not there, cannot be read, or is damaged gzip.
    """
    name = source_name(path)
    if str(path) == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    try:
        with Path(path).open("rb") as plain:
            is_gzip = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            if is_gzip:
                with gzip.open(plain) as unpacked:
                    yield io.BufferedReader(unpacked)  # type: ignore[type-var]
            else:
                yield plain
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{name}: is damaged gzip ({shortened(str(error))}); compress it again") from error
    except OSError as error:
        raise InputError(f"{name}: cannot read: {error.strerror or error}; check the path") from error


def text_lines(handle: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1, without their ends and without a byte-order mark.

    Raises:
        InputError: a line is not UTF-8.
    """
    for number, line in enumerate(handle, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield number, line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: row {number}: not UTF-8 at its byte {error.start}; save the file as UTF-8") from error


def read_records(
    path: str | Path, kind: RowFormat, header: Sequence[str] | None, text_column: str
) -> Iterator[tuple[int, Record]]:
    """The records of a file with their numbers.

    Args:
        path: a file or `-`.
        kind: jsonl, csv, tsv, parquet or txt.
        header: names of the columns of a table without a header line.
        text_column: what a line of a plain text is called.

    Raises:
        InputError: the file cannot be read, or a record is damaged.
    """
    if header is not None and kind not in ("csv", "tsv"):
        raise InputError(f"{source_name(path)}: --columns is for CSV and TSV; a file of the format {kind} names its own")
    if kind == "parquet":
        yield from _parquet(path)
        return
    name = source_name(path)
    with open_bytes(path) as handle:
        if kind == "jsonl":
            yield from _json_lines(handle, name)
        elif kind == "txt":
            yield from ((number, {text_column: line}) for number, line in text_lines(handle, name) if line.strip())
        else:
            yield from _table(handle, name, kind, header)


def _json_lines(handle: BinaryIO, name: str) -> Iterator[tuple[int, Record]]:
    for number, line in text_lines(handle, name):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: row {number}: not JSON ({shortened(str(error))}); write one object a line") from error
        if not isinstance(record, dict):
            raise InputError(f'{name}: row {number}: {shortened(line)} is no object; write for example {{"text": "..."}}')
        yield number, record


def _table(handle: BinaryIO, name: str, kind: RowFormat, header: Sequence[str] | None) -> Iterator[tuple[int, Record]]:
    columns = None if header is None else list(header)
    for number, cells in _tab_cells(handle, name) if kind == "tsv" else _comma_cells(handle, name):
        if columns is None:
            columns = [cell.strip() for cell in cells]
            twice = [column for column in columns if columns.count(column) > 1]
            if twice:
                raise InputError(f"{name}: two columns are called {twice[0]!r}; name them apart, or pass --columns")
            continue
        if len(cells) != len(columns):
            raise InputError(
                f"{name}: row {number}: has {len(cells)} cells, the columns are {len(columns)} ({', '.join(columns)[:80]}); "
                "mend the row"
            )
        yield number, {column: cell for column, cell in zip(columns, cells, strict=True) if cell != ""}


def _tab_cells(handle: BinaryIO, name: str) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in text_lines(handle, name) if line)


def _comma_cells(handle: BinaryIO, name: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LARGEST_FIELD)
    lines = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: row {reader.line_num + 1}: not UTF-8; save the file as UTF-8") from error
    except csv.Error as error:
        raise InputError(f"{name}: row {reader.line_num}: not CSV ({error}); mend its quotes") from error
    finally:
        lines.detach()


def _parquet(path: str | Path) -> Iterator[tuple[int, Record]]:
    from gaudi_bert.records.tables.arrow import require_pyarrow

    if str(path) == STANDARD_INPUT:
        raise InputError("standard input: Parquet cannot be read as it comes; give the name of the file")
    if not Path(path).is_file():
        raise InputError(f"{path}: cannot read: no such file; check the path")
    pyarrow: Any = require_pyarrow()
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a Parquet table ({shortened(str(error))}); write it again") from error
