"""metadata.json: what a packed folder holds. It is written last, so a folder that has it is whole.

The trainer takes every size from here. Folders of the predecessor have a sibling `<folder>_metadata.json`
instead, which knows no sizes; they are then taken from the records themselves.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.records.schema import PackedSchema

__all__ = ["METADATA_NAME", "InputFile", "Metadata", "Shard", "VocabularyInfo", "read_own_metadata"]

METADATA_NAME = "metadata.json"
FORMAT_VERSION = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class InputFile(_Frozen):
    """An input file: name relative to RECORDS, size and CRC-32C of the file as it lies on the disk."""

    name: str
    bytes: int = Field(ge=0)
    crc32c: int = Field(ge=0, lt=2**32)


class Shard(_Frozen):
    """A packed file: its name in the folder, its packs, size and CRC-32C (None where the predecessor did not say)."""

    name: str
    packs: int = Field(ge=0)
    bytes: int = Field(ge=0)
    crc32c: int | None = Field(None, ge=0, lt=2**32)


class VocabularyInfo(_Frozen):
    """The vocabulary: its number of tokens, and the SHA-256 of the file in hexadecimal."""

    size: int = Field(ge=1)
    sha256: str


class Metadata(_Frozen):
    """The contract between `write` and the trainer."""

    format_version: int = FORMAT_VERSION
    tool_version: str
    max_sequence_length: int = Field(ge=1)
    max_predictions: int = Field(ge=1)
    masked_slots: int = Field(ge=1)
    depth: int = Field(ge=1)
    seed: int
    algorithm: str
    vocabulary: VocabularyInfo | None = None
    sequences: int = Field(ge=1)
    packs: int = Field(ge=1)
    tokens: int = Field(ge=1)
    padding_tokens: int = Field(ge=0)
    efficiency: float = Field(ge=0, le=1)
    packing_factor: float = Field(ge=1)
    lower_bound: int = Field(ge=0)
    gap: int
    shard_multiple: int = Field(ge=1)
    inputs: tuple[InputFile, ...]
    shards: tuple[Shard, ...]
    histogram: tuple[int, ...] = Field(description="sequences of each length; the first entry is length 1")

    @property
    def packed_schema(self) -> PackedSchema:
        """The sizes of the packed records."""
        return PackedSchema(self.max_sequence_length, self.masked_slots, self.depth, self.max_predictions)


def read_own_metadata(folder: Path | str) -> Metadata:
    """The metadata.json of a packed folder that gaudi-bert wrote (see `packed_folder.read_metadata` for any).

    Raises:
        InputError: there is none, or it is damaged or of another format version.
    """
    path = Path(folder) / METADATA_NAME
    if not path.exists():
        raise InputError(f"{path}: missing, so the folder is not (or not wholly) packed; run `gaudi-bert write` to its end")
    content = read_json(path)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version {version}, this version reads {FORMAT_VERSION}; write the folder again")
    try:
        return Metadata.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"{path}: `{place}`: {problem['msg']}; write the folder again") from error
