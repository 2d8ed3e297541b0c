"""Access to object stores through a local folder that mirrors a URL.

`mirror_folder(path)` returns the folder in which a stage works. A local path is returned unchanged. For a URL, a new scratch
folder is created that mirrors the objects below the URL. Each file that a stage completes in it is uploaded immediately
(`common.files` reports such files). The final file of an output is written last, so it is also uploaded last. Files that
grow are uploaded when the stage calls `upload_changed_files`, and hidden files are never uploaded. Files of an earlier run
are downloaded when the stage requests them.

`open_local_copies` downloads complete files or folders, for libraries that read files several times or in any order. Most
other functions also accept ordinary local paths. They then do the same on the local disk, or nothing if only a store needs
the operation.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gaudi_bert.artefacts.base import find_complete_parts
from gaudi_bert.artefacts.object_store import ObjectInfo, ObjectStore
from gaudi_bert.common.errors import GaudiBertError, InputError
from gaudi_bert.common.files import Mirror, explain_os_errors, find_mirror, get_store_url, is_in_store, mount_mirror
from gaudi_bert.config.places import StoreSettings


class _FileState(NamedTuple):
    """The size and modification time (in nanoseconds) of a local file. If either changes, the file has changed."""

    bytes: int
    modified_ns: int


@dataclass(frozen=True)
class _MirroredFolder(Mirror):
    """A local folder that mirrors the objects below a URL. Its methods download files from the store and upload files to the
    store.

    Attributes:
        folder: The local folder.
        url: The URL that corresponds to the folder.
        objects: Access to the store.
        listed: The size and version of each file when it was listed. If the file has changed since then, its download fails.
        uploaded_states: The size and modification time of each local file when it was last equal to its object in the store.
    """

    folder: Path
    url: str
    objects: ObjectStore
    listed: dict[Path, ObjectInfo] = field(default_factory=dict)
    uploaded_states: dict[Path, _FileState] = field(default_factory=dict)

    def object_url(self, path: Path) -> str:
        """Return the URL of the object that is mirrored at a local path."""
        return "/".join((self.url, *path.relative_to(self.folder).parts))

    def is_dotfile(self, path: Path) -> bool:
        """Return whether a file is hidden, that is, whether any part of its path below this folder begins with a dot."""
        return any(part.startswith(".") for part in path.relative_to(self.folder).parts)

    def upload_completed(self, path: Path) -> None:
        """Upload a file that has just been written completely, unless it is hidden."""
        if not self.is_dotfile(path):
            self.upload(path)

    def upload(self, path: Path) -> None:
        """Upload a local file to the store."""
        state = _read_file_state(path)
        self.listed.pop(path, None)
        self.objects.upload(path, self.object_url(path))
        self.uploaded_states[path] = state

    def download(self, path: Path) -> None:
        """Download a file from the store.

        Raises:
            InputError: The store does not have the file, or it has changed since it was listed.
        """
        self.objects.download(self.object_url(path), path, self.listed.get(path))
        self.uploaded_states[path] = _read_file_state(path)

    def download_if_present(self, path: Path) -> None:
        """Download a file if it exists in the store."""
        info = self.listed.get(path) or self.objects.info(self.object_url(path))
        if info is not None:
            self.listed[path] = info
            self.download(path)

    def has_changed(self, path: Path) -> bool:
        """Return whether a local file differs from its object in the store. Return False for hidden files."""
        return not self.is_dotfile(path) and self.uploaded_states.get(path) != _read_file_state(path)

    def remove(self, path: Path) -> None:
        """Remove the copy of a local file from the object store, but keep the local file."""
        self.listed.pop(path, None)
        self.uploaded_states.pop(path, None)
        self.objects.remove(self.object_url(path))

    def run_in_threads(self, action: Callable[[Path], None], paths: Iterable[Path]) -> None:
        """Call a function for every path in parallel threads. `StoreSettings.connections` limits the number of threads."""
        with ThreadPoolExecutor(self.objects.settings.connections) as pool:
            list(pool.map(action, paths))  # raise the first error, if any


def _read_file_state(path: Path) -> _FileState:
    """Return the size and modification time of a local file."""
    status = path.stat()
    return _FileState(status.st_size, status.st_mtime_ns)


def _find_mirrored_folder(path: Path) -> _MirroredFolder | None:
    """Return the mirrored folder that contains a path. Return None if the path is an ordinary local path."""
    mirror = find_mirror(path)
    return mirror if isinstance(mirror, _MirroredFolder) else None


@contextmanager
def mirror_folder(path: Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """Provide a local folder where a stage can read and write the files of `path` while the `with` block runs.

    A local path is provided unchanged. For a URL, the folder is empty at first and mirrors the objects below the URL. Errors
    that are raised in the `with` block name the URL instead of the local folder.

    Args:
        path: A local folder or the URL of a folder.
        store: The settings of the object store, or None for the defaults.

    Yields:
        The local folder.
    """
    if not is_in_store(path):
        yield path
        return
    objects, url = ObjectStore(store), get_store_url(path)
    with _create_scratch_folder(objects.settings.scratch) as scratch:
        # `settings_path` treats a path with a suffix as a file, so replace the dots in the name of the local folder.
        folder = scratch / Path(url).name.replace(".", "_")
        folder.mkdir()
        with mount_mirror(folder, _MirroredFolder(folder, url, objects)):
            try:
                yield folder
            except GaudiBertError as error:  # name the URL, because users do not know the local path of an object
                message = str(error).replace(str(folder), url)
                if message == str(error):
                    raise
                raise type(error)(message) from error


def is_mirrored(path: Path) -> bool:
    """Return whether a local path is in a folder that mirrors an object store."""
    return _find_mirrored_folder(path) is not None


def format_path(path: Path) -> str:
    """Format a path for a message. If the path is in a mirrored folder, return its URL instead."""
    mirror = _find_mirrored_folder(path)
    return str(path) if mirror is None else mirror.object_url(path)


def download_missing_files(*paths: Path) -> None:
    """Download the given files that exist in the store but are missing locally.

    Do nothing for files that are not in a mirrored folder.
    """
    mirror = _find_mirrored_folder(paths[0]) if paths else None
    if mirror is not None:
        mirror.run_in_threads(mirror.download_if_present, [path for path in paths if not path.exists()])


def upload_changed_files(*paths: Path) -> None:
    """Upload files that grow while a stage runs, such as logs. Do nothing for files that are not in a mirrored folder.

    Files that have not changed since they were uploaded are skipped, and so are hidden files.

    Args:
        paths: Files, or folders whose files are uploaded. The paths are uploaded one after the other.
    """
    for path in paths:
        mirror = _find_mirrored_folder(path)
        if mirror is not None:
            files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
            mirror.run_in_threads(mirror.upload, filter(mirror.has_changed, files))


def remove_local_copies(*paths: Path) -> None:
    """Remove the local copies of files in a mirrored folder, but keep their objects in the store.

    Do nothing for files that are not in a mirrored folder.
    """
    for path in paths:
        if is_mirrored(path):
            path.unlink(missing_ok=True)


def remove_files(*paths: Path) -> None:
    """Remove files and folders. If they are in a mirrored folder, also remove their objects from the store."""
    for path in paths:
        mirror = _find_mirrored_folder(path)
        if mirror is not None:
            mirror.remove(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def list_names(folder: Path) -> list[str]:
    """Return the sorted names of the files in a folder, which may be in an object store.

    For a local folder, these are the names of its files and sub-folders. For a mirrored folder, these are the names of all
    objects below it in the store, relative to the folder.
    """
    mirror = _find_mirrored_folder(folder)
    if mirror is None:
        return sorted(path.name for path in folder.iterdir())
    return list(mirror.objects.list(mirror.object_url(folder)))


def list_files(folder: Path) -> dict[str, ObjectInfo]:
    """Return the size of each file directly in a folder, by file name. Hidden files are omitted.

    Files of a store must not change between this call and their download. Otherwise the download fails.
    """
    mirror = _find_mirrored_folder(folder)
    if mirror is None:
        return {
            path.name: ObjectInfo(path.stat().st_size, "")
            for path in folder.iterdir()
            if not path.name.startswith(".") and path.is_file()
        }
    listed = mirror.objects.list(mirror.object_url(folder), direct_only=True)
    files = {name: info for name, info in listed.items() if not name.startswith(".")}
    mirror.listed.update({folder / name: info for name, info in files.items()})
    return files


# --- downloading files ahead of a reader that reads them in order


@contextmanager
def prefetch_batches(batches: Sequence[_Batch], batches_ahead: int = 1) -> Iterator[_BatchPrefetcher]:
    """Download batches of files in background threads, shortly before the caller reads them.

    Each batch is read once. Ordinary local files are used in place.

    Args:
        batches: The batches in reading order. A batch is one file or several.
        batches_ahead: How many batches are downloaded before the reader requests them.

    Yields:
        An object with a `keep_batch_local_during` method, which makes a batch available.
    """
    listed = [[batch] if isinstance(batch, Path) else batch for batch in batches]
    mirror = next(
        (mirror for batch in listed for path in batch if (mirror := _find_mirrored_folder(path)) is not None), None
    )
    if mirror is None:
        yield _BatchPrefetcher()
        return

    def download(path: Path) -> None:
        """Download a file if it is in a mirrored folder."""
        mirror_of_path = _find_mirrored_folder(path)
        if mirror_of_path is not None:
            mirror_of_path.download(path)

    with ThreadPoolExecutor(mirror.objects.settings.connections, thread_name_prefix="read-ahead") as pool:
        try:
            yield _BatchPrefetcher(listed, batches_ahead, lambda path: pool.submit(download, path))
        finally:
            pool.shutdown(cancel_futures=True)


_Batch = Path | Sequence[Path]


class _BatchPrefetcher:
    """Downloads batches of files before the caller reads them, and removes the local copies after use.

    Args:
        batches: The files of each batch.
        batches_ahead: How many batches are downloaded before the reader requests them.
        fetch: Starts the download of a file. None if all files are local.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Path]] = (),
        batches_ahead: int = 0,
        fetch: Callable[[Path], Future[None]] | None = None,
    ) -> None:
        self._batches, self._batches_ahead, self._fetch = batches, batches_ahead, fetch
        self._lock = threading.Lock()
        self._fetches: list[list[Future[None]]] = []

    @contextmanager
    def keep_batch_local_during(self, batch_number: int) -> Iterator[None]:
        """Download the files of a batch before the `with` block runs, and remove the local copies after it.

        Each batch may be requested once. The order should be approximately ascending, because all batches before the
        requested one are downloaded too.

        Raises:
            InputError: A file does not exist, or has changed since it was listed.
        """
        if self._fetch is None:
            yield
            return
        with self._lock:
            for batch in self._batches[len(self._fetches) : batch_number + 1 + self._batches_ahead]:
                self._fetches.append(list(map(self._fetch, batch)))
        try:
            for fetched in self._fetches[batch_number]:
                fetched.result()
            yield
        finally:
            remove_local_copies(*self._batches[batch_number])


