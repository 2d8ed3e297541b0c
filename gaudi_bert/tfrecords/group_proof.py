"""One group of a packed folder, held to its manifest and its index once its shards are read.

The manifest is rebuilt from what was read, and the stored one must be the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.completion import first_difference, read_signature, settings_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, of_counts
from gaudi_bert.artefacts.references import manifest_path
from gaudi_bert.artefacts.shards import Shard, SizeArray, index_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, release
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import FailedError, shown
from gaudi_bert.common.files import read_file
from gaudi_bert.tfrecords import packed_proof as proof
from gaudi_bert.tfrecords.scanning.file_contents import SequenceSums
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES


class ReadGroup:
    """What was read of a group: its shards and the sizes of their records, by number, and how many sequences of each length.

    Attributes:
        counts: int64 [L + 1], sequences of length 0, 1, ...
    """

    def __init__(self, max_sequence_length: int) -> None:
        self.shards: dict[int, tuple[Shard, SizeArray]] = {}
        self.counts: IntArray = np.zeros(max_sequence_length + 1, np.int64)

    def add(self, number: int, path: Path, sums: SequenceSums) -> None:
        """Add shard `number` of the folder."""
        shard = Shard(name=path.name, packs=sums.record_sizes.size, bytes=sums.file_bytes, crc32c=sums.file_crc32c)
        self.shards[number] = shard, _sizes_on_disk(path, sums)
        self.counts[:] += sums.lengths[: self.counts.size]


def hold_group(
    packed: Path,
    metadata: Metadata,
    plan_sha256: str,
    number: int,
    read: ReadGroup,
    sequences_of_inputs: Mapping[str, int],
) -> tuple[GroupManifest, int]:
    """The manifest of a group that was read, which is the stored one, and its CRC-32C; else an error."""
    stored, crc = proof.read_manifest(GroupManifest, packed, number)
    shards, record_sizes = zip(*(read.shards[shard] for shard in sorted(read.shards)), strict=True)
    proof.check_crc32c(packed, stored.shards, shards, metadata.remedy)
    right = GroupManifest(
        format_version=2,
        plan_sha256=plan_sha256,
        group=number,
        packs=sum(shard.packs for shard in shards),
        **of_counts(read.counts[1:].tolist()),
        inputs=stored.inputs,  # held to the files where those of all groups are known
        index_crc32c=_check_index(index_path(packed, number), record_sizes, stored.remedy),
        shards=shards,
    )
    path = manifest_path(packed, number)
    proof.check_same(path, stored, right)
    held = sum(sequences_of_inputs.get(file.name, 0) for file in stored.inputs)
    if held != right.sequences:
        raise FailedError(
            f"{path}: inputs: these files hold {held} sequences, the group has {right.sequences}; {stored.remedy}"
        )
    return right, crc


def _sizes_on_disk(path: Path, sums: SequenceSums) -> SizeArray:
    """Of each record; the scan knows the canonical size of those that another program encoded."""
    if int(sums.record_sizes.sum(dtype=np.int64)) == sums.file_bytes:
        return sums.record_sizes
    return np.array([len(payload) + FRAME_BYTES for payload in read_records(path)], np.uint32)


def _check_index(path: Path, record_sizes: Sequence[SizeArray], remedy: str) -> int:
    """The index of a group holds the size of every record; its CRC-32C."""
    fetch(path)
    right = np.concatenate(record_sizes).astype("<u4").tobytes()
    stored = read_file(path) if path.exists() else None
    release(path)
    if stored is None:
        raise FailedError(f"{path}: the index is missing; {remedy}")
    if stored != right:
        raise FailedError(f"{path}: does not say the sizes of the records; {remedy}")
    return crc32c(right)


def plan_sha256_of(packed: Path, metadata: Metadata) -> str:
    """The plan by which all groups were written: of the folder's settings, or of the first group where there are none.

    The settings have the keys of the plan, which metadata.json must repeat.
    """
    path = settings_path(packed)
    fetch(path)
    if not path.exists():
        return proof.read_manifest(GroupManifest, packed, 0)[0].plan_sha256
    signature = read_signature(path)
    planned = {key: getattr(metadata, key) for key in Metadata.planned}
    difference = first_difference(dict(signature.settings), planned, "in metadata.json")
    sha256 = signature.inputs.get("plan_sha256")
    if difference is None and not (isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)):
        difference = f"inputs.plan_sha256 is {shown(sha256)}, it must be 64 hexadecimal digits"
    if difference is not None:
        raise FailedError(f"{path}: {difference}; {metadata.remedy}")
    return str(sha256)
