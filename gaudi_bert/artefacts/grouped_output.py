"""A folder that is written in groups: begin, skip complete groups, write the others, finish.

A group is a pure function of its inputs and the settings: every writer writes the same bytes. Its files come first and
its summary (a manifest) last, each written atomically; the folder's final file comes after all groups. So a killed run
is continued by running it again: groups with a summary are skipped. A kernel lock keeps two writers of one group apart; in
an object store locks do not exist, and they put equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, names_in, release, remove, shown_path
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.common.progress import Reporter

_FETCHED_TOGETHER = 256
"""Summaries that are on scratch at once."""

Group = TypeVar("Group")
Summary = TypeVar("Summary", bound=Artefact)


@dataclass(frozen=True)
class GroupedOutput(Generic[Group, Summary]):
    """One such folder, whose file `final` is written last."""

    folder: Path
    final: Path
    signature: Signature
    summary: type[Summary]
    summary_path: Callable[[Group], Path]
    reporter: Reporter

    def begin(self, overwrite: bool) -> bool:
        """Make the folder ready; say whether it is finished already, which a read-only folder may be."""
        finished = is_finished(self.folder, self.final, self.signature)
        if not finished:
            with exclusive_lock(settings_path(self.folder, self.final), str(self.folder), wait=True):
                finished = begin_artefact(self.folder, self.final, self.signature, overwrite)
        if finished:
            self.reporter.say(f"{shown_path(self.folder)}: already there, nothing to do")
        return finished

    @contextmanager
    def removed_on_bad_input(self) -> Iterator[None]:
        """Inside the block, bad input leaves nothing half-written: a corrected input has no use for it."""
        try:
            yield
        except InputError:
            self.remove_all()
            raise

    def remove_all(self) -> None:
        """Remove what there is of the folder."""
        if is_mirrored(self.folder):
            remove(*(self.folder / name for name in names_in(self.folder)))
            return
        remove_artefact(self.folder, self.final)
        for folder in dict.fromkeys((self.final.parent, self.folder)):
            for path in folder.glob(".*.lock"):
                path.unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()

    def completed(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Summary]]:
        """Yield those of `groups` that are complete with their summaries; a store's are fetched some at a time."""
        for start in range(0, len(groups), _FETCHED_TOGETHER):
            some = groups[start : start + _FETCHED_TOGETHER]
            fetch(*map(self.summary_path, some))
            summaries = ((group, self._read(group)) for group in some)
            yield from ((group, summary) for group, summary in summaries if summary is not None)
            release(*map(self.summary_path, some))

    def missing(self, groups: Sequence[Group]) -> list[Group]:
        """Return those of `groups` that are still to be written."""
        completed = {group for group, _ in self.completed(groups)}
        if completed:
            self.reporter.say(f"{shown_path(self.folder)}: {len(completed)} of {len(groups)} groups are there already")
        return [group for group in groups if group not in completed]

    @contextmanager
    def writing(self, group: Group, name: str) -> Iterator[bool]:
        """Hold the lock of a group; whether it is still to be written: another writer may have ended meanwhile."""
        with exclusive_lock(self.summary_path(group), name):
            yield is_mirrored(self.folder) or self._read(group) is None

    def _read(self, group: Group) -> Summary | None:
        path = self.summary_path(group)
        if not path.exists():
            return None
        summary = self.summary.read(path)
        return summary if self.is_complete(summary) else None

    def is_complete(self, summary: Summary) -> bool:
        """Whether a summary is of this output, and what it names is there."""
        return True

    def write_final(self, content: Artefact) -> None:
        """Write the final file, under a lock: several may finish at once."""
        with exclusive_lock(self.final, str(self.folder), wait=True):
            content.write(self.final)
