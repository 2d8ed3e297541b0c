"""Scratch on the local disk: a folder for one command, removed when the command ends.

A kernel lock dies with its process, so the next command also removes what a killed one left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gaudi_bert.common.files import explained_os_errors

__all__ = ["scratch_folder"]

_PREFIX = "gaudi-bert-scratch-"


@contextmanager
def scratch_folder(parent: str | None) -> Iterator[Path]:
    """An empty folder below `parent` (None: where the system keeps temporary files).

    Raises:
        FailedError: it cannot be made there.
    """
    place = Path(parent or tempfile.gettempdir())
    with explained_os_errors(place, "make scratch"):
        place.mkdir(parents=True, exist_ok=True)
        _remove_what_was_left(place)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place)).resolve()
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_what_was_left(place: Path) -> None:
    """Remove the scratch of processes that are gone: nobody holds its lock."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # another user's, or another process just removed it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
