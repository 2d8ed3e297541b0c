"""The stage `verify`, which checks that packs of any format contain every sequence of their source exactly once.

For each group, the sequences in its shards must be the same as those in its source, and its manifest must agree with what
was read. Finally, metadata.json must agree with the sums over all manifests. Part K of N verifies the groups K, K + N, ...
and stores its sums in a file. The last run, with `finish`, reads these files and the manifests, but no packs. The result is
written to verification.json, which the report shows.
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
    download_missing_files,
    format_path,
    is_mirrored,
    list_names,
    remove_files,
    remove_local_copies,
)
from gaudi_bert.artefacts.packed import (
    GroupManifest,
    PackedMetadata,
    PackedTotals,
    RecordMetadata,
    TableMetadata,
    Verification,
)
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun, build_partial_run_result
from gaudi_bert.artefacts.shards import check_shard_sizes, index_path, list_file_sizes
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
from gaudi_bert.packing.certificate import prove_bound_by_totals

_Metadata = TypeVar("_Metadata", bound=PackedMetadata)
_Manifest = TypeVar("_Manifest", bound=GroupManifest)


@dataclass(frozen=True)
class PackedFolder(Generic[_Metadata, _Manifest]):
    """A packed folder and its metadata, for code that reads all of its packs, such as verification and conversion.

    metadata.json lists the CRC-32C of each manifest, and each manifest lists its shards. The methods check that these files
    agree with each other before any record is read.

    Attributes:
        path: The folder.
        metadata: The content of metadata.json.
        manifest_type: The type of the group manifests.
    """

    path: Path
    metadata: _Metadata
    manifest_type: type[_Manifest]

    @property
    def json_folder(self) -> Path:
        """The folder that contains metadata.json and the group manifests. In a packed table, this is a sub-folder."""
        return self.metadata.json_path_in(self.path).parent

    @property
    def group_numbers(self) -> range:
        """The numbers of all groups of packs, starting at 0."""
        return range(len(self.metadata.groups))

    def list_shards(self, group: int) -> list[Path]:
        """Return the paths of the shards of a group, in order."""
        table = self.metadata.shard_table
        first = int(table.first_shards[group])
        return [self.path / table.file_name(shard) for shard in range(first, first + int(table.shards_per_group[group]))]

    def check_file_list(self) -> None:
        """Check that the folder contains exactly the shards that metadata.json lists, with the listed sizes.

        Raises:
            FailedError: A shard is missing, has another size, or is not listed, or a group has a wrong number of shards.
        """
        metadata, table = self.metadata, self.metadata.shard_table
        try:
            check_shard_sizes(self.path, table, metadata.remedy)
        except InputError as error:
            raise FailedError(str(error)) from error
        unlisted = [
            name for name, _ in list_file_sizes(self.path) if name.startswith("packed-") and table.find_shard(name) is None
        ]
        if unlisted:
            raise FailedError(
                f"{self.path / min(unlisted)}: the file is not listed in metadata.json; remove it, or {metadata.remedy}"
            )
        for number, shards in enumerate(table.shards_per_group.tolist()):
            fewer = isinstance(metadata, TableMetadata) and shards and metadata.shard_multiple % shards == 0
            if shards % metadata.shard_multiple and not fewer:
                raise FailedError(
                    f"{metadata.json_path_in(self.path)}: shard_multiple is {metadata.shard_multiple}, but group {number} "
                    f"has {shards} shards; {metadata.remedy}"
                )
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
        """Read the manifest of a group, and check that its checksum is the one that metadata.json lists.

        Raises:
            FailedError: The manifest is missing, is invalid, or differs from the one that metadata.json lists.
        """
        path = manifest_path(self.json_folder, group)
        download_missing_files(path)
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
        """Read and yield the manifests of the given groups one at a time. By default, yield those of all groups."""
        return map(self.read_manifest, self.group_numbers if groups is None else groups)

    def check_metadata(self, expected: PackedMetadata) -> None:
        """Raise a FailedError if metadata.json differs from the expected content."""
        check_same_content(self.metadata.json_path_in(self.path), self.metadata, expected, self.metadata.remedy)


def check_same_content(
    path: Path, stored: Artefact | Signature, expected: Artefact | Signature, remedy: str, source: str = "the data"
) -> None:
    """Raise an error if the content of a JSON file differs from the expected content.

    Args:
        path: The file, for the message.
        stored: The content of the file.
        expected: The content that the file should have.
        remedy: What the user can do, for the message.
        source: The origin of the expected content, for the message.

    Raises:
        FailedError: The contents differ. The message names the first key that differs.
    """
    difference = describe_first_difference(stored.as_json(), expected.as_json(), f"by {source}")
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {remedy}")


def check_inputs_unchanged(
    packed_folder: Path, packed_files: Iterable[InputFile], current_files: Iterable[InputFile], remedy: str
) -> None:
    """Check that the current input files have the same names, sizes and checksums as the files that were packed.

    Args:
        packed_folder: The packed folder, for the message.
        packed_files: The input files as they were when they were packed.
        current_files: The input files as they are now.
        remedy: What the user can do, for the message.

    Raises:
        FailedError: A file is new, missing or changed. The message names the first one.
    """
    known, now = (
        {file.name: (file.size_and_crc32c, file.sequences) for file in files} for files in (packed_files, current_files)
    )
    for name in [*now, *known]:
        if now.get(name) != known.get(name):
            problem = "has changed since it was packed" if name in known else "did not exist when the folder was packed"
            if name not in now:
                problem = "was packed but is now missing"
            raise FailedError(f"{packed_folder}: input file {name} {problem}; {remedy}")


# --- verification, for any format


@dataclass(frozen=True)
class VerifiedGroup(Generic[_Manifest]):
    """The result of comparing one group of packs with the data that was packed.

    Attributes:
        stored_manifest: The stored manifest of the group.
        expected_manifest: The manifest computed from the shards that were read. Keys that cannot be computed are copied from
            the stored manifest.
        lower_bound: The proven minimum number of packs.
        fingerprint: The sum of the hashes of the sequences, or 0 if values were compared instead.
    """

    stored_manifest: _Manifest
    expected_manifest: _Manifest
    lower_bound: int
    fingerprint: int = 0


class GroupVerifier(Protocol[_Manifest]):
    """Compares each group of packs in a folder with its source, the data that was packed.

    One class implements this protocol for packed TFRecords, and another one for packed tables. A group consists of sequences
    that were packed together.
    """

    @property
    def folder(self) -> PackedFolder[Any, _Manifest]:
        """The packed folder."""
        ...

    def verify_groups(self, manifests: Iterable[_Manifest]) -> Iterator[VerifiedGroup[_Manifest]]:
        """Compare each group with its source, and yield the results in the order of the manifests.

        Raises:
            FailedError: The sequences of a group differ from its source.
        """
        ...

    def build_expected_metadata(self, totals: PackedTotals) -> PackedMetadata:
        """Check the list of input files, and return the content that metadata.json should have.

        Args:
            totals: The totals over the manifests of all groups.
        """
        ...


def verify_packs(verifier: GroupVerifier[Any], run: StageRun) -> StageOutput[Verification] | PlainResult:
    """Check that a packed folder contains every sequence of its source exactly once.

    `run` determines what is checked: all groups, the groups of one part (`--shard K/N`), or only that all parts were
    verified (`--finish`).

    Args:
        verifier: Compares the groups of the folder with their source.
        run: The options of the run, which may select one part.

    Returns:
        The verification of the folder. For a part, return the totals of its groups.

    Raises:
        FailedError: The packs differ from their source, or a file of the folder is wrong.
        InputError: The run verifies only a part, and the folder is read-only.
    """
    folder = verifier.folder
    path = folder.json_folder / VERIFICATION_NAME
    is_writable = is_mirrored(folder.path) or os.access(folder.json_folder, os.W_OK)
    if not is_writable and not run.runs_whole_stage:
        raise InputError(
            f"{folder.path}: the folder is read-only, but --shard must store its results in it; verify the complete "
            "folder without --shard"
        )
    folder.check_file_list()
    parts = find_complete_parts(path, list_names(path.parent)) if run.finish else []
    if run.finish:
        proof = _combine_part_verifications(folder, path, parts)
    else:
        try:
            proof = _verify_groups(verifier, run.select_items_of_this_run(folder.group_numbers))
        except FailedError:
            if is_writable:
                remove_files(path)
            raise
    if run.part is not None:
        proof.write(part_path(path, run.part))
        return build_partial_run_result(proof.groups, proof.groups, proof)
    sums = PackedTotals()
    for manifest in folder.read_manifests():
        sums.add_group(manifest, folder.metadata.groups[manifest.group].manifest_crc32c)
    folder.check_metadata(verifier.build_expected_metadata(sums))
    metadata = folder.metadata
    if metadata.lower_bound > min(proof.lower_bound, metadata.packs):
        depth = metadata.depth or metadata.max_sequence_length

        def counts() -> Iterable[IntArray]:
            """Read the manifests again, and return the number of sequences of each length in each group."""
            return (np.array(manifest.counts, np.int64) for manifest in folder.read_manifests())

        check_lower_bound(
            metadata.json_path_in(folder.path), metadata.lower_bound, metadata.packs, counts, depth, metadata.remedy
        )
    if is_writable:
        proof.write(path)
        remove_files(*parts)
    else:
        run.reporter.say(
            f"{format_path(folder.path)}: the folder is read-only, so the result of the verification is not stored there"
        )
    return StageOutput(proof)


def _verify_groups(verifier: GroupVerifier[Any], group_numbers: Sequence[int]) -> Verification:
    """Compare the given groups of packs with the data that was packed. Also check that the manifest of each group agrees
    with its shards.

    Return the verification of these groups, which contains the numbers of sequences, tokens and packs that were read.
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
        return proof.model_copy(
            update={
                "columns": (*metadata.aligned_columns, *metadata.scalar_columns),
                "too_long": metadata.too_long.model_copy(update=sums.too_long),
            }
        )
    return proof.model_copy(update={"fingerprint": f"{fingerprint % 2**64:016x}"})


