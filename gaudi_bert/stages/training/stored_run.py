"""The folder of a training run in an object store: worked on in scratch, put at every checkpoint.

The lines about a run go up before the checkpoint that they lead to: a run that is taken up drops the lines after its
checkpoint, and lacks none before it. `training.json` goes up last. Only the first process puts anything.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

from gaudi_bert.artefacts.completion import settings_path
from gaudi_bert.artefacts.names import TRAINING_NAME
from gaudi_bert.artefacts.store.workplace import Workplace
from gaudi_bert.common.errors import InputError

__all__ = ["StoredRun"]

CHECKPOINTS = "checkpoints/update-*.safetensors"


class StoredRun:
    """What the first process of a run does about its folder; nothing, where the folder is no store's.

    Args:
        place: where the run works.
        keep: how many checkpoints stay.
        is_first: whether this is the first process.
    """

    def __init__(self, place: Workplace, keep: int, is_first: bool) -> None:
        self._place, self._keep = place, keep
        self._acts = place.is_store and is_first
        self._put: dict[Path, tuple[int, int]] = {}
        self._checkpoints: list[str] = []

    def begin(self, overwrite: bool) -> None:
        """Bring what an earlier run left, or remove it.

        Raises:
            InputError: what is there was made by no run.
        """
        if not self._acts:
            return
        folder, place = self._place.folder, self._place
        there = list(place.listed(folder))
        if overwrite:
            # Last what says whose the folder is: a kill half-way leaves what is refused or removed.
            last = settings_path(folder).name
            place.remove(folder / name for name in sorted(there, key=lambda name: name == last))
            return
        if there and settings_path(folder).name not in there:
            raise InputError(
                f"{folder}: exists, but no settings.json says what made it; choose another place, or pass --overwrite"
            )
        self._checkpoints = sorted(fnmatch.filter(there, CHECKPOINTS))
        small = [name for name in there if name not in self._checkpoints and not name.startswith("tensorboard/")]
        place.fetch(*(folder / name for name in (*small, *self._checkpoints[-1:])))

    def has_begun(self) -> None:
        """Put the settings, before anything that depends on them."""
        if self._acts:
            self._place.put(settings_path(self._place.folder), self._place.folder / "settings.yaml")

    def saved(self, checkpoint: Path) -> None:
        """Put a checkpoint, and what was written of the run before it; remove the ones that are too many."""
        if not self._acts:
            return
        folder = self._place.folder
        self._put_changed(but=TRAINING_NAME)
        self._place.put(checkpoint)
        self._checkpoints = sorted({*self._checkpoints, checkpoint.relative_to(folder).as_posix()})
        old, self._checkpoints = self._checkpoints[: -self._keep], self._checkpoints[-self._keep :]
        for name in old:
            self._place.objects.remove(self._place.url_of(folder / name))

    def finish(self) -> None:
        """Put the rest, and last that the run is finished."""
        if self._acts:
            self._put_changed(but=TRAINING_NAME)
            self._place.put(self._place.folder / TRAINING_NAME)

    def _put_changed(self, but: str) -> None:
        """Put the small files that changed since they were put."""
        changed = {}
        for path in sorted(self._place.folder.rglob("*")):
            name = path.relative_to(self._place.folder).as_posix()
            hidden = any(part.startswith(".") for part in name.split("/"))
            if path.is_file() and not hidden and name != but and not fnmatch.fnmatch(name, CHECKPOINTS):
                state = (path.stat().st_size, path.stat().st_mtime_ns)
                if self._put.get(path) != state:
                    changed[path] = state
        self._place.put(*changed)
        self._put.update(changed)
