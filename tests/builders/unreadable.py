"""A file that may not be read, also where root runs the tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may read and write: those of pytest are of one user."""
    folder = Path(tempfile.mkdtemp(prefix="gaudi-bert-test-"))
    try:
        folder.chmod(0o777)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Take the permission to read from `path`, and be a user for whom that counts."""
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(0)
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)
