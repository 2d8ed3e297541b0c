"""The files of a packed folder: metadata.json, a manifest per group and verification.json; of TFRecords and of tables.

A manifest is written after the shards of its group, metadata.json last; those of packed tables are in `__gaudi_bert__`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

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
    manifest_path,
)
from gaudi_bert.artefacts.completion import read_signature, settings_path
from gaudi_bert.artefacts.mirrored_folder import fetch
from gaudi_bert.artefacts.shards import GroupShards, Shard, ShardTable
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, join_with_and
from gaudi_bert.common.features import PackingMetrics, describe_algorithm, describe_packing
from gaudi_bert.common.files import explain_os_errors
from gaudi_bert.common.progress import format_bytes, format_count
from gaudi_bert.config.values import matching

_Fingerprint = Annotated[str, matching("[0-9a-f]{16}", "16 digits from 0 to f")]


class GroupManifest(Artefact):
    """group-GGGGG.json: one group of a packed folder, written after its shards.

    Attributes:
        source_sha256: of the plan, or of the settings and inputs of a table.
        counts: sequences of each length; the first entry is length 1.
        inputs: of TFRecords, the files of the group.
        index_crc32c: of TFRecords, that of `group-GGGGG.index`, which states the size and checksum of every record.
        rows, lower_bound, deepest_pack, algorithm_used, too_long: of tables, whose groups are planned when they are read.
    """

    remedy = "remove it and pack again"
    omits_defaults = True

    format_version: Literal[2]
    source_sha256: Sha256
    group: Count
    sequences: Count
    packs: Count
    tokens: Count
    inputs: tuple[InputFile, ...] = ()
    index_crc32c: Crc32c | None = None
    rows: Count = 0
    lower_bound: Count = 0
    deepest_pack: Count = 0
    algorithm_used: str = ""
    too_long: TooLongRows | None = None
    counts: tuple[Count, ...]
    shards: tuple[Shard, ...]


def read_shard_crc32c(notes: Path, table: ShardTable, shard: int) -> int | None:
    """Return the CRC-32C that the manifest of its group states for a shard; None if there is no manifest in `notes`."""
    group, number = table.group_and_number(shard)
    path = manifest_path(notes, group)
    fetch(path)
    manifest = GroupManifest.read_if_present(path)
    return None if manifest is None else manifest.shards[number].crc32c


def of_counts(counts: Sequence[int]) -> dict[str, Any]:
    """Return a manifest's figures for the sequences of its group; `counts` are those of length 1, 2, ..."""
    tokens = sum(length * count for length, count in enumerate(counts, start=1))
    return {"sequences": sum(counts), "tokens": tokens, "counts": tuple(counts)}


class PackedMetadata(Artefact):
    """metadata.json of packs of any kind: the contract between packing and all readers of packs.

    Attributes:
        depth: most sequences that a pack may hold; None for no limit.
        lower_bound: packs that are proven necessary; `gap` more are used.
        histogram: sequences of each length; the first entry is length 1.
    """

    packs_name: ClassVar[str]
    shard_ending: ClassVar[str]

    format_version: Literal[2]
    tool_version: str
    max_sequence_length: Length
    depth: Length | None
    seed: int
    algorithm: str
    sequences: Positive
    packs: Positive
    tokens: Positive
    padding_tokens: Count
    efficiency: Share
    packing_factor: float = Field(ge=1)
    lower_bound: Count
    gap: int
    shard_multiple: Length
    groups: tuple[GroupShards, ...]
    histogram: tuple[Count, ...]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read the metadata of a folder of such packs; any other folder is refused by what it holds."""
        path = cls.path_in(path)
        with explain_os_errors(path, "read"):
            is_packed = path.is_file()
        if not is_packed:
            folder = path.parents[cls.file_name.count("/")]
            refuse_row_tables(folder)
            for other in (Metadata, TableMetadata):
                if other.path_in(folder).is_file():
                    raise InputError(f"{folder}: holds {other.packs_name}, not {cls.packs_name}; give a folder of those")
            raise InputError(f"{path}: missing, so the folder is not packed; run `gaudi-bert pack` to its end")
        return super().read(path)

    @cached_property
    def shard_table(self) -> ShardTable:
        """The shards as arrays."""
        return ShardTable.of_groups(self.groups, self.shard_ending)

    def identity(self, encode: Callable[[Any], str] = json.dumps) -> str:
        """Return the digest of what tells these packs from others: the manifests of all groups, which know every byte.

        `encode` writes it out, for PyTorch in its own way.
        """
        return hashlib.sha256(encode([group.manifest_crc32c for group in self.groups]).encode("utf-8")).hexdigest()


class Metadata(PackedMetadata):
    """metadata.json of packed TFRecords.

    Attributes:
        masked_slots: most masked positions of a pack (Q).
        input_files: how many there are; the manifests name them.
        bad_files: those that could not be read, so that their sequences are in no pack.
    """

    file_name = METADATA_NAME
    remedy = "write the folder again"
    line_per_entry = ("groups",)
    rare = ("bad_files",)
    packs_name, shard_ending = "packed TFRecords", ".tfrecord"
    planned: ClassVar[tuple[str, ...]] = (
        *("max_sequence_length", "max_predictions", "masked_slots", "depth"),
        *("seed", "algorithm", "shard_multiple"),
    )
    """Keys that are those of the plan."""

    depth: Length
    max_predictions: Length
    masked_slots: Length
    vocabulary: VocabularyInfo | None
    input_files: Count
    bad_files: tuple[InputFile, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Return the totals, without the list of every shard."""
        figures = ("sequences", "packs", "tokens", "padding_tokens", "efficiency", "packing_factor", "lower_bound", "gap")
        shown = {name: getattr(self, name) for name in (*figures, "algorithm", "depth", "masked_slots")}
        return {**shown, "shards": len(self.shard_table), "bytes": int(self.shard_table.bytes.sum())}

    def lines(self, out: Path | None = None, verbose: bool = False) -> list[str]:
        """Return the packs for people, and that they were written to `out`; where `verbose`, also the algorithm."""
        table, lines = self.shard_table, describe_packing(self)
        if out is not None:
            lines.append(f"Wrote {out} ({format_count(len(table), 'shard')}, {format_bytes(int(table.bytes.sum()))})")
        return [*lines, describe_algorithm(self.algorithm, (), self.depth)] if verbose else lines


