"""The stage `verify` for packs of any kind: the packs hold every sequence of their source exactly once.

Group by group: what is read of its shards and of its source must be the same sequences, and its manifest must state what
was read. At last metadata.json must state what all manifests add up to. Part K of N verifies the groups K, K + N, ... and
leaves its sums in a file; the last step, `finish`, reads these files and the manifests, and no packs. The result is in
verification.json, for the report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from gaudi_bert.artefacts.base import VERIFICATION_NAME, Artefact, InputFile, complete_parts, manifest_path, part_path
from gaudi_bert.artefacts.completion import Signature, first_difference
from gaudi_bert.artefacts.mirrored_folder import fetch, is_mirrored, names_in, release, remove, shown_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedMetadata, PackedSums, TableMetadata, Verification
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun, result_of_part
from gaudi_bert.artefacts.shards import check_shards, index_path, sizes_in
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
from gaudi_bert.packing.certificate import simple_certificate

_Metadata = TypeVar("_Metadata", bound=PackedMetadata)


@dataclass(frozen=True)
class PackedFolder(Generic[_Metadata]):
    """A packed folder by its files: the one way to read all of it, to verify or to convert it.

    metadata.json, as it was read, knows the manifests by their CRC-32C, and each manifest its shards. What one file states
    about another is checked here, before any record is read.
    """

    path: Path
    metadata: _Metadata

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
                problem = f"shard_multiple is {metadata.shard_multiple}, but group {number} has {shards} shards"
                raise FailedError(f"{metadata.path_in(self.path)}: {problem}; {metadata.remedy}")
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

    def manifests(self, numbers: Iterable[int] | None = None) -> Iterator[GroupManifest]:
        """Yield the manifests of these groups, or of all, one at a time."""
        return map(self.manifest, self.groups if numbers is None else numbers)

    def check_metadata(self, right: PackedMetadata) -> None:
        """Check that metadata.json states what is right."""
        check_same(self.metadata.path_in(self.path), self.metadata, right, self.metadata.remedy)


def check_same(
    path: Path, stored: Artefact | Signature, right: Artefact | Signature, remedy: str, source: str = "the data"
) -> None:
    """Check that a stored file agrees with `source`."""
    difference = first_difference(stored.as_json(), right.as_json(), f"by {source}")
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {remedy}")


def check_inputs(packed: Path, packed_files: Iterable[InputFile], present: Iterable[InputFile], remedy: str) -> None:
    """Check that the inputs are those that were packed; otherwise the first that is new, missing or changed is named."""
    known, now = ({file.name: (file.identity, file.sequences) for file in files} for files in (packed_files, present))
    for name in [*now, *known]:
        if now.get(name) != known.get(name):
            gone = "was packed but is missing now" if name not in now else "has changed since it was packed"
            problem = gone if name in known else "is not among those that were packed"
            raise FailedError(f"{packed}: input file {name} {problem}; {remedy}")


# --- the flow, for groups of any kind


class ReadGroup(NamedTuple):
    """A group as it was read."""

    stored: GroupManifest  # its manifest as it is
    right: GroupManifest  # its manifest, computed again from what was read; a key that cannot be is a copy
    lower_bound: int  # packs that are proven to be necessary
    fingerprint: int = 0  # the sum of the hashes of its sequences; 0 where values were compared instead


class GroupReader(Protocol):
    """Reads groups of packs again, and compares each with its source."""

    @property
    def folder(self) -> PackedFolder[Any]:
        """The packed folder."""
        ...

    def read(self, manifests: Iterable[GroupManifest]) -> Iterator[ReadGroup]:
        """Read groups in order; one whose sequences are not those of the source is a FailedError."""
        ...

    def metadata(self, sums: PackedSums) -> PackedMetadata:
        """Check the list of inputs, and return what metadata.json must state by the manifests of all groups."""
        ...


def verify(reader: GroupReader, run: StageRun) -> StageOutput[Verification] | PlainResult:
    """Verify a packed folder: all of it, the groups of a part, or the sums of all parts."""
    folder = reader.folder
    path = folder.notes / VERIFICATION_NAME
    writable = is_mirrored(folder.path) or os.access(folder.notes, os.W_OK)
    if not writable and not run.does_all:
        raise InputError(f"{folder.path}: is read-only, and parts leave their sums there; verify it at once")
    folder.check_files()
    if run.finish:
        parts = complete_parts(path, names_in(path.parent))
        proof = _sums_of_parts(folder, path, parts)
    else:
        parts = []
        try:
            proof = _prove(reader, run.share_of(folder.groups))
        except FailedError:
            if writable:
                remove(path)
            raise
    if run.part is not None:
        proof.write(part_path(path, run.part))
        return result_of_part(proof.groups, proof.groups, proof)
    sums = PackedSums()
    for manifest in folder.manifests():
        sums.add(manifest, folder.metadata.groups[manifest.group].manifest_crc32c)
    folder.check_metadata(reader.metadata(sums))
    metadata = folder.metadata
    if metadata.lower_bound > min(proof.lower_bound, metadata.packs):
        depth = metadata.depth or metadata.max_sequence_length

        def counts() -> Iterable[IntArray]:
            return (np.array(manifest.counts, np.int64) for manifest in folder.manifests())

        check_bound(metadata.path_in(folder.path), metadata.lower_bound, metadata.packs, counts, depth, metadata.remedy)
    if writable:
        proof.write(path)
        remove(*parts)
    else:
        run.reporter.say(f"note: {shown_path(folder.path)} is read-only, so the verification cannot be stored there")
    return StageOutput(proof)


def _prove(reader: GroupReader, numbers: Sequence[int]) -> Verification:
    """Read groups, and check the manifest of each; what was proven of them together."""
    folder, sums, bound, fingerprint, shards = reader.folder, PackedSums(), 0, 0, 0
    for stored, right, lower_bound, of_group in reader.read(folder.manifests(numbers)):
        check_same(manifest_path(folder.notes, stored.group), stored, right, stored.remedy)
        sums.add(right)
        bound, fingerprint, shards = bound + lower_bound, fingerprint + of_group, shards + len(right.shards)
    metadata = folder.metadata
    proof = Verification(
        packs_sha256=metadata.identity(),
        groups=len(numbers),
        sequences=sums.sequences,
        tokens=sums.tokens,
        packs=sums.packs,
        shards=shards,
        lower_bound=bound,
        rows=sums.rows,
        input_files=len(sums.input_names),
        bad_files=len(metadata.bad_files) if isinstance(metadata, Metadata) else 0,
    )
    if isinstance(metadata, TableMetadata):
        columns = (*metadata.aligned_columns, *metadata.scalar_columns)
        return proof.model_copy(update={"columns": columns, "too_long": metadata.too_long.model_copy(update=sums.too_long)})
    return proof.model_copy(update={"fingerprint": f"{fingerprint % 2**64:016x}"})


def _sums_of_parts(folder: PackedFolder[Any], path: Path, parts: Sequence[Path]) -> Verification:
    """Return what all parts proved together; without parts, what was proven of these packs before."""
    fetch(path, *parts)
    if not parts and path.exists():
        return Verification.read_of(path, folder.metadata)
    proofs = [Verification.read(part) for part in parts]
    of_others = [part for part, proof in zip(parts, proofs, strict=True) if proof.packs_sha256 != folder.metadata.identity()]
    if of_others or sum(proof.groups for proof in proofs) != len(folder.groups):
        problem = f"{of_others[0].name} is of other packs" if of_others else "not every part is verified"
        raise FailedError(f"{folder.path}: {problem}; run `gaudi-bert verify --shard K/N` for every K and then finish again")
    added = {
        key: sum(getattr(proof, key) for proof in proofs)
        for key in ("groups", "sequences", "tokens", "packs", "shards", "lower_bound", "input_files", "rows")
    }
    first = proofs[0]
    if first.fingerprint is not None:
        added["fingerprint"] = f"{sum(int(proof.fingerprint or '0', 16) for proof in proofs) % 2**64:016x}"
    if isinstance(folder.metadata, TableMetadata):
        added["too_long"] = folder.metadata.too_long
    return first.model_copy(update=added)


# --- the bound: how few packs any packing needs


def group_bound(folder: PackedFolder[Any], counts: Sequence[int], packs: int) -> int:
    """Return packs that are proven to be necessary for a group with these sequences of length 1, 2, ...

    By simple sums; by a solver where they miss more than the group's share of the gap of the folder.
    """
    depth = folder.metadata.depth or len(counts)
    simple = simple_certificate(np.array(counts, np.int64), depth).bound
    if (packs - simple) * len(folder.groups) <= folder.metadata.gap:
        return simple
    from gaudi_bert.packing.exact.bounds import prove_bound  # slow to load, and rarely needed here

    return max(simple, prove_bound(np.array(counts, np.int64), depth).bound)


def check_bound(
    path: Path, claimed: int, packs: int, groups: Callable[[], Iterable[IntArray]], depth: int, remedy: str
) -> None:
    """Check that the bound that a file states can be proven, group by group; by a solver where simple sums do not do.

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
