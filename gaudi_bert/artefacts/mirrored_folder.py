"""The door to object stores: a local folder that mirrors a URL.

`mirrored(path)` gives a stage the folder to work in: the one it was given, or scratch in front of an object store, where a
file goes up as soon as it is complete (`common.files` reports it): the file that marks an artefact as finished goes up last,
as it is written last on a disk. Files that grow go up when a stage calls `publish`; hidden files stay here. The files of an
earlier run come down when a stage requests them. `local_copies` fetches what libraries read more than once, in any order.
The functions here take local paths; on a disk they do what is right there, mostly nothing.
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

from gaudi_bert.artefacts.base import complete_parts
from gaudi_bert.artefacts.object_store import ObjectInfo, Objects
from gaudi_bert.common.errors import GaudiBertError, InputError
from gaudi_bert.common.files import Mirror, explain_os_errors, find_mirror, is_in_store, mount_mirror, store_url
from gaudi_bert.config.places import StoreSettings


@dataclass(frozen=True)
class _Mirrored(Mirror):
    """A mirrored folder.

    Attributes:
        listed: what the store reported when files were listed; it must still hold when they are fetched.
        same: size and time of the local files that are as the store has them.
    """

    folder: Path
    url: str
    objects: Objects
    listed: dict[Path, ObjectInfo] = field(default_factory=dict)
    same: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def object_url(self, path: Path) -> str:
        return "/".join((self.url, *path.relative_to(self.folder).parts))

    def is_visible(self, path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(self.folder).parts)

    def completed(self, path: Path) -> None:
        if self.is_visible(path):
            self.put(path)

    def put(self, path: Path) -> None:
        state = _state(path)
        self.listed.pop(path, None)
        self.objects.put(path, self.object_url(path))
        self.same[path] = state

    def fetch(self, path: Path) -> None:
        """Fetch what must be there."""
        self.objects.fetch(self.object_url(path), path, self.listed.get(path))
        self.same[path] = _state(path)

    def fetch_if_there(self, path: Path) -> None:
        info = self.listed.get(path) or self.objects.info(self.object_url(path))
        if info is not None:
            self.listed[path] = info
            self.fetch(path)

    def remove(self, path: Path) -> None:
        self.listed.pop(path, None)
        self.same.pop(path, None)
        self.objects.remove(self.object_url(path))

    def each(self, do: Callable[[Path], None], paths: Iterable[Path]) -> None:
        with ThreadPoolExecutor(self.objects.settings.connections) as pool:
            for _ in pool.map(do, paths):
                pass


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _mirrored_folder_of(path: Path) -> _Mirrored | None:
    mirror = find_mirror(path)
    return mirror if isinstance(mirror, _Mirrored) else None


@contextmanager
def mirrored(path: Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """The local folder to work in for the folder `path`: itself; or empty scratch, for a URL, which errors then name."""
    if not is_in_store(path):
        yield path
        return
    objects, url = Objects(store), store_url(path)
    with _scratch_folder(objects.settings.scratch) as scratch:
        # A path with an ending is treated as a file, and this is a folder, whatever its name.
        folder = scratch / Path(url).name.replace(".", "_")
        folder.mkdir()
        with mount_mirror(folder, _Mirrored(folder, url, objects)):
            try:
                yield folder
            except GaudiBertError as error:  # which names the local copy of an object
                message = str(error).replace(str(folder), url)
                if message == str(error):
                    raise
                raise type(error)(message) from error


def is_mirrored(path: Path) -> bool:
    """Whether `path` is in a mirrored folder."""
    return _mirrored_folder_of(path) is not None


def shown_path(path: Path) -> str:
    """Return the name of a local path for messages: its URL, where it has one."""
    mirror = _mirrored_folder_of(path)
    return str(path) if mirror is None else mirror.object_url(path)


def fetch(*paths: Path) -> None:
    """Bring down those of `paths` that the store has and that are not here yet."""
    mirror = _mirrored_folder_of(paths[0]) if paths else None
    if mirror is not None:
        mirror.each(mirror.fetch_if_there, [path for path in paths if not path.exists()])


def publish(*paths: Path) -> None:
    """Put files that grow, and the visible files of folders that hold some, one of `paths` after the other.

    Files that the store has as they are, because they went up when they were complete, are skipped.
    """
    for path in paths:
        mirror = _mirrored_folder_of(path)
        if mirror is not None:
            files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
            changed = [file for file in files if mirror.is_visible(file) and mirror.same.get(file) != _state(file)]
            mirror.each(mirror.put, changed)


def release(*paths: Path) -> None:
    """Remove local copies of files that are in the store and are not read here again."""
    for path in paths:
        if is_mirrored(path):
            path.unlink(missing_ok=True)


def remove(*paths: Path) -> None:
    """Remove files and folders; of a mirrored folder, also the objects."""
    for path in paths:
        mirror = _mirrored_folder_of(path)
        if mirror is not None:
            mirror.remove(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def names_in(folder: Path) -> list[str]:
    """List a folder, sorted: names of its files and folders; in a store, of all objects below it, relative to it."""
    mirror = _mirrored_folder_of(folder)
    if mirror is None:
        return sorted(path.name for path in folder.iterdir())
    return list(mirror.objects.list(mirror.object_url(folder)))


def files_in(folder: Path) -> dict[str, ObjectInfo]:
    """The visible files in a folder, by name. Those of a store must not change between this and their being fetched."""
    mirror = _mirrored_folder_of(folder)
    if mirror is None:
        visible = (path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
        return {path.name: ObjectInfo(path.stat().st_size, "") for path in visible}
    listed = mirror.objects.list(mirror.object_url(folder), only_here=True)
    files = {name: info for name, info in listed.items() if not name.startswith(".")}
    mirror.listed.update({folder / name: info for name, info in files.items()})
    return files


# --- files fetched in the order in which they are read, the next ones while the present are worked on


@contextmanager
def read_ahead(batches: Sequence[_Batch], ahead: int = 1) -> Iterator[_ReadAhead]:
    """Files to be read batch by batch, and once; those of a store are fetched `ahead` batches before their turn.

    A batch is one file, or several.
    """
    listed = [[batch] if isinstance(batch, Path) else batch for batch in batches]
    mirror = next((mirror for batch in listed for path in batch if (mirror := _mirrored_folder_of(path)) is not None), None)
    if mirror is None:
        yield _ReadAhead()
        return

    def bring(path: Path) -> None:
        of_path = _mirrored_folder_of(path)
        if of_path is not None:
            of_path.fetch(path)

    with ThreadPoolExecutor(mirror.objects.settings.connections, thread_name_prefix="read-ahead") as pool:
        try:
            yield _ReadAhead(listed, ahead, lambda path: pool.submit(bring, path))
        finally:
            pool.shutdown(cancel_futures=True)


_Batch = Path | Sequence[Path]


class _ReadAhead:
    """Batches of files, each of them there while it is used; those of a store are removed here afterwards."""

    def __init__(
        self,
        batches: Sequence[Sequence[Path]] = (),
        ahead: int = 0,
        fetch: Callable[[Path], Future[None]] | None = None,
    ) -> None:
        self._batches, self._ahead, self._fetch = batches, ahead, fetch
        self._lock = threading.Lock()
        self._fetches: list[list[Future[None]]] = []

    @contextmanager
    def batch(self, number: int) -> Iterator[None]:
        """The files of batch `number` are there inside the block; each is requested once, in order or nearly so."""
        if self._fetch is None:
            yield
            return
        with self._lock:
            for batch in self._batches[len(self._fetches) : number + 1 + self._ahead]:
                self._fetches.append(list(map(self._fetch, batch)))
        try:
            for fetched in self._fetches[number]:
                fetched.result()
            yield
        finally:
            release(*self._batches[number])


# --- scratch: removed when the command ends; a kernel lock dies with its process, so that the next command also removes what
# of a killed one

_PREFIX = "gaudi-bert-scratch-"


@contextmanager
def _scratch_folder(parent: str | None) -> Iterator[Path]:
    """An empty folder below `parent` (None: where the system keeps temporary files)."""
    parent_folder = Path(parent or tempfile.gettempdir())
    with explain_os_errors(parent_folder, "make scratch"):
        parent_folder.mkdir(parents=True, exist_ok=True)
        _remove_stale_scratch(parent_folder)
        while True:  # another one where somebody removed it before it was locked
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
    """Remove the scratch of processes that are gone: nobody holds its lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
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


