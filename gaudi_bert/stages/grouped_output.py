"""A folder that is made in groups: begin, skip what is whole, write groups, finish.

A group is a pure function of its inputs and the settings: whoever makes it writes the same bytes. Its files come first and
its summary (a manifest) last, all of them whole or absent; the folder's final file comes after all groups. So a killed run
is continued by running it again: groups with a summary are skipped. A kernel lock keeps two writers of one group apart; in
an object store there is no lock, and they put equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.packed import GroupManifest, TableGroupManifest
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, names_in, remove, shown
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.results import GroupsResult

Group = TypeVar("Group")
Summary = TypeVar("Summary", bound=Artefact)
Manifest = TypeVar("Manifest", GroupManifest, TableGroupManifest)


@dataclass(frozen=True)
class GroupedOutput(Generic[Group, Summary]):
    """One such folder.

    Args:
        final: the file that is written last.
        summary_path: where the summary of a group lies.
    """

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
            with exclusive_lock(settings_path(self.folder), str(self.folder), wait=True):
                finished = begin_artefact(self.folder, self.final, self.signature, overwrite)
        if finished:
            self.reporter.say(f"{shown(self.folder)}: already there, nothing to do")
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
        remove_artefact(self.folder)
        for path in self.folder.glob(".*.lock"):
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def whole(self, groups: Sequence[Group]) -> dict[Group, Summary]:
        """The summaries of those of `groups` that are whole."""
        fetch(*map(self.summary_path, groups))
        summaries = {group: self._read(group) for group in groups}
        return {group: summary for group, summary in summaries.items() if summary is not None}

    def missing(self, groups: Sequence[Group]) -> list[Group]:
        """Those of `groups` that are still to be made."""
        whole = self.whole(groups)
        if whole:
            self.reporter.say(f"{shown(self.folder)}: {len(whole)} of {len(groups)} groups are there already")
        return [group for group in groups if group not in whole]

    @contextmanager
    def writing(self, group: Group, name: str) -> Iterator[bool]:
        """Hold the lock of a group; whether it is still to be made: another writer may have ended meanwhile."""
        with exclusive_lock(self.summary_path(group), name):
            yield is_mirrored(self.folder) or self._read(group) is None

    def _read(self, group: Group) -> Summary | None:
        path = self.summary_path(group)
        if not path.exists():
            return None
        summary = self.summary.read(path)
        return summary if self.is_whole(summary) else None

    def is_whole(self, summary: Summary) -> bool:
        """Whether a summary is of this output, and what it names is there."""
        return True


@dataclass(frozen=True)
class PackedOutput(GroupedOutput[int, Manifest]):
    """A packed folder: groups of shards.

    Args:
        source_sha256: what its manifests were made from.
        command: that writes groups, for errors.
    """

    source_sha256: str
    command: str

    def is_whole(self, summary: Manifest) -> bool:
        """The manifest is of this source, and its shards have their sizes; in a store the manifest was put after them."""
        if summary.source_sha256 != self.source_sha256:
            return False
        if is_mirrored(self.folder):
            return True
        paths = [(self.folder / shard.name, shard.bytes) for shard in summary.shards]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def all_whole(self, groups: Sequence[int]) -> list[Manifest]:
        """The manifests of all groups, which must be there."""
        whole = self.whole(groups)
        missing = [group for group in groups if group not in whole]
        if missing:
            raise FailedError(
                f"{self.folder}: {len(missing)} of {len(groups)} groups are not written, the first is group {missing[0]};"
                f" run `{self.command}` for them (without --finish) and then finish again"
            )
        return [whole[group] for group in groups]

    def write_final(self, content: Artefact) -> None:
        """Write the final file, under a lock: several may finish at once."""
        with exclusive_lock(self.final, str(self.folder), wait=True):
            content.write(self.final)

    def groups_result(self, groups: Sequence[int], written: int) -> GroupsResult:
        """The totals of some groups, `written` of them by this run."""
        manifests = [self.summary.read(self.summary_path(group)) for group in groups]
        return GroupsResult(
            groups=len(groups),
            groups_written=written,
            sequences=sum(manifest.sequences for manifest in manifests),
            packs=sum(manifest.packs for manifest in manifests),
            tokens=sum(manifest.tokens for manifest in manifests),
        )
