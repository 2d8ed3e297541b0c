"""The JSON files of packed folders, for packed TFRecords and packed tables.

Each group has a manifest, which is written after the shards of the group. `metadata.json` describes the folder and is
written after all groups. In a packed table, these files are in the sub-folder `__gaudi_bert__`. `verify` writes
`verification.json`, and `convert` writes `conversion.json`. `detect_pack_format` determines which format a folder contains.
"""

from __future__ import annotations

import hashlib
import json
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
    ExtensibleArtefact,
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
from gaudi_bert.artefacts.mirrored_folder import download_missing_files
from gaudi_bert.artefacts.shards import GroupShards, Shard, ShardTable
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, join_with_and
from gaudi_bert.common.features import PackingMetrics, describe_algorithm, describe_packing
from gaudi_bert.common.files import explain_os_errors
from gaudi_bert.common.progress import format_bytes, format_count
from gaudi_bert.config.values import require_pattern


class GroupManifest(Artefact):
    """The content of group-GGGGG.json, the manifest that describes the shards of one group of packs. It is written after the
    shards.

    Attributes:
        source_sha256: The SHA-256 of the plan, or of the settings and the inputs of a table.
        group: The number of the group.
        sequences: The number of sequences.
        packs: The number of packs.
        tokens: The number of non-padding tokens.
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
    counts: tuple[Count, ...]
    shards: tuple[Shard, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the content as JSON values, with the two longest lists at the end."""
        content = super().as_json()
        content |= {key: content.pop(key) for key in ("counts", "shards")}
        return content

    @classmethod
    def read_shard_crc32c(cls, folder: Path, table: ShardTable, shard: int) -> int | None:
        """Return the CRC-32C of a shard from the manifest of its group. Return None if there is no manifest.

        Args:
            folder: The folder of the manifests.
            table: The shards of the packed folder.
            shard: The number of the shard.
        """
        group, number = table.locate_shard(shard)
        path = manifest_path(folder, group)
        download_missing_files(path)
        manifest = cls.read_if_present(path)
        return None if manifest is None else manifest.shards[number].crc32c


class RecordManifest(GroupManifest):
    """The manifest of one group of packed TFRecords.

    Attributes:
        inputs: The input files of the group.
        index_crc32c: The CRC-32C of `group-GGGGG.index`, which states the size and the checksum of every record.
    """

    inputs: tuple[InputFile, ...]
    index_crc32c: Crc32c


class TableManifest(GroupManifest):
    """The manifest of one group of a packed table. It also states how the group was packed, because tables have no plan
    file.

    Attributes:
        rows: The number of table rows.
        lower_bound: The proven minimum number of packs.
        deepest_pack: The largest number of sequences in a pack.
        algorithm_used: The algorithm that produced the packs.
        too_long: The rows that were longer than a pack.
    """

    rows: Count
    lower_bound: Count = 0
    deepest_pack: Count = 0
    algorithm_used: str = ""
    too_long: TooLongRows


