"""The files of a packed folder: metadata.json and a manifest per group; of TFRecords and of tables.

metadata.json is written last, so a folder that has it is complete; the trainer takes every size from it. It holds
totals, and arrays for each group. A manifest is written after the shards of its group.
Those of packed tables have the same names, in the folder `__gaudi_bert__`. `tfrecords.packed_folder` also reads the folders
of the vendor's deleted script (Habana Model-References, up to 1.14.0), which this project calls *the predecessor*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import Self

from gaudi_bert.artefacts.base import Artefact, Count, Crc32c, Length, Positive, Sha256, Share
from gaudi_bert.artefacts.references import METADATA_NAME, NOTES_NAME, InputFile, InputTable, VocabularyInfo
from gaudi_bert.artefacts.shards import GroupShards, Shard, ShardTable
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.figures import PackingFigures


class _PackedTotals(Artefact):
    """What the metadata of every packed folder hold: the fields of `PackingFigures.stored`, in the order of the file."""

    sequences: Positive
    packs: Positive
    tokens: Positive
    padding_tokens: Count
    efficiency: Share
    packing_factor: float = Field(ge=1)
    lower_bound: Count
    gap: int

    if TYPE_CHECKING:
        groups: tuple[GroupShards, ...]
        """A field of each subclass, at its own position in the file."""
    shard_ending: ClassVar[str]
    """Of the files of the shards."""

    @cached_property
    def shard_table(self) -> ShardTable:
        """The shards as arrays."""
        return ShardTable.of_groups(self.groups, self.shard_ending)

    def known_by(self) -> list[Any]:
        """What tells these packs from others: the manifests of all groups, which know every byte."""
        return [group.manifest_crc32c for group in self.groups]

    def identity(self, encode: Callable[[Any], str] = json.dumps) -> str:
        """The digest of what tells these packs from others; `encode` writes it out, for PyTorch in its own way."""
        return hashlib.sha256(encode(self.known_by()).encode("utf-8")).hexdigest()


class PackedSums:
    """The figures of a folder's groups for metadata.json, summed up one manifest at a time, in any order."""

    def __init__(self) -> None:
        self.sequences = self.packs = self.tokens = 0
        self._counts: IntArray = np.zeros(0, np.int64)
        self._groups: dict[int, GroupShards] = {}

    def add(self, manifest: GroupManifest | TableGroupManifest, crc32c: int) -> None:
        """Add a group; `crc32c` is that of its manifest's bytes."""
        self.sequences += manifest.sequences
        self.packs += manifest.packs
        self.tokens += manifest.tokens
        counts = np.array(manifest.counts, np.int64)
        self._counts = self._counts + counts if self._counts.size else counts
        packs, sizes = (tuple(getattr(shard, key) for shard in manifest.shards) for key in ("packs", "bytes"))
        self._groups[manifest.group] = GroupShards(packs=packs, bytes=sizes, manifest_crc32c=crc32c)

    def stored(self, max_sequence_length: int, lower_bound: int) -> dict[str, Any]:
        """The keys of metadata.json that follow from the groups."""
        slots = self.packs * max_sequence_length
        figures = PackingFigures(self.sequences, self.packs, self.tokens, slots, lower_bound)
        groups = tuple(self._groups[number] for number in sorted(self._groups))
        return {"format_version": 2, **figures.stored(), "groups": groups, "histogram": tuple(self._counts.tolist())}


class _MetadataHead(Artefact):
    """The first keys of metadata.json."""

    format_version: Literal[2]
    tool_version: str
    max_sequence_length: Length
    max_predictions: Length
    masked_slots: Length
    depth: Length
    seed: int
    algorithm: str
    vocabulary: VocabularyInfo | None


