"""What differs between TFRecords and tables where groups are packed and where packs are verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from gaudi_bert.artefacts.packed import GroupManifest, PackedMetadata, PackedSums
from gaudi_bert.common.progress import Task
from gaudi_bert.packs.folder import PackedFolder


class GroupWriter(Protocol):
    """Reads the groups of one source, and packs each: a group is a function of the source and the settings alone."""

    unit: str
    """What progress counts."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        ...

    def prepare(self, numbers: Sequence[int]) -> tuple[Sequence[Sequence[Path]], float]:
        """Check these groups before any is written; return the files that each is read from, and the units of all."""
        ...

    def write_group(self, number: int, task: Task) -> GroupManifest:
        """Write the shards of a group; the manifest of what was written."""
        ...

    def check_manifest(self, manifest: GroupManifest) -> None:
        """Refuse the manifest of a group that is not the one that was planned."""
        ...

    def metadata(self, sums: PackedSums) -> PackedMetadata:
        """Return the metadata of the folder, by the manifests of all its groups."""
        ...


class ReadGroup(NamedTuple):
    """A group as it was read.

    Attributes:
        stored: its manifest as it is.
        right: its manifest, computed again from what was read; a key that cannot be is a copy.
        lower_bound: packs that are proven to be necessary.
        fingerprint: the sum of the hashes of its sequences; 0 where values were compared instead.
    """

    stored: GroupManifest
    right: GroupManifest
    lower_bound: int
    fingerprint: int = 0


class GroupReader(Protocol):
    """Reads groups of packs again, and compares each with its source."""

    @property
    def folder(self) -> PackedFolder:
        """The packed folder."""
        ...

    def read(self, manifests: Iterable[GroupManifest]) -> Iterator[ReadGroup]:
        """Read groups in order; one whose sequences are not those of the source is a FailedError."""
        ...

    def metadata(self, sums: PackedSums) -> PackedMetadata:
        """Check the list of inputs, and return what metadata.json must state by the manifests of all groups."""
        ...
