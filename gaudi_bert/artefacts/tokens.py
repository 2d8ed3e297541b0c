"""tokens.json: what a folder of tokenised texts holds. It is written last, so a folder that has it is complete.

Until then, each finished part has a small file next to it, `tokens-KKKKK-of-NNNNN.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from gaudi_bert.artefacts.base import Artefact, Count, Figures, Length
from gaudi_bert.artefacts.packed import TooLongRows
from gaudi_bert.artefacts.references import NOTES_NAME, VocabularyInfo

_REMEDY = "tokenise the texts again with --overwrite"


def tokens_path(folder: Path, part: int, parts: int) -> Path:
    """The table of a part."""
    return folder / f"tokens-{part:05d}-of-{parts:05d}.parquet"


class TokenisedPart(Artefact):
    """What one part of the texts became.

    Attributes:
        texts: that were read; `empty_texts` of them give no row, because they hold nothing but space.
        rows: of the table.
        tokens: of these rows, special tokens included.
        too_long: the texts that give more tokens than a row may have; `dropped_tokens` are those of the texts alone.
    """

    remedy = _REMEDY

    name: str
    bytes: Count
    texts: Count
    empty_texts: Count
    rows: Count
    tokens: Count
    too_long: TooLongRows


class TextInput(Artefact):
    """A source of text, by its name, its size and the CRC-32 of its bytes."""

    name: str
    bytes: Count
    crc32: str


class TokenisedTexts(Figures):
    """tokens.json."""

    file_name = f"{NOTES_NAME}/tokens.json"
    remedy = _REMEDY
    line_per_entry: ClassVar[tuple[str, ...]] = ("inputs", "files")

    format_version: Literal[1] = 1
    tool_version: str
    tokenizer: VocabularyInfo
    max_sequence_length: Length
    special_tokens: bool
    text_column: str
    columns: tuple[str, ...]
    texts: Count
    empty_texts: Count
    rows: Count
    tokens: Count
    too_long: TooLongRows
    inputs: tuple[TextInput, ...]
    files: tuple[TokenisedPart, ...]

    def summary(self) -> dict[str, object]:
        """Without the lists of files."""
        return {name: value for name, value in self.as_json().items() if name not in self.line_per_entry}
