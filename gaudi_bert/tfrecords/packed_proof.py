"""The flow of `verify`, for packed TFRecords and packed tables, and the proof of every key of their JSON files.

How the sequences of a group are read and compared is in `tfrecords.verify` and `tables.verify`. From what they read they
rebuild the manifests and the metadata; here the stored ones are held to these. So each key is recomputed from
the data or, where it cannot be, is in the code that rebuilds them as a copy of what is stored.

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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import (
    Signature,
    begin_artefact,
    first_difference,
    is_finished,
    parts_of,
    settings_path,
)
from gaudi_bert.artefacts.grouped_output import GroupedOutput
from gaudi_bert.artefacts.packed import (
    GroupManifest,
    GroupVerification,
    Metadata,
    TableMetadata,
    TableVerification,
    Verification,
)
from gaudi_bert.artefacts.references import InputFile, group_verification_path, manifest_path
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.shards import Shard, index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, last_change, names_in, release, remove, shown_path
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock, hidden_beside, read_file, read_text, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.tfrecords import packed_folder

_Stored = TypeVar("_Stored", Verification, TableVerification)
Manifest = TypeVar("Manifest", bound=Artefact)


@dataclass(frozen=True)
class Proof(Generic[_Stored]):
    """What the files of a packed folder must state, by what was read; its manifests were held to that already."""

    metadata: Metadata | TableMetadata
    verification: _Stored


@dataclass(frozen=True)
class VerifiedFolder(Generic[_Stored]):
    """A packed folder that is verified: what is read for it, and the files that hold the result.

    Attributes:
        inputs: the files of the records or of the table, with their bytes.
    """

    packed: Path
    metadata: Metadata | TableMetadata
    inputs: Mapping[Path, int]
    kind: type[_Stored]
    reporter: Reporter

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
        return _identity_of(self._sources())

    def stored(self) -> StageOutput[_Stored] | None:
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

    def store(self, verification: _Stored) -> None:
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


def verify_folder(
    folder: VerifiedFolder[_Stored], prove: Callable[[], Proof[_Stored]], overwrite: bool
) -> StageOutput[_Stored]:
    """Verify a packed folder, unless that was done and nothing has changed since."""
    stored = None if overwrite else folder.stored()
    if stored is not None:
        return stored
    if folder.is_writable:
        folder.begin()
    else:
        name = shown_path(folder.packed)
        folder.reporter.say(f"note: {name} is read-only, so the verification cannot be stored there")
    _ = folder.identity  # before anything is read
    proof = prove()
    _check_files(folder, proof)
    if folder.is_writable:
        folder.store(proof.verification)
    return StageOutput(proof.verification)


def _identity_of(sources: Iterable[Path]) -> str:
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


# --- the same in parts: part K of N proves the groups K, K + N, ...
#
# The proof of a group is a file next to verification.json, `verification-GGGGG.json`, which does not depend on N. It holds
# for the files that were read, as verification.json does. The last step adds the proofs up, writes verification.json and
# removes them, so that the folder is as if one process had verified it.

Take: TypeAlias = Callable[[int, dict[str, Any]], None]
"""Gets the number of a group that was proven, and the keys of `GroupVerification` that only its data tell."""
_NAMED = 3


@dataclass(frozen=True)
class _GroupProofs(GroupedOutput[int, GroupVerification]):
    """The proofs of groups; `files_sha256` is that of the files of a group as they are now."""

    files_sha256: Callable[[int], str]

    @property
    def artefact(self) -> Path:
        """The file that is written last."""
        return self.final

    def _problem(self, group: int, proof: GroupVerification) -> str | None:
        """Why a stored proof does not hold for this group; None where it does."""
        if proof.signature_sha256 != self.signature.sha256:
            return "is of another packed folder, or of other records"
        if not proof.is_as_written:
            return "was changed after it was written"
        if proof.group != group:
            return f"is that of group {proof.group}"
        if proof.files_sha256 != self.files_sha256(group):
            return "is of files that have changed since, or of which these are copies"
        return None

    def _read(self, group: int) -> GroupVerification | None:
        proof = self.summary.read_if_present(self.summary_path(group))
        return None if proof is None or self._problem(group, proof) else proof

    def describe(self, group: int) -> str:
        """Why a group is not verified."""
        path = self.summary_path(group)
        fetch(path)
        proof = self.summary.read_if_present(path)
        problem = proof and self._problem(group, proof)
        return f"{path.name} {problem}" if problem else f"group {group} has no proof"


@dataclass(frozen=True)
class PartlyVerified(Generic[_Stored]):
    """A packed folder whose groups are verified one by one; `files_of` names the files of a group that are read for it."""

    folder: VerifiedFolder[_Stored]
    files_of: Callable[[int], Iterable[Path]]

    @property
    def _groups(self) -> range:
        return range(len(self.folder.metadata.shard_table.group_firsts))

    def prove_shard(
        self, shard: tuple[int, int], prove: Callable[[Sequence[int], Take], None], overwrite: bool
    ) -> StageOutput[_Stored] | GroupsResult:
        """Prove the groups K, K + N, ... that have no proof yet, for `shard` (K, N); with `overwrite` all of these.

        `prove` gets their numbers, and calls back with each as soon as it is proven. The result has the totals of these
        groups, or of the complete folder where it was verified already.
        """
        stored = None if overwrite else self.folder.stored()
        if stored is not None:
            return stored
        self._check_writable()
        numbers = self._groups[shard[0] :: shard[1]]
        proofs, out = self._proofs(), self.folder.out
        with exclusive_lock(settings_path(out), str(out), wait=True):
            # Another process may have proven all of it, and removed the proofs of groups, before this one had the lock.
            stored = None if overwrite else self.folder.stored()
            if stored is not None:
                return stored
            self.folder.begin(keep_groups=True)
        if overwrite:
            remove(*(path for path in map(proofs.summary_path, numbers) if path.exists()))
        pending = list(numbers) if overwrite else proofs.missing(numbers)
        # Before anything is read: a file that changes while it is read is then noticed.
        files = {number: proofs.files_sha256(number) for number in pending}

        def take(number: int, figures: dict[str, Any]) -> None:
            proof = GroupVerification.of(
                format_version=1,
                signature_sha256=proofs.signature.sha256,
                files_sha256=files[number],
                group=number,
                **figures,
            )
            proof.write(proofs.summary_path(number))

        prove(pending, take)
        sums = dict.fromkeys(("sequences", "packs", "tokens"), 0)
        for _, proof in proofs.each_whole(numbers):
            for key in sums:
                sums[key] += getattr(proof, key)
        return GroupsResult(len(numbers), len(pending), **sums)

    def finish(self, add_up: Callable[[Iterable[GroupVerification]], Proof[_Stored]]) -> StageOutput[_Stored]:
        """Write verification.json where every group has its proof; nothing is read but these, manifests and names."""
        out = self.folder.out
        stored = self.folder.stored()
        if stored is not None:
            if self.folder.is_writable:
                remove(*parts_of(out))  # a process that was killed here has left them
            return stored
        self._check_writable()
        _ = self.folder.identity  # before the proofs are held to the files
        proofs = self._proofs()
        proof = add_up(self._all_proofs(proofs))
        _check_files(self.folder, proof)
        with exclusive_lock(settings_path(out), str(out), wait=True):
            begin_artefact(out, out, proofs.signature)
            self.folder.store(proof.verification)
            remove(*parts_of(out))
        return StageOutput(proof.verification)

    def _check_writable(self) -> None:
        if not self.folder.is_writable:
            raise InputError(
                f"{self.folder.packed}: is read-only, and parts store their proofs there; verify it at once, without"
                " --shard and --finish"
            )

    def _proofs(self) -> _GroupProofs:
        out = self.folder.out
        return _GroupProofs(
            out.parent,
            out,
            self.folder.signature,
            GroupVerification,
            partial(group_verification_path, out),
            self.folder.reporter,
            lambda group: _identity_of(self.files_of(group)),
        )

    def _all_proofs(self, proofs: _GroupProofs) -> Iterator[GroupVerification]:
        """The proofs of all groups, one at a time; what is missing, or does not hold, is an error."""
        missing = set(self._groups)
        for group, proof in proofs.each_whole(self._groups):
            missing.discard(group)
            yield proof
        if missing:
            named = ", ".join(map(proofs.describe, sorted(missing)[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
            raise FailedError(
                f"{self.folder.packed}: {len(missing)} of {len(self._groups)} groups are not verified: {named};"
                " run `gaudi-bert verify --shard K/N` for every K and then finish again"
            )


# --- what is held to the folder before its shards are read


def check_shards(packed: Path, metadata: Metadata | TableMetadata) -> None:
    """The folder holds the shards of the metadata, and no other that a reader might read as one of them."""
    table = metadata.shard_table
    try:
        packed_folder.check_shards(packed, table, metadata.remedy)
    except InputError as error:
        raise FailedError(str(error)) from error
    foreign = [
        name for name, _ in packed_folder.sizes_in(packed) if name.startswith("packed-") and table.number(name) is None
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


def counts_of_groups(packed: Path, metadata: Metadata) -> Iterator[IntArray]:
    """Of each group, int64 [L], sequences of length 1, 2, ..., by its manifest, which was held to the data."""
    for number in range(len(metadata.shard_table.group_firsts)):
        yield np.array(read_manifest(GroupManifest, packed, number)[0].counts, np.int64)


def _check_files(folder: VerifiedFolder[_Stored], proof: Proof[_Stored]) -> None:
    """The folder holds no manifest and no index but those of the groups, and metadata.json states what was proven."""
    packed, metadata = folder.packed, folder.metadata
    groups = len(metadata.shard_table.group_firsts)
    known = {path(packed, number).name for number in range(groups) for path in (manifest_path, index_path)}
    path = metadata.path_in(packed)
    for name in names_in(path.parent):
        if re.fullmatch(r"group-.*\.(json|index)", name) and name not in known:
            what = "manifest" if name.endswith(".json") else "index"
            raise FailedError(
                f"{path.with_name(name)}: the {what} of a group that metadata.json does not have; {metadata.remedy}"
            )
    check_same(path, metadata, proof.metadata)


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
