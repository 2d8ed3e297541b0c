"""pyarrow, which is optional: imported, its errors as one line, and what it has read proven sound before it is used.

An Arrow file is used as it is on disk: its offsets are not checked by reading it, and one that leads out of its
buffer is followed into foreign memory. So whatever comes out of a file, of any format, passes `validated` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import InputError, install_command, shortened
from gaudi_bert.common.files import regular


def require_pyarrow() -> Any:
    """The module pyarrow."""
    try:
        import pyarrow
    except ImportError as error:
        reason = " ".join(str(error).split())
        command = install_command("parquet")
        raise InputError(f"Parquet, Arrow and JSON lines need pyarrow ({reason}); run: {command}") from error
    return pyarrow


@contextmanager
def explained_arrow_errors(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors for a file that it cannot read into one line.

    For damaged files it also raises a KeyError, a UnicodeDecodeError (names of columns) and other ValueErrors.
    """
    pyarrow = require_pyarrow()
    try:
        yield
    except (OSError, pyarrow.ArrowException, ValueError, KeyError) as error:
        reason = shortened(str(error), 200)
        raise InputError(f"{path}: cannot be read as a Parquet or Arrow table: {reason}; write it again") from error


@contextmanager
def opened_parquet(path: Path, **options: Any) -> Iterator[Any]:
    """A Parquet file, a `pyarrow.parquet.ParquetFile` with these options."""
    require_pyarrow()
    from pyarrow import parquet

    with explained_arrow_errors(path), parquet.ParquetFile(regular(path), **options) as file:
        yield file


@contextmanager
def explained_values(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors for values that it can read and not write into one line; `path` is the table."""
    try:
        yield
    except require_pyarrow().ArrowException as error:
        reason = shortened(str(error), 200)
        remedy = "cast the column, or leave it out with --columns"
        raise InputError(f"{path}: holds a column that cannot be packed: {reason}; {remedy}") from error


def named(path: Path, schema: Any) -> Any:
    """A schema of the file `path` whose names, also those inside its types, are UTF-8: pyarrow looks when they are used."""
    with explained_arrow_errors(path):
        _ = schema.names, [str(kind) for kind in schema.types]
    return schema


def validated(path: Path, content: Any) -> Any:
    """A table, batch or column of the file `path`: every offset is in its buffer, every text is UTF-8."""
    with explained_arrow_errors(path):
        content.validate(full=True)
    return content
