"""RECORDS: a folder, a file or a glob of TFRecord files or of HDF5 files, as a sorted list with names that do not depend on
the machine.

A folder means its files, not recursive, whatever their ending; sub-folders, `*.json`, `README*` and, as in Spark and
pyarrow, names that begin with `_` or `.` are passed over. Any other entry that cannot be read as a file, such as a dangling
symbolic link, is an error: a shard that is silently missing would be data that is silently missing. A file is known by its
name relative to RECORDS, so artefacts of the same data elsewhere are the same. The endings tell the two formats apart.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.artefacts.base import InputFile
from gaudi_bert.artefacts.mirrored_folder import fetch, files_in, mirrored
from gaudi_bert.artefacts.object_store import Objects
from gaudi_bert.artefacts.packed import refuse_row_tables
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explain_os_errors, format_location, is_in_store, open_file, resolve_links, store_url
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.tfrecords.wire.hdf5 import HDF5_ENDINGS

_PIECE_BYTES = 1 << 20


def list_record_files(records: str | Path) -> dict[Path, int]:
    """The files of RECORDS (a folder, a file, or a glob pattern), sorted by name, and their bytes."""
    location = Path(records)
    with explain_os_errors(location, "read"):
        if location.is_dir():
            paths = [child for child in location.iterdir() if not _is_ignored(child.name) and not child.is_dir()]
            missing = "the folder holds no record files, names that begin with _ or . aside; check the path"
        elif os.path.lexists(location):
            paths, missing = [location], ""
        else:
            matches = map(Path, glob.glob(os.fspath(records)))
            paths = [path for path in matches if not _is_ignored(path.name) and not path.is_dir()]
            missing = "no such folder or file, and no file matches it as a pattern; check the path"
        paths.sort(key=lambda path: path.name)
        for path in paths:
            if path.is_symlink() and not path.is_file():
                problem = f"a symbolic link to {os.readlink(path)}, which leads to no file; fix the link, or remove it"
                raise InputError(f"{path}: {problem}")
            if not path.is_file():
                problem = "a pipe, socket or device, expected a record file; remove it, or give the files by a pattern"
                raise InputError(f"{path}: {problem}")
        sizes = {path: path.stat().st_size for path in paths}
    if not sizes:
        refuse_row_tables(location)
        raise InputError(f"{records}: {missing}")
    _check_one_format(records, sizes)
    for path, following in itertools.pairwise(sizes):
        if path.name == following.name:
            raise InputError(f"{following}: has the same name as {path}; rename one, files are known by name")
    for path in sizes:
        if not path.name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path.name):
            raise InputError(f"{path}: its name is not UTF-8, and files are known by name; rename it")
    return sizes


def input_file(path: Path) -> InputFile:
    """A file by its name, bytes and CRC-32C."""
    checksum = size = 0
    with explain_os_errors(path, "read"), open_file(path) as handle:
        while piece := handle.read(_PIECE_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return InputFile(name=path.name, bytes=size, crc32c=checksum)


def bad_file(path: Path) -> InputFile:
    """Return what a file is known by that cannot be read: of one without permission, its name and bytes."""
    if not os.access(path, os.R_OK, effective_ids=True):
        return InputFile(name=path.name, bytes=path.stat().st_size, crc32c=0)
    return input_file(path)


def records_folder(records: str | Path) -> Path:
    """The folder of the files of RECORDS."""
    location = Path(records)
    return location if location.is_dir() else location.parent


def find_vocabulary(records: str | Path) -> Path | None:
    """`vocab.txt` next to the folder of RECORDS (where `prepare` puts it), or None."""
    candidate = resolve_links(records_folder(records)).parent / "vocab.txt"
    return candidate if candidate.is_file() else None


def _is_ignored(name: str) -> bool:
    """Whether a file next to data is not data, by its name: `_SUCCESS`, a dot file, a README, JSON."""
    return name.startswith((".", "_", "README")) or name.endswith(".json")


def _check_one_format(records: str | Path, paths: Iterable[Path]) -> None:
    first = {path.suffix in HDF5_ENDINGS: path.name for path in paths}
    if len(first) > 1:
        shown = format_location(records)
        raise InputError(
            f"{shown}: holds both HDF5 files ({first[True]}) and others ({first[False]}); give one by a pattern"
        )


# --- RECORDS where they are: files of this machine as they are, or objects of a store, which are fetched as they are read


@dataclass(frozen=True)
class RecordInputs:
    """The files of RECORDS."""

    shown: str  # RECORDS, as messages name them
    folder: Path  # where the files are, or where their copies go
    sizes: Mapping[Path, int]  # bytes of each file, sorted by name; those of a store are there in a batch of `read_ahead`
    vocabulary: Path | None  # the vocab.txt next to their folder, on this machine; None without one


@contextmanager
def open_inputs(records: str | Path, store: StoreSettings | None = None) -> Iterator[RecordInputs]:
    """The files of RECORDS: a folder, a file or a glob; or the same as a URL."""
    if not is_in_store(records):
        yield RecordInputs(str(records), records_folder(records), list_record_files(records), find_vocabulary(records))
        return
    url, pattern = store_url(records), "*"
    parent, _, name = url.rpartition("/")
    # An object, or a pattern: its folder, and which names in it are meant.
    if not parent.endswith(":/") and (any(letter in name for letter in "*?[") or Objects(store).info(url) is not None):
        url, pattern, parent = parent, name, parent.rpartition("/")[0]
    # The vocabulary is next to the folder; nothing is next to a bucket's root.
    is_bucket = parent.endswith(":/")
    with mirrored(Path(url if is_bucket else parent), store) as root:
        folder = root if is_bucket else root / Path(url).name
        sizes = {
            folder / name: info.bytes
            for name, info in files_in(folder).items()
            if fnmatch.fnmatchcase(name, pattern) and not _is_ignored(name)
        }
        if not sizes:
            raise InputError(f"{store_url(records)}: no record files there, or no such bucket; check the URL")
        _check_one_format(records, sizes)
        vocabulary = root / "vocab.txt"
        if not is_bucket:
            fetch(vocabulary)
        yield RecordInputs(format_location(records), folder, sizes, vocabulary if vocabulary.exists() else None)
