"""Local copies of objects, for what is read completely.

Text, weights and tables are read by libraries that want files, more than once and in any order. They are fetched before,
into a mirrored bucket, so that their relative paths are those of the objects.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gaudi_bert.artefacts.references import complete_parts, histogram_parts
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored, names_in, shown_path
from gaudi_bert.artefacts.store.objects import Objects, in_store, url_of
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.places import StoreSettings

_MAGIC = re.compile(r"[*?[]")


@contextmanager
def mirrored_bucket(location: str | Path, store: StoreSettings | None = None) -> Iterator[Path]:
    """The local path that stands for a URL, of which nothing is there yet; a path of this machine as it is."""
    if not in_store(location):
        yield Path(location)
        return
    bucket, key = _bucket_and_key(location)
    with mirrored(Path(bucket), store) as folder:
        yield folder / key


def fetch_below(path: Path) -> None:
    """Fetch an object, all objects below a prefix, or those that a pattern means."""
    folder, pattern = _split_pattern(path)
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
    """As `local_copy`, of several. What two of them mean has one copy, so that its path is the same."""
    with ExitStack() as stack:
        buckets: dict[str, Path] = {}

        def copy(location: str | Path) -> Path:
            if not in_store(location):
                return Path(location)
            bucket, key = _bucket_and_key(location)
            if bucket not in buckets:
                buckets[bucket] = stack.enter_context(mirrored(Path(bucket), store))
            fetch_below(buckets[bucket] / key)
            return buckets[bucket] / key

        yield [None if location is None else copy(location) for location in locations]


def _bucket_and_key(location: str | Path) -> tuple[str, str]:
    scheme, _, rest = url_of(location).partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def _split_pattern(path: Path) -> tuple[Path, str]:
    """A path as the folder before the first part with a wildcard, and the rest."""
    parts = _bucket_and_key(shown_path(path))[1].split("/")
    for number, part in enumerate(parts):
        if _MAGIC.search(part):
            return path.parents[len(parts) - number - 1], "/".join(parts[number:])
    return path, ""


def exists(path: Path, store: StoreSettings | None = None) -> bool:
    """Whether a file is there, on a disk or in a store."""
    return Objects(store).info(path) is not None if in_store(path) else path.exists()


def existing_histograms(histogram: Path, store: StoreSettings | None = None) -> list[Path]:
    """As `histogram_parts`, on a disk or in a store."""
    if not in_store(histogram):
        return histogram_parts(histogram)
    if exists(histogram, store):
        return [histogram]
    return complete_parts(histogram, Objects(store).list(histogram.parent, only_here=True))