class PackedMetadata(Artefact):
    """The keys of metadata.json that are the same for packed TFRecords and packed tables.

    Attributes:
        packs_name: The name of this kind of packs, for messages.
        shard_ending: The suffix of the shards.
        manifest_type: The type of the group manifests.
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
    manifest_type: ClassVar[type[GroupManifest]]

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
        path = cls.json_path_in(path)
        with explain_os_errors(path, "read"):
            is_packed = path.is_file()
        if not is_packed:
            folder = path.parents[cls.file_name.count("/")]
            check_no_row_tables(folder)
            for other in (RecordMetadata, TableMetadata):
                if other.json_path_in(folder).is_file():
                    raise InputError(
                        f"{folder}: expected {cls.packs_name}, found {other.packs_name}; pass a folder that contains "
                        f"{cls.packs_name}"
                    )
            raise InputError(
                f"{path}: the file is missing, so packing has not finished; run `gaudi-bert pack` until it finishes"
            )
        return super().read(path)

    @cached_property
    def shard_table(self) -> ShardTable:
        """The number of packs and the size of every shard, as arrays."""
        return ShardTable.from_groups(self.groups, self.shard_ending)

    def compute_packs_sha256(self) -> str:
        """Return a SHA-256 that identifies the content of all packs.

        It is computed from the checksums of the manifests, which contain the checksums of all shards.
        """
        return hashlib.sha256(json.dumps([group.manifest_crc32c for group in self.groups]).encode()).hexdigest()

    def format_lines(self, out: Path | None = None, verbose: bool = False) -> list[str]:
        """Return lines of text with the packing metrics.

        Args:
            out: The packed folder. If it is given, add a line about the files that were written to it.
            verbose: Also describe the algorithm.
        """
        table, lines = self.shard_table, describe_packing(self, self.input_rows)
        if out is not None:
            lines.append(f"Wrote {out} ({format_count(len(table), 'shard')}, {format_bytes(int(table.bytes.sum()))})")
        return [*lines, self.describe_algorithm()] if verbose else lines

    @property
    def input_rows(self) -> int | None:
        """The number of table rows in these packs. It is None if the source is not a table, or if other packed tables
        contain some of its rows.
        """
        return None

    def describe_algorithm(self) -> str:
        """Return a line of text that names the packing algorithm and the depth of the packs."""
        return describe_algorithm(self.algorithm, (), self.depth)


class RecordMetadata(PackedMetadata):
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
    packs_name, shard_ending, manifest_type = "packed TFRecords", ".tfrecord", RecordManifest
    # `write` copies these keys from the plan to the metadata.json of the packed folder.
    planned: ClassVar[tuple[str, ...]] = (
        *("max_sequence_length", "max_predictions", "masked_slots", "depth"),
        *("seed", "algorithm", "shard_multiple"),
    )

    depth: Length
    max_predictions: Length
    masked_slots: Length
    vocabulary: VocabularyInfo | None
    input_files: Count
    bad_files: tuple[InputFile, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Return the packing metrics of the folder, without the lists of groups and shards."""
        keys = (
            *("sequences", "packs", "tokens", "padding_tokens", "efficiency", "packing_factor", "lower_bound", "gap"),
            *("algorithm", "depth", "masked_slots"),
        )
        return {
            **{key: getattr(self, key) for key in keys},
            "shards": len(self.shard_table),
            "bytes": int(self.shard_table.bytes.sum()),
        }


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
    packs_name, shard_ending, manifest_type = "a packed table", ".parquet", TableManifest

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
        """Return the content of metadata.json with the numbers of groups and shards, but without the longest lists."""
        content = {name: value for name, value in self.as_json().items() if name not in ("inputs", "histogram")}
        return {**content, "groups": len(self.groups), "shards": len(self.shard_table)}

    def format_lines(self, out: Path | None = None, verbose: bool = False) -> list[str]:
        """Return lines of text with the packing metrics and the handling of rows that were too long. If another algorithm
        might need fewer packs, recommend it.
        """
        lines = super().format_lines(out, verbose)
        if self.gap and self.algorithm != "optimal":
            lines.append(
                f"{format_count(self.gap, 'pack')} might be saved: pass --algorithm optimal, which takes a few seconds per "
                "group"
            )
        return [*lines, self.too_long.format_line()]

    @property
    def input_rows(self) -> int | None:
        """The number of table rows in these packs, or None if other packed tables contain some of the rows."""
        return None if self.row_lengths else self.rows

    def describe_algorithm(self) -> str:
        """Return a line of text that names the algorithms of the groups and the largest number of sequences in a pack."""
        return describe_algorithm(self.algorithm, self.algorithms_used, self.deepest_pack)


