"""Paths here and in object stores, files that are either complete or absent, and locks that die with their process.

A process killed at any moment leaves at most a temporary file, which the next writer of that file removes. Nothing is
written through a symbolic link that somebody put there: temporary names cannot be known before.

Every file that outlives a stage gets its name here. So this is the door to object stores: `mounted` puts a mirror behind a
folder, and the mirror is notified of each file there, in the order in which files are completed.
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

from gaudi_bert.common.errors import FailedError, InputError, shortened, shown

LONGEST_ROW_BYTES = 64 << 20
"""What a reader of texts holds at most of one line, row, sentence or document, whatever its file was compressed to."""

BAD_PATH = (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
"""Errors that mean a wrong path, not a machine that fails."""


@contextmanager
def explained_os_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an `OSError` while doing `action` on `path` into one line with its remedy."""
    remedies = {
        errno.ENOSPC: "free some space on that disk and run the same command again",
        errno.EDQUOT: "raise the quota or choose another folder",
        errno.EACCES: "check the permissions" + ("" if action == "read" else ", or choose another folder"),
        errno.EROFS: "the file system is read-only: choose another folder",
        errno.ENOENT: "it does not exist or has vanished: check the path",
        errno.ENAMETOOLONG: "use shorter names",
        errno.ELOOP: "fix the symbolic links",
        errno.ENOTDIR: "one of its folders is a file: check the path",
        errno.EISDIR: "give a file in it",
    }
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = remedies.get(error.errno or 0, "see the reason given by the operating system")
        is_closed = error.errno == errno.EACCES and action == "read"
        kind = InputError if error.errno in BAD_PATH or is_closed else FailedError
        raise kind(f"{shortened(str(path), 300)}: cannot {action}: {reason}; {remedy}") from error


_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def regular(path: Path | str) -> Path:
    """Return `path`, checked to be a file with an end that may be read.

    A pipe, a device or a socket would be waited for, or never end. Whatever is opened for reading passes here, also by
    libraries that call a file without permission missing. An operating system error is raised as it is: the reader knows
    the remedy.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except ValueError as error:  # also a name that cannot be encoded
        raise InputError(f"{shown(str(path))}: invalid path: it has a NUL or a lone surrogate; correct it") from error
    if kind is not None:
        raise InputError(f"{shortened(str(path), 300)}: is {kind}; give a file, which has an end")
    if not os.access(path, os.R_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return Path(path)


def open_file(path: Path | str) -> BinaryIO:
    """A file for reading; never a pipe, a device or a socket."""
    return open(regular(path), "rb")


def read_file(path: Path | str) -> bytes:
    """The content of a file; that it cannot be read is one line."""
    with explained_os_errors(Path(path), "read"), open_file(path) as handle:
        return handle.read()


def file_identity(path: Path) -> str:
    """Name and SHA-256 of a file."""
    digest = hashlib.sha256()
    with explained_os_errors(path, "read"), open_file(path) as handle:
        while block := handle.read(2**20):
            digest.update(block)
    return f"{path.name}:{digest.hexdigest()}"


def read_text(path: Path | str) -> str:
    """The content of a file of UTF-8; every end of a line is a line feed."""
    try:
        with explained_os_errors(Path(path), "read"), open(regular(path), encoding="utf-8") as handle:
            return handle.read()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error


def followed(path: Path) -> Path:
    """An absolute path without links; a loop of links remains one (`Path.resolve` raises), and reading it is an error."""
    return Path(os.path.realpath(path))


# As Hugging Face's hub has them: `bert-base-uncased`, `sentence-transformers/all-MiniLM-L6-v2`.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def check_model(path: Path) -> None:
    """Refuse a model's folder or file that is not on this machine; a TF1 checkpoint is a prefix of names."""
    if path.exists() or any(path.parent.glob(f"{escape(path.name)}.*")):
        return
    if _HUB_NAME.fullmatch(str(path)) is None:
        raise InputError(f"{path}: no such folder; check the path")
    command = f"`hf download {path} --local-dir {path.name}`"
    raise InputError(f"{path}: no folder here; download it by {command} and give {path.name}, or check the path")


def check_name(path: Path) -> None:
    """Refuse what cannot be created, locked or removed: what has no name, a device, a link that leads nowhere."""
    if path.name in ("", ".."):
        raise InputError(f"{str(path)!r}: has no name; give the name of a file or folder to create")
    with explained_os_errors(path, "write"), suppress(FileNotFoundError):
        regular(path)


def hidden_beside(path: Path, ending: str) -> Path:
    """`.<name>.<ending>` next to `path`."""
    check_name(path)
    return path.with_name(f".{path.name}.{ending}")


# --- locations: a location in a store is written as its URL, or as the `Path` that `pathlib` makes of it
#
# `Path("s3://bucket/work") / "plan.json"` is `s3:/bucket/work/plan.json`: pathlib drops one slash and keeps the rest, so a
# location in a store has a name, a parent and children as every path has. Its first part, `s3:`, tells it from a path on a
# disk. A folder of this machine whose name ends in a colon is written `./s3:`.

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)", re.DOTALL)


def in_store(location: str | Path) -> bool:
    """Whether `location` is in an object store."""
    return _URL.fullmatch(str(location)) is not None


