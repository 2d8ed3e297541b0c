"""Which files a table consists of: one file, a folder, a glob, or a folder that Hugging Face datasets wrote.

A folder that `Dataset.save_to_disk` wrote names its files in `state.json`; other files in it are left from an earlier save
and are no part of the data. A file is known by its name, so names must differ.
"""

from __future__ import annotations

import glob
import itertools
import os
from pathlib import Path
from typing import NamedTuple

from gaudi_bert.artefacts.store.location import in_store
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors, read_json
from gaudi_bert.records.wire.crc32c import crc32c

__all__ = ["TABLE_ENDINGS", "TableFiles", "file_identity", "is_table", "table_files"]

TABLE_ENDINGS = (".parquet", ".arrow", ".feather", ".jsonl", ".jsonl.gz")
DATASET_STATE = "state.json"
_PIECE_BYTES = 1 << 20


class TableFiles(NamedTuple):
    """The tables of a source, sorted by name, and the names of tables beside them that are no part of it."""

    files: list[Path]
    left_out: list[str]


def is_table(source: str | Path) -> bool:
    """Whether `source` is a table by its ending, or holds files that are; anything else is taken for TFRecords."""
    path = Path(source)
    if in_store(source):
        return _has_table_ending(path) or any(_is_of_table(name) for name in Objects().list(source, only_here=True))
    if path.is_dir():
        return (path / DATASET_STATE).is_file() or bool(_tables_in(path)) or bool(_splits_in(path))
    if os.path.lexists(path):
        return _has_table_ending(path)
    found = glob.glob(os.fspath(source))
    return _has_table_ending(path) or (bool(found) and all(_has_table_ending(Path(name)) for name in found))


def table_files(source: str | Path) -> TableFiles:
    """The table files of `source`: one file, a folder of them, a glob, or a folder that `Dataset.save_to_disk` wrote.

    Raises:
        InputError: there is none; a file that `state.json` names is missing; two have one name; or the folder holds splits,
            of which one must be chosen.
        FailedError: the folder cannot be read.
    """
    path = Path(source)
    if path.is_file():
        return TableFiles([path], [])
    if not path.is_dir():
        return TableFiles(_files_of_glob(source), [])
    with explained_os_errors(path, "read"):
        found = _tables_in(path)
    named = _files_of_saved_dataset(path)
    if named is not None:
        return TableFiles(named, [file.name for file in found if file not in named])
    if found:
        return TableFiles(found, [])
    splits = _splits_in(path)
    if splits:
        raise InputError(f"{path}: holds the splits {', '.join(splits)}; pass one of them, for example {path / splits[0]}")
    raise InputError(f"{path}: holds no {', '.join(TABLE_ENDINGS)} file; pass a folder of tables with a column input_ids")


def _is_of_table(name: str) -> bool:
    return name == DATASET_STATE or _has_table_ending(Path(name))


def _has_table_ending(path: Path) -> bool:
    return path.name.endswith(TABLE_ENDINGS)


def _tables_in(folder: Path) -> list[Path]:
    """Files with the ending of a table, sorted; not those that datasets keep as a cache."""
    return sorted(
        child for child in folder.iterdir() if _has_table_ending(child) and not child.name.startswith((".", "cache-"))
    )


def _splits_in(folder: Path) -> list[str]:
    """Sub-folders that hold tables: the splits of a `DatasetDict`."""
    return sorted(child.name for child in folder.iterdir() if child.is_dir() and any(child.glob("*.arrow")))


def _files_of_glob(source: str | Path) -> list[Path]:
    paths = sorted(map(Path, glob.glob(os.fspath(source))), key=lambda path: path.name)
    if not paths:
        raise InputError(
            f"{source}: does not exist, and no file matches it as a pattern; pass a {', '.join(TABLE_ENDINGS)} file, "
            "a folder of them, or a pattern"
        )
    for path in paths:
        if not (path.is_file() and _has_table_ending(path)):
            raise InputError(f"{path}: is no {', '.join(TABLE_ENDINGS)} file; pass a pattern that matches tables only")
    for path, following in itertools.pairwise(paths):
        if path.name == following.name:
            raise InputError(f"{following}: has the same name as {path}; rename one, files are known by name")
    return paths


def _files_of_saved_dataset(folder: Path) -> list[Path] | None:
    """The files that `state.json` names, sorted; None where the folder is not one of `Dataset.save_to_disk`."""
    path = folder / DATASET_STATE
    state = read_json(path) if path.exists() else None
    if not isinstance(state, dict) or "_data_files" not in state:
        return None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(f"{path}: the dataset is a selection of rows; save `dataset.flatten_indices()` instead")
    entries = state["_data_files"]
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or []]
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise InputError(f"{path}: `_data_files` names no files; save the dataset again")
    files = sorted(folder / str(name) for name in names)
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: missing, {DATASET_STATE} names it; copy it, or save the dataset again")
    return files


def file_identity(path: Path) -> dict[str, int]:
    """`bytes` and `crc32c` of a file, by which an input is known wherever it lies.

    Raises:
        FailedError: it cannot be read.
    """
    checksum = size = 0
    with explained_os_errors(path, "read"), path.open("rb") as handle:
        while piece := handle.read(_PIECE_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return {"bytes": size, "crc32c": checksum}
