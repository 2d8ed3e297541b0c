"""Import the optional library pyarrow, convert its errors into one-line errors, and validate what it has read.

pyarrow uses the buffers of an Arrow file without checking the offsets in them. A damaged offset could make it read memory
outside the buffer. Therefore, everything that is read from a file must pass through `validate_arrow_buffers` before it is
used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gaudi_bert.common.errors import InputError, install_command, shorten
from gaudi_bert.common.files import check_regular_file

if TYPE_CHECKING:
    import pyarrow

_ArrowData = TypeVar("_ArrowData")  # a pyarrow table, record batch or column


def require_pyarrow() -> Any:
    """Import pyarrow and return the module.

    Raises:
        InputError: The library is not installed. The message contains the command that installs it.
    """
    try:
        import pyarrow
    except ImportError as error:
        reason = " ".join(str(error).split())
        command = install_command("parquet")
        raise InputError(f"Parquet, Arrow and JSON lines files require pyarrow ({reason}); run: {command}") from error
    return pyarrow


@contextmanager
def explain_arrow_errors(path: Path) -> Iterator[None]:
    """Convert errors that pyarrow raises for a file to an `InputError`. Use this function in a `with` statement.

    For damaged files, pyarrow also raises KeyError, UnicodeDecodeError (for column names) and other ValueErrors.
    """
    pyarrow = require_pyarrow()
    try:
        yield
    except (OSError, pyarrow.ArrowException, ValueError, KeyError) as error:
        reason = shorten(str(error), 200)
        raise InputError(
            f"{path}: the file cannot be read as a Parquet or Arrow table ({reason}); create the file again"
        ) from error


@contextmanager
def open_parquet(path: Path, **options: Any) -> Iterator[Any]:
    """Open a Parquet file as a `pyarrow.parquet.ParquetFile`. Use this function in a `with` statement.

    Errors of pyarrow inside the block become an `InputError`.

    Args:
        path: The file.
        **options: Further arguments of `ParquetFile`.
    """
    require_pyarrow()
    from pyarrow import parquet

    with explain_arrow_errors(path), parquet.ParquetFile(check_regular_file(path), **options) as file:
        yield file


@contextmanager
def explain_arrow_cast_errors(path: Path) -> Iterator[None]:
    """Convert errors that pyarrow raises for column values of the wrong type to an `InputError`. Use this function in a
    `with` statement.
    """
    try:
        yield
    except require_pyarrow().ArrowException as error:
        reason = shorten(str(error), 200)
        remedy = "cast the column to another type, or leave it out with --columns"
        raise InputError(f"{path}: the table contains a column that cannot be packed ({reason}); {remedy}") from error


def require_utf8_column_names(path: Path, schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return the schema if all its column names are valid UTF-8.

    pyarrow checks the name of a column, even of a nested one, only when the name is used.

    Args:
        path: The file of the schema, for the message.
        schema: The schema.

    Raises:
        InputError: A column name is not valid UTF-8.
    """
    with explain_arrow_errors(path):
        _ = schema.names, [str(kind) for kind in schema.types]
    return schema


def validate_arrow_buffers(path: Path, data: _ArrowData) -> _ArrowData:
    """Return a pyarrow table, record batch or column if its offsets are valid and all its strings are UTF-8.

    Args:
        path: The file that the data were read from, for the message.
        data: The table, record batch or column.

    Raises:
        InputError: An offset is invalid, or a string is not UTF-8.
    """
    with explain_arrow_errors(path):
        data.validate(full=True)  # type: ignore[attr-defined]
    return data
