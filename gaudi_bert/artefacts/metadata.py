"""metadata.json: what a packed folder holds. It is written last, so a folder that has it is whole.

The trainer takes every size from here. `records.packed_folder` also reads the folders of the vendor's deleted script
(Habana Model-References, up to 1.14.0), which this project calls *the predecessor*.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field

from gaudi_bert.artefacts.model import Artefact, Count, Crc32c, Length, Positive, Share, read_artefact
from gaudi_bert.artefacts.names import METADATA_NAME
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json, write_json

__all__ = ["InputFile", "Metadata", "Shard", "VocabularyInfo", "read_own_metadata", "write_metadata"]


class InputFile(Artefact):
    """An input file: name relative to RECORDS, size and CRC-32C of the file as it lies on the disk."""

    name: str
    bytes: Count
    crc32c: Crc32c


class Shard(Artefact):
    """A packed file: its name in the folder, its packs, size and CRC-32C (None where the predecessor did not say)."""

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
        """Of a vocab.txt: one token per line, and only a newline ends it.

        Raises:
            InputError: the file cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot read the vocabulary: {error.strerror}; check the path") from error
        # Tokens may hold other characters that Unicode counts as line breaks.
        return cls(size=len(data.removesuffix(b"\n").split(b"\n")), sha256=hashlib.sha256(data).hexdigest())


class Metadata(Artefact):
    """The contract between `write` and the trainer.

    Attributes:
        masked_slots: most masked positions of a pack (Q).
        efficiency: real tokens / slots, 0..1.
        packing_factor: sequences per pack.
        lower_bound: packs that are proven necessary; `gap` more are used.
        histogram: sequences of each length; the first entry is length 1.
    """

    format_version: Literal[1] = 1
    tool_version: str
    max_sequence_length: Length
    max_predictions: Length
    masked_slots: Length
    depth: Length
    seed: int
    algorithm: str
    vocabulary: VocabularyInfo | None = None
    sequences: Positive
    packs: Positive
    tokens: Positive
    padding_tokens: Count
    efficiency: Share
    packing_factor: float = Field(ge=1)
    lower_bound: Count
    gap: int
    shard_multiple: Length
    inputs: tuple[InputFile, ...]
    shards: tuple[Shard, ...]
    histogram: tuple[Count, ...]


def read_own_metadata(folder: Path | str) -> Metadata:
    """The metadata.json of a packed folder that gaudi-bert wrote (see `records.packed_folder.read_metadata` for any).

    Raises:
        InputError: there is none, or it is damaged or of another format version.
    """
    path = Path(folder) / METADATA_NAME
    if not path.exists():
        raise InputError(f"{path}: missing, so the folder is not (or not wholly) packed; run `gaudi-bert write` to its end")
    content = read_json(path)
    if isinstance(content, dict) and content.get("format") == "table":
        raise InputError(
            f"{path}: is of a packed table, packed TFRecords are wanted; gaudi_bert.pytorch reads packed tables"
        )
    return read_artefact(path, Metadata, "write the folder again")


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Write metadata.json into a packed folder, whole or not at all."""
    write_json(folder / METADATA_NAME, metadata.as_json())
