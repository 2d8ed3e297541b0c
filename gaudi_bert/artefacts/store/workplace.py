"""Where a stage works: the artefact's own folder, or scratch on the local disk in front of an object store.

A stage says `fetch` before it reads a file that an earlier run may have made, and `put` once a file is whole. For a folder
both do nothing. In a store, the file that says that an artefact is finished is put last, as it is written last on a disk:
whoever finds it finds all that it names. Two writers put equal bytes, so they need no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gaudi_bert.artefacts.completion import Signature, begin_artefact, first_difference, settings_path
from gaudi_bert.artefacts.names import complete_parts, histogram_parts
from gaudi_bert.artefacts.store.location import in_store, url_of
from gaudi_bert.artefacts.store.objects import ObjectInfo, Objects
from gaudi_bert.artefacts.store.read_ahead import ReadAhead, Turns, Wanted
from gaudi_bert.artefacts.store.scratch import scratch_folder
from gaudi_bert.common.errors import GaudiBertError, InputError
from gaudi_bert.common.files import read_json, write_json
from gaudi_bert.config import StoreSettings

__all__ = ["Workplace", "begin_in", "exists", "found_histograms", "local_copy", "named_as_urls", "workplace"]


class Workplace:
    """A folder to read and write in; all paths that its methods take are below it.

    Args:
        folder: on the local disk.
        url: what it is a copy of, as far as it was fetched; None for the artefact's own folder.
        objects: the stores.
    """

    def __init__(self, folder: Path, url: str | None = None, objects: Objects | None = None) -> None:
        self.folder, self.url = folder, url
        self._objects = objects or Objects()

    @property
    def is_store(self) -> bool:
        """Whether what is written here has to be put into a store."""
        return self.url is not None

    @property
    def objects(self) -> Objects:
        """The stores."""
        return self._objects

    def url_of(self, path: Path) -> str:
        """The object that `path` is a copy of."""
        return "/".join((self.url or "", *path.relative_to(self.folder).parts))

    def fetch(self, *paths: Path) -> None:
        """Bring what the store has of `paths`; what it has not is then not there."""
        if self.is_store:
            self._each(self._fetch, paths)

    def _fetch(self, path: Path) -> None:
        info = self._objects.info(self.url_of(path))
        if info is None:
            path.unlink(missing_ok=True)
        else:
            self._objects.fetch(self.url_of(path), path, info)

    def put(self, *paths: Path) -> None:
        """Put files that are whole into the store; all are there when this returns."""
        if self.is_store:
            self._each(lambda path: self._objects.put(path, self.url_of(path)), paths)

    def put_once(self, path: Path) -> None:
        """Put a small file that says that something is finished, unless the store has it: another writer's is the same."""
        if self.is_store:
            self._objects.create(self.url_of(path), path.read_bytes())

    def move(self, path: Path) -> None:
        """Put a file and remove the local copy: it is not read here again."""
        if self.is_store:
            self.put(path)
            path.unlink()

    @contextmanager
    def turns(self, batches: Sequence[Sequence[Path]], ahead: int = 1) -> Iterator[Turns]:
        """Files to be read batch by batch; from a store, `ahead` batches are fetched before they are asked for."""
        if not self.is_store:
            yield Turns()
            return
        wanted = [[Wanted(self.url_of(path), path) for path in batch] for batch in batches]
        with ReadAhead(self._objects, wanted, ahead) as reading:
            yield Turns(reading)

    def listed(self, folder: Path) -> dict[str, ObjectInfo]:
        """What the store has below `folder`, by names relative to it."""
        return self._objects.list(self.url_of(folder))

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove files here and objects there."""
        for path in paths:
            if self.is_store:
                self._objects.remove(self.url_of(path))
            path.unlink(missing_ok=True)

    def _each(self, do: Callable[[Path], None], paths: Iterable[Path]) -> None:
        with ThreadPoolExecutor(self._objects.settings.connections) as pool:
            for _ in pool.map(do, paths):
                pass


@contextmanager
def workplace(place: Path, store: StoreSettings | None = None) -> Iterator[Workplace]:
    """A place to work on the folder `place`: itself, or empty scratch where it lies in a store.

    Raises:
        InputError, FailedError: with URLs where messages name scratch.
    """
    if not in_store(place):
        yield Workplace(place, objects=Objects(store))
        return
    objects, url = Objects(store), url_of(place)
    with scratch_folder(objects.settings.scratch) as scratch:
        # What is made here is a folder, whatever its name: one with an ending is taken for a file.
        folder = scratch / Path(url).name.replace(".", "_")
        folder.mkdir()
        with named_as_urls({folder: url}):
            yield Workplace(folder, url, objects)


@contextmanager
def named_as_urls(copies: dict[Path, str]) -> Iterator[None]:
    """Name objects by their URLs in errors that name their local copies."""
    try:
        yield
    except GaudiBertError as error:
        message = str(error)
        for folder, url in copies.items():
            message = message.replace(str(folder), url)
        if message == str(error):
            raise
        raise type(error)(message) from error


def begin_in(place: Workplace, artefact: Path, final: Path, signature: Signature, overwrite: bool = False) -> bool:
    """As `begin_artefact`, wherever `artefact` lies: whether it is finished; its settings are there afterwards.

    Raises:
        InputError: it was made from other settings or inputs, or is not ours, and `overwrite` is False.
    """
    if not place.is_store:
        return begin_artefact(artefact, final, signature, overwrite)
    kept, wanted = settings_path(artefact), signature.as_json()
    place.fetch(kept, final)
    difference = first_difference(read_json(kept), wanted) if kept.exists() else None
    if kept.exists() and difference is None:
        if final.exists():
            return True
    else:
        made = _made(place, artefact, kept)
        if made and not overwrite:
            reason = f"made with another {difference}" if kept.exists() else f"exists, but no {kept.name} says what made it"
            raise InputError(f"{artefact}: {reason}; choose another place, or pass --overwrite")
        place.remove([*made, *([kept] if kept.exists() else [])])
    write_json(kept, wanted)
    place.put(kept)
    return False


def _made(place: Workplace, artefact: Path, kept: Path) -> list[Path]:
    """What the store has of an artefact, besides its settings."""
    if artefact != place.folder:
        return [artefact] if artefact.exists() else []
    return [artefact / name for name in place.listed(artefact) if artefact / name != kept]


def exists(path: Path, store: StoreSettings | None = None) -> bool:
    """Whether a file is there, on a disk or in a store."""
    return Objects(store).info(path) is not None if in_store(path) else path.exists()


def found_histograms(histogram: Path, store: StoreSettings | None = None) -> list[Path]:
    """As `histogram_parts`, on a disk or in a store."""
    if not in_store(histogram):
        return histogram_parts(histogram)
    if exists(histogram, store):
        return [histogram]
    return complete_parts(histogram, Objects(store).list(histogram.parent, only_here=True))


@contextmanager
def local_copy(path: Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """A file to read: itself, or a copy of the object.

    Raises:
        InputError: there is no such object.
    """
    if not in_store(path):
        yield path
        return
    with workplace(Path(url_of(path)).parent, store) as place:
        copy = place.folder / path.name
        place.objects.fetch(path, copy)
        yield copy