class Metadata(_PackedTotals, _MetadataHead):
    """metadata.json: the contract between `write` and the trainer. Pydantic puts the fields of the last base first.

    Attributes:
        masked_slots: most masked positions of a pack (Q).
        lower_bound: packs that are proven necessary; `gap` more are used.
        input_files: how many there are; the manifests name them.
        histogram: sequences of each length; the first entry is length 1.
    """

    file_name = METADATA_NAME
    remedy = "write the folder again"
    line_per_entry = ("groups",)
    shard_ending = ".tfrecord"
    planned: ClassVar[tuple[str, ...]] = (
        *("max_sequence_length", "max_predictions", "masked_slots", "depth"),
        *("seed", "algorithm", "shard_multiple"),
    )
    """Keys that are those of the plan."""

    shard_multiple: Length
    input_files: Count
    groups: tuple[GroupShards, ...]
    histogram: tuple[Count, ...]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The metadata of a packed folder that gaudi-bert wrote (see `tfrecords.packed_folder.read_metadata` for any)."""
        path = cls.path_in(path)
        if not path.exists() and TableMetadata.path_in(path.parent).exists():
            raise InputError(
                f"{path.parent}: holds a packed table, not packed TFRecords; gaudi_bert.pytorch reads packed tables"
            )
        if not path.exists():
            raise InputError(
                f"{path}: missing, so the folder is not packed, or packing did not finish; run `gaudi-bert write` to its end"
            )
        return super().read(path)

    def summary(self) -> dict[str, Any]:
        """The totals, without the list of every shard."""
        totals = {name: getattr(self, name) for name in _PackedTotals.model_fields}
        settings = {name: getattr(self, name) for name in ("algorithm", "depth", "masked_slots")}
        return {**totals, **settings, "shards": len(self.shard_table), "bytes": int(self.shard_table.bytes.sum())}


class GroupManifest(Artefact):
    """group-GGGGG.json: one group of a packed folder, written after its shards.

    Attributes:
        plan_sha256: the plan by which it was written.
        counts: sequences of each length; the first entry is length 1.
        inputs: the files of the group.
        index_crc32c: of `group-GGGGG.index`, which holds the size of every record.
    """

    remedy = "remove it and write the folder again"
    omits_defaults = True

    format_version: Literal[2]
    plan_sha256: Sha256
    group: Count
    sequences: Positive
    packs: Positive
    tokens: Positive
    counts: tuple[Count, ...]
    inputs: tuple[InputFile, ...]
    index_crc32c: Crc32c
    shards: tuple[Shard, ...]

    @property
    def source_sha256(self) -> str:
        """The identity of its source."""
        return self.plan_sha256


def of_counts(counts: Sequence[int]) -> dict[str, Any]:
    """A manifest's figures for the sequences of its group; `counts` are those of length 1, 2, ..."""
    tokens = sum(length * count for length, count in enumerate(counts, start=1))
    return {"sequences": sum(counts), "tokens": tokens, "counts": tuple(counts)}


# --- packed tables


TooLong = Literal["error", "truncate", "split", "drop"]


class TooLongRows(Artefact):
    """What became of rows longer than a pack.

    Attributes:
        policy: what becomes of them: refused, cut to their first tokens, cut into pieces, or dropped.
        dropped_rows: how many of them are in no pack.
        dropped_tokens: tokens that are in no pack.
        added_sequences: sequences beyond one per row, from splitting.
    """

    policy: TooLong
    rows: Count
    dropped_rows: Count
    dropped_tokens: Count
    added_sequences: Count


class TableGroupManifest(Artefact):
    """One group of a folder of packed tables.

    Attributes:
        signature_sha256: of its settings and inputs.
        counts: sequences of each length; the first entry is length 1.
    """

    remedy = "remove it and pack the table again"

    format_version: Literal[1]
    format: Literal["table"]
    signature_sha256: Sha256
    group: Count
    rows: Positive
    sequences: Count
    packs: Count
    tokens: Count
    lower_bound: Count
    deepest_pack: Count
    algorithm_used: str
    too_long: TooLongRows
    counts: tuple[Count, ...]
    shards: tuple[Shard, ...]

    @property
    def source_sha256(self) -> str:
        """The identity of its source."""
        return self.signature_sha256


class _TableMetadataHead(Artefact):
    """The first keys of the metadata.json of packed tables."""

    format_version: Literal[2]
    format: Literal["table"]
    tool_version: str
    max_sequence_length: Length
    depth: Length | None
    deepest_pack: Positive
    seed: int
    algorithm: str
    algorithms_used: tuple[str, ...]
    index_only: bool
    aligned_columns: dict[str, str]
    scalar_columns: dict[str, str]
    rows: Positive


class TableMetadata(_PackedTotals, _TableMetadataHead):
    """metadata.json of a folder of packed tables; written last.

    Attributes:
        depth: most sequences a pack may hold; None for no limit.
        deepest_pack: most sequences that one does hold.
        aligned_columns, scalar_columns: the columns of the table and their types.
        rows: of the table; `sequences` come from them.
    """

    file_name = f"{NOTES_NAME}/{METADATA_NAME}"
    remedy = "pack the table again"
    line_per_entry = ("inputs", "groups")
    omits_defaults = True
    shard_ending = ".parquet"

    too_long: TooLongRows
    shard_multiple: Length
    group_sequences: Positive
    group_bytes: Positive
    groups: tuple[GroupShards, ...]
    inputs: tuple[InputTable, ...]
    histogram: tuple[Count, ...]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The metadata of a folder of packed tables."""
        path = cls.path_in(path)
        if not path.is_file() and (path.parent.parent / METADATA_NAME).is_file():
            raise InputError(
                f"{path.parent.parent}: holds packed TFRecords, not a packed table; give the records that were packed"
            )
        if not path.is_file():
            raise InputError(
                f"{path}: missing, so the folder is not packed, or packing did not finish; run `gaudi-bert pack` again"
            )
        return super().read(path)

    def summary(self) -> dict[str, Any]:
        """All but the long lists."""
        content = {name: value for name, value in self.as_json().items() if name not in ("inputs", "histogram")}
        return {**content, "groups": len(self.groups), "shards": len(self.shard_table)}
