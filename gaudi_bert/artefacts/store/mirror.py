"""Local copies of objects, in folders that lie to one another as the objects do: for what is read as a whole.

Text, weights and tables are read by libraries that want files, more than once and in any order. They are fetched before.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gaudi_bert.artefacts.store.location import in_store, url_of
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.artefacts.store.scratch import scratch_folder
from gaudi_bert.artefacts.store.workplace import named_as_urls
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import StoreSettings

__all__ = ["Mirror", "local_copies", "mirror"]

_MAGIC = re.compile(r"[*?[]")


class Mirror:
    """Copies below one scratch folder; places on this machine are their own copies."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self.objects, self._folder = objects, folder

    def copy_of(self, place: str | Path) -> Path:
        """Where the copy of a place is, or would be."""
        if not in_store(place):
            return Path(place)
        scheme, _, rest = url_of(place).partition("://")
        return self._folder / scheme / rest

    def fetch_one(self, place: str | Path) -> bool:
        """Copy one object, if it is there; whether it is."""
        if not in_store(place):
            return Path(place).exists()
        info = self.objects.info(place)
        if info is None:
            return False
        self.objects.fetch(place, self.copy_of(place), info)
        return True

    def fetch(self, place: str | Path) -> Path:
        """Copy an object, all objects below a prefix, or those that a pattern means; where their copy is.

        Raises:
            InputError: there are none.
        """
        if not in_store(place):
            return Path(place)
        url = url_of(place)
        folder, pattern = _split_pattern(url)
        if not pattern and self.fetch_one(url):
            return self.copy_of(url)
        found = [f"{folder}/{name}" for name in self.objects.list(folder) if _matches(name, pattern)]
        if not found:
            raise InputError(f"{url}: no objects there, or no such bucket; check the URL")
        with ThreadPoolExecutor(self.objects.settings.connections) as pool:
            for _ in pool.map(self.fetch_one, found):
                pass
        return self.copy_of(folder) / pattern if pattern else self.copy_of(url)


@contextmanager
def mirror(store: StoreSettings | None = None, places: Sequence[str | Path | None] = ()) -> Iterator[Mirror]:
    """Scratch for copies; none is made where no place of `places` lies in a store."""
    objects = Objects(store)
    if not any(place is not None and in_store(place) for place in places):
        yield Mirror(objects, Path())
        return
    with scratch_folder(objects.settings.scratch) as scratch:
        schemes = {url_of(place).split(":")[0] for place in places if place is not None and in_store(place)}
        with named_as_urls({scratch / scheme: f"{scheme}:/" for scheme in schemes}):
            yield Mirror(objects, scratch)


@contextmanager
def local_copies(places: Sequence[str | Path | None], store: StoreSettings | None = None) -> Iterator[list[Path | None]]:
    """Files or folders to read, in their order: those of this machine themselves, of others copies.

    Raises:
        InputError: there are no such objects.
    """
    with mirror(store, places) as copies:
        yield [None if place is None else copies.fetch(place) for place in places]


def _split_pattern(url: str) -> tuple[str, str]:
    """A URL as the folder before the first part with a wildcard, and the rest."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    first = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    return f"{scheme}://{'/'.join(parts[:first])}", "/".join(parts[first:])


def _matches(name: str, pattern: str) -> bool:
    """Whether a name is meant; what is fetched too much (`*` also passes a slash here) is left out by who reads."""
    return not pattern or fnmatch.fnmatchcase(name, pattern.replace("**/", "*"))
