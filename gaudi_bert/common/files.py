"""Paths on disk and in object stores, atomic files, mirrored folders, and locks.

A file that this module writes is either complete or absent. If a process is killed, it leaves at most a temporary file,
which the next writer of the same file removes. Locks end with the process that holds them. Temporary files have random
names, so that nobody can create a symbolic link with such a name in advance.

Every file that remains after a stage gets its final name in this module. If a stage writes to the URL of an object store,
this module reports each completed file, which is then uploaded. The section "mirrored folders" explains this.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from gaudi_bert.common.errors import FailedError, InputError, short_repr, shorten

# Readers reject a line, row, sentence or document that is longer than this after decompression, to limit their memory.
LONGEST_ROW_BYTES = 64 << 20

# These error numbers mean that the user passed a wrong path. Most other OSErrors are failures of the machine.
WRONG_PATH_ERRORS = (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


@contextmanager
def explain_os_errors(path: Path, action: str) -> Iterator[None]:
    """Convert an `OSError` inside a `with` block into a one-line error with a remedy.

    Args:
        path: The file, for the message.
        action: What the block does with the file, such as "read", "write" or "lock".

    Raises:
        InputError: The path is wrong or may not be read.
        FailedError: Another `OSError` was raised.
    """
    remedies = {
        errno.ENOSPC: "free some space on that disk and run the same command again",
        errno.EDQUOT: "raise the quota or choose another folder",
        errno.EACCES: "check the permissions" + ("" if action == "read" else " or choose another folder"),
        errno.EROFS: "choose another folder, because this file system is read-only",
        errno.ENOENT: "check the path, because the file or folder does not exist",
        errno.ENAMETOOLONG: "use shorter names",
        errno.ELOOP: "fix the symbolic links",
        errno.ENOTDIR: "check the path, because one of its folders is a file",
        errno.EISDIR: "pass a file in this folder",
    }
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = remedies.get(error.errno or 0, "fix the cause and run the same command again")
        is_closed = error.errno == errno.EACCES and action == "read"
        kind = InputError if error.errno in WRONG_PATH_ERRORS or is_closed else FailedError
        raise kind(f"{shorten(str(path), 300)}: cannot {action}: {reason}; {remedy}") from error


_SPECIAL_FILE_TYPES = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_regular_file(path: Path | str) -> Path:
    """Check that `path` can be read and is not a pipe, a device or a socket. Return `path`.

    Reading a pipe, a device or a socket would block or never end. Every file that is opened for reading must be checked,
    even if a library opens it, because some libraries report that a file is missing if its permissions forbid reading.

    Raises:
        InputError: The path is a pipe, a device or a socket, or it contains a NUL character or a lone surrogate.
        OSError: The file does not exist or cannot be read. The caller converts this error, because the remedy depends on it.
    """
    try:
        kind = _SPECIAL_FILE_TYPES.get(stat.S_IFMT(os.stat(path).st_mode))
    except ValueError as error:  # also if the name cannot be encoded
        raise InputError(f"{short_repr(str(path))}: the path contains a NUL or a lone surrogate; correct it") from error
    if kind is not None:
        raise InputError(f"{shorten(str(path), 300)}: the path is {kind}; pass a regular file")
    if not os.access(path, os.R_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return Path(path)


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file for reading in binary mode."""
    return open(check_regular_file(path), "rb")


def read_file(path: Path | str) -> bytes:
    """Return the content of a file as bytes.

    Raises:
        InputError: The path is wrong or may not be read.
        FailedError: The file cannot be read for another reason.
    """
    with explain_os_errors(Path(path), "read"), open_file(path) as handle:
        return handle.read()


def fingerprint_file(path: Path) -> str:
    """Return the file name and the SHA-256 of the content as "name:SHA-256"."""
    digest = hashlib.sha256()
    with explain_os_errors(path, "read"), open_file(path) as handle:
        while block := handle.read(2**20):
            digest.update(block)
    return f"{path.name}:{digest.hexdigest()}"


def read_text(path: Path | str) -> str:
    """Return the content of a UTF-8 file as text. All line ends are converted to line feeds.

    Raises:
        InputError: The file cannot be read or is not UTF-8.
    """
    try:
        with explain_os_errors(Path(path), "read"), open(check_regular_file(path), encoding="utf-8") as handle:
            return handle.read()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the file is not valid UTF-8 at byte {error.start}; save it as UTF-8") from error


def resolve_links(path: Path) -> Path:
    """Return the absolute path with all symbolic links resolved.

    If the links form a loop, one of them stays in the path, and reading the path fails later. `Path.resolve` would raise an
    exception.
    """
    return Path(os.path.realpath(path))


