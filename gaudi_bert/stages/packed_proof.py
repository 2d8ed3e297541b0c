"""The flow of `verify`, for packed TFRecords and packed tables, and the proof of every key of their JSON files.

How the sequences of a group are read and compared is told apart in `data.verify` and `tables.verify_table`. From what they
read they make the manifests and the metadata anew; here the stored ones are held to these. So each key is recomputed from
the data or, where it cannot be, stands in the code that makes them anew as a copy of what is stored.

The result is stored in the folder itself, so that the same folder is not verified twice; a shard or an input file that
changed since, if only by its time, is verified anew.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import Signature, begin_artefact, first_difference, is_finished, settings_path
from gaudi_bert.artefacts.packed import (
    METADATA_NAME,
    VERIFICATION_NAME,
    GroupManifest,
    InputFile,
    Metadata,
    Shard,
    TableGroupManifest,
    TableMetadata,
    TableVerification,
    Verification,
    manifest_path,
)
from gaudi_bert.artefacts.store.mirrored_folder import fetch, files_in, is_mirrored, last_change, names_in, remove, shown
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Reporter
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.stages.results import Made

Stored = TypeVar("Stored", Verification, TableVerification)
Manifest = TypeVar("Manifest", bound=Artefact)


@dataclass(frozen=True)
class Proof(Generic[Stored]):
    """What the files of a packed folder must say, by what was read."""

    manifests: Sequence[GroupManifest] | Sequence[TableGroupManifest]
    metadata: Metadata | TableMetadata
    verification: Stored


def verify_folder(
    packed: Path,
    metadata: Metadata | TableMetadata,
    inputs: Mapping[Path, int],
    kind: type[Stored],
    prove: Callable[[], Proof[Stored]],
    *,
    reporter: Reporter,
    overwrite: bool,
) -> Made[Stored]:
    """Verify a packed folder, unless that was done and nothing has changed since.

    Args:
        inputs: the files that it was made from, with their bytes.
        prove: reads both sides and compares their sequences.
    """
    out, sources = packed / VERIFICATION_NAME, [*(packed / shard.name for shard in metadata.shards), *inputs]
    sha256 = hashlib.sha256(read_file(packed / METADATA_NAME)).hexdigest()
    files = {path.name: size for path, size in inputs.items()}
    signature = Signature("verify", {}, {"metadata_sha256": sha256, "files": files})
    if not overwrite and _is_verified(out, signature, sources):
        reporter.say(f"{shown(packed)}: already verified, nothing to do")
        return Made(kind.read_of(out, metadata), skipped=True)
    is_writable = is_mirrored(packed) or os.access(packed, os.W_OK)
    if is_writable:
        # A verification is of no use to anyone once its data changed, so it is replaced without `overwrite`.
        remove(out, settings_path(out))
        begin_artefact(out, out, signature)
    else:
        reporter.say(f"note: {shown(packed)} is read-only, so the verification cannot be stored there")
    proof = prove()
    _check_files(packed, metadata, proof)
    if is_writable:
        proof.verification.write(out)
    return Made(proof.verification)


def _is_verified(out: Path, signature: Signature, sources: Sequence[Path]) -> bool:
    """Whether the same was verified, and nothing was changed since."""
    if not is_mirrored(out):
        return is_finished(out, out, signature, [source for source in sources if not is_mirrored(source)])
    return is_finished(out, out, signature) and max(map(last_change, sources)) <= last_change(out) < math.inf


# --- what is held to the folder before its shards are read


def check_shards(packed: Path, metadata: Metadata | TableMetadata) -> None:
    """The folder holds the shards of the metadata, and no other that a reader might take for its own."""
    stored, named = files_in(packed), {shard.name for shard in metadata.shards}
    for shard in metadata.shards:
        path = packed / shard.name
        if shard.name not in stored:
            raise FailedError(f"{path}: the shard is missing; {metadata.remedy}")
        if stored[shard.name].bytes != shard.bytes:
            raise FailedError(
                f"{path}: {stored[shard.name].bytes} bytes, metadata.json says {shard.bytes}; {metadata.remedy}"
            )
    for name in sorted(stored):
        if name.startswith("packed-") and name not in named:
            raise FailedError(f"{packed / name}: is not in metadata.json; remove it, or {metadata.remedy}")


def check_crc32c(path: Path, stored: Shard, crc32c: int, remedy: str) -> None:
    """A shard is the one of the metadata; the predecessor noted no CRC."""
    if stored.crc32c is not None and stored.crc32c != crc32c:
        raise FailedError(f"{path}: its CRC-32C differs from metadata.json; {remedy}")


def check_inputs(packed: Path, metadata: Metadata | TableMetadata, present: Sequence[InputFile]) -> None:
    """The input files are those that were packed; otherwise the first that is new, missing or changed is named."""
    known, now = ({file.name: (file.bytes, file.crc32c) for file in files} for files in (metadata.inputs, present))
    for name in [*now, *known]:
        if now.get(name) != known.get(name):
            gone = "was packed but is missing now" if name not in now else "has changed since it was packed"
            problem = gone if name in known else "is not among those that were packed"
            raise FailedError(f"{packed}: input file {name} {problem}; {metadata.remedy}")


def shards_of_groups(packed: Path, metadata: Metadata | TableMetadata) -> list[list[Shard]]:
    """The shards of each group; they are numbered without a gap, and as many as `shard_multiple` asks for."""
    groups: list[list[Shard]] = []
    for shard in metadata.shards:
        match = re.fullmatch(r"packed-(\d{5,})-(\d{5,})\.(tfrecord|parquet)", shard.name, re.ASCII)
        position = (int(match[1]), int(match[2])) if match is not None else None
        if position == (len(groups), 0):
            groups.append([])
        elif not groups or position != (len(groups) - 1, len(groups[-1])):
            raise FailedError(f"{packed / METADATA_NAME}: shard {shard.name} is out of order; {metadata.remedy}")
        groups[-1].append(shard)
    for number, shards in enumerate(groups):
        if len(shards) % metadata.shard_multiple:
            raise FailedError(
                f"{packed / METADATA_NAME}: shard_multiple is {metadata.shard_multiple}, but group {number} has"
                f" {len(shards)} shards; {metadata.remedy}"
            )
    return groups


# --- metadata.json and the manifests, held to what was read


def read_manifest(kind: type[Manifest], packed: Path, number: int) -> Manifest:
    """The stored manifest of a group."""
    path = manifest_path(packed, number)
    fetch(path)
    try:
        return kind.read(path)
    except InputError as error:
        raise FailedError(str(error)) from error


def _check_files(packed: Path, metadata: Metadata | TableMetadata, proof: Proof[Stored]) -> None:
    paths = [manifest_path(packed, number) for number in range(len(proof.manifests))]
    fetch(*paths)
    present = {name for name in names_in(packed) if name.startswith("group-") and name.endswith(".json")}
    for name in sorted(present - {path.name for path in paths}):
        raise FailedError(f"{packed / name}: the manifest of a group that metadata.json does not have; {metadata.remedy}")
    for number, (path, manifest) in enumerate(zip(paths, proof.manifests, strict=True)):
        _check_same(path, read_manifest(type(manifest), packed, number), manifest)
    _check_same(packed / METADATA_NAME, metadata, proof.metadata)


def _check_same(path: Path, stored: Artefact, right: Artefact) -> None:
    difference = first_difference(stored.as_json(), right.as_json(), "by the data")
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {stored.remedy}")


def check_bound(path: Path, claimed: int, packs: int, groups: Sequence[IntArray], depth: int, remedy: str) -> None:
    """The bound that a file states can be proven, group by group; by a solver where simple sums do not do.

    Args:
        claimed: fewest packs that the groups need together.
        groups: of each, int64 [L]: what is packed as one, by its length.
        depth: most of these in a pack.
    """
    proven = sum(simple_certificate(counts, depth).bound for counts in groups)
    if claimed <= min(proven, packs):
        return
    # The solvers are slow to load, and rarely needed here.
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.exact.bounds import prove_bound
    from gaudi_bert.packing.histogram import Histogram

    proven = sum(prove_bound(counts, depth).bound for counts in groups)
    if proven < claimed <= packs:
        # The quick proof is not always the best one that a plan can carry.
        proven = sum(pack_histogram(Histogram(len(counts), counts), "optimal", depth).lower_bound for counts in groups)
    if not claimed <= min(proven, packs):
        raise FailedError(f"{path}: lower_bound is {claimed}, only {proven} packs can be proven; {remedy}")