class PackedTotals:
    """Adds up the packs, sequences, tokens and other numbers of all groups in a packed folder. The manifests of the groups
    may be added in any order.

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

    def add_group(self, manifest: GroupManifest, crc32c: int = 0) -> None:
        """Add the values in the manifest of a group to the totals. `crc32c` is the checksum of the manifest file."""
        self._add_manifest_fields(manifest, "sequences", "packs", "tokens")
        counts = np.array(manifest.counts, np.int64)
        self._counts = self._counts + counts if self._counts.size else counts
        packs, sizes = (tuple(getattr(shard, key) for shard in manifest.shards) for key in ("packs", "bytes"))
        self._groups[manifest.group] = GroupShards(packs=packs, bytes=sizes, manifest_crc32c=crc32c)
        if isinstance(manifest, RecordManifest):
            self.input_names += [file.name for file in manifest.inputs]
        if isinstance(manifest, TableManifest):
            self._add_manifest_fields(manifest, "rows", "lower_bound")
            self.deepest_pack = max(self.deepest_pack, manifest.deepest_pack)
            self.algorithms.add(manifest.algorithm_used)
            for key in self.too_long:
                self.too_long[key] += getattr(manifest.too_long, key)

    def _add_manifest_fields(self, manifest: GroupManifest, *field_names: str) -> None:
        """For each name in `field_names`, add the manifest's field to the attribute of this object with the same name."""
        for name in field_names:
            setattr(self, name, getattr(self, name) + getattr(manifest, name))

    def to_metadata_fields(self, max_sequence_length: int, lower_bound: int) -> dict[str, Any]:
        """Return the keys and values of metadata.json that are computed from the group manifests.

        Args:
            max_sequence_length: The number of tokens in a pack, including padding.
            lower_bound: The proven minimum number of packs.
        """
        metrics = PackingMetrics(self.sequences, self.packs, self.tokens, self.packs * max_sequence_length, lower_bound)
        return {
            "format_version": 2,
            **metrics.to_json_fields(),
            "groups": tuple(self._groups[number] for number in sorted(self._groups)),
            "histogram": tuple(self._counts.tolist()),
        }


# --- Which format of packs a folder contains: packed TFRecords, a packed table, several packed tables, or none
#
# Several packed tables with different row lengths are sub-folders of one folder, and `row_lengths.json` describes them.


class RowLengthTables(Artefact):
    """The content of row_lengths.json, which lists the row lengths of several packed tables in one folder.

    The tables are in the sub-folders `rows-512` and so on. This file is written last.

    Attributes:
        row_lengths: The row length of each table.
    """

    file_name = f"{NOTES_NAME}/row_lengths.json"
    remedy = "pack the table again"

    format_version: Literal[1]
    format: Literal["row_lengths"]
    row_lengths: Annotated[tuple[Length, ...], Field(min_length=1)]


def row_table_path(folder: Path, length: int) -> Path:
    """Return the path of the packed table with the given row length in a folder that contains several tables."""
    return folder / f"rows-{length}"


def check_no_row_tables(folder: Path) -> None:
    """Raise an error if a folder contains several packed tables with different row lengths.

    Raises:
        InputError: The folder contains several tables. The message names one of them, because only one can be used.
    """
    tables = RowLengthTables.read_if_present(folder)
    if tables is not None:
        lengths = join_with_and(f"{length:,}" for length in tables.row_lengths)
        raise InputError(
            f"{folder}: the folder contains packed tables with rows of {lengths} tokens; pass one of them, such as "
            f"{row_table_path(folder, tables.row_lengths[0])}"
        )


PackFormat = Literal["records", "table"]
# The commands that write packs, by the name of their stage. If packing has not finished, an error message names the command
# to run again.
_COMMANDS = {"write": "gaudi-bert write` or `pack", "pack-table": "gaudi-bert pack", "pack-rows": "gaudi-bert pack"}