# --- scratch folders
#
# A scratch folder is removed when the command ends. If the command is killed, the next command removes the folder. It
# detects such a folder by its lock, because a kernel lock ends with its process.

_PREFIX = "gaudi-bert-scratch-"


@contextmanager
def _create_scratch_folder(parent: str | None) -> Iterator[Path]:
    """Create an empty scratch folder, and lock it while the `with` block runs.

    Args:
        parent: The parent of the scratch folder, or None for the system's folder of temporary files.
    """
    parent_folder = Path(parent or tempfile.gettempdir())
    with explain_os_errors(parent_folder, "make scratch"):
        parent_folder.mkdir(parents=True, exist_ok=True)
        _remove_stale_scratch(parent_folder)
        while True:  # another process may remove the new folder before it is locked, so try again
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent_folder)).resolve()
            with suppress(FileNotFoundError):
                descriptor = os.open(folder, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if folder.exists():
                    break
                os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_stale_scratch(parent: Path) -> None:
    """Remove the scratch folders of processes that were killed. No process holds a lock on such a folder."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # the folder belongs to another user, or another process has just removed it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


# --- local copies of objects that are read completely

_WILDCARD = re.compile(r"[*?[]")


@contextmanager
def mirror_bucket(location: str | Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """Provide the local path that corresponds to a URL while the `with` block runs.

    The path is in a folder that mirrors the bucket. Files are only downloaded when `download_missing_files` is called.

    Args:
        location: A URL, or a local path, which is returned unchanged.
        store: The settings of the object store, or None for the defaults.
    """
    if not is_in_store(location):
        yield Path(location)
        return
    bucket, key = _split_bucket_and_key(location)
    with mirror_folder(Path(bucket), store) as folder:
        yield folder / key


def download_prefix_or_glob(prefix_or_pattern: Path) -> None:
    """Download one object, all objects below a prefix, or all objects that match a glob pattern, to a mirrored folder.

    Args:
        prefix_or_pattern: The local path that corresponds to the object, the prefix or the pattern.

    Raises:
        InputError: There are no such objects.
    """
    path, parts = prefix_or_pattern, _split_bucket_and_key(format_path(prefix_or_pattern))[1].split("/")
    first = next((number for number, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))
    # A store can only list objects below a fixed prefix, so split the path before its first wildcard.
    folder, pattern = [path, *path.parents][len(parts) - first], "/".join(parts[first:])
    if not pattern:
        download_missing_files(path)
        if path.is_file():
            return
    matched = pattern.replace("**/", "*")  # `*` also matches a slash here, and the reader ignores files that do not match
    names = [name for name in list_names(folder) if not pattern or fnmatch.fnmatchcase(name, matched)]
    if not names:
        raise InputError(f"{format_path(path)}: the bucket does not exist or contains no such objects; check the URL")
    download_missing_files(*(folder / name for name in names))


@contextmanager
def open_local_copy(location: str | Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """Provide a local copy of a file or folder while the `with` block runs.

    Args:
        location: A local path, which is used in place, or the URL of an object or a prefix, which is downloaded.
        store: The settings of the object store, or None for the defaults.

    Yields:
        The local path.
    """
    with open_local_copies([location], store) as (path,):
        yield path or Path(location)


@contextmanager
def open_local_copies(
    locations: Sequence[str | Path | None], store: StoreSettings | None = None
) -> Iterator[list[Path | None]]:
    """Provide local copies of several files or folders while the `with` block runs.

    Args:
        locations: Local paths and URLs. None stands for a file that is not used. Equal URLs have the same local path.
        store: The settings of the object store, or None for the defaults.

    Yields:
        The local path of each location, or None.
    """
    with ExitStack() as stack:
        buckets: dict[str, Path] = {}

        def copy(location: str | Path) -> Path:
            """Return the local path of a file or folder. If its location is a URL, download it first."""
            if not is_in_store(location):
                return Path(location)
            bucket, key = _split_bucket_and_key(location)
            if bucket not in buckets:
                buckets[bucket] = stack.enter_context(mirror_folder(Path(bucket), store))
            download_prefix_or_glob(buckets[bucket] / key)
            return buckets[bucket] / key

        yield [None if location is None else copy(location) for location in locations]


def _split_bucket_and_key(location: str | Path) -> tuple[str, str]:
    """Split a URL into the URL of its bucket and the key of the object, which has no leading slash."""
    scheme, _, rest = get_store_url(location).partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def file_exists(path: Path, store: StoreSettings | None = None) -> bool:
    """Return whether a file exists on the local disk or, if its path is a URL, in an object store."""
    return ObjectStore(store).info(path) is not None if is_in_store(path) else path.exists()


def find_histogram_files(histogram: Path, store: StoreSettings | None = None) -> list[Path]:
    """Return the path of a histogram file if it exists. Otherwise, return the paths of the parts that several runs have
    written.

    Returns:
        The histogram file if it exists. Otherwise all of its parts, or an empty list if a part is missing.
    """
    if file_exists(histogram, store):
        return [histogram]
    if is_in_store(histogram):
        return find_complete_parts(histogram, ObjectStore(store).list(histogram.parent, direct_only=True))
    return find_complete_parts(histogram, (path.name for path in histogram.parent.glob(f"{histogram.stem}-*-of-*.json")))
