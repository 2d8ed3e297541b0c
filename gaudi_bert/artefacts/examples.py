"""examples.json: what a folder of examples holds, whether `prepare` made it from text or `import` from tables.

It is written last, so a folder that has it is whole. Until then, each finished part of the work has a small file of its own:
`sections/<split>-NNNNN.json` of `prepare`, `<table>.json` of `import`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gaudi_bert.artefacts.metadata import VocabularyInfo
from gaudi_bert.artefacts.model import Artefact, Count, Figures, Positive, read_artefact
from gaudi_bert.artefacts.names import EXAMPLES_NAME
from gaudi_bert.common.files import write_json

__all__ = [
    "ImportedExamples",
    "ImportedTable",
    "PreparedExamples",
    "PreparedFile",
    "PreparedSection",
    "PreparedVocabulary",
    "TextSource",
    "read_imported_examples",
    "read_imported_table",
    "read_prepared_examples",
    "read_section",
    "write_examples",
    "write_imported_table",
]

REMEDY = "prepare the examples again"
IMPORT_REMEDY = "import the tables again with --overwrite"


class PreparedFile(Artefact):
    """A file of examples."""

    name: str
    sequences: Count
    bytes: Count


class PreparedSection(Figures):
    """What was made of some of the text, in one section or in a whole split.

    Attributes:
        unknown_tokens: tokens of the text that the vocabulary lacks.
        random_next: sequences whose second part does not follow the first.
        masked: masked positions.
    """

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

    format_version: Literal[1] = 1
    vocabulary: PreparedVocabulary
    sources: tuple[TextSource, ...]
    splits: dict[Literal["train", "evaluation"], PreparedSection]


class ImportedTable(Artefact):
    """The file beside one imported table: how many sequences became records."""

    sequences: Count


class ImportedExamples(Figures):
    """examples.json of `import`."""

    sequences: Count
    files: Positive
    max_sequence_length: Positive
    max_predictions: Positive
    ignored_columns: tuple[str, ...]


def read_prepared_examples(folder: Path) -> PreparedExamples:
    """What `prepare` made.

    Raises:
        InputError: examples.json is missing or damaged.
    """
    return read_artefact(folder / EXAMPLES_NAME, PreparedExamples, REMEDY)


def read_imported_examples(folder: Path) -> ImportedExamples:
    """What `import` made.

    Raises:
        InputError: examples.json is missing or damaged.
    """
    return read_artefact(folder / EXAMPLES_NAME, ImportedExamples, IMPORT_REMEDY)


def read_imported_table(path: Path) -> ImportedTable:
    """What became of one table.

    Raises:
        InputError: the file is missing or damaged.
    """
    return read_artefact(path, ImportedTable, IMPORT_REMEDY)


def write_imported_table(path: Path, content: ImportedTable) -> None:
    """Write what became of one table, whole or not at all."""
    write_json(path, content.as_json())


def write_examples(folder: Path, content: PreparedExamples | ImportedExamples) -> None:
    """Write examples.json, whole or not at all."""
    write_json(folder / EXAMPLES_NAME, content.as_json())


def read_section(path: Path) -> PreparedSection:
    """The figures of a finished section.

    Raises:
        InputError: the file is missing or damaged.
    """
    return read_artefact(path, PreparedSection, REMEDY)
