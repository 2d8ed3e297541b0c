"""What a folder of `prepare` or `tokenize` holds: examples.json of `prepare`, tokens.json of `tokenize`.

It is written last, so a folder that has it is complete. Until then, each finished part of the work has a small file:
`sections/<split>-NNNNN.json` of `prepare`, `tokens-KKKKK-of-NNNNN.json` of `tokenize`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from gaudi_bert.artefacts.base import NOTES_NAME, Artefact, Count, Figures, Length, TooLongRows, VocabularyInfo
from gaudi_bert.artefacts.work_folder import EXAMPLES_NAME
from gaudi_bert.common.progress import format_count

_REMEDY = "prepare the examples again"
_TOKENISE_REMEDY = "tokenise the texts again with --overwrite"


class PreparedFile(Artefact):
    """A file of examples."""

    name: str
    sequences: Count
    bytes: Count


class PreparedSection(Figures):
    """Counts of the examples from some text: one section, or a complete split.

    The vocabulary lacks `unknown_tokens` of it; `random_next` sequences have a second part that does not follow the first.
    """

    remedy = _REMEDY

    text_documents: Count
    text_sentences: Count
    text_tokens: Count
    unknown_tokens: Count
    sequences: Count
    tokens: Count
    random_next: Count
    masked: Count
    files: tuple[PreparedFile, ...]


class PreparedVocabulary(VocabularyInfo):
    """The vocabulary of the examples, and whether it was trained from their text."""

    trained: bool


class TextSource(Artefact):
    """A source of text: a file, or what this program brings."""

    name: str
    format: str
    documents: Count


class PreparedExamples(Figures):
    """examples.json of `prepare`."""

    file_name = EXAMPLES_NAME
    remedy = _REMEDY

    format_version: Literal[1] = 1
    vocabulary: PreparedVocabulary
    sources: tuple[TextSource, ...]
    splits: dict[Literal["train", "evaluation"], PreparedSection]

    def lines(self) -> list[str]:
        """Return each split and the vocabulary for people."""
        lines = [
            f"{split}: {format_count(section.sequences, 'sequence')} ({format_count(section.tokens, 'token')}) "
            f"from {format_count(section.text_documents, 'document')}"
            for split, section in self.splits.items()
        ]
        origin = "trained from the text" if self.vocabulary.trained else "given"
        return [*lines, f"vocabulary of {format_count(self.vocabulary.size, 'token')}, {origin}"]


# --- tokenised texts


def tokens_path(folder: Path, part: int, parts: int) -> Path:
    """The table of a part."""
    return folder / f"tokens-{part:05d}-of-{parts:05d}.parquet"


class TokenisedPart(Artefact):
    """Counts of the rows from one part of the texts.

    Attributes:
        texts: that were read; `empty_texts` of them give no row, because they hold nothing but space.
        too_long: the texts that give more tokens than a row may have; `dropped_tokens` are those of the texts alone.
    """

    remedy = _TOKENISE_REMEDY

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
    remedy = _TOKENISE_REMEDY
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

    def lines(self) -> list[str]:
        """Return for people how many rows there are, and what became of texts that were too long."""
        counted = f"{format_count(self.texts, 'text')} became {format_count(self.rows, 'row')}"
        lines, too_long = [f"{counted} with {format_count(self.tokens, 'token')}"], self.too_long
        if self.empty_texts:
            lines.append(f"{format_count(self.empty_texts, 'text')} held nothing but space and gave no row")
        if not too_long.rows:
            return [*lines, "no text was too long"]
        lost = f"{format_count(too_long.dropped_tokens, 'token')} lost"
        became = {"split": f"{too_long.added_sequences:,} rows more, no token lost", "truncate": f"cut, {lost}"}
        about = f"{format_count(too_long.rows, 'text')} too long for {format_count(self.max_sequence_length, 'token')}"
        return [*lines, f"{about}: {became.get(too_long.policy, f'dropped, {lost}')}"]
