"""The files of a packed folder: metadata.json, a manifest per group and verification.json; of TFRecords and of tables.

metadata.json is written last, so a folder that has it is complete; the trainer takes every size from it. It holds
totals, and arrays for each group. A manifest is written after the shards of its group.
Those of packed tables have the same names, in the folder `__gaudi_bert__`. `tfrecords.packed_folder` also reads the folders
of the vendor's deleted script (Habana Model-References, up to 1.14.0), which this project calls *the predecessor*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import Self

from gaudi_bert.artefacts.base import (
    METADATA_NAME,
    NOTES_NAME,
    VERIFICATION_NAME,
    Artefact,
    Count,
    Crc32c,
    Figures,
    InputFile,
    InputTable,
    Length,
    Positive,
    Sha256,
    Share,
    TooLongRows,
    VocabularyInfo,
)
from gaudi_bert.artefacts.completion import first_difference
from gaudi_bert.artefacts.pack_kinds import refuse_row_tables
from gaudi_bert.artefacts.shards import GroupShards, Shard, ShardTable
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackingFigures
from gaudi_bert.config.values import matching

_Fingerprint = Annotated[str, matching("[0-9a-f]{16}", "16 digits from 0 to f")]
_Factor = Annotated[float, Field(ge=1)]


class _PackedMetadata(Artefact):
    """What the metadata of every packed folder can do; each kind has its fields in the order of its file."""

    if TYPE_CHECKING:
        groups: tuple[GroupShards, ...]
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


class Metadata(_PackedMetadata):
    """metadata.json: the contract between `write` and the trainer.

    Attributes:
        masked_slots: most masked positions of a pack (Q).
        lower_bound: packs that are proven necessary; `gap` more are used.
        input_files: how many there are; the manifests name them.
        bad_files: those that could not be read, so that their sequences are in no pack.
        histogram: sequences of each length; the first entry is length 1.
    """

    file_name = METADATA_NAME
    remedy = "write the folder again"
    line_per_entry = ("groups",)
    rare = ("bad_files",)
    shard_ending = ".tfrecord"
    planned: ClassVar[tuple[str, ...]] = (
        *("max_sequence_length", "max_predictions", "masked_slots", "depth"),
        *("seed", "algorithm", "shard_multiple"),
    )
    """Keys that are those of the plan."""

    format_version: Literal[2]
    tool_version: str
    max_sequence_length: Length
    max_predictions: Length
    masked_slots: Length
    depth: Length
    seed: int
    algorithm: str
    vocabulary: VocabularyInfo | None
    sequences: Positive
    packs: Positive
    tokens: Positive
    padding_tokens: Count
    efficiency: Share
    packing_factor: _Factor
    lower_bound: Count
    gap: int
    shard_multiple: Length
    input_files: Count
    bad_files: tuple[InputFile, ...] = ()
    groups: tuple[GroupShards, ...]
    histogram: tuple[Count, ...]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The metadata of a packed folder that gaudi-bert wrote (see `tfrecords.packed_folder.read_metadata` for any)."""
        path = cls.path_in(path)
        if not path.exists():
            refuse_row_tables(path.parent)
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
        figures = ("sequences", "packs", "tokens", "padding_tokens", "efficiency", "packing_factor", "lower_bound", "gap")
        shown = {name: getattr(self, name) for name in (*figures, "algorithm", "depth", "masked_slots")}
        return {**shown, "shards": len(self.shard_table), "bytes": int(self.shard_table.bytes.sum())}


class GroupManifest(Artefact):
    """group-GGGGG.json: one group of a packed folder, written after its shards.

    Attributes:
        counts: sequences of each length; the first entry is length 1.
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


class TableGroupManifest(Artefact):
    """One group of a folder of packed tables; the first of `counts` is that of length 1."""

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


class TableMetadata(_PackedMetadata):
    """metadata.json of a folder of packed tables; written last.

    Attributes:
        depth: most sequences a pack may hold; None for no limit.
        deepest_pack: most sequences that one does hold.
        aligned_columns, scalar_columns: the columns of the table and their types.
        rows: of the table; `sequences` come from them.
        row_lengths: those of a folder of several packed tables: this one holds what fits no shorter row.
    """

    file_name = f"{NOTES_NAME}/{METADATA_NAME}"
    remedy = "pack the table again"
    line_per_entry = ("inputs", "groups")
    omits_defaults = True
    shard_ending = ".parquet"

    format_version: Literal[2]
    format: Literal["table"]
    tool_version: str
    max_sequence_length: Length
    depth: Length | None
    deepest_pack: Positive
    seed: int
    algorithm: str
    algorithms_used: tuple[str, ...]
    aligned_columns: dict[str, str]
    scalar_columns: dict[str, str]
    rows: Positive
    sequences: Positive
    packs: Positive
    tokens: Positive
    padding_tokens: Count
    efficiency: Share
    packing_factor: _Factor
    lower_bound: Count
    gap: int
    too_long: TooLongRows
    shard_multiple: Length
    group_sequences: Positive
    group_bytes: Positive
    groups: tuple[GroupShards, ...]
    inputs: tuple[InputTable, ...]
    histogram: tuple[Count, ...]
    row_lengths: tuple[Length, ...] = ()

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The metadata of a folder of packed tables."""
        path = cls.path_in(path)
        if not path.is_file():
            refuse_row_tables(path.parent.parent)
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


