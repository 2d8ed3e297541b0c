"""The files of a packed folder: metadata.json, a manifest per group, verification.json; of TFRecords and of tables.

metadata.json is written last, so a folder that has it is whole; the trainer takes every size from it. A manifest is written
after the shards of its group. The files of packed tables have the same names; `format` tells them apart.
`records.packed_folder` also reads the folders of the vendor's deleted script (Habana Model-References, up to 1.14.0), which
this project calls *the predecessor*.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import Self

from gaudi_bert.artefacts.base import Artefact, Count, Crc32c, Figures, Length, Positive, Sha256, Share
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_file, read_json

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


class _MetadataHead(Artefact):
    """The first keys of metadata.json."""

    format_version: Literal[1] = 1
    tool_version: str
    max_sequence_length: Length
    max_predictions: Length
    masked_slots: Length
    depth: Length
    seed: int
    algorithm: str
    vocabulary: VocabularyInfo | None = None


class Metadata(_PackedTotals, _MetadataHead):
    """metadata.json: the contract between `write` and the trainer. Pydantic puts the fields of the last base first.

    Attributes:
        masked_slots: most masked positions of a pack (Q).
        lower_bound: packs that are proven necessary; `gap` more are used.
        histogram: sequences of each length; the first entry is length 1.
    """

    file_name = METADATA_NAME
    remedy = "write the folder again"

    shard_multiple: Length
    inputs: tuple[InputFile, ...]
    shards: tuple[Shard, ...]
    histogram: tuple[Count, ...]

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
        return {**totals, **settings, "shards": len(self.shards), "bytes": sum(shard.bytes for shard in self.shards)}


class GroupManifest(Artefact):
    """group-GGGGG.json: one group of a packed folder, written after its shards.

    Attributes:
        plan_sha256: the plan by which it was written.
        counts: sequences of each length; the first entry is length 1.
    """

    remedy = "remove it and write the folder again"

    format_version: Literal[1] = 1
    plan_sha256: Sha256
    group: Count
    sequences: Positive
    packs: Positive
    tokens: Positive
    counts: tuple[Count, ...]
    shards: tuple[Shard, ...]

    @property
    def source_sha256(self) -> str:
        """What it was made from."""
        return self.plan_sha256


class Verification(Figures):
    """verification.json: the result of `verify`. It lies in the verified folder, and only where the proof succeeded.

    Attributes:
        fingerprint: of all sequences, whatever their order: 16 hexadecimal digits.
        balanced: whether the shards of each group differ by at most one pack.
        dropped_packs: packs of an epoch that 1 .. 32 workers cannot share evenly; our readers continue, others drop them.
        mixing: standard deviation of sequences per batch over that of independent draws; None for too few packs.
    """

    file_name = VERIFICATION_NAME
    remedy = "remove it and verify again"

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

    @classmethod
    def total(cls, policy: _Policy, parts: list[TooLongRows]) -> TooLongRows:
        """The sum over groups."""
        numbers = [name for name in cls.model_fields if name != "policy"]
        return cls(policy=policy, **{name: sum(getattr(part, name) for part in parts) for name in numbers})


class TableGroupManifest(Artefact):
    """One group of a folder of packed tables.

    Attributes:
        signature_sha256: of the settings and inputs that it was made from.
        counts: sequences of each length; the first entry is length 1.
    """

    remedy = "remove it and pack the table again"

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

    @property
    def source_sha256(self) -> str:
        """What it was made from."""
        return self.signature_sha256


class _TableMetadataHead(Artefact):
    """The first keys of the metadata.json of packed tables."""

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


class TableMetadata(_PackedTotals, _TableMetadataHead):
    """metadata.json of a folder of packed tables; written last.

    Attributes:
        depth: most sequences a pack may hold; None for no limit.
        deepest_pack: most sequences that one does hold.
        keep_together: the column whose equal values stay in one pack.
        aligned_columns, scalar_columns: the columns of the table and their types.
        rows: of the table; `sequences` were made of them.
    """

    file_name = METADATA_NAME
    remedy = "pack the table again"

    too_long: TooLongRows
    shard_multiple: Length
    group_sequences: Positive
    group_bytes: Positive
    groups: Positive
    inputs: tuple[InputTable, ...]
    shards: tuple[Shard, ...]
    histogram: tuple[Count, ...]

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
        return {**content, "shards": len(self.shards)}


class TableVerification(Figures):
    """verification.json of a folder of packed tables."""

    file_name: ClassVar[str] = VERIFICATION_NAME
    remedy: ClassVar[str] = "remove it and verify again"

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


def _is_of_table(path: Path) -> bool:
    """Whether a metadata.json is of packed tables, and not of packed TFRecords."""
    content = read_json(path)
    return isinstance(content, dict) and content.get("format") == "table"
