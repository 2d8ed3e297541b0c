"""pyarrow, and its errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import InputError, shortened

__all__ = ["explained_arrow_errors", "require_pyarrow"]


def require_pyarrow() -> Any:
    """The module pyarrow.

    Raises:
        InputError: it is not installed, or does not go with the numpy that is installed.
    """
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
    """Turn what pyarrow says of a file that it cannot read into one line.

    Raises:
        InputError: the file is damaged, or no table.
    """
    pyarrow = require_pyarrow()
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        reason = shortened(str(error), 200)
        raise InputError(f"{path}: cannot be read as a Parquet or Arrow table: {reason}; write it again") from error