# This pattern matches model names of the Hugging Face Hub, such as `bert-base-uncased` or `google/electra-base-generator`.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def check_model_exists(path: Path) -> None:
    """Check that a local model folder or file exists.

    Args:
        path: A folder, a file, or the prefix of the files of a TF1 checkpoint.

    Raises:
        InputError: The model does not exist. If the path looks like a name on the Hugging Face Hub, the message contains
            the command that downloads it.
    """
    if path.exists() or any(path.parent.glob(f"{escape(path.name)}.*")):
        return
    if _HUB_NAME.fullmatch(str(path)) is None:
        raise InputError(f"{path}: no such folder; check the path")
    raise InputError(
        f"{path}: no such folder; download it with `hf download {path} --local-dir {path.name}` and pass {path.name}, or "
        "check the path"
    )


def check_path_to_write(path: Path) -> None:
    """Check that a path has a file name and is not a pipe, a device or a socket. The file need not exist.

    Raises:
        InputError: The path has no file name, or it is a pipe, a device or a socket.
    """
    if path.name in ("", ".."):
        raise InputError(f"{str(path)!r}: the path has no file name; pass the name of a file or folder to create")
    with explain_os_errors(path, "write"), suppress(FileNotFoundError):
        check_regular_file(path)


def hidden_path_beside(path: Path, ending: str) -> Path:
    """Return the hidden path `.<name>.<ending>` in the folder of `path`."""
    check_path_to_write(path)
    return path.with_name(f".{path.name}.{ending}")


# --- locations: a path on a disk, the URL of an object in a store, or a `Path` that was created from such a URL
#
# `Path("s3://bucket/work") / "plan.json"` is `s3:/bucket/work/plan.json`, because pathlib only drops one slash of a URL.
# Therefore, a location in a store can be used like every path: it has a name, a parent and children. Its first part, `s3:`,
# distinguishes it from a path on a disk. A local folder whose name ends with a colon has to be written as `./s3:`.

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)", re.DOTALL)


def is_in_store(location: str | Path) -> bool:
    """Return whether a location is in an object store and not on a disk."""
    return _URL.fullmatch(str(location)) is not None


def get_store_url(location: str | Path) -> str:
    """Return the URL of a location in an object store, without a trailing slash.

    Raises:
        InputError: The location is not in an object store, or its URL contains credentials.
    """
    match = _URL.fullmatch(str(location))
    if match is None:
        raise InputError(f"{location}: the location is not in an object store; pass a URL such as s3://bucket/prefix")
    scheme, rest = match[1], match[2].rstrip("/")
    if "@" in rest.split("/")[0] and scheme in ("s3", "gs", "http", "https"):
        raise InputError(
            f"{scheme}://...: the URL contains credentials; use the store's environment variables or files instead"
        )
    return f"{scheme}://{rest}"


def get_store_scheme(location: str | Path) -> str:
    """Return the URL scheme of a location in an object store, such as `s3` for `s3://bucket/prefix`."""
    return get_store_url(location).split(":", 1)[0]


def resolve_location(folder: Path, text: str) -> Path:
    """Convert a path or URL from a setting to a location. A relative path is resolved against `folder`."""
    return Path(text) if is_in_store(text) else folder / text


def format_location(location: str | Path) -> str:
    """Format a location for messages, as a URL or as a path on a disk."""
    return get_store_url(location) if is_in_store(location) else str(location)


# --- writing files that are either complete or absent


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing in a `with` statement. The file appears under its name only when it is complete.

    The data are written to the hidden temporary file `.<name>.<8 hexadecimal digits>.tmp`, flushed to disk and then renamed.
    The temporary file is removed if the block raises an exception. If the process is killed, the next writer removes it. If
    several processes write the same file, the file of the last one to finish remains.
    """
    path = Path(path)
    check_path_to_write(path)
    with explain_os_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        written = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
        for abandoned in [path.with_name(each) for each in os.listdir(path.parent) if written.fullmatch(each)]:
            # A writer that was killed leaves its temporary file behind without a lock, so remove the file. An OSError here
            # means that the writer is still active, has just ended, or belongs to another user.
            with suppress(OSError), open(os.open(abandoned, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                abandoned.unlink()
        temporary, handle = _create_temporary_file(path)
        with handle:
            try:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        flush_folder(path.parent)
    _report_completed_file(path)


def _create_temporary_file(path: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file next to `path`, and return its path and the open file.

    The file is locked while it is open, which distinguishes it from temporary files of killed processes.
    """
    while True:
        temporary = hidden_path_beside(path, f"{secrets.token_hex(4)}.tmp")
        try:
            handle = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb")
        except FileExistsError:
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        if temporary.exists():  # otherwise another writer removed it before it was locked
            return temporary, handle
        handle.close()


def move_finished_file(temporary: Path, path: Path) -> None:
    """Rename a finished file to its final name. If its folder is mirrored, also upload the file.

    The caller must have flushed the file to disk.
    """
    with explain_os_errors(path, "write"):
        os.replace(temporary, path)
        flush_folder(path.parent)
    _report_completed_file(path)


