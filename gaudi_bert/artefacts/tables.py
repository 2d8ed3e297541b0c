"""The files of a folder of packed tables: metadata.json, a manifest a group, and what a verification found.

They are named as those of packed TFRecords; `format` tells them apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gaudi_bert.artefacts.metadata import InputFile, Shard
from gaudi_bert.artefacts.model import Artefact, Count, Figures, Length, Positive, Sha256, Share, read_artefact
from gaudi_bert.artefacts.names import METADATA_NAME, VERIFICATION_NAME, manifest_path
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json, write_json

__all__ = [
    "InputTable",
    "TableGroupManifest",
    "TableMetadata",
    "TableVerification",
    "TooLongRows",
    "is_packed_table",
    "read_table_manifest",
    "read_table_metadata",
    "read_table_verification",
    "write_table_manifest",
    "write_table_metadata",
    "write_table_verification",
]

REMEDY = "pack the table again"


class InputTable(InputFile):
    """An input file, and how many rows it has; rows are numbered through all files in the order of their names."""

    rows: Count


class TooLongRows(Artefact):
    """What became of rows longer than a pack.

    Attributes:
        policy: what was asked for.
        rows: how many rows were too long.
        dropped_rows: how many of them are in no pack.
        dropped_tokens: tokens that are in no pack.
        added_sequences: sequences beyond one a row, from splitting.
    """

    policy: Literal["error", "truncate", "split", "drop"]
    rows: Count
    dropped_rows: Count
    dropped_tokens: Count
    added_sequences: Count


class TableGroupManifest(Artefact):
    """One group of a folder of packed tables; written after its shards.

    Attributes:
        signature_sha256: of the settings and inputs that it was made from.
        counts: sequences of each length; the first entry is length 1.
    """

    format_version: Literal[1] = 1
    format: Literal["table"] = "table"
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


class TableMetadata(Artefact):
    """metadata.json of a folder of packed tables; written last.

    Attributes:
        depth: most sequences a pack may hold; None for no limit.
        deepest_pack: most sequences that one does hold.
        keep_together: the column whose equal values stay in one pack.
        aligned_columns, scalar_columns: the columns of the table and their types.
        rows: of the table; `sequences` were made of them.
    """

    format_version: Literal[1] = 1
    format: Literal["table"] = "table"
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
    sequences: Positive
    packs: Positive
    tokens: Positive
    padding_tokens: Count
    efficiency: Share
    packing_factor: float = Field(ge=1)
    lower_bound: Count
    gap: int
    too_long: TooLongRows
    shard_multiple: Length
    group_sequences: Positive
    group_bytes: Positive
    groups: Positive
    inputs: tuple[InputTable, ...]
    shards: tuple[Shard, ...]
    histogram: tuple[Count, ...]


class TableVerification(Figures):
    """verification.json of a folder of packed tables; it exists only where the proof succeeded."""

    format: Literal["table"] = "table"
    rows: Count
    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    groups: Count
    columns: tuple[str, ...]
    index_only: bool
    too_long: TooLongRows


def is_packed_table(folder: Path) -> bool:
    """Whether a finished folder holds packed tables (and not packed TFRecords)."""
    path = folder / METADATA_NAME
    if not path.is_file():
        return False
    content = read_json(path)
    return isinstance(content, dict) and content.get("format") == "table"


def read_table_metadata(folder: Path) -> TableMetadata:
    """The metadata.json of a folder of packed tables.

    Raises:
        InputError: there is none, or it is damaged or of another format.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        raise InputError(
            f"{path}: missing, so the folder is not (or not wholly) packed; run `gaudi-bert pack` on the table to its end"
        )
    if not is_packed_table(folder):
        raise InputError(f"{path}: is of packed TFRecords, not of a packed table; give the records that it was made from")
    return read_artefact(path, TableMetadata, REMEDY)


def write_table_metadata(folder: Path, metadata: TableMetadata) -> None:
    """Write metadata.json, whole or not at all."""
    write_json(folder / METADATA_NAME, metadata.as_json())


def read_table_manifest(folder: Path, group: int) -> TableGroupManifest:
    """The manifest of `group`.

    Raises:
        InputError: it is missing or damaged.
    """
    return read_artefact(manifest_path(folder, group), TableGroupManifest, f"remove it and {REMEDY}")


def write_table_manifest(folder: Path, manifest: TableGroupManifest) -> None:
    """Write the manifest of a group whose shards are all there."""
    write_json(manifest_path(folder, manifest.group), manifest.as_json())


def read_table_verification(folder: Path) -> TableVerification:
    """What the last verification found.

    Raises:
        InputError: it is missing or damaged.
    """
    return read_artefact(folder / VERIFICATION_NAME, TableVerification, "remove it and verify again")


def write_table_verification(folder: Path, content: TableVerification) -> None:
    """Write what a verification found, whole or not at all."""
    write_json(folder / VERIFICATION_NAME, content.as_json())
