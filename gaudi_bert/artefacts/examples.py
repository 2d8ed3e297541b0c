"""The summaries that `prepare` (examples.json) and `tokenize` (tokens.json) write.

The summary is written last, so that a folder that contains it is complete. Before that, each finished part of the work has a
small file of its own: `sections/<split>-NNNNN.json` for `prepare`, and `tokens-KKKKK-of-NNNNN.json` for `tokenize`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from gaudi_bert.artefacts.base import NOTES_NAME, Artefact, Count, ExtensibleArtefact, Length, TooLongRows, VocabularyInfo
from gaudi_bert.artefacts.work_folder import EXAMPLES_NAME
from gaudi_bert.common.progress import format_count

_REMEDY = "prepare the examples again"
_TOKENIZE_REMEDY = "tokenize the texts again with --overwrite"


class PreparedFile(Artefact):
    """The name of a file of pretraining examples, its number of sequences, and its size in bytes."""

    name: str
    sequences: Count
    bytes: Count


class PreparedSection(ExtensibleArtefact):
    """The amount of text in a data split or in one section of it, and the examples that were made from this text.

    Attributes:
        text_documents: The number of documents.
        text_sentences: The number of sentences.
        text_tokens: The number of tokens in the text.
        unknown_tokens: The number of these tokens that are not in the vocabulary.
        sequences: The number of examples.
        tokens: The number of non-padding tokens in the examples.
        random_next: The number of examples whose second part does not follow the first in the text.
        masked: The number of masked positions.
        files: The files of the examples.
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
    """The vocabulary of the pretraining examples, and whether it was trained from their text.

    Attributes:
        trained: Whether `prepare` trained the vocabulary from the text.
    """

    trained: bool


class TextSource(Artefact):
    """The name, format and document count of a text source. The source is a file, or a text that is bundled with this
    package.
    """

    name: str
    format: str
    documents: Count


class PreparedExamples(ExtensibleArtefact):
    """The content of examples.json, which summarizes the output of `gaudi-bert prepare`.

    Attributes:
        vocabulary: The vocabulary of the examples.
        sources: The sources of the text.
        splits: The counts of each split.
    """

    file_name = EXAMPLES_NAME
    remedy = _REMEDY

    format_version: Literal[1] = 1
    vocabulary: PreparedVocabulary
    sources: tuple[TextSource, ...]
    splits: dict[Literal["train", "evaluation"], PreparedSection]

    def format_lines(self) -> list[str]:
        """Return one line of text for each split, and one for the vocabulary."""
        origin = "trained from the text" if self.vocabulary.trained else "from the settings"
        return [
            *(
                f"{split}: {format_count(section.sequences, 'sequence')} ({format_count(section.tokens, 'token')}) "
                f"from {format_count(section.text_documents, 'document')}"
                for split, section in self.splits.items()
            ),
            f"vocabulary of {format_count(self.vocabulary.size, 'token')}, {origin}",
        ]


# --- tokenised texts


def token_table_path(folder: Path, part: int, parts: int) -> Path:
    """Return the path of the Parquet table that `gaudi-bert tokenize` writes for one part of the texts.

    Parts are counted from 0, and `parts` is their number.
    """
    return folder / f"tokens-{part:05d}-of-{parts:05d}.parquet"


class TokenisedPart(Artefact):
    """The name, size and row counts of the table that was written for one part of the texts.

    Attributes:
        name: The name of the table file.
        bytes: The size of the table file.
        texts: The number of texts that were read.
        empty_texts: The number of these texts that contain only white space. They produce no row.
        rows: The number of rows.
        tokens: The number of tokens in all rows.
        too_long: The texts that have more tokens than a row may have. Special tokens do not count as dropped tokens.
    """

    remedy = _TOKENIZE_REMEDY

    name: str
    bytes: Count
    texts: Count
    empty_texts: Count
    rows: Count
    tokens: Count
    too_long: TooLongRows


class TextInput(Artefact):
    """The name, size and CRC-32 of an input file that contains texts."""

    name: str
    bytes: Count
    crc32: str


class TokenisedTexts(ExtensibleArtefact):
    """The content of tokens.json, which summarizes the output of `gaudi-bert tokenize`.

    Attributes:
        tool_version: The version of this package.
        tokenizer: The identity of the tokenizer.
        max_sequence_length: The maximum number of tokens in a row.
        special_tokens: Whether special tokens were added to each row.
        text_column: The column of the input that contains the text.
        columns: The columns of the tables.
        texts: The number of texts that were read.
        empty_texts: The number of these texts that contain only white space. They produce no row.
        rows: The number of rows.
        tokens: The number of tokens in all rows.
        too_long: The texts that have more tokens than a row may have.
        inputs: The files of the texts.
        files: The tables that were written.
    """

    file_name = f"{NOTES_NAME}/tokens.json"
    remedy = _TOKENIZE_REMEDY
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
        """Return the content of tokens.json without the lists of files."""
        return {name: value for name, value in self.as_json().items() if name not in self.line_per_entry}

    def format_lines(self) -> list[str]:
        """Return lines of text with the number of rows, and how texts that were too long were handled."""
        too_long = self.too_long
        lines = [
            f"{format_count(self.texts, 'text')} became {format_count(self.rows, 'row')} "
            f"with {format_count(self.tokens, 'token')}"
        ]
        if self.empty_texts:
            lines.append(f"{format_count(self.empty_texts, 'text')} contained only white space and produced no row")
        if not too_long.rows:
            return [*lines, "no text was too long"]
        lost = f"which removed {format_count(too_long.dropped_tokens, 'token')}"
        done = {"split": f"split, which added {too_long.added_sequences:,} rows", "truncate": f"truncated, {lost}"}
        return [
            *lines,
            f"{format_count(too_long.rows, 'text')} longer than {format_count(self.max_sequence_length, 'token')}: "
            f"{done.get(too_long.policy, f'dropped, {lost}')}",
        ]