# --- mirrored folders: temporary local folders for a location in an object store
#
# A stage that reads or writes a URL works in a new local folder that mirrors the URL, so that its code only needs paths.
# `artefacts/mirrored_folder.py` creates the folder, downloads and uploads its files, and removes the folder at the end.
#
# - A path is *mirrored* if it is such a folder or is inside one. `_MIRRORS` contains the mirror of each such folder, and
#   `find_mirror` returns the mirror of a path. All other paths are ordinary local paths.
# - Downloads: The folder is empty at first. A stage must call `fetch` before it opens a file of an earlier command. For a
#   local path, `fetch` does nothing.
# - Uploads: `atomic_file` and `move_finished_file` report each completed file to the mirror, in the thread that wrote the
#   file. The mirror uploads the file before they return, unless it is hidden. A file that grows, such as a log, is uploaded
#   when the stage calls `publish`.
# - If a command is killed, the store contains exactly the files that were uploaded before, and each of them is complete. A
#   stage writes the file that marks its artefact as finished last, so an unfinished artefact has no such file in the store.
#   The next command removes the local folder.
#
# `_MIRRORS` is a global variable, because a context variable would be lost in other threads and in generators, and files
# that they write would not be uploaded. Only `mount_mirror` changes it. Commands in one process use folders with different
# names, so they do not affect each other.


class Mirror(Protocol):
    """Connects a mirrored local folder to its location in an object store."""

    def upload_completed(self, path: Path) -> None:
        """Upload a file that was just completed in the local folder. The thread that wrote the file calls this method."""


_MIRRORS: dict[Path, Mirror] = {}


@contextmanager
def mount_mirror(folder: Path, mirror: Mirror) -> Iterator[None]:
    """Mark a new local folder as mirrored while the `with` block runs."""
    _MIRRORS[folder] = mirror
    try:
        yield
    finally:
        del _MIRRORS[folder]


def find_mirror(path: Path) -> Mirror | None:
    """Return the mirror of the folder at or above `path`, or None if no such folder is mirrored."""
    if not _MIRRORS:
        return None
    return next((_MIRRORS[folder] for folder in (path, *path.parents) if folder in _MIRRORS), None)


def _report_completed_file(path: Path) -> None:
    """Report a completed file to the mirror of its folder, if the folder is mirrored."""
    mirror = find_mirror(path)
    if mirror is not None:
        mirror.upload_completed(path)


def flush_folder(folder: Path) -> None:
    """Flush a folder to disk, so that files that were renamed in it keep their new names after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write text to a UTF-8 file atomically.

    Raises:
        InputError: The text contains a lone surrogate, which comes from a file name that is not UTF-8.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        around = short_repr(text[max(0, error.start - 10) : error.start + 11])
        raise InputError(
            f"{path}: cannot store the file name {around}, because it is not valid UTF-8; rename that file"
        ) from error
    with atomic_file(path) as handle:
        handle.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file atomically. Keys keep their order."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def hash_json(value: Any) -> str:
    """Return a SHA-256 of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        InputError: The file cannot be read or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else shorten(str(error), 160)
        raise InputError(f"{path}: the file is not valid JSON ({reason}); create it again") from error


# The size of a lock file in bytes. The file contains the name of the process that holds the lock, padded to this size. A new
# name therefore replaces the old name completely, so the file never has to be truncated.
_LOCK_BYTES = 300


@contextmanager
def exclusive_lock(path: Path, description: str, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a file or folder while the `with` block runs.

    The lock is a kernel lock on the hidden file `.<name>.lock` next to `path`, so it ends when this process ends, even if it
    is killed. The hidden file contains the name of the process that holds the lock.

    Args:
        path: The file or folder to protect.
        description: What is locked, for messages.
        wait: Whether to wait until another process releases the lock. Use this only if the lock is never held for long.

    Raises:
        FailedError: Another process holds the lock, and `wait` is False.
        InputError: The hidden file exists, but is not a lock file.
    """
    lock_path = hidden_path_beside(Path(path), "lock")
    with explain_os_errors(lock_path, "lock"):
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        # A user's own file may have the name of the lock file and must not be overwritten, so check the content.
        content = os.pread(descriptor, _LOCK_BYTES + 1, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b"no file"
        if len(content) > _LOCK_BYTES or not (content.startswith(b"process ") or content.isspace() or not content):
            raise InputError(f"{lock_path}: the file has the name of a lock file, but is not one; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            holder = os.pread(descriptor, _LOCK_BYTES, 0).decode("utf-8", "replace").strip() or "another process"
            raise FailedError(f"{description}: {holder} is writing to it; wait until it ends, or stop it") from error
        with explain_os_errors(lock_path, "write"):
            _write_lock_holder(descriptor, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            _write_lock_holder(descriptor, "")  # the lock file of finished work must not name a process or host
    finally:
        os.close(descriptor)


def _write_lock_holder(descriptor: int, holder: str) -> None:
    """Write the name of the process that holds a lock to the lock file, padded to the file's fixed size."""
    os.pwrite(descriptor, holder.encode()[: _LOCK_BYTES - 1].ljust(_LOCK_BYTES - 1) + b"\n", 0)