def detect_pack_format(folder: Path) -> PackFormat | None:
    """Return whether a folder contains packed TFRecords or a packed table. Return None if it contains neither.

    Only the presence of metadata.json is checked.

    Raises:
        InputError: Packing was started in the folder but has not finished.
    """
    found = next((name for name, path in _metadata_path_by_format(folder).items() if path.exists()), None)
    if found is None and not RowLengthTables.json_path_in(folder).exists():
        for path in filter(Path.is_file, _settings_path_by_format(folder).values()):
            try:
                command = _COMMANDS.get(read_signature(path).stage)
            except InputError:  # a file of the user that happens to have this name
                continue
            if command is not None:
                raise InputError(
                    f"{folder}: packing has not finished; run the same `{command}` command again until it finishes"
                )
    return found


def list_format_detection_files(folder: Path) -> tuple[Path, ...]:
    """Return the paths of the files that `detect_pack_format` checks.

    If the folder is in a store, the caller must download these files first.
    """
    return (
        *_metadata_path_by_format(folder).values(),
        RowLengthTables.json_path_in(folder),
        *_settings_path_by_format(folder).values(),
    )


def _metadata_path_by_format(folder: Path) -> dict[PackFormat, Path]:
    """Return where metadata.json is in a folder of packed TFRecords, and where it is in a folder with a packed table."""
    return {"table": folder / NOTES_NAME / METADATA_NAME, "records": folder / METADATA_NAME}


def _settings_path_by_format(folder: Path) -> dict[PackFormat, Path]:
    """Return where the settings file is in a folder of packed TFRecords, and where it is in a folder with packed tables."""
    return {
        "records": settings_path(folder, folder / METADATA_NAME),
        "table": settings_path(folder, RowLengthTables.json_path_in(folder)),
    }


# --- The results of the commands that read a packed folder: verification.json (`verify`) and conversion.json (`convert`)

_Fingerprint = Annotated[str, require_pattern("[0-9a-f]{16}", "16 digits from 0 to f")]


class Verification(ExtensibleArtefact):
    """The content of verification.json, which is only written if the verification was successful.

    Attributes:
        sequences: The number of sequences.
        tokens: The number of non-padding tokens.
        packs: The number of packs.
        shards: The number of shards.
        groups: The number of groups.
        packs_sha256: The identity of the packs (`PackedMetadata.compute_packs_sha256`).
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
    def read_matching(cls, path: Path, metadata: PackedMetadata) -> Self:
        """Read the verification of a packed folder, and check that it belongs to the current packs.

        Args:
            path: The verification file, or its folder.
            metadata: The metadata of the packed folder.

        Raises:
            InputError: The file cannot be read, is invalid, or is the verification of other packs.
        """
        stored = cls.read(path)
        if stored.packs_sha256 != metadata.compute_packs_sha256() or stored.sequences != metadata.sequences:
            raise InputError(
                f"{cls.json_path_in(path)}: the file verifies packs that differ from those in metadata.json; {cls.remedy}"
            )
        return stored

    def format_lines(self) -> list[str]:
        """Return lines of text that describe what was verified."""
        if self.too_long is None:
            return [f"each of {format_count(self.sequences, 'sequence')} is in the packs exactly once"]
        return [
            f"{format_count(self.rows, 'row')}, {format_count(self.sequences, 'sequence')} in "
            f"{format_count(self.packs, 'pack')}",
            f"each sequence is in the packs exactly once, with equal values in {', '.join(self.columns)}",
            self.too_long.format_line(),
        ]


class Conversion(Artefact):
    """The content of conversion.json, which summarizes a conversion of packs. It is written after all HDF5 files.

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

    def format_lines(self) -> list[str]:
        """Return a line of text with the number of packs and the number of files."""
        return [f"{self.format}: {format_count(self.packs, 'pack')} in {format_count(self.files, 'file')}"]


def conversion_summary_path(hdf5_folder: Path) -> Path:
    """Return the path of the conversion.json file for a folder of HDF5 files.

    The file is in the folder `OUT-conversion` next to the folder `OUT`, because other trainers read every file in `OUT`.
    """
    return hdf5_folder.with_name(f"{hdf5_folder.name}-conversion") / "conversion.json"
