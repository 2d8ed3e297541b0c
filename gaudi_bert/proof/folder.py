"""A packed folder that is verified, whatever its packs are: the loop over its groups, and the result that is stored in it.

`tfrecords.verify` and `tables.verify` read the groups one after the other, hold each to its manifest, and yield what was
proven; here that is added up and held to metadata.json. They rebuild manifests and metadata from what they read; here the
stored ones are held to these. So each key is recomputed from the data or, where it cannot be, is in the code that rebuilds
them as a copy of what is stored.

The result is stored in the folder itself, so that the same folder is not verified twice. It holds for the files that were
read: a hidden file next to it identifies them (their inodes and times), so a copied folder, or one with a file that changed,
is verified again.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from gaudi_bert.artefacts import shards as stored_shards
from gaudi_bert.artefacts.base import Artefact, InputFile, manifest_path
from gaudi_bert.artefacts.completion import Signature, begin_artefact, first_difference, is_finished, parts_of
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedSums, TableMetadata, TableVerification, Verification
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import Shard, index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, last_change, names_in, release, remove, shown_path
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import hidden_beside, read_file, read_text, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.packing.certificate import simple_certificate

Manifest = TypeVar("Manifest", bound=Artefact)


# --- what is held to the folder before its shards are read


def check_shards(packed: Path, metadata: Metadata | TableMetadata) -> None:
    """The folder holds the shards of the metadata, and no other that a reader might read as one of them."""
    table = metadata.shard_table
    try:
        stored_shards.check_shards(packed, table, metadata.remedy)
    except InputError as error:
        raise FailedError(str(error)) from error
    foreign = [
        name for name, _ in stored_shards.sizes_in(packed) if name.startswith("packed-") and table.number(name) is None
    ]
    if foreign:
        raise FailedError(f"{packed / min(foreign)}: is not in metadata.json; remove it, or {metadata.remedy}")


def check_crc32c(packed: Path, stored: Sequence[Shard], present: Sequence[Shard], remedy: str) -> None:
    """The shards of a group are those of its manifest."""
    for one, other in zip(stored, present, strict=False):  # other names, or fewer, are reported where all keys are compared
        if one.name == other.name and one.crc32c != other.crc32c:
            raise FailedError(f"{packed / one.name}: its CRC-32C differs from the manifest of its group; {remedy}")


def check_inputs(packed: Path, packed_files: Iterable[InputFile], present: Iterable[InputFile], remedy: str) -> None:
    """The input files are those that were packed; otherwise the first that is new, missing or changed is named."""
    known, now = ({file.name: (file.identity, file.sequences) for file in files} for files in (packed_files, present))
    for name in [*now, *known]:
        if now.get(name) != known.get(name):
            gone = "was packed but is missing now" if name not in now else "has changed since it was packed"
            problem = gone if name in known else "is not among those that were packed"
            raise FailedError(f"{packed}: input file {name} {problem}; {remedy}")


def check_numbers(packed: Path, metadata: Metadata | TableMetadata) -> None:
    """The shards of each group are numbered without a gap, and as many as `shard_multiple` asks for."""
    table = metadata.shard_table
    for number, shards in enumerate(table.group_sizes.tolist()):
        fewer = isinstance(metadata, TableMetadata) and shards and metadata.shard_multiple % shards == 0
        if shards % metadata.shard_multiple and not fewer:
            raise FailedError(
                f"{metadata.path_in(packed)}: shard_multiple is {metadata.shard_multiple}, but group {number} has"
                f" {shards} shards; {metadata.remedy}"
            )


# --- metadata.json and the manifests, held to what was read


def read_manifest(kind: type[Manifest], packed: Path, number: int) -> tuple[Manifest, int]:
    """The stored manifest of a group, and its CRC-32C."""
    path = manifest_path(packed, number)
    fetch(path)
    try:
        return kind.read(path), crc32c(read_file(path))
    except InputError as error:
        raise FailedError(str(error)) from error
    finally:
        release(path)


def checked_manifests(packed: Path, metadata: Metadata) -> Iterator[GroupManifest]:
    """Yield the manifest of every group: the door for whoever reads all packs without their records.

    Each has the CRC-32C and the shards that metadata.json lists, and together they make what it states.

    Raises:
        FailedError: a file is not what another says of it.
    """
    sums, files = PackedSums(), 0
    for number in range(len(metadata.groups)):
        manifest, crc = read_manifest(GroupManifest, packed, number)
        path = manifest_path(packed, number)
        if crc != metadata.groups[number].manifest_crc32c:
            raise FailedError(f"{path}: is not the manifest that metadata.json lists; {metadata.remedy}")
        if manifest.group != number:
            raise FailedError(f"{path}: is of group {manifest.group}; {manifest.remedy}")
        sums.add(manifest, crc)
        files += len(manifest.inputs)
        yield manifest
    stated = {**sums.stored(metadata.max_sequence_length, metadata.lower_bound), "input_files": files}
    check_same(metadata.path_in(packed), metadata, metadata.model_copy(update=stated))


def counts_of_groups(packed: Path, metadata: Metadata) -> Iterator[IntArray]:
    """Of each group, int64 [L], sequences of length 1, 2, ..., by its manifest, which was held to the data."""
    for number in range(len(metadata.shard_table.group_firsts)):
        yield np.array(read_manifest(GroupManifest, packed, number)[0].counts, np.int64)


def check_metadata(packed: Path, metadata: Metadata | TableMetadata, right: Metadata | TableMetadata) -> None:
    """The folder holds no manifest and no index but those of the groups, and metadata.json states what is right."""
    groups = len(metadata.shard_table.group_firsts)
    known = {path(packed, number).name for number in range(groups) for path in (manifest_path, index_path)}
    path = metadata.path_in(packed)
    for name in names_in(path.parent):
        if re.fullmatch(r"group-.*\.(json|index)", name) and name not in known:
            what = "manifest" if name.endswith(".json") else "index"
            raise FailedError(
                f"{path.with_name(name)}: the {what} of a group that metadata.json does not have; {metadata.remedy}"
            )
    check_same(path, metadata, right)


def check_same(path: Path, stored: Artefact, right: Artefact) -> None:
    """A stored file agrees with the data."""
    difference = first_difference(stored.as_json(), right.as_json(), "by the data")
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {stored.remedy}")


def check_bound(
    path: Path, claimed: int, packs: int, groups: Callable[[], Iterable[IntArray]], depth: int, remedy: str
) -> None:
    """The bound that a file states can be proven, group by group; by a solver where simple sums do not do.

    `claimed` packs are those that the groups need together; a group, int64 [L], is what is packed as one, by its length.
    """
    proven = sum(simple_certificate(counts, depth).bound for counts in groups())
    if claimed <= min(proven, packs):
        return
    # The solvers are slow to load, and rarely needed here.
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.exact.bounds import prove_bound
    from gaudi_bert.packing.histogram import Histogram

    proven = sum(prove_bound(counts, depth).bound for counts in groups())
    if proven < claimed <= packs:
        # The quick proof is not always the best one that a plan can carry.
        proven = sum(pack_histogram(Histogram(len(counts), counts), "optimal", depth).lower_bound for counts in groups())
    if not claimed <= min(proven, packs):
        raise FailedError(f"{path}: lower_bound is {claimed}, only {proven} packs can be proven; {remedy}")


Stored = TypeVar("Stored", Verification, TableVerification)


# --- the loop over the groups


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
        """Read groups, hold each to its manifest, and yield it; `in_parts`: each with its own bound."""
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