def _combine_part_verifications(
    folder: PackedFolder[Any, Any], verification_path: Path, part_paths: Sequence[Path]
) -> Verification:
    """Combine the verification results of all parts, and return the result for the complete folder. If there are no parts,
    return its stored result.
    """
    download_missing_files(verification_path, *part_paths)
    if not part_paths and verification_path.exists():
        return Verification.read_matching(verification_path, folder.metadata)
    proofs = [Verification.read(part) for part in part_paths]
    packs_sha256 = folder.metadata.compute_packs_sha256()
    outdated = [path for path, proof in zip(part_paths, proofs, strict=True) if proof.packs_sha256 != packs_sha256]
    if outdated or sum(proof.groups for proof in proofs) != len(folder.group_numbers):
        problem = f"{outdated[0].name} verifies different packs" if outdated else "some parts are not verified yet"
        raise FailedError(
            f"{folder.path}: {problem}; run `gaudi-bert verify --shard K/N` for every K, and then "
            "`gaudi-bert verify --finish`"
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
    """Prove that the sequences of a group need at least a certain number of packs, and return this number.

    The quick proof is sufficient if the group's packs exceed its bound by at most the mean gap of the folder's groups.
    Otherwise, a solver is used.

    Args:
        folder: The packed folder.
        counts: The number of sequences of length 1, 2, ...
        packs: The number of packs of the group.
    """
    depth = folder.metadata.depth or len(counts)
    simple = prove_bound_by_totals(np.array(counts, np.int64), depth).bound
    if (packs - simple) * len(folder.group_numbers) <= folder.metadata.gap:
        return simple
    from gaudi_bert.packing.bounds import prove_lower_bound  # this import is slow, and rarely needed here

    return max(simple, prove_lower_bound(np.array(counts, np.int64), depth).bound)


def check_lower_bound(
    path: Path, claimed_bound: int, packs: int, counts_by_group: Callable[[], Iterable[IntArray]], depth: int, remedy: str
) -> None:
    """Check that the lower bound on the number of packs, as stated in a file, can be proven.

    Simple certificates are tried first, then solvers.

    Args:
        path: The file, for the message.
        claimed_bound: The lower bound that the file states for all groups together.
        packs: The number of packs of all groups.
        counts_by_group: Returns the number of sequences of each length, int64 [L], for each group.
        depth: The maximum number of sequences in a pack.
        remedy: What the user can do, for the message.

    Raises:
        FailedError: The bound exceeds the number of packs, or the highest bound that can be proven.
    """
    proven = sum(prove_bound_by_totals(counts, depth).bound for counts in counts_by_group())
    if claimed_bound <= min(proven, packs):
        return
    # The solvers are slow to import and rarely needed, so import them only here.
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.bounds import prove_lower_bound
    from gaudi_bert.packing.histogram import Histogram

    proven = sum(prove_lower_bound(counts, depth).bound for counts in counts_by_group())
    if proven < claimed_bound <= packs:
        # If the packs were planned with the algorithm `optimal`, the stated bound is the one that this algorithm has proven,
        # which may be higher than the bound from `prove_lower_bound`. Therefore run `optimal` before rejecting
        # `claimed_bound`.
        proven = sum(
            pack_histogram(Histogram(len(counts), counts), "optimal", depth).lower_bound for counts in counts_by_group()
        )
    if not claimed_bound <= min(proven, packs):
        raise FailedError(
            f"{path}: lower_bound is {claimed_bound}, but only a lower bound of {proven} packs can be proven; {remedy}"
        )
