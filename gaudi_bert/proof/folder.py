"""A packed folder that is verified, whatever its packs are: the loop over its groups, and the result that is stored in it.

`tfrecords.verify` and `tables.verify` read the groups one after the other, hold each to its manifest, and yield what was
proven; here that is added up and held to metadata.json.

The result is stored in the folder itself, so that the same folder is not verified twice. It holds for the files that were
read: a hidden file next to it identifies them (their inodes and times), so a copied folder, or one with a file that changed,
is verified again.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, parts_of
from gaudi_bert.artefacts.packed import Metadata, TableMetadata, TableVerification, Verification
from gaudi_bert.artefacts.references import manifest_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import index_path
from gaudi_bert.artefacts.store.mirrored_folder import is_mirrored, last_change, remove, shown_path
from gaudi_bert.common.files import hidden_beside, read_file, read_text, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.proof.checks import check_metadata

Stored = TypeVar("Stored", Verification, TableVerification)


class ProvenGroup(NamedTuple):
    """A group whose files are what its manifest states.

    Attributes:
        lower_bound: packs that were proven to be necessary.
        fingerprint: of its sequences; None for tables.
    """

    group: int
    sequences: int
    packs: int
    tokens: int
    lower_bound: int
    fingerprint: str | None = None


@dataclass(frozen=True)
class Proof(Generic[Stored]):
    """What the files of a packed folder must state, by what was read; its manifests were held to that already."""

    metadata: Metadata | TableMetadata
    verification: Stored


class Prover(Protocol[Stored]):
    """What differs between packed TFRecords and packed tables."""

    @property
    def verified(self) -> VerifiedFolder[Stored]:
        """The folder, and where its result is stored."""
        ...

    def prove(self, groups: Sequence[int], in_parts: bool = False) -> Iterator[ProvenGroup]:
        """Read groups, hold each to its manifest, and yield it; `in_parts`: each with a bound of its own."""
        ...

    def add_up(self, groups: Iterable[ProvenGroup]) -> Proof[Stored]:
        """What the folder must state, by all its groups."""
        ...

    def files_of(self, group: int) -> Iterable[Path]:
        """The files that are read for a group."""
        ...


def verify_folder(prover: Prover[Stored], overwrite: bool) -> StageOutput[Stored]:
    """Verify a packed folder, unless that was done and nothing has changed since."""
    folder = prover.verified
    stored = None if overwrite else folder.stored()
    if stored is not None:
        return stored
    if folder.is_writable:
        folder.begin()
    else:
        name = shown_path(folder.packed)
        folder.reporter.say(f"note: {name} is read-only, so the verification cannot be stored there")
    _ = folder.identity  # before anything is read
    proof = prover.add_up(prover.prove(folder.groups))
    check_metadata(folder.packed, folder.metadata, proof.metadata)
    if folder.is_writable:
        folder.store(proof.verification)
    return StageOutput(proof.verification)


@dataclass(frozen=True)
class VerifiedFolder(Generic[Stored]):
    """A packed folder that is verified: what is read for it, and the files that hold the result.

    Attributes:
        inputs: the files of the records or of the table, with their bytes.
    """

    packed: Path
    metadata: Metadata | TableMetadata
    inputs: Mapping[Path, int]
    kind: type[Stored]
    reporter: Reporter

    @property
    def groups(self) -> range:
        """The numbers of its groups."""
        return range(len(self.metadata.shard_table.group_firsts))

    @property
    def out(self) -> Path:
        """verification.json."""
        return self.kind.path_in(self.packed)

    @property
    def is_writable(self) -> bool:
        """Whether the result can be stored there."""
        return is_mirrored(self.packed) or os.access(self.packed, os.W_OK)

    @cached_property
    def signature(self) -> Signature:
        """Of the verification: metadata.json, and the names and sizes of the inputs."""
        sha256 = hashlib.sha256(read_file(self.metadata.path_in(self.packed))).hexdigest()
        files = {path.name: size for path, size in self.inputs.items()}
        return Signature("verify", {}, {"metadata_sha256": sha256, "files": files})

    @cached_property
    def identity(self) -> str:
        """Of all files that the proof holds for, as they are when this is first called."""
        return identity_of(self._sources())

    def stored(self) -> StageOutput[Stored] | None:
        """The result that is stored already, where no file has changed since."""
        if not is_finished(self.out, self.out, self.signature) or not self._is_of_these():
            return None
        self.reporter.say(f"{shown_path(self.packed)}: already verified, nothing to do")
        return StageOutput(self.kind.read_of(self.out, self.metadata), skipped=True)

    def begin(self, keep_groups: bool = False) -> None:
        """Remove the result of before, and proofs of groups: all, or with `keep_groups` those of another signature.

        A verification is of no use to anyone once its data changed, so it is replaced without `overwrite`.
        """
        remove(self.out, *([] if keep_groups else parts_of(self.out)))
        begin_artefact(self.out, self.out, self.signature, overwrite=True)

    def store(self, verification: Stored) -> None:
        """Store the result, which holds for the files as `identity` knows them."""
        write_text(self._seen, self.identity)
        verification.write(self.out)

    @property
    def _seen(self) -> Path:
        return hidden_beside(self.out, "seen")

    def _sources(self) -> Iterator[Path]:
        """The shards, the manifest and index of each group, and the inputs."""
        table = self.metadata.shard_table
        yield from (self.packed / table.name(number) for number in range(len(table)))
        if isinstance(self.metadata, Metadata):
            for number in range(len(table.group_firsts)):
                yield from (manifest_path(self.packed, number), index_path(self.packed, number))
        yield from self.inputs

    def _is_of_these(self) -> bool:
        """Whether a stored verification is of these files as they are now; in a store, whether none is newer."""
        if is_mirrored(self.out):
            return max(map(last_change, self._sources())) <= last_change(self.out) < math.inf
        return self._seen.exists() and read_text(self._seen) == self.identity


def identity_of(sources: Iterable[Path]) -> str:
    """Identifies files as they are now: a copy has other inodes, a file that was written to has another time."""
    digest = hashlib.sha256()
    for source in sources:
        try:
            status = None if is_mirrored(source) else os.stat(source)
        except FileNotFoundError:
            continue  # the proof names what is missing
        known = (last_change(source),) if status is None else (status.st_size, status.st_ino, status.st_ctime_ns)
        digest.update(repr((source.name, *known)).encode("utf-8"))
    return digest.hexdigest()
