"""Model, rows and answers on this machine, wherever they lie: copied from object stores before, put into one afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gaudi_bert.artefacts.completion import settings_path
from gaudi_bert.artefacts.store.location import in_store, url_of
from gaudi_bert.artefacts.store.mirror import local_copies
from gaudi_bert.artefacts.store.workplace import workplace
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import StoreSettings

__all__ = ["at_hand"]


@contextmanager
def at_hand(model: Path, data: str, out: str, store: StoreSettings | None = None) -> Iterator[tuple[Path, str, str]]:
    """The three as they are read and written here.

    Answers for a store are put when all are there: a run that is killed before begins again.

    Raises:
        InputError: there are no such objects, or the answers would replace the rows.
    """
    if in_store(data) and in_store(out) and url_of(data) == url_of(out):
        raise InputError(f"{url_of(out)}: is the data itself; give another place with --out")
    with local_copies((model, data), store) as (weights, rows), workplace(Path(out).parent, store) as place:
        here = (weights or model, str(rows) if in_store(data) else data)
        if not place.is_store:
            yield (*here, out)
            return
        path = place.folder / Path(out).name
        place.fetch(path, settings_path(path))
        before = path.stat().st_mtime_ns if path.exists() else None
        yield (*here, str(path))
        if path.stat().st_mtime_ns != before:
            place.put(settings_path(path))
            place.put(path)
