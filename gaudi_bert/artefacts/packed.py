"""The files of a packed folder: metadata.json, a manifest per group, verification.json; of TFRecords and of tables.

metadata.json is written last, so a folder that has it is whole; the trainer takes every size from it. It holds totals, and
arrays for each group (up to format_version 1, an entry for each shard). A manifest is written after the shards of its group.
The files of packed tables have the same names; `format` tells them apart. `records.packed_folder` also reads the folders of
the vendor's deleted script (Habana Model-References, up to 1.14.0), which this project calls *the predecessor*.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import Self

from gaudi_bert.artefacts.base import Artefact, Count, Crc32c, Figures, Length, Positive, Sha256, Share, check_version
from gaudi_bert.artefacts.completion import first_difference
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.figures import PackingFigures
from gaudi_bert.common.files import read_file

METADATA_NAME = "metadata.json"
VERIFICATION_NAME = "verification.json"


def manifest_path(folder: Path, group: int) -> Path:
    """Where the manifest of `group` lies in a packed folder."""
    return folder / f"group-{group:05d}.json"


class InputFile(Artefact):
    """An input file: its name relative to RECORDS, size and CRC-32C of the file as it lies on the disk."""

    name: str
    bytes: Count
    crc32c: Crc32c


class InputTable(InputFile):
    """A table file and its number of rows; rows are numbered through all files in the order of their names."""

    rows: Count


class Shard(Artefact):
    """A packed file: its name in the folder, its packs, size and CRC-32C (None where the predecessor did not record it)."""

    name: str
    packs: Count
    bytes: Count
    crc32c: Crc32c | None = None


class GroupShards(Artefact):
    """The shards of a group in their order, and what its manifest is known by.

    Attributes:
        packs, bytes: of each shard.
        manifest_crc32c: of the manifest's bytes, which say the CRC of every shard.
    """

    packs: tuple[Count, ...] = Field(min_length=1)
    bytes: tuple[Count, ...]
    manifest_crc32c: Crc32c

    @model_validator(mode="after")
    def _of_the_same_shards(self) -> GroupShards:
        if len(self.packs) != len(self.bytes):
            raise ValueError(f"packs of {len(self.packs)} shards, bytes of {len(self.bytes)}")
        return self


@dataclass(frozen=True)
class ShardTable:
    """The shards of a packed folder as arrays, which hold 640,000 of them in few megabytes.

    Attributes:
        packs, bytes: of each shard, int64 [shards].
        group_firsts: the number of the first shard of each group, int64 [groups].
        ending: of the files, with its dot; "" where `given_names` are all that is known.
        given_names: of folders whose files are not named by group and shard (the predecessor's).
    """

    packs: IntArray
    bytes: IntArray
    group_firsts: IntArray
    ending: str
    given_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.packs)

    def place(self, shard: int) -> tuple[int, int]:
        """The group of a shard, and its number in this group."""
        group = int(np.searchsorted(self.group_firsts, shard, side="right")) - 1
        return group, shard - int(self.group_firsts[group])

    def name(self, shard: int) -> str:
        """Its file in the folder."""
        if self.given_names:
            return self.given_names[shard]
        group, number = self.place(shard)
        return f"packed-{group:05d}-{number:05d}{self.ending}"

    def packs_before(self, shard: int) -> int:
        """Packs of the earlier shards of its group."""
        _, number = self.place(shard)
        return int(self.packs[shard - number : shard].sum())

    @cached_property
    def group_sizes(self) -> IntArray:
        """Shards of each group, int64 [groups]."""
        return np.diff(self.group_firsts, append=len(self))

    def number(self, name: str) -> int | None:
        """The shard with this file; None where there is none."""
        if self.given_names:
            return self._given_numbers.get(name)
        match = re.fullmatch(r"packed-(\d{5,})-(\d{5,})(\.\w+)", name, re.ASCII)
        if match is None or int(match[1]) >= len(self.group_firsts) or int(match[2]) >= self.group_sizes[int(match[1])]:
            return None
        number = int(self.group_firsts[int(match[1])]) + int(match[2])
        return number if self.name(number) == name else None

    @cached_property
    def _given_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.given_names)}

    @classmethod
    def of_groups(cls, groups: Sequence[GroupShards], ending: str) -> ShardTable:
        """Of shards that are listed group by group."""
        sizes = np.array([len(group.packs) for group in groups], np.int64)
        packs, size = (
            np.fromiter(itertools.chain.from_iterable(getattr(group, key) for group in groups), np.int64, int(sizes.sum()))
            for key in ("packs", "bytes")
        )
        return cls(packs, size, np.cumsum(sizes) - sizes, ending)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> ShardTable:
        """Of shards that are listed one by one."""
        names = tuple(shard.name for shard in shards)
        packs, sizes = (np.array([getattr(shard, key) for shard in shards], np.int64) for key in ("packs", "bytes"))
        firsts = np.array([number for number, name in enumerate(names) if re.fullmatch(r"packed-\d{5,}-00000\.\w+", name)])
        table = cls(packs, sizes, firsts.astype(np.int64), Path(names[0]).suffix if names else "")
        is_numbered = len(firsts) > 0 and all(table.name(number) == name for number, name in enumerate(names))
        return table if is_numbered else replace(table, given_names=names, group_firsts=np.zeros(1, np.int64), ending="")


class VocabularyInfo(Artefact):
    """The vocabulary: its number of tokens, and the SHA-256 of the file in hexadecimal."""

    size: Positive
    sha256: str

    @classmethod
    def of(cls, path: Path) -> VocabularyInfo:
        """Of a vocab.txt: one token per line, and only a newline ends it."""
        try:
            data = read_file(path)
        except OSError as error:
            raise InputError(f"{path}: cannot read the vocabulary: {error.strerror}; check the path") from error
        # Tokens may hold other characters that Unicode counts as line breaks.
        return cls(size=len(data.removesuffix(b"\n").split(b"\n")), sha256=hashlib.sha256(data).hexdigest())


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

    shard_ending: ClassVar[str]
    """Of the files of the shards."""

    @cached_property
    def shard_table(self) -> ShardTable:
        """The shards as arrays."""
        groups, shards = getattr(self, "groups", None), getattr(self, "shards", None)
        return ShardTable.of_groups(groups, self.shard_ending) if isinstance(groups, tuple) else ShardTable.of(shards or ())

    def identity(self, encode: Callable[[Any], str] = json.dumps) -> str:
        """What tells these packs from others: the manifests of all groups, which know every byte, or all shards.

        `encode` writes the list out; PyTorch's states of earlier versions have another one than runs of training.
        """
        groups = getattr(self, "groups", None)
        if isinstance(groups, tuple):
            known: list[Any] = [group.manifest_crc32c for group in groups]
        else:
            known = [shard.model_dump() for shard in getattr(self, "shards", ())]
        return hashlib.sha256(encode(known).encode("utf-8")).hexdigest()


class PackedSums:
    """What metadata.json says of the groups of a folder, summed up one manifest at a time, in any order."""

    def __init__(self, format_version: int = 2) -> None:
        self._version = format_version
        self.sequences = self.packs = self.tokens = 0
        self._counts: IntArray = np.zeros(0, np.int64)
        self._groups: dict[int, GroupShards] = {}
        self._shards: dict[int, tuple[Shard, ...]] = {}

    def add(self, manifest: GroupManifest | TableGroupManifest, crc32c: int) -> None:
        """Add a group; `crc32c` is that of its manifest's bytes."""
        self.sequences += manifest.sequences
        self.packs += manifest.packs
        self.tokens += manifest.tokens
        counts = np.array(manifest.counts, np.int64)
        self._counts = self._counts + counts if self._counts.size else counts
        if self._version == 1:
            self._shards[manifest.group] = manifest.shards
            return
        packs, sizes = (tuple(getattr(shard, key) for shard in manifest.shards) for key in ("packs", "bytes"))
        self._groups[manifest.group] = GroupShards(packs=packs, bytes=sizes, manifest_crc32c=crc32c)

    def stored(self, max_sequence_length: int, lower_bound: int) -> dict[str, Any]:
        """The keys of metadata.json that follow from the groups."""
        slots = self.packs * max_sequence_length
        figures = PackingFigures(self.sequences, self.packs, self.tokens, slots, lower_bound)
        shards: dict[str, Any] = {"groups": tuple(self._groups[number] for number in sorted(self._groups))}
        if self._version == 1:
            shards = {"shards": tuple(itertools.chain.from_iterable(self._shards[group] for group in sorted(self._shards)))}
        histogram = tuple(self._counts.tolist())
        return {"format_version": self._version, **figures.stored(), **shards, "histogram": histogram}


class _MetadataHead(Artefact):
    """The first keys of metadata.json."""

    format_version: Literal[1, 2]
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
        inputs, shards: of format_version 1, which has neither `input_files` nor `groups`.
        histogram: sequences of each length; the first entry is length 1.
    """

    file_name = METADATA_NAME
    remedy = "write the folder again"
    line_per_entry = ("groups",)
    omits_defaults = True
    shard_ending = ".tfrecord"
    planned: ClassVar[tuple[str, ...]] = (
        *("max_sequence_length", "max_predictions", "masked_slots", "depth"),
        *("seed", "algorithm", "shard_multiple"),
    )
    """Keys that are those of the plan."""

    shard_multiple: Length
    input_files: Count | None = None
    inputs: tuple[InputFile, ...] | None = None
    shards: tuple[Shard, ...] | None = None
    groups: tuple[GroupShards, ...] | None = None
    histogram: tuple[Count, ...]

    @model_validator(mode="after")
    def _is_of_its_version(self) -> Metadata:
        check_version(self, {1: ("inputs", "shards"), 2: ("input_files", "groups")})
        return self

    @property
    def packed_files(self) -> int:
        """How many input files were packed."""
        return len(self.inputs or ()) if self.input_files is None else self.input_files

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The metadata of a packed folder that gaudi-bert wrote (see `records.packed_folder.read_metadata` for any)."""
        path = cls.path_in(path)
        if not path.exists():
            raise InputError(
                f"{path}: missing, so the folder is not (or not wholly) packed; run `gaudi-bert write` to its end"
            )
        if _is_of_table(path):
            raise InputError(
                f"{path}: describes a packed table, not packed TFRecords; gaudi_bert.pytorch reads packed tables"
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
        index_crc32c: of `group-GGGGG.index`, which holds the size of every record. Format_version 1 had neither.
    """

    remedy = "remove it and write the folder again"
    omits_defaults = True

    format_version: Literal[1, 2]
    plan_sha256: Sha256
    group: Count
    sequences: Positive
    packs: Positive
    tokens: Positive
    counts: tuple[Count, ...]
    inputs: tuple[InputFile, ...] | None = None
    index_crc32c: Crc32c | None = None
    shards: tuple[Shard, ...]

    @model_validator(mode="after")
    def _is_of_its_version(self) -> GroupManifest:
        check_version(self, {1: (), 2: ("inputs", "index_crc32c")})
        return self

    @property
    def source_sha256(self) -> str:
        """What it was made from."""
        return self.plan_sha256


def of_counts(counts: Sequence[int]) -> dict[str, Any]:
    """What a manifest says of the sequences of its group; `counts` are those of length 1, 2, ..."""
    tokens = sum(length * count for length, count in enumerate(counts, start=1))
    return {"sequences": sum(counts), "tokens": tokens, "counts": tuple(counts)}


class _Verified(Figures):
    """verification.json: the result of `verify`. It lies in the verified folder, and only where the proof succeeded."""

    file_name = VERIFICATION_NAME
    remedy = "remove it and verify again"
    only_read: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_of(cls, path: Path, metadata: Any) -> Self:
        """The verification of a folder with this metadata, which a false one does not go with."""
        stored = cls.read(path)
        kept = {key: getattr(stored, key) for key in cls.only_read}
        difference = first_difference(stored.as_json(), cls.of(metadata, **kept).as_json(), "by metadata.json")
        if difference is not None:
            raise InputError(f"{cls.path_in(path)}: {difference}; {cls.remedy}")
        return stored

    @classmethod
    def of(cls, *args: Any, **only_read: Any) -> Self:
        """The verification of a folder with this metadata; `only_read` are the keys that only reading the data tells."""
        raise NotImplementedError


class Verification(_Verified):
    """The verification of packed TFRecords.

    Attributes:
        fingerprint: of all sequences, whatever their order: 16 hexadecimal digits.
        balanced: whether the shards of each group differ by at most one pack.
        dropped_packs: packs of an epoch that 1 .. 32 workers cannot share evenly; our readers continue, others drop them.
        mixing: standard deviation of sequences per batch over that of independent draws; None for too few packs.
    """

    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    input_files: Count
    fingerprint: str = Field(pattern=r"^[0-9a-f]{16}$")
    balanced: bool
    most_dropped_packs: Count
    dropped_packs: dict[str, Count]
    mixing: float | None
    fairly_mixed: bool
    mixing_batch_packs: Positive

    only_read = ("fingerprint", "mixing")

    @classmethod
    def of(cls, metadata: Metadata, fingerprint: str, mixing: float | None) -> Self:
        """The verification of a folder with this metadata; only reading its data tells the fingerprint and the mixing."""
        table = metadata.shard_table
        dropped, batch = dropped_packs(metadata.packs), mixing_batch_packs(table.packs)
        batches = int((table.packs // batch).sum())
        mixing = mixing if tells_mixing(batch, batches) else None
        return cls(
            sequences=metadata.sequences,
            tokens=metadata.tokens,
            packs=metadata.packs,
            shards=len(table),
            input_files=metadata.packed_files,
            fingerprint=fingerprint,
            balanced=is_balanced(table),
            most_dropped_packs=max(dropped.values()),
            dropped_packs={str(workers): count for workers, count in dropped.items()},
            mixing=mixing,
            fairly_mixed=is_fair(mixing, batches),
            mixing_batch_packs=batch,
        )


# How even the shards are, and whether any batch is a fair sample of the data: the number of sequences in a batch of b packs
# varies as if the packs were drawn independently, whose standard deviation is that of one pack times the square root of b.
# A folder with one strategy per file (as the predecessor wrote) varies many times more.

_FAIR_RATIO = 1.2
_FEWEST_BATCHES = 20
_MOST_WORKERS = 32


def mixing_batch_packs(packs: IntArray) -> int:
    """The largest batch, a power of two up to 256, of which the median shard holds at least four; int64 [shards]."""
    median = int(np.sort(packs)[len(packs) // 2]) if len(packs) else 0
    return int(2 ** min(8, max(0, int(math.log2(max(1, median // 4))))))


def tells_mixing(batch_packs: int, batches: int) -> bool:
    """Whether so many batches can tell how well they are mixed."""
    return batch_packs >= 2 and batches >= _FEWEST_BATCHES


def is_fair(ratio: float | None, batches: int) -> bool:
    """Whether a ratio of deviations is at most 1.2, or within four standard errors of 1 where there are few batches."""
    return ratio is None or ratio <= max(_FAIR_RATIO, 1 + 4 / math.sqrt(2 * max(1, batches)))


def is_balanced(table: ShardTable) -> bool:
    """Whether the shards of each group hold equal packs, to within one."""
    if not len(table):
        return True
    most, least = (function.reduceat(table.packs, table.group_firsts) for function in (np.maximum, np.minimum))
    return bool((most - least <= 1).all())


def dropped_packs(packs: int) -> dict[int, int]:
    """Packs of an epoch that do not go round, by number of workers W = 1 .. 32, when rank r takes pack i with i mod W = r.

    Our trainer counts on into the next epoch and drops none of them; a reader that ends with the epoch drops them.
    """
    return {workers: packs % workers for workers in range(1, _MOST_WORKERS + 1)}


# --- packed tables


_Policy = Literal["error", "truncate", "split", "drop"]


class TooLongRows(Artefact):
    """What became of rows longer than a pack.

    Attributes:
        dropped_rows: how many of them are in no pack.
        dropped_tokens: tokens that are in no pack.
        added_sequences: sequences beyond one per row, from splitting.
    """

    policy: _Policy
    rows: Count
    dropped_rows: Count
    dropped_tokens: Count
    added_sequences: Count


class TableGroupManifest(Artefact):
    """One group of a folder of packed tables.

    Attributes:
        signature_sha256: of the settings and inputs that it was made from.
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
        """What it was made from."""
        return self.signature_sha256


class _TableMetadataHead(Artefact):
    """The first keys of the metadata.json of packed tables."""

    format_version: Literal[1, 2]
    format: Literal["table"]
    tool_version: str
    max_sequence_length: Length
    depth: Length | None
    deepest_pack: Positive
    seed: int
    algorithm: str
    algorithms_used: tuple[str, ...]
    index_only: bool
    keep_together: str | None
    aligned_columns: dict[str, str]
    scalar_columns: dict[str, str]
    rows: Positive


class TableMetadata(_PackedTotals, _TableMetadataHead):
    """metadata.json of a folder of packed tables; written last.

    Attributes:
        depth: most sequences a pack may hold; None for no limit.
        deepest_pack: most sequences that one does hold.
        keep_together: the column whose equal values stay in one pack.
        aligned_columns, scalar_columns: the columns of the table and their types.
        rows: of the table; `sequences` were made of them.
        groups, shards: format_version 1 has the number of groups, and the shards one by one.
    """

    file_name = METADATA_NAME
    remedy = "pack the table again"
    line_per_entry = ("inputs", "groups")
    omits_defaults = True
    shard_ending = ".parquet"

    too_long: TooLongRows
    shard_multiple: Length
    group_sequences: Positive
    group_bytes: Positive
    groups: Positive | tuple[GroupShards, ...]
    inputs: tuple[InputTable, ...]
    shards: tuple[Shard, ...] | None = None
    histogram: tuple[Count, ...]

    @model_validator(mode="after")
    def _is_of_its_version(self) -> TableMetadata:
        check_version(self, {1: ("shards",), 2: ()})
        if isinstance(self.groups, tuple) != (self.format_version == 2):
            raise ValueError(f"its groups are not as format_version {self.format_version} has them")
        return self

    @property
    def group_count(self) -> int:
        """How many groups there are."""
        return len(self.groups) if isinstance(self.groups, tuple) else self.groups

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The metadata of a folder of packed tables."""
        path = cls.path_in(path)
        if not path.is_file():
            raise InputError(
                f"{path}: missing, so the folder is not (or not wholly) packed; run `gaudi-bert pack` on its table again"
            )
        if not _is_of_table(path):
            raise InputError(f"{path}: describes packed TFRecords, not a packed table; give the records it was made from")
        return super().read(path)

    def summary(self) -> dict[str, Any]:
        """All but the long lists."""
        content = {name: value for name, value in self.as_json().items() if name not in ("inputs", "histogram")}
        return {**content, "groups": self.group_count, "shards": len(self.shard_table)}


class TableVerification(_Verified):
    """The verification of packed tables."""

    format: Literal["table"]
    rows: Count
    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    groups: Count
    columns: tuple[str, ...]
    index_only: bool
    too_long: TooLongRows

    @classmethod
    def of(cls, metadata: TableMetadata) -> Self:
        """The verification of a folder with this metadata: all of it follows."""
        copied = ("format", "rows", "sequences", "tokens", "packs", "index_only", "too_long")
        columns = () if metadata.index_only else (*metadata.aligned_columns, *metadata.scalar_columns)
        counts: dict[str, Any] = {"groups": metadata.group_count, "shards": len(metadata.shard_table)}
        return cls(**{key: getattr(metadata, key) for key in copied}, **counts, columns=columns)


class _Kind(Figures):
    """What tells packed tables from packed TFRecords."""

    format: str | None = None


def _is_of_table(path: Path) -> bool:
    """Whether a metadata.json is of packed tables, and not of packed TFRecords."""
    try:
        return _Kind.read(path).format == "table"
    except InputError:
        return False  # who reads it says what is wrong with it
