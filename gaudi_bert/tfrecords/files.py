"""Listing the input files of a command. The argument RECORDS of the command is a folder, a file or a glob pattern of
TFRecord or HDF5 files, or the URL of one of these.

A folder stands for all files directly in it, with any suffix. Sub-folders, `*.json`, `README*` and, as in Spark and pyarrow,
names that begin with `_` or `.` are ignored. Any other entry that cannot be read as a file, such as a dangling symbolic
link, is an error, because otherwise a part of the data would be missing without notice. A file is identified by its name
without its folder, so that the same data in another place produce the same artefacts. The suffix decides whether a file is
HDF5.
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
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, list_files, mirror_folder
from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.artefacts.packed import check_no_row_tables
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explain_os_errors, format_location, get_store_url, is_in_store, open_file, resolve_links
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.tfrecords.wire.hdf5 import HDF5_ENDINGS

_PIECE_BYTES = 1 << 20


def list_record_files(records: str | Path) -> dict[Path, int]:
    """Return the record files that match a local path or glob pattern, sorted by name, with their sizes in bytes.

    Args:
        records: A folder, a file or a glob pattern on this machine.

    Raises:
        InputError: There are no record files, an entry is not a regular file, the formats are mixed, two files have the same
            name, or a name is not UTF-8.
    """
    location = Path(records)
    with explain_os_errors(location, "read"):
        if location.is_dir():
            paths = [child for child in location.iterdir() if not _is_ignored(child.name) and not child.is_dir()]
            missing = "the folder contains no record files (names that begin with _ or . are ignored); check the path"
        elif os.path.lexists(location):
            paths, missing = [location], ""
        else:
            paths = [
                path for path in map(Path, glob.glob(os.fspath(records))) if not _is_ignored(path.name) and not path.is_dir()
            ]
            missing = "the path does not exist, and no file matches it as a pattern; check the path"
        paths.sort(key=lambda path: path.name)
        for path in paths:
            if path.is_symlink() and not path.is_file():
                problem = f"the file is a symbolic link to {os.readlink(path)}, which does not exist; fix or remove the link"
                raise InputError(f"{path}: {problem}")
            if not path.is_file():
                problem = "expected a file, found a pipe, socket or device; remove it, or select the files with a pattern"
                raise InputError(f"{path}: {problem}")
        sizes = {path: path.stat().st_size for path in paths}
    if not sizes:
        check_no_row_tables(location)
        raise InputError(f"{records}: {missing}")
    _check_one_format(records, sizes)
    for path, following in itertools.pairwise(sizes):
        if path.name == following.name:
            raise InputError(f"{following}: the file must not have the same name as {path}; rename one of the two files")
    for path in sizes:
        if not path.name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path.name):
            raise InputError(f"{path}: the file name must be UTF-8; rename the file")
    return sizes


def compute_file_identity(path: Path) -> InputFile:
    """Read a file and return its name, size and CRC-32C.

    Raises:
        InputError: The file cannot be read.
    """
    checksum = size = 0
    with explain_os_errors(path, "read"), open_file(path) as handle:
        while piece := handle.read(_PIECE_BYTES):
            checksum, size = crc32c(piece, checksum), size + len(piece)
    return InputFile(name=path.name, bytes=size, crc32c=checksum)


def compute_bad_file_identity(path: Path) -> InputFile:
    """Return the name, size and CRC-32C of an input file that is not a valid record file.

    If this process has no permission to read the file, the CRC-32C is 0.
    """
    if not os.access(path, os.R_OK, effective_ids=True):
        return InputFile(name=path.name, bytes=path.stat().st_size, crc32c=0)
    return compute_file_identity(path)


def get_records_folder(records: str | Path) -> Path:
    """Return the folder that contains the record files. `records` is this folder itself, a file in it, or a glob pattern."""
    location = Path(records)
    return location if location.is_dir() else location.parent


def find_vocabulary(records: str | Path) -> Path | None:
    """Return the path of the `vocab.txt` next to the folder of the record files, or None if there is no such file.

    The `prepare` stage writes the vocabulary there.
    """
    candidate = resolve_links(get_records_folder(records)).parent / "vocab.txt"
    return candidate if candidate.is_file() else None


def _is_ignored(name: str) -> bool:
    """Return whether a file is ignored because of its name. This applies to dot files, JSON files, READMEs and names such as
    `_SUCCESS`.
    """
    return name.startswith((".", "_", "README")) or name.endswith(".json")


def _check_one_format(records: str | Path, paths: Iterable[Path]) -> None:
    """Check that the suffixes of the files do not mix HDF5 with another format.

    Raises:
        InputError: The formats are mixed. The message names one file of each.
    """
    first = {path.suffix in HDF5_ENDINGS: path.name for path in paths}
    if len(first) > 1:
        raise InputError(
            f"{format_location(records)}: the folder contains both HDF5 files ({first[True]}) and other files"
            f" ({first[False]}); select one format with a pattern"
        )


# --- opening RECORDS: local files are read in place, and objects of a store are downloaded while they are read


@dataclass(frozen=True)
class RecordInputs:
    """The record files that a command reads, together with their vocabulary file.

    Attributes:
        shown: RECORDS as messages name them.
        folder: The folder of the files, or the local folder to which they are downloaded.
        sizes: The size of each file in bytes, sorted by name. A file of a store exists only inside a batch of
            `prefetch_batches`.
        vocabulary: The local path of the `vocab.txt` next to the folder of the files, or None if there is none.
    """

    shown: str
    folder: Path
    sizes: Mapping[Path, int]
    vocabulary: Path | None


@contextmanager
def open_inputs(records: str | Path, store: StoreSettings | None = None) -> Iterator[RecordInputs]:
    """List the record files that a command reads. If they are in an object store, mirror their folder locally until the
    `with` block ends.

    Args:
        records: A folder, a file or a glob, on this machine or as a URL.
        store: The settings of the object store, or None for the defaults.

    Yields:
        The files and the vocabulary.

    Raises:
        InputError: There are no record files, or they are not valid (see `list_record_files`).
    """
    if not is_in_store(records):
        yield RecordInputs(str(records), get_records_folder(records), list_record_files(records), find_vocabulary(records))
        return
    url, pattern = get_store_url(records), "*"
    parent, _, name = url.rpartition("/")
    # If the URL names a single object or contains wildcards, list the parent folder, and select the objects whose names
    # match.
    if not parent.endswith(":/") and (any(letter in name for letter in "*?[") or ObjectStore(store).info(url) is not None):
        url, pattern, parent = parent, name, parent.rpartition("/")[0]
    # The vocabulary is next to the folder of the records, so mirror the parent of this folder. The root of a bucket has no
    # parent, so mirror only the bucket.
    is_bucket = parent.endswith(":/")
    with mirror_folder(Path(url if is_bucket else parent), store) as root:
        folder = root if is_bucket else root / Path(url).name
        sizes = {
            folder / name: info.bytes
            for name, info in list_files(folder).items()
            if fnmatch.fnmatchcase(name, pattern) and not _is_ignored(name)
        }
        if not sizes:
            raise InputError(
                f"{get_store_url(records)}: the URL contains no record files, or the bucket does not exist; check the URL"
            )
        _check_one_format(records, sizes)
        vocabulary = root / "vocab.txt"
        if not is_bucket:
            download_missing_files(vocabulary)
        yield RecordInputs(format_location(records), folder, sizes, vocabulary if vocabulary.exists() else None)
