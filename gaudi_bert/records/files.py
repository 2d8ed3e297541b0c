"""RECORDS: a folder, a file or a glob of TFRecord files, as a sorted list with names that do not depend on
the machine.

A folder means its files, not recursive, whatever their ending; dot files, `*.json` and sub-folders are left
out. Any other entry that cannot be read as a file, such as a dangling symbolic link, is an error: a shard that is
silently missing would be data that is silently missing. A file is known by its name relative to RECORDS, so artefacts
made from the same data elsewhere are the same.
"""

from __future__ import annotations

import glob
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors

__all__ = ["RecordFile", "find_vocabulary", "list_record_files", "records_folder"]


@dataclass(frozen=True)
class RecordFile:
    """One input file: its name relative to RECORDS, where it is now, and its size in bytes."""

    name: str
    path: Path
    bytes: int


def list_record_files(records: str | Path) -> list[RecordFile]:
    """The files of RECORDS, sorted by name.

    Args:
        records: a folder, a file, or a glob pattern.

    Raises:
        InputError: nothing is there, a file is empty, or an entry is neither a file nor left out by the rules,
            or has a name that is not UTF-8.
        FailedError: a file or the folder cannot be read.
    """
    location = Path(records)
    with explained_os_errors(location, "read"):
        if location.is_dir():
            paths = [child for child in location.iterdir() if not _is_left_out(child)]
            missing = "the folder holds no record files; check the path"
        elif os.path.lexists(location):
            paths, missing = [location], ""
        else:
            paths = [path for path in map(Path, glob.glob(os.fspath(records))) if not _is_left_out(path)]
            missing = "no such folder or file, and no file matches it as a pattern; check the path"
        files = [RecordFile(path.name, path, _file_bytes(path)) for path in sorted(paths, key=lambda path: path.name)]
    if not files:
        raise InputError(f"{records}: {missing}")
    for file, following in itertools.pairwise(files):
        if file.name == following.name:
            raise InputError(f"{following.path}: has the same name as {file.path}; rename one, files are known by name")
    for file in files:
        if not file.name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in file.name):
            raise InputError(f"{file.path}: its name is not UTF-8, and files are known by name; rename it")
        if file.bytes == 0:
            raise InputError(f"{file.path}: the file is empty; remove it, or make it again")
    return files


def records_folder(records: str | Path) -> Path:
    """The folder in which the files of RECORDS lie."""
    location = Path(records)
    return location if location.is_dir() else location.parent


def find_vocabulary(records: str | Path) -> Path | None:
    """`vocab.txt` beside the folder of RECORDS (where `prepare` puts it), or None."""
    candidate = records_folder(records).resolve().parent / "vocab.txt"
    return candidate if candidate.is_file() else None


def _is_left_out(path: Path) -> bool:
    """Whether the rules name this entry: a dot file, a JSON file, or a folder."""
    return path.name.startswith(".") or path.suffix == ".json" or path.is_dir()


def _file_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    if path.is_symlink():
        raise InputError(
            f"{path}: a symbolic link to {os.readlink(path)}, which leads to no file; mend the link, or remove it"
        )
    raise InputError(
        f"{path}: a pipe, socket or device, where record files are wanted; remove it, or give the files by a pattern"
    )
