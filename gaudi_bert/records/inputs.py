"""RECORDS where they lie: files of this machine as they are, or objects that are fetched before they are read.

From a store, files come in the order in which they will be read, the next while the present are worked on, and go when they
have been read. Files of this machine are simply there.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.artefacts.store.location import in_store, shown_place, url_of
from gaudi_bert.artefacts.store.objects import ObjectInfo, Objects
from gaudi_bert.artefacts.store.read_ahead import ReadAhead, Turns, Wanted
from gaudi_bert.artefacts.store.scratch import scratch_folder
from gaudi_bert.artefacts.store.workplace import named_as_urls
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.files import RecordFile, find_vocabulary, list_record_files, records_folder

__all__ = ["RecordInputs", "open_inputs"]


@dataclass(frozen=True)
class RecordInputs:
    """The files of RECORDS.

    Attributes:
        shown: RECORDS, as messages name them.
        folder: where the files lie, or where their copies go.
        files: sorted by name; in a store, `path` is where the copy of the file goes.
        vocabulary: the vocab.txt beside their folder, on this machine; None without one.
    """

    shown: str
    folder: Path
    files: tuple[RecordFile, ...]
    vocabulary: Path | None
    _objects: Objects | None = None
    _wanted: dict[str, Wanted] | None = None

    @contextmanager
    def turns(self, batches: Iterable[Sequence[str]], ahead: int = 1) -> Iterator[Turns]:
        """Files to be read batch by batch, by name; `ahead` batches are fetched before they are asked for."""
        if self._objects is None or self._wanted is None:
            yield Turns()
            return
        wanted = [[self._wanted[name] for name in batch] for batch in batches]
        with ReadAhead(self._objects, wanted, ahead) as reading:
            yield Turns(reading)

    @property
    def are_fetched(self) -> bool:
        """Whether the files come from a store."""
        return self._objects is not None

    @property
    def changed(self) -> list[float]:
        """When each file was last changed, in seconds since 1970; a store that does not say it counts as now."""
        if self._wanted is None:
            return [file.path.stat().st_ctime for file in self.files]
        times = [one.info.modified if one.info is not None else None for one in self._wanted.values()]
        return [time if time is not None else math.inf for time in times]

    @contextmanager
    def all_here(self, names: Iterable[str] | None = None) -> Iterator[None]:
        """All files, or those of `names`, are there inside the block."""
        chosen = list(names) if names is not None else [file.name for file in self.files]
        with self.turns([chosen]) as turns, turns.batch(0):
            yield


@contextmanager
def open_inputs(records: str | Path, objects: Objects | None = None) -> Iterator[RecordInputs]:
    """The files of RECORDS: a folder, a file or a glob; or the same as a URL.

    Raises:
        InputError: as `list_record_files`; or there is no such bucket, or nothing at the URL.
        FailedError: a store refuses.
    """
    if not in_store(records):
        files = tuple(list_record_files(records))
        yield RecordInputs(str(records), records_folder(records), files, find_vocabulary(records))
        return
    objects = objects or Objects()
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(objects.settings.scratch))
        url, found = _listed(records, objects)
        folder = scratch / "records" / Path(url).name
        stack.enter_context(named_as_urls({folder: url}))
        wanted = {name: Wanted(f"{url}/{name}", folder / name, info) for name, info in found.items()}
        for name, one in wanted.items():
            if found[name].bytes == 0:
                raise InputError(f"{one.url}: the object is empty; remove it, or make it again")
        files = tuple(RecordFile(name, one.path, found[name].bytes) for name, one in wanted.items())
        vocabulary = _fetched_vocabulary(url, folder.parent / "vocab.txt", objects)
        yield RecordInputs(shown_place(records), folder, files, vocabulary, objects, wanted)


def _listed(records: str | Path, objects: Objects) -> tuple[str, dict[str, ObjectInfo]]:
    """The URL of the folder, and its record objects by name; the same rules as for files."""
    url = url_of(records)
    folder, _, name = url.rpartition("/")
    one = None if folder.endswith(":/") or any(letter in name for letter in "*?[") else objects.info(url)
    if one is not None:
        return folder, {name: one}
    if any(letter in name for letter in "*?["):
        url, pattern = folder, name
    else:
        pattern = "*"
    found = {
        key: info
        for key, info in objects.list(url, only_here=True).items()
        if not key.startswith(".") and not key.endswith(".json") and fnmatch.fnmatchcase(key, pattern)
    }
    if not found:
        raise InputError(f"{url_of(records)}: no record files there, or no such bucket; check the URL")
    return url, found


def _fetched_vocabulary(url: str, path: Path, objects: Objects) -> Path | None:
    """`vocab.txt` beside the folder, where `prepare` puts it; a bucket's root has nothing beside it."""
    folder = url.rpartition("/")[0]
    if folder.endswith(":/"):
        return None
    info = objects.info(f"{folder}/vocab.txt")
    if info is None:
        return None
    objects.fetch(f"{folder}/vocab.txt", path, info)
    return path
