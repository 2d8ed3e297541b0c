"""What libraries write to standard error below Python, such as TensorFlow's and XLA's own lines: to a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gaudi_bert.common.files import explained_os_errors

__all__ = ["native_lines_to"]

STANDARD_ERROR = 2


@contextmanager
def native_lines_to(log: Path) -> Iterator[None]:
    """Append to `log` what is written to file descriptor 2; what Python prints to `sys.stderr` goes where it went before.

    A stream that was taken from `sys.stderr` before is on descriptor 2, so take it anew inside.

    Raises:
        InputError: the folder of `log` does not exist.
        FailedError: `log` cannot be written.
    """
    python_stream = sys.stderr
    with explained_os_errors(log, "write"):
        file = log.open("ab")
    with file, os.fdopen(os.dup(STANDARD_ERROR), "w", buffering=1) as terminal:
        if _is_on(python_stream, STANDARD_ERROR):
            python_stream.flush()
            sys.stderr = terminal
        os.dup2(file.fileno(), STANDARD_ERROR)
        try:
            yield
        finally:
            os.dup2(terminal.fileno(), STANDARD_ERROR)
            sys.stderr = python_stream


def _is_on(stream: TextIO | None, descriptor: int) -> bool:
    """Whether `stream` writes to `descriptor`; one in memory writes to none."""
    try:
        return stream is not None and stream.fileno() == descriptor
    except (OSError, ValueError):
        return False
