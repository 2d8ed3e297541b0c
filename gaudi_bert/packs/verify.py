"""The stage `verify` for packs of any kind: the packs hold every sequence of their source exactly once.

Group by group: what is read of its shards and of its source must be the same sequences, and its manifest must state what
was read. At last metadata.json must state what all manifests add up to. So each key is computed again or, where it
cannot be, is a copy in the code that computes the others.

Groups share nothing, so part K of N verifies the groups K, K + N, ... and leaves its sums in a file; the last step,
`finish`, reads these files and the manifests, and no packs. The result is in verification.json, for the report; a folder
is verified each time that somebody asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from gaudi_bert.artefacts.base import VERIFICATION_NAME, complete_parts, manifest_path, part_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, PackedMetadata, PackedSums, TableMetadata, Verification
from gaudi_bert.artefacts.results import PlainResult, StageOutput, result_of_part
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, names_in, remove, shown_path
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.packs.folder import PackedFolder, check_same


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
    for manifest in folder.manifests(folder.groups):
        sums.add(manifest, folder.metadata.groups[manifest.group].manifest_crc32c)
    folder.check_metadata(reader.metadata(sums))
    metadata = folder.metadata
    if metadata.lower_bound > min(proof.lower_bound, metadata.packs):
        depth = metadata.depth or metadata.max_sequence_length

        def counts() -> Iterable[IntArray]:
            return (np.array(manifest.counts, np.int64) for manifest in folder.manifests(folder.groups))

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
        check_same(manifest_path(folder.notes, stored.group), stored, right)
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


def _sums_of_parts(folder: PackedFolder, path: Path, parts: Sequence[Path]) -> Verification:
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


def group_bound(folder: PackedFolder, counts: Sequence[int], packs: int) -> int:
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
