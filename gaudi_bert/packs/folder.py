"""A packed folder by its files: the one way to read all of it, to verify or to convert it.

metadata.json knows the manifests by their CRC-32C, and each manifest its shards. What one file states about another is
checked here, before any record is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.artefacts.base import Artefact, InputFile, manifest_path
from gaudi_bert.artefacts.completion import first_difference
from gaudi_bert.artefacts.packed import GroupManifest, PackedMetadata, TableMetadata
from gaudi_bert.artefacts.shards import check_shards, index_path, sizes_in
from gaudi_bert.artefacts.store.mirrored_folder import fetch, names_in, release
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file


@dataclass(frozen=True)
class PackedFolder:
    """A packed folder, and its metadata as they were read."""

    path: Path
    metadata: PackedMetadata

    @property
    def notes(self) -> Path:
        """Folder of its JSON files."""
        return self.metadata.path_in(self.path).parent

    @property
    def groups(self) -> range:
        """The numbers of its groups."""
        return range(len(self.metadata.groups))

    def shards_of(self, group: int) -> list[Path]:
        """Return the shards of a group, in order."""
        table = self.metadata.shard_table
        first = int(table.group_firsts[group])
        return [self.path / table.name(shard) for shard in range(first, first + int(table.group_sizes[group]))]

    def check_files(self) -> None:
        """Check that the shards of metadata.json are there, with their sizes and in their number, and no others."""
        metadata, table = self.metadata, self.metadata.shard_table
        try:
            check_shards(self.path, table, metadata.remedy)
        except InputError as error:
            raise FailedError(str(error)) from error
        foreign = [name for name, _ in sizes_in(self.path) if name.startswith("packed-") and table.number(name) is None]
        if foreign:
            raise FailedError(f"{self.path / min(foreign)}: is not in metadata.json; remove it, or {metadata.remedy}")
        for number, shards in enumerate(table.group_sizes.tolist()):
            fewer = isinstance(metadata, TableMetadata) and shards and metadata.shard_multiple % shards == 0
            if shards % metadata.shard_multiple and not fewer:
                raise FailedError(
                    f"{metadata.path_in(self.path)}: shard_multiple is {metadata.shard_multiple}, but group {number} has"
                    f" {shards} shards; {metadata.remedy}"
                )
        known = {path(self.notes, number).name for number in self.groups for path in (manifest_path, index_path)}
        for name in names_in(self.notes):
            if re.fullmatch(r"group-.*\.(json|index)", name) and name not in known:
                raise FailedError(f"{self.notes / name}: is of a group that metadata.json does not have; {metadata.remedy}")

    def manifest(self, number: int) -> GroupManifest:
        """Read the manifest of a group, which is the one that metadata.json lists."""
        path = manifest_path(self.notes, number)
        fetch(path)
        try:
            manifest, crc = GroupManifest.read(path), crc32c(read_file(path))
        except InputError as error:
            raise FailedError(str(error)) from error
        finally:
            release(path)
        if crc != self.metadata.groups[number].manifest_crc32c or manifest.group != number:
            raise FailedError(f"{path}: is not the manifest that metadata.json lists; {self.metadata.remedy}")
        return manifest

    def manifests(self, numbers: Iterable[int]) -> Iterator[GroupManifest]:
        """Yield the manifests of these groups, one at a time."""
        return map(self.manifest, numbers)

    def check_metadata(self, right: PackedMetadata) -> None:
        """Check that metadata.json states what is right."""
        check_same(self.metadata.path_in(self.path), self.metadata, right)


def check_same(path: Path, stored: Artefact, right: Artefact) -> None:
    """Check that a stored file agrees with the data."""
    difference = first_difference(stored.as_json(), right.as_json(), "by the data")
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {stored.remedy}")


def check_inputs(packed: Path, packed_files: Iterable[InputFile], present: Iterable[InputFile], remedy: str) -> None:
    """Check that the inputs are those that were packed; otherwise the first that is new, missing or changed is named."""
    known, now = ({file.name: (file.identity, file.sequences) for file in files} for files in (packed_files, present))
    for name in [*now, *known]:
        if now.get(name) != known.get(name):
            gone = "was packed but is missing now" if name not in now else "has changed since it was packed"
            problem = gone if name in known else "is not among those that were packed"
            raise FailedError(f"{packed}: input file {name} {problem}; {remedy}")
