"""The stage `verify` for packs of any format: check that the packs contain every sequence of their source exactly once.

For each group, the sequences in its shards must be the same as those in its source, and its manifest must state what was
read. Finally, metadata.json must agree with the sums of all manifests. Part K of N verifies the groups K, K + N, ... and
leaves its sums in a file. The last step, `finish`, reads these files and the manifests, but no packs. The result is written
to verification.json, from which the report takes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from gaudi_bert.artefacts.base import VERIFICATION_NAME, Artefact, InputFile, find_complete_parts, manifest_path, part_path
from gaudi_bert.artefacts.completion import Signature, describe_first_difference
from gaudi_bert.artefacts.mirrored_folder import (
    fetch_files,
    format_path,
    is_mirrored,
    list_names,
    remove_files,
    remove_local_copies,
)
from gaudi_bert.artefacts.packed import GroupManifest, PackedMetadata, PackedTotals, RecordMetadata, TableMetadata
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun, build_part_result
from gaudi_bert.artefacts.shards import check_shard_sizes, index_path, list_file_sizes
from gaudi_bert.artefacts.verification import Verification
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
from gaudi_bert.packing.certificate import certify_token_or_count_bound

_Metadata = TypeVar("_Metadata", bound=PackedMetadata)
_Manifest = TypeVar("_Manifest", bound=GroupManifest)


@dataclass(frozen=True)
class PackedFolder(Generic[_Metadata, _Manifest]):
    """A packed folder with its metadata. Verification and conversion read packs through this class.

    metadata.json lists the CRC-32C of each manifest, and each manifest lists its shards. What one of these files states
    about another is checked here, before any record is read.

    Attributes:
        path: the folder.
        metadata: the content of metadata.json.
        manifest_type: the type of the group manifests.
    """

    path: Path
    metadata: _Metadata
    manifest_type: type[_Manifest]

    @property
    def json_folder(self) -> Path:
        """The folder of metadata.json and the group manifests. Packed tables have a sub-folder for these files."""
        return self.metadata.path_in(self.path).parent

    @property
    def group_numbers(self) -> range:
        """The numbers of all groups, which count from 0."""
        return range(len(self.metadata.groups))

    def list_shards(self, group: int) -> list[Path]:
        """Return the paths of the shards of a group, in order."""
        table = self.metadata.shard_table
        first = int(table.first_shards[group])
        return [self.path / table.file_name(shard) for shard in range(first, first + int(table.shards_per_group[group]))]

    def check_file_list(self) -> None:
        """Check that the folder contains exactly the shards that metadata.json lists, with their sizes.

        Raises:
            FailedError: a shard is missing, has another size, or is not listed; or a group has a wrong number of shards.
        """
        metadata, table = self.metadata, self.metadata.shard_table
        try:
            check_shard_sizes(self.path, table, metadata.remedy)
        except InputError as error:
            raise FailedError(str(error)) from error
        foreign = [
            name for name, _ in list_file_sizes(self.path) if name.startswith("packed-") and table.find_shard(name) is None
        ]
        if foreign:
            raise FailedError(
                f"{self.path / min(foreign)}: the file is not listed in metadata.json; remove it, or {metadata.remedy}"
            )
        for number, shards in enumerate(table.shards_per_group.tolist()):
            fewer = isinstance(metadata, TableMetadata) and shards and metadata.shard_multiple % shards == 0
            if shards % metadata.shard_multiple and not fewer:
                problem = f"shard_multiple is {metadata.shard_multiple}, but group {number} has {shards} shards"
                raise FailedError(f"{metadata.path_in(self.path)}: {problem}; {metadata.remedy}")
        known = {
            path(self.json_folder, number).name for number in self.group_numbers for path in (manifest_path, index_path)
        }
        for name in list_names(self.json_folder):
            if re.fullmatch(r"group-.*\.(json|index)", name) and name not in known:
                raise FailedError(
                    f"{self.json_folder / name}: the file belongs to a group that metadata.json does not list; "
                    f"{metadata.remedy}"
                )

    def read_manifest(self, group: int) -> _Manifest:
        """Read the manifest of a group, and check that it is the one that metadata.json lists.

        Raises:
            FailedError: it is missing, invalid, or another manifest.
        """
        path = manifest_path(self.json_folder, group)
        fetch_files(path)
        try:
            manifest, crc = self.manifest_type.read(path), crc32c(read_file(path))
        except InputError as error:
            raise FailedError(str(error)) from error
        finally:
            remove_local_copies(path)
        if crc != self.metadata.groups[group].manifest_crc32c or manifest.group != group:
            raise FailedError(f"{path}: the manifest differs from the one that metadata.json lists; {self.metadata.remedy}")
        return manifest

    def read_manifests(self, groups: Iterable[int] | None = None) -> Iterator[_Manifest]:
        """Yield the manifests of these groups, or of all groups, one at a time."""
        return map(self.read_manifest, self.group_numbers if groups is None else groups)

    def check_metadata(self, expected: PackedMetadata) -> None:
        """Raise a FailedError if metadata.json differs from the expected content."""
        check_same_content(self.metadata.path_in(self.path), self.metadata, expected, self.metadata.remedy)


def check_same_content(
    path: Path, stored: Artefact | Signature, expected: Artefact | Signature, remedy: str, source: str = "the data"
) -> None:
    """Raise an error if the content of a stored JSON file differs from the expected content.

    Args:
        path: the file, for the message.
        stored: its content.
        expected: its expected content.
        remedy: what the user can do, for the message.
        source: where the expected content comes from, for the message.

    Raises:
        FailedError: the contents differ. The message names the first key that differs.
    """
    difference = describe_first_difference(stored.as_json(), expected.as_json(), f"by {source}")
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {remedy}")


def check_inputs_unchanged(
    packed_folder: Path, packed_files: Iterable[InputFile], current_files: Iterable[InputFile], remedy: str
) -> None:
    """Check that the input files that exist now are those that were packed: the same names, sizes and checksums.

    Args:
        packed_folder: the packed folder, for the message.
        packed_files: the input files at the time of packing.
        current_files: the input files now.
        remedy: what the user can do, for the message.

    Raises:
        FailedError: a file is new, missing or changed. The message names the first one.
    """
    known, now = ({file.name: (file.identity, file.sequences) for file in files} for files in (packed_files, current_files))
    for name in [*now, *known]:
        if now.get(name) != known.get(name):
            problem_of_known = "was packed but is missing now" if name not in now else "has changed since it was packed"
            problem = problem_of_known if name in known else "was not there when the folder was packed"
            raise FailedError(f"{packed_folder}: input file {name} {problem}; {remedy}")


# --- verification, for any format


@dataclass(frozen=True)
class VerifiedGroup(Generic[_Manifest]):
    """A group whose shards were read and compared with their source during verification.

    Attributes:
        stored_manifest: the manifest of the group as it is stored.
        expected_manifest: the manifest as computed from what was read. Keys that cannot be computed are copied.
        lower_bound: the proven minimum number of packs.
        fingerprint: the sum of the hashes of the sequences, or 0 if values were compared instead.
    """

    stored_manifest: _Manifest
    expected_manifest: _Manifest
    lower_bound: int
    fingerprint: int = 0


class GroupVerifier(Protocol[_Manifest]):
    """Compares the groups of a packed folder with the source from which they were packed.

    There is one implementation for packed TFRecords and one for packed tables. A group consists of input files that were
    packed together.
    """

    @property
    def folder(self) -> PackedFolder[Any, _Manifest]:
        """The packed folder."""
        ...

    def verify_groups(self, manifests: Iterable[_Manifest]) -> Iterator[VerifiedGroup[_Manifest]]:
        """Compare each group with its source, and yield the groups in the order of their manifests.

        Raises:
            FailedError: the sequences of a group are not those of its source.
        """
        ...

    def build_expected_metadata(self, totals: PackedTotals) -> PackedMetadata:
        """Check the list of input files, and return the expected content of metadata.json.

        Args:
            totals: the sums of the manifests of all groups.
        """
        ...


def verify_packs(verifier: GroupVerifier[Any], run: StageRun) -> StageOutput[Verification] | PlainResult:
    """Verify a packed folder against its source.

    The run decides what is verified: all groups, the groups of one part (`--shard K/N`), or only that all parts were
    verified (`--finish`).

    Args:
        verifier: compares the groups with their source.
        run: how to run the stage, and for which part.

    Returns:
        The verification, or the totals of a part.

    Raises:
        FailedError: the packs are not those of their source, or a file of the folder is wrong.
        InputError: a part is to be verified in a folder that is read-only.
    """
    folder = verifier.folder
    path = folder.json_folder / VERIFICATION_NAME
    writable = is_mirrored(folder.path) or os.access(folder.json_folder, os.W_OK)
    if not writable and not run.does_all_parts:
        raise InputError(
            f"{folder.path}: the folder is read-only, but the sums of a part are stored in it; verify the complete "
            "folder, without --shard"
        )
    folder.check_file_list()
    if run.finish:
        parts = find_complete_parts(path, list_names(path.parent))
        proof = _combine_part_verifications(folder, path, parts)
    else:
        parts = []
        try:
            proof = _verify_groups(verifier, run.select_part(folder.group_numbers))
        except FailedError:
            if writable:
                remove_files(path)
            raise
    if run.part is not None:
        proof.write(part_path(path, run.part))
        return build_part_result(proof.groups, proof.groups, proof)
    sums = PackedTotals()
    for manifest in folder.read_manifests():
        sums.add_group(manifest, folder.metadata.groups[manifest.group].manifest_crc32c)
    folder.check_metadata(verifier.build_expected_metadata(sums))
    metadata = folder.metadata
    if metadata.lower_bound > min(proof.lower_bound, metadata.packs):
        depth = metadata.depth or metadata.max_sequence_length

        def counts() -> Iterable[IntArray]:
            """Return the counts of each group, read again from the manifests."""
            return (np.array(manifest.counts, np.int64) for manifest in folder.read_manifests())

        check_lower_bound(
            metadata.path_in(folder.path), metadata.lower_bound, metadata.packs, counts, depth, metadata.remedy
        )
    if writable:
        proof.write(path)
        remove_files(*parts)
    else:
        run.reporter.say(
            f"{format_path(folder.path)}: the folder is read-only, so the result of the verification is not stored in it"
        )
    return StageOutput(proof)


def _verify_groups(verifier: GroupVerifier[Any], group_numbers: Sequence[int]) -> Verification:
    """Verify the groups with these numbers and compare their manifests with what was read.

    Return the verification of these groups, which contains the numbers of sequences, tokens and packs that were proven.
    """
    folder, sums, bound, fingerprint, shards = verifier.folder, PackedTotals(), 0, 0, 0
    for group in verifier.verify_groups(folder.read_manifests(group_numbers)):
        stored, expected = group.stored_manifest, group.expected_manifest
        check_same_content(manifest_path(folder.json_folder, stored.group), stored, expected, stored.remedy)
        sums.add_group(expected)
        bound, fingerprint = bound + group.lower_bound, fingerprint + group.fingerprint
        shards += len(expected.shards)
    metadata = folder.metadata
    proof = Verification(
        packs_sha256=metadata.compute_packs_sha256(),
        groups=len(group_numbers),
        sequences=sums.sequences,
        tokens=sums.tokens,
        packs=sums.packs,
        shards=shards,
        lower_bound=bound,
        rows=sums.rows,
        input_files=len(sums.input_names),
        bad_files=len(metadata.bad_files) if isinstance(metadata, RecordMetadata) else 0,
    )
    if isinstance(metadata, TableMetadata):
        columns = (*metadata.aligned_columns, *metadata.scalar_columns)
        return proof.model_copy(update={"columns": columns, "too_long": metadata.too_long.model_copy(update=sums.too_long)})
    return proof.model_copy(update={"fingerprint": f"{fingerprint % 2**64:016x}"})


def _combine_part_verifications(
    folder: PackedFolder[Any, Any], verification_path: Path, part_paths: Sequence[Path]
) -> Verification:
    """Add up the verifications of all parts. Without parts, return the verification that is already stored."""
    fetch_files(verification_path, *part_paths)
    if not part_paths and verification_path.exists():
        return Verification.read_matching(verification_path, folder.metadata)
    proofs = [Verification.read(part) for part in part_paths]
    of_others = [
        part
        for part, proof in zip(part_paths, proofs, strict=True)
        if proof.packs_sha256 != folder.metadata.compute_packs_sha256()
    ]
    if of_others or sum(proof.groups for proof in proofs) != len(folder.group_numbers):
        problem = (
            f"{of_others[0].name} is the verification of other packs" if of_others else "some parts are not verified yet"
        )
        raise FailedError(
            f"{folder.path}: {problem}; run `gaudi-bert verify --shard K/N` for every K, and then --finish again"
        )
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


# --- lower bounds: how few packs any packing needs


def prove_group_lower_bound(folder: PackedFolder[Any, Any], counts: Sequence[int], packs: int) -> int:
    """Prove a lower bound on the number of packs that the sequences of a group need, and return it.

    The simple certificate is used, or a solver if that misses more than the group's share of the folder's gap.

    Args:
        folder: the packed folder.
        counts: the number of sequences of length 1, 2, ...
        packs: the packs of the group.
    """
    depth = folder.metadata.depth or len(counts)
    simple = certify_token_or_count_bound(np.array(counts, np.int64), depth).bound
    if (packs - simple) * len(folder.group_numbers) <= folder.metadata.gap:
        return simple
    from gaudi_bert.packing.exact.bounds import prove_lower_bound  # slow to load, and rarely needed here

    return max(simple, prove_lower_bound(np.array(counts, np.int64), depth).bound)


def check_lower_bound(
    path: Path, claimed_bound: int, packs: int, counts_by_group: Callable[[], Iterable[IntArray]], depth: int, remedy: str
) -> None:
    """Check that the lower bound that a file states can be proven.

    Simple certificates are tried first, then solvers.

    Args:
        path: the file, for the message.
        claimed_bound: the stated lower bound for all groups together.
        packs: the packs of all groups.
        counts_by_group: returns the counts of each group, int64 [L].
        depth: the most sequences per pack.
        remedy: what the user can do, for the message.

    Raises:
        FailedError: the bound exceeds what can be proven, or the number of packs.
    """
    proven = sum(certify_token_or_count_bound(counts, depth).bound for counts in counts_by_group())
    if claimed_bound <= min(proven, packs):
        return
    # The solvers are slow to import and rarely needed here.
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.exact.bounds import prove_lower_bound
    from gaudi_bert.packing.histogram import Histogram

    proven = sum(prove_lower_bound(counts, depth).bound for counts in counts_by_group())
    if proven < claimed_bound <= packs:
        # A plan may carry a better proof than the quick one, so run the full algorithm before rejecting the bound.
        proven = sum(
            pack_histogram(Histogram(len(counts), counts), "optimal", depth).lower_bound for counts in counts_by_group()
        )
    if not claimed_bound <= min(proven, packs):
        raise FailedError(
            f"{path}: lower_bound is {claimed_bound}, but only a bound of {proven} packs can be proven; {remedy}"
        )
