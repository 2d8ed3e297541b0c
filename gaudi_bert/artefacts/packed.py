"""The JSON files of a packed folder, for packed TFRecords and packed tables.

Each group has a manifest, which is written after the shards of the group. `metadata.json` describes the folder and is
written after all groups. `verification.json` is the result of `verify`. In a packed table, these files are in the sub-folder
`__gaudi_bert__`.
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
    """The content of group-GGGGG.json, the manifest of one group. It is written after the shards of the group.

    The attributes from `rows` to `too_long` are only used for tables, because the groups of a table are planned when they
    are read. `inputs` and `index_crc32c` are only used for TFRecords.

    Attributes:
        source_sha256: The SHA-256 of the plan, or of the settings and the inputs of a table.
        group: The number of the group.
        sequences: The number of sequences.
        packs: The number of packs.
        tokens: The number of non-padding tokens.
        inputs: The input files of the group.
        index_crc32c: The CRC-32C of `group-GGGGG.index`, which states the size and the checksum of every record.
        rows: The number of table rows.
        lower_bound: The proven minimum number of packs.
        deepest_pack: The largest number of sequences in a pack.
        algorithm_used: The algorithm that produced the packs.
        too_long: The rows that were longer than a pack.
        counts: The number of sequences of length 1, 2, ...
        shards: The shards of the group.
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
    """Return the CRC-32C of a shard as its group's manifest states it, or None if there is no manifest.

    Args:
        notes: The folder of the manifests.
        table: The shards of the packed folder.
        shard: The number of the shard.
    """
    group, number = table.group_and_number(shard)
    path = manifest_path(notes, group)
    fetch(path)
    manifest = GroupManifest.read_if_present(path)
    return None if manifest is None else manifest.shards[number].crc32c


def of_counts(counts: Sequence[int]) -> dict[str, Any]:
    """Return the manifest keys `sequences`, `tokens` and `counts` for the numbers of sequences of length 1, 2, ..."""
    tokens = sum(length * count for length, count in enumerate(counts, start=1))
    return {"sequences": sum(counts), "tokens": tokens, "counts": tuple(counts)}