# --- local copies of objects, for what is read completely

_MAGIC = re.compile(r"[*?[]")


@contextmanager
def mirrored_bucket(location: str | Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """The local path that stands for a URL, of which nothing is there yet; a path of this machine as it is."""
    if not is_in_store(location):
        yield Path(location)
        return
    bucket, key = _bucket_and_key(location)
    with mirrored(Path(bucket), store) as folder:
        yield folder / key


def fetch_below(path: Path) -> None:
    """Fetch an object, all objects below a prefix, or those that a pattern means."""
    parts = _bucket_and_key(shown_path(path))[1].split("/")
    first = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    # The folder before the first part with a wildcard, and the rest.
    folder, pattern = [path, *path.parents][len(parts) - first], "/".join(parts[first:])
    if not pattern:
        fetch(path)
        if path.is_file():
            return
    matched = pattern.replace("**/", "*")  # what is fetched too much (`*` also passes a slash here) is ignored by the reader
    names = [name for name in names_in(folder) if not pattern or fnmatch.fnmatchcase(name, matched)]
    if not names:
        raise InputError(f"{shown_path(path)}: no objects there, or no such bucket; check the URL")
    fetch(*(folder / name for name in names))


@contextmanager
def local_copy(location: str | Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """A file or folder to read: itself, or a copy of the object or of those below a prefix."""
    with local_copies([location], store) as (path,):
        yield path or Path(location)


@contextmanager
def local_copies(locations: Sequence[str | Path | None], store: StoreSettings | None = None) -> Iterator[list[Path | None]]:
    """Copy several as `local_copy` does. What two of them mean has one copy, so that its path is the same."""
    with ExitStack() as stack:
        buckets: dict[str, Path] = {}

        def copy(location: str | Path) -> Path:
            if not is_in_store(location):
                return Path(location)
            bucket, key = _bucket_and_key(location)
            if bucket not in buckets:
                buckets[bucket] = stack.enter_context(mirrored(Path(bucket), store))
            fetch_below(buckets[bucket] / key)
            return buckets[bucket] / key

        yield [None if location is None else copy(location) for location in locations]


def _bucket_and_key(location: str | Path) -> tuple[str, str]:
    scheme, _, rest = store_url(location).partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def exists(path: Path, store: StoreSettings | None = None) -> bool:
    """Whether a file is there, on a disk or in a store."""
    return Objects(store).info(path) is not None if is_in_store(path) else path.exists()


def existing_histograms(histogram: Path, store: StoreSettings | None = None) -> list[Path]:
    """The files of a histogram, on a disk or in a store: the complete one, or all its parts; none where some are missing."""
    if exists(histogram, store):
        return [histogram]
    names = (path.name for path in histogram.parent.glob(f"{histogram.stem}-*-of-*.json"))
    return complete_parts(
        histogram, Objects(store).list(histogram.parent, only_here=True) if is_in_store(histogram) else names
    )
