"""Comparing metadata.json and the manifests of a packed folder with what was counted in its records and shards.

Every figure is counted or computed again. The bound is proven anew, group by group, from the lengths that the manifests
record, whose sums are those of the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.packed import GroupManifest, Metadata, Shard, VocabularyInfo, manifest_path
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.figures import PackingFigures

REMEDY = "write the folder again"


@dataclass(frozen=True)
class ShardContents:
    """What was counted in one shard."""

    packs: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class PackedContents:
    """What was counted in the records and in the packed folder.

    Attributes:
        histogram: int64 [L], sequences of length 1, 2, ...
        shards: by name.
        vocabulary: of the vocab.txt beside the records; None where there is none.
    """

    histogram: IntArray
    shards: Mapping[str, ShardContents]
    vocabulary: VocabularyInfo | None


def check_metadata(packed: Path, metadata: Metadata, counted: PackedContents) -> None:
    """Compare all of metadata.json and of the manifests with what was counted."""
    shards = counted.shards.values()
    sequences, tokens = sum(shard.sequences for shard in shards), sum(shard.tokens for shard in shards)
    packs = sum(shard.packs for shard in shards)
    slots = packs * metadata.max_sequence_length
    figures = PackingFigures(sequences, packs, tokens, slots, metadata.lower_bound)
    expected = {**figures.stored(), "histogram": tuple(counted.histogram.tolist())}
    for key, value in expected.items():
        _same(packed / "metadata.json", key, getattr(metadata, key), value)
    if metadata.vocabulary is not None and counted.vocabulary is not None:
        _same(packed / "metadata.json", "vocabulary", metadata.vocabulary, counted.vocabulary)
    groups = _check_layout(packed, metadata)
    manifests = [_check_manifest(packed, metadata, number, members, counted) for number, members in enumerate(groups)]
    _check_sums(packed, metadata, manifests)
    _check_bound(packed, metadata, manifests)


def _same(path: Path, key: str, stored: object, counted: object) -> None:
    if stored != counted:
        if isinstance(stored, tuple) and isinstance(counted, tuple) and len(stored) == len(counted):
            index = next(index for index in range(len(stored)) if stored[index] != counted[index])
            what = f"length {index + 1}" if isinstance(stored[index], int) else f"entry {index}"
            key, stored, counted = f"{key} of {what}", stored[index], counted[index]
        raise FailedError(f"{path}: {key} is {stored}, the data give {counted}; {REMEDY}")


def _check_layout(packed: Path, metadata: Metadata) -> list[list[Shard]]:
    """The shards of each group; they are numbered without a gap, and as many as `shard_multiple` asks for."""
    groups: list[list[Shard]] = []
    for shard in metadata.shards:
        match = re.fullmatch(r"packed-(\d{5,})-(\d{5,})\.tfrecord", shard.name)
        position = (int(match[1]), int(match[2])) if match is not None else None
        if position == (len(groups), 0):
            groups.append([])
        elif not groups or position != (len(groups) - 1, len(groups[-1])):
            raise FailedError(f"{packed / 'metadata.json'}: shard {shard.name} is out of order; {REMEDY}")
        groups[-1].append(shard)
    for number, shards in enumerate(groups):
        if len(shards) % metadata.shard_multiple:
            raise FailedError(
                f"{packed / 'metadata.json'}: shard_multiple is {metadata.shard_multiple}, but group {number} has"
                f" {len(shards)} shards; {REMEDY}"
            )
    present = {path.name for path in packed.glob("group-*.json")}
    for name in sorted(present - {manifest_path(packed, number).name for number in range(len(groups))}):
        raise FailedError(f"{packed / name}: the manifest of a group that metadata.json does not have; {REMEDY}")
    return groups


def _check_manifest(
    packed: Path, metadata: Metadata, number: int, shards: Sequence[Shard], counted: PackedContents
) -> GroupManifest:
    """The manifest of a group, which agrees with its shards."""
    path = manifest_path(packed, number)
    try:
        manifest = GroupManifest.read(path)
    except InputError as error:
        raise FailedError(str(error)) from error
    contents = [counted.shards[shard.name] for shard in shards]
    counts = np.array(manifest.counts, np.int64)
    _same(path, "number of counts", counts.size, metadata.max_sequence_length)
    expected = {
        "group": number,
        "sequences": sum(content.sequences for content in contents),
        "packs": sum(content.packs for content in contents),
        "tokens": sum(content.tokens for content in contents),
        "shards": tuple(shards),
    }
    for key, value in expected.items():
        _same(path, key, getattr(manifest, key), value)
    _same(path, "sum of counts", int(counts.sum()), manifest.sequences)
    _same(path, "tokens of counts", int(counts @ np.arange(1, counts.size + 1)), manifest.tokens)
    return manifest


def _check_sums(packed: Path, metadata: Metadata, manifests: Sequence[GroupManifest]) -> None:
    """All groups were written by one plan, and together have the histogram of the data."""
    if len({manifest.plan_sha256 for manifest in manifests}) > 1:
        raise FailedError(f"{packed}: its groups were written by different plans; {REMEDY}")
    totals = tuple(sum(column) for column in zip(*(manifest.counts for manifest in manifests), strict=True))
    _same(packed / "the manifests", "histogram", totals, metadata.histogram)


def _check_bound(packed: Path, metadata: Metadata, manifests: Sequence[GroupManifest]) -> None:
    """The bound that metadata.json states can be proven, group by group; by a solver where simple sums do not do."""
    simple = sum(
        max(-(-group.tokens // metadata.max_sequence_length), -(-group.sequences // metadata.depth)) for group in manifests
    )
    if metadata.lower_bound <= min(simple, metadata.packs):
        return
    # The solvers are slow to load, and rarely needed here.
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.exact.bounds import prove_bound
    from gaudi_bert.packing.histogram import Histogram

    histograms = [np.array(manifest.counts, np.int64) for manifest in manifests]
    proven = sum(prove_bound(counts, metadata.depth).bound for counts in histograms)
    if proven < metadata.lower_bound <= metadata.packs:
        # The quick proof is not always the best one that a plan can carry.
        length = metadata.max_sequence_length
        proven = sum(
            pack_histogram(Histogram(length, counts), "optimal", metadata.depth).lower_bound for counts in histograms
        )
    if not metadata.lower_bound <= min(proven, metadata.packs):
        raise FailedError(
            f"{packed / 'metadata.json'}: lower_bound is {metadata.lower_bound}, only {proven} packs can be proven; {REMEDY}"
        )
