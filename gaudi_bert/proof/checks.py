"""What `verify` holds the files of a packed folder to: shards, inputs, manifests, the bound, each key of a stored file.

The provers rebuild manifests and metadata from what they read; here the stored ones are held to these. So each key is
recomputed from the data or, where it cannot be, is in the code that rebuilds them as a copy of what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from gaudi_bert.artefacts import shards as stored_shards
from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import first_difference
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, TableMetadata
from gaudi_bert.artefacts.references import InputFile, manifest_path
from gaudi_bert.artefacts.shards import Shard, index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, names_in, release
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_file
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