def url_of(location: str | Path) -> str:
    """The URL of a location in a store, without a slash at its end."""
    match = _URL.fullmatch(str(location))
    if match is None:
        raise InputError(f"{location}: is not an object-store URL; write for example s3://bucket/prefix")
    scheme, rest = match[1], match[2].rstrip("/")
    if "@" in rest.split("/")[0] and scheme in ("s3", "gs", "http", "https"):
        raise InputError(f"{scheme}://...: a URL with credentials in it; leave them to the store's variables or files")
    return f"{scheme}://{rest}"


def scheme_of(location: str | Path) -> str:
    """`s3` of `s3://bucket/prefix`."""
    return url_of(location).split(":", 1)[0]


def path_below(folder: Path, text: str) -> Path:
    """`text` as a location: a URL as it is, a relative path from `folder`."""
    return Path(text) if in_store(text) else folder / text


def shown_location(location: str | Path) -> str:
    """Return the name of a location for messages: a URL, or the path."""
    return url_of(location) if in_store(location) else str(location)


# --- files that are written: complete or absent


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing so that it appears complete or not at all.

    The temporary name is `.<name>.<8 hexadecimal digits>.tmp`, so listings that skip dot files never see it. On an exception
    it is removed, and after a kill by the next writer. Of several processes that write the same file, the last one to finish
    keeps it.
    """
    path = Path(path)
    check_name(path)
    with explained_os_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        written = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
        for abandoned in [path.with_name(each) for each in os.listdir(path.parent) if written.fullmatch(each)]:
            # An error: its writer still writes or ends at this moment, or the file is not ours.
            with suppress(OSError), open(os.open(abandoned, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                abandoned.unlink()
        temporary, handle = _new_temporary(path)
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
    _tell_mirror(path)


def _new_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """A new file, locked while it is open: that tells it from those of killed processes."""
    while True:
        temporary = hidden_beside(path, f"{secrets.token_hex(4)}.tmp")
        try:
            handle = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb")
        except FileExistsError:
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        if temporary.exists():  # nobody took it for abandoned before it was locked
            return temporary, handle
        handle.close()


def move_finished_file(temporary: Path, path: Path) -> None:
    """Give a finished and flushed file its name."""
    with explained_os_errors(path, "write"):
        os.replace(temporary, path)
        flush_folder(path.parent)
    _tell_mirror(path)


class Mirror(Protocol):
    """A store behind a mounted folder."""

    def completed(self, path: Path) -> None:
        """A file below the folder is complete; called in the thread that wrote it."""


# A table of mounts: in it a path finds its mirror from any thread and generator; a context variable would be lost
# in both, and the file with it. `mounted` alone changes it. Two commands in one process have folders of different names, so
# neither sees the other's.
_MOUNTED: dict[Path, Mirror] = {}


@contextmanager
def mounted(folder: Path, mirror: Mirror) -> Iterator[None]:
    """Inside the block, `mirror` stands behind `folder`, which is a new one."""
    _MOUNTED[folder] = mirror
    try:
        yield
    finally:
        del _MOUNTED[folder]


def mirror_of(path: Path) -> Mirror | None:
    """Return the mirror of the mounted folder that a path is or is in."""
    if not _MOUNTED:
        return None
    return next((_MOUNTED[folder] for folder in (path, *path.parents) if folder in _MOUNTED), None)


def _tell_mirror(path: Path) -> None:
    mirror = mirror_of(path)
    if mirror is not None:
        mirror.completed(path)


def flush_folder(folder: Path) -> None:
    """Make the renames done in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`, atomically."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        around = shown(text[max(0, error.start - 10) : error.start + 11])
        raise InputError(f"{path}: would hold a name that is not UTF-8, in {around}; rename that file") from error
    with atomic_file(path) as handle:
        handle.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON with sorted keys off (the order given) and a final newline, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def json_digest(value: Any) -> str:
    """The SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else shortened(str(error), 160)
        raise InputError(f"{path}: not a JSON file ({reason}); make it again with the command that writes it") from error


_LOCK_BYTES = 300
"""Of a lock's file. The line that names its holder is filled up to this, so that the file is never cut."""


@contextmanager
def exclusive_lock(path: Path, what: str, wait: bool = False) -> Iterator[None]:
    """Hold a kernel lock on the hidden file `.<name>.lock` next to `path`; it ends with this process, however that ends.

    The file names the process that holds the lock; errors call it `what`. With `wait`, another holder may end first (for
    moments, not for work), otherwise it is an error.
    """
    lock_path = hidden_beside(Path(path), "lock")
    with explained_os_errors(lock_path, "lock"):
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        # A file that has the name of a lock and holds something else would be lost.
        content = os.pread(descriptor, _LOCK_BYTES + 1, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b"no file"
        if len(content) > _LOCK_BYTES or not (content.startswith(b"process ") or content.isspace() or not content):
            raise InputError(f"{lock_path}: has the name of a lock, but is another file; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            holder = os.pread(descriptor, _LOCK_BYTES, 0).decode("utf-8", "replace").strip() or "another process"
            raise FailedError(f"{what}: {holder} is writing it; wait for it to end, or stop it") from error
        with explained_os_errors(lock_path, "write"):
            _name_holder(descriptor, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            _name_holder(descriptor, "")  # what is finished names no process and no host
    finally:
        os.close(descriptor)


def _name_holder(descriptor: int, holder: str) -> None:
    os.pwrite(descriptor, holder.encode()[: _LOCK_BYTES - 1].ljust(_LOCK_BYTES - 1) + b"\n", 0)