class TableMetadata(PackedMetadata):
    """metadata.json of a packed table.

    Attributes:
        deepest_pack: most sequences that a pack does hold.
        aligned_columns, scalar_columns: the columns of the table and their types.
        rows: of the table; `sequences` come from them.
        row_lengths: those of a folder of several packed tables: this one holds what fits no shorter row.
    """

    file_name = f"{NOTES_NAME}/{METADATA_NAME}"
    remedy = "pack the table again"
    line_per_entry = ("inputs", "groups")
    omits_defaults = True
    packs_name, shard_ending = "a packed table", ".parquet"

    format: Literal["table"]
    deepest_pack: Positive
    algorithms_used: tuple[str, ...]
    aligned_columns: dict[str, str]
    scalar_columns: dict[str, str]
    rows: Positive
    too_long: TooLongRows
    group_sequences: Positive
    group_bytes: Positive
    inputs: tuple[InputTable, ...]
    row_lengths: tuple[Length, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Return all but the long lists."""
        content = {name: value for name, value in self.as_json().items() if name not in ("inputs", "histogram")}
        return {**content, "groups": len(self.groups), "shards": len(self.shard_table)}

    def lines(self, out: Path | None = None, verbose: bool = False) -> list[str]:
        """Return the lines for people, of the folder `out`."""
        lines = describe_packing(self, None if self.row_lengths else self.rows)
        if out is not None:
            lines.append(f"Wrote {out} ({format_count(len(self.shard_table), 'shard')})")
        if verbose:
            lines.append(describe_algorithm(self.algorithm, self.algorithms_used, self.deepest_pack))
        if self.gap and self.algorithm != "optimal":
            saved = f"{format_count(self.gap, 'pack')} might be saved"
            lines.append(f"{saved}: --algorithm optimal looks for them, which takes a few seconds per group")
        return [*lines, self.too_long.line()]


class PackedSums:
    """The figures of a folder's groups for metadata.json, summed up one manifest at a time, in any order."""

    def __init__(self) -> None:
        self.sequences = self.packs = self.tokens = self.rows = self.lower_bound = self.deepest_pack = 0
        self.input_names: list[str] = []
        self.algorithms: set[str] = set()
        self.too_long = {"rows": 0, "dropped_rows": 0, "dropped_tokens": 0, "added_sequences": 0}
        self._counts: IntArray = np.zeros(0, np.int64)
        self._groups: dict[int, GroupShards] = {}

    def add(self, manifest: GroupManifest, crc32c: int = 0) -> None:
        """Add a group; `crc32c` is that of its manifest's bytes."""
        for key in ("sequences", "packs", "tokens", "rows", "lower_bound"):
            setattr(self, key, getattr(self, key) + getattr(manifest, key))
        self.deepest_pack = max(self.deepest_pack, manifest.deepest_pack)
        self.input_names += [file.name for file in manifest.inputs]
        self.algorithms.add(manifest.algorithm_used)
        if manifest.too_long is not None:
            for key in self.too_long:
                self.too_long[key] += getattr(manifest.too_long, key)
        counts = np.array(manifest.counts, np.int64)
        self._counts = self._counts + counts if self._counts.size else counts
        packs, sizes = (tuple(getattr(shard, key) for shard in manifest.shards) for key in ("packs", "bytes"))
        self._groups[manifest.group] = GroupShards(packs=packs, bytes=sizes, manifest_crc32c=crc32c)

    def stored(self, max_sequence_length: int, lower_bound: int) -> dict[str, Any]:
        """Return the keys of metadata.json that follow from the groups of any kind."""
        slots = self.packs * max_sequence_length
        figures = PackingMetrics(self.sequences, self.packs, self.tokens, slots, lower_bound)
        groups = tuple(self._groups[number] for number in sorted(self._groups))
        return {"format_version": 2, **figures.to_json_fields(), "groups": groups, "histogram": tuple(self._counts.tolist())}


# --- what packs a folder holds: TFRecords, a table, tables of several lengths of rows; or packs that are not finished


class RowTables(Artefact):
    """row_lengths.json of a folder of packed tables, `rows-512` and so on, one for each length of rows; written last."""

    file_name = f"{NOTES_NAME}/row_lengths.json"
    remedy = "pack the table again"

    format_version: Literal[1]
    format: Literal["row_lengths"]
    row_lengths: Annotated[tuple[Length, ...], Field(min_length=1)]


def row_table_path(folder: Path, length: int) -> Path:
    """The packed table of rows of one of the lengths of a folder."""
    return folder / f"rows-{length}"


def refuse_row_tables(folder: Path) -> None:
    """Refuse a folder of rows of several lengths, for what takes one packed folder."""
    tables = RowTables.read_if_present(folder)
    if tables is not None:
        lengths = join_with_and(f"{length:,}" for length in tables.row_lengths)
        table = row_table_path(folder, tables.row_lengths[0])
        raise InputError(f"{folder}: holds rows of {lengths}; give the packed table of one length, such as {table}")


PackKind = Literal["records", "table"]
_COMMANDS = {"write": "gaudi-bert write` or `pack", "pack-table": "gaudi-bert pack", "pack-rows": "gaudi-bert pack"}
"""What makes packs, by the name of the stage in its settings."""


def pack_kind(folder: Path) -> PackKind | None:
    """Return what packs a folder holds, by the metadata there; None for none.

    Raises:
        InputError: their writing was begun and has not been finished.
    """
    kind = next((kind for kind, path in _metadata_paths(folder).items() if path.exists()), None)
    if kind is None and not RowTables.path_in(folder).exists():
        for path in filter(Path.is_file, _settings_paths(folder)):
            try:
                command = _COMMANDS.get(read_signature(path).stage)
            except InputError:  # the user's own file of this name
                continue
            if command is not None:
                raise InputError(f"{folder}: packing has not finished; run the `{command}` that began it again, to its end")
    return kind


def files_that_tell_kinds(folder: Path) -> tuple[Path, ...]:
    """Return each file that `pack_kind` looks for, to be fetched before it is asked about a folder in a store."""
    return *_metadata_paths(folder).values(), RowTables.path_in(folder), *_settings_paths(folder)


def _metadata_paths(folder: Path) -> dict[PackKind, Path]:
    return {"table": folder / NOTES_NAME / METADATA_NAME, "records": folder / METADATA_NAME}


def _settings_paths(folder: Path) -> tuple[Path, Path]:
    """Return where the settings of packs are stored, of TFRecords and of tables; the metadata are written last."""
    return settings_path(folder, folder / METADATA_NAME), settings_path(folder, RowTables.path_in(folder))


# --- verification.json: the result of `verify`, of the folder or of a part of it


class Verification(Figures):
    """verification.json: what was proven of a packed folder when it was last verified; stored only where it succeeded.

    Attributes:
        packs_sha256: the identity of the packs.
        lower_bound: packs that were proven to be necessary.
        fingerprint: of TFRecords: of all sequences, whatever their order.
        bad_files: were skipped when the records were packed, and cannot be read.
    """

    file_name = VERIFICATION_NAME
    remedy = "remove it and verify again"
    omits_defaults = True

    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    groups: Count
    packs_sha256: Sha256
    lower_bound: Count
    input_files: Count = 0
    bad_files: Count = 0
    fingerprint: _Fingerprint | None = None
    rows: Count = 0
    columns: tuple[str, ...] = ()
    too_long: TooLongRows | None = None

    @classmethod
    def read_of(cls, path: Path, metadata: PackedMetadata) -> Self:
        """Read the verification of a folder with this metadata; one of other packs is refused."""
        stored = cls.read(path)
        if stored.packs_sha256 != metadata.identity() or stored.sequences != metadata.sequences:
            raise InputError(f"{cls.path_in(path)}: is of other packs than metadata.json; {cls.remedy}")
        return stored

    def lines(self) -> list[str]:
        """Return the lines for people."""
        if self.too_long is None:
            return [f"every one of {format_count(self.sequences, 'sequence')} is in the packs exactly once"]
        sequences, packs = format_count(self.sequences, "sequence"), format_count(self.packs, "pack")
        counted = f"{format_count(self.rows, 'row')}, {sequences} in {packs}"
        columns = ", ".join(self.columns)
        return [counted, f"every sequence is there exactly once, value for value in {columns}", self.too_long.line()]


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

    def lines(self) -> list[str]:
        """Return for people what was written."""
        return [f"{self.format}: {format_count(self.packs, 'pack')} in {format_count(self.files, 'file')}"]


def conversion_path(out: Path) -> Path:
    """Return where the conversion.json of the folder `out` is stored."""
    return out.with_name(f"{out.name}-conversion") / "conversion.json"