# --- verification.json: the result of `verify`


class _Verified(Figures):
    """verification.json: the result of `verify`. It is stored in the verified folder, and only where the proof succeeded."""

    file_name = VERIFICATION_NAME
    remedy = "remove it and verify again"
    only_read: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_of(cls, path: Path, metadata: Any) -> Self:
        """The verification of a folder with this metadata, which a false one does not go with."""
        stored = cls.read(path)
        only_read = {key: getattr(stored, key) for key in cls.only_read}
        difference = first_difference(stored.as_json(), cls.of(metadata, **only_read).as_json(), "by metadata.json")
        if difference is not None:
            raise InputError(f"{cls.path_in(path)}: {difference}; {cls.remedy}")
        return stored

    @classmethod
    def of(cls, *args: Any, **only_read: Any) -> Self:
        """The verification of a folder with this metadata; `only_read` are the keys that only reading the data tells."""
        raise NotImplementedError


class Verification(_Verified):
    """The verification of packed TFRecords; the fingerprint is of all sequences, whatever their order.

    `bad_files` were skipped when the records were packed, and cannot be read.
    """

    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    input_files: Count
    bad_files: Count = 0
    fingerprint: _Fingerprint

    only_read = ("fingerprint",)
    rare = ("bad_files",)

    @classmethod
    def of(cls, metadata: Metadata, fingerprint: str) -> Self:
        """The verification of a folder with this metadata; only reading its data tells the fingerprint."""
        return cls(
            sequences=metadata.sequences,
            tokens=metadata.tokens,
            packs=metadata.packs,
            shards=len(metadata.shard_table),
            input_files=metadata.input_files,
            bad_files=len(metadata.bad_files),
            fingerprint=fingerprint,
        )


class TableVerification(_Verified):
    """The verification of packed tables."""

    file_name = f"{NOTES_NAME}/{VERIFICATION_NAME}"

    format: Literal["table"]
    rows: Count
    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    groups: Count
    columns: tuple[str, ...]
    too_long: TooLongRows

    @classmethod
    def of(cls, metadata: TableMetadata) -> Self:
        """The verification of a folder with this metadata: all of it follows."""
        copied = ("format", "rows", "sequences", "tokens", "packs", "too_long")
        columns = (*metadata.aligned_columns, *metadata.scalar_columns)
        counts: dict[str, Any] = {"groups": len(metadata.groups), "shards": len(metadata.shard_table)}
        return cls(**{key: getattr(metadata, key) for key in copied}, **counts, columns=columns)


class GroupVerification(Artefact):
    """verification-GGGGG.json: one group as a part of `verify` proved it; removed when verification.json is written.

    Attributes:
        signature_sha256: of the verification, which knows metadata.json and the names and sizes of the inputs.
        files_sha256: of the shards, the manifest and the inputs of the group as files: a copy or a change is another.
        lower_bound: packs that were proven to be necessary.
        fingerprint: of its sequences; None for tables.
        content_sha256: of all other keys, so that a file that was edited is not believed.
    """

    remedy = "remove it and verify this group again"
    omits_defaults = True

    format_version: Literal[1]
    signature_sha256: Sha256
    files_sha256: Sha256
    group: Count
    sequences: Count
    packs: Count
    tokens: Count
    lower_bound: Count
    fingerprint: _Fingerprint | None = None
    content_sha256: Sha256

    @classmethod
    def of(cls, **keys: Any) -> Self:
        """The proof with these keys, and the digest of them."""
        return cls(**keys, content_sha256=_content_sha256(keys))

    @property
    def is_as_written(self) -> bool:
        """Whether nobody changed a key since."""
        return _content_sha256(self.model_dump(exclude={"content_sha256"}, exclude_defaults=True)) == self.content_sha256


def _content_sha256(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode("ascii")).hexdigest()


# --- conversion.json: all packs of a folder are there as HDF5, in the folder `OUT` next to `OUT-conversion/`.
#
# Other trainers read every file of a folder, so nothing else is in that folder.


class Conversion(Artefact):
    """conversion.json, written last.

    Attributes:
        files: how many were written; shards without packs have none.
    """

    remedy = "convert the packs again"

    format: Literal["hdf5"]
    files: Count
    packs: Count
    sequences: Count


def conversion_path(out: Path) -> Path:
    """Where the conversion.json of the folder `out` is stored."""
    return out.with_name(f"{out.name}-conversion") / "conversion.json"