class PackedMetadata(Artefact):
    """The content of metadata.json that all packed folders have. All readers of packs rely on it.

    Attributes:
        packs_name: The name of this kind of packs, for messages.
        shard_ending: The suffix of the shards.
        tool_version: The version of this package.
        max_sequence_length: The number of tokens in a pack, including padding.
        depth: The maximum number of sequences in a pack, or None for no limit.
        seed: The seed of the packing.
        algorithm: The requested algorithm.
        sequences: The number of sequences.
        packs: The number of packs.
        tokens: The number of non-padding tokens.
        padding_tokens: The number of padding tokens.
        efficiency: The share of non-padding tokens in all token slots.
        packing_factor: The mean number of sequences per pack.
        lower_bound: The proven minimum number of packs.
        gap: The number of packs above the lower bound.
        shard_multiple: The number of shards of each group is a multiple of this.
        groups: The shards of each group.
        histogram: The number of sequences of length 1, 2, ...
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
        """Read the metadata of a packed folder.

        Args:
            path: The folder, or its metadata file.

        Raises:
            InputError: The folder has packs of another kind, packing has not finished, or the file is invalid. The message
                says which of these it is.
        """
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
        """The shards of all groups, as arrays."""
        return ShardTable.of_groups(self.groups, self.shard_ending)

    def identity(self, encode: Callable[[Any], str] = json.dumps) -> str:
        """Return a SHA-256 that differs between different packs.

        It is computed from the checksums of all manifests, because a manifest contains the checksums of all its shards.

        Args:
            encode: Converts the list of checksums to text, by default to JSON.
        """
        return hashlib.sha256(encode([group.manifest_crc32c for group in self.groups]).encode("utf-8")).hexdigest()


class Metadata(PackedMetadata):
    """The content of metadata.json for packed TFRecords.

    Attributes:
        max_predictions: P, the maximum number of masked positions in a sequence.
        masked_slots: Q, the number of masked slots of a pack.
        vocabulary: The vocabulary of the records, or None if there is none.
        input_files: The number of input files. The manifests contain their names.
        bad_files: The input files that could not be read. Their sequences are in no pack.
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
    """The keys whose values are copied from the plan."""

    depth: Length
    max_predictions: Length
    masked_slots: Length
    vocabulary: VocabularyInfo | None
    input_files: Count
    bad_files: tuple[InputFile, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Return the totals without the lists of groups and shards."""
        figures = ("sequences", "packs", "tokens", "padding_tokens", "efficiency", "packing_factor", "lower_bound", "gap")
        shown = {name: getattr(self, name) for name in (*figures, "algorithm", "depth", "masked_slots")}
        return {**shown, "shards": len(self.shard_table), "bytes": int(self.shard_table.bytes.sum())}

    def lines(self, out: Path | None = None, verbose: bool = False) -> list[str]:
        """Return the metrics as lines of text.

        Args:
            out: The packed folder. If it is given, a line states what was written there.
            verbose: Also describe the algorithm.
        """
        table, lines = self.shard_table, describe_packing(self)
        if out is not None:
            lines.append(f"Wrote {out} ({format_count(len(table), 'shard')}, {format_bytes(int(table.bytes.sum()))})")
        return [*lines, describe_algorithm(self.algorithm, (), self.depth)] if verbose else lines


class TableMetadata(PackedMetadata):
    """The content of metadata.json for a packed table.

    Attributes:
        deepest_pack: The largest number of sequences in a pack.
        algorithms_used: The algorithms that produced the packs of the groups.
        aligned_columns: The types of the columns that have one value for each token, by name.
        scalar_columns: The types of the columns that have one value for each sequence, by name.
        rows: The number of rows of the input. `sequences` is the number of sequences that were made from them.
        too_long: The rows that were longer than a pack.
        group_sequences: The target number of sequences in a group.
        group_bytes: The target size of a group in bytes.
        inputs: The input files.
        row_lengths: If the table is one of several with different row lengths, the lengths of all of them. This table then
            contains the sequences that do not fit into a shorter row.
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
        """Return the content without the long lists, and the numbers of groups and shards."""
        content = {name: value for name, value in self.as_json().items() if name not in ("inputs", "histogram")}
        return {**content, "groups": len(self.groups), "shards": len(self.shard_table)}

    def lines(self, out: Path | None = None, verbose: bool = False) -> list[str]:
        """Return the metrics as lines of text.

        Args:
            out: The packed folder. If it is given, a line states what was written there.
            verbose: Also describe the algorithm.
        """
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
    """The totals of a packed folder, to which group manifests are added one by one, in any order.

    Attributes:
        sequences: The number of sequences.
        packs: The number of packs.
        tokens: The number of non-padding tokens.
        rows: The number of table rows.
        lower_bound: The sum of the groups' lower bounds.
        deepest_pack: The largest number of sequences in a pack.
        input_names: The names of the input files.
        algorithms: The algorithms that produced the packs.
        too_long: The totals of the rows that were longer than a pack.
    """

    def __init__(self) -> None:
        self.sequences = self.packs = self.tokens = self.rows = self.lower_bound = self.deepest_pack = 0
        self.input_names: list[str] = []
        self.algorithms: set[str] = set()
        self.too_long = {"rows": 0, "dropped_rows": 0, "dropped_tokens": 0, "added_sequences": 0}
        self._counts: IntArray = np.zeros(0, np.int64)
        self._groups: dict[int, GroupShards] = {}

    def add(self, manifest: GroupManifest, crc32c: int = 0) -> None:
        """Add a group. `crc32c` is the CRC-32C of the bytes of its manifest."""
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
        """Return the keys of metadata.json that follow from the group manifests.

        Args:
            max_sequence_length: The number of tokens in a pack, including padding.
            lower_bound: The proven minimum number of packs.
        """
        slots = self.packs * max_sequence_length
        figures = PackingMetrics(self.sequences, self.packs, self.tokens, slots, lower_bound)
        groups = tuple(self._groups[number] for number in sorted(self._groups))
        return {"format_version": 2, **figures.to_json_fields(), "groups": groups, "histogram": tuple(self._counts.tolist())}


# --- finding out which kind of packs a folder contains: TFRecords, a table, tables with several row lengths, or none


class RowTables(Artefact):
    """The content of row_lengths.json, which is the last file of a folder that contains packed tables with several row
    lengths.

    The tables are the sub-folders `rows-512` and so on.

    Attributes:
        row_lengths: The row length of each table.
    """

    file_name = f"{NOTES_NAME}/row_lengths.json"
    remedy = "pack the table again"

    format_version: Literal[1]
    format: Literal["row_lengths"]
    row_lengths: Annotated[tuple[Length, ...], Field(min_length=1)]


def row_table_path(folder: Path, length: int) -> Path:
    """Return the path of the packed table with the given row length."""
    return folder / f"rows-{length}"


def refuse_row_tables(folder: Path) -> None:
    """Check that a folder does not contain packed tables with several row lengths.

    Raises:
        InputError: It does. The message names one of the tables, because the caller can use only one.
    """
    tables = RowTables.read_if_present(folder)
    if tables is not None:
        lengths = join_with_and(f"{length:,}" for length in tables.row_lengths)
        table = row_table_path(folder, tables.row_lengths[0])
        raise InputError(f"{folder}: holds rows of {lengths}; give the packed table of one length, such as {table}")


PackKind = Literal["records", "table"]
_COMMANDS = {"write": "gaudi-bert write` or `pack", "pack-table": "gaudi-bert pack", "pack-rows": "gaudi-bert pack"}
"""The commands that write packs, by the stage name in their settings file."""


def pack_kind(folder: Path) -> PackKind | None:
    """Return the kind of packs in a folder, or None if it contains none. Only the presence of the metadata is checked.

    Raises:
        InputError: Packing was started in the folder but has not finished.
    """
    kind = next((kind for kind, path in _metadata_paths(folder).items() if path.exists()), None)
    if kind is None and not RowTables.path_in(folder).exists():
        for path in filter(Path.is_file, _settings_paths(folder)):
            try:
                command = _COMMANDS.get(read_signature(path).stage)
            except InputError:  # not a settings file of this package, but a file of the user with the same name
                continue
            if command is not None:
                raise InputError(f"{folder}: packing has not finished; run the `{command}` that began it again, to its end")
    return kind


def files_that_tell_kinds(folder: Path) -> tuple[Path, ...]:
    """Return the files whose presence `pack_kind` checks. For a folder in a store, the caller must download them first."""
    return *_metadata_paths(folder).values(), RowTables.path_in(folder), *_settings_paths(folder)


def _metadata_paths(folder: Path) -> dict[PackKind, Path]:
    """Return the path of the metadata for each kind of packs."""
    return {"table": folder / NOTES_NAME / METADATA_NAME, "records": folder / METADATA_NAME}


def _settings_paths(folder: Path) -> tuple[Path, Path]:
    """Return the paths of the settings file for TFRecords and for tables."""
    return settings_path(folder, folder / METADATA_NAME), settings_path(folder, RowTables.path_in(folder))


# --- verification.json: the result of `verify` for a folder or a part of it


class Verification(Figures):
    """The content of verification.json, which is written only if the verification succeeded.

    Attributes:
        sequences: The number of sequences.
        tokens: The number of non-padding tokens.
        packs: The number of packs.
        shards: The number of shards.
        groups: The number of groups.
        packs_sha256: The identity of the packs (`PackedMetadata.identity`).
        lower_bound: The proven minimum number of packs.
        input_files: The number of input files.
        bad_files: The number of input files that were skipped because they cannot be read.
        fingerprint: The fingerprint of all sequences, independent of their order. Only for TFRecords.
        rows: The number of table rows.
        columns: The columns whose values were compared. Only for tables.
        too_long: The rows that were longer than a pack. Only for tables.
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
        """Read the verification of a packed folder.

        Args:
            path: The verification file, or its folder.
            metadata: The metadata of the packed folder.

        Raises:
            InputError: The file cannot be read, is invalid, or is the verification of other packs.
        """
        stored = cls.read(path)
        if stored.packs_sha256 != metadata.identity() or stored.sequences != metadata.sequences:
            raise InputError(f"{cls.path_in(path)}: is of other packs than metadata.json; {cls.remedy}")
        return stored

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        if self.too_long is None:
            return [f"every one of {format_count(self.sequences, 'sequence')} is in the packs exactly once"]
        sequences, packs = format_count(self.sequences, "sequence"), format_count(self.packs, "pack")
        counted = f"{format_count(self.rows, 'row')}, {sequences} in {packs}"
        columns = ", ".join(self.columns)
        return [counted, f"every sequence is there exactly once, value for value in {columns}", self.too_long.line()]


# --- conversion.json: the result of `convert`
#
# Other trainers read every file in the folder `OUT` of HDF5 files, so this file is in the folder `OUT-conversion` next to
# it.


class Conversion(Artefact):
    """The content of conversion.json, which is written after all HDF5 files.

    Attributes:
        format: The format of the files.
        files: The number of files. Shards without packs produce no file.
        packs: The number of packs.
        sequences: The number of sequences.
    """

    remedy = "convert the packs again"

    format: Literal["hdf5"]
    files: Count
    packs: Count
    sequences: Count

    def lines(self) -> list[str]:
        """Return the result as one line of text."""
        return [f"{self.format}: {format_count(self.packs, 'pack')} in {format_count(self.files, 'file')}"]


def conversion_path(out: Path) -> Path:
    """Return the path of the conversion.json that belongs to the folder `out` of HDF5 files."""
    return out.with_name(f"{out.name}-conversion") / "conversion.json"
