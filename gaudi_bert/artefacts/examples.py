"""examples.json: what a folder of examples holds, from text (`prepare`) or from tables (`import`).

It is written last, so a folder that has it is complete. Until then, each finished part of the work has a small file:
`sections/<split>-NNNNN.json` of `prepare`, `<table>.json` of `import`.
"""

from __future__ import annotations

from typing import Literal

from gaudi_bert.artefacts.base import Artefact, Count, Figures, Positive
from gaudi_bert.artefacts.references import VocabularyInfo
from gaudi_bert.artefacts.work_folder import EXAMPLES_NAME

REMEDY = "prepare the examples again"
IMPORT_REMEDY = "import the tables again with --overwrite"


class PreparedFile(Artefact):
    """A file of examples."""

    name: str
    sequences: Count
    bytes: Count


class PreparedSection(Figures):
    """What some of the text became, in one section or in a complete split.

    Attributes:
        unknown_tokens: tokens of the text that the vocabulary lacks.
        random_next: sequences whose second part does not follow the first.
    """

    remedy = REMEDY

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
    remedy = REMEDY

    format_version: Literal[1] = 1
    vocabulary: PreparedVocabulary
    sources: tuple[TextSource, ...]
    splits: dict[Literal["train", "evaluation"], PreparedSection]


class ImportedTable(Artefact):
    """The file next to one imported table: how many sequences became records."""

    remedy = IMPORT_REMEDY

    sequences: Count


class ImportedSoFar(Figures):
    """The progress of an import, over all its shards."""

    sequences: Count
    files: Count
    max_sequence_length: Positive
    max_predictions: Positive
    ignored_columns: tuple[str, ...]


class ImportedExamples(ImportedSoFar):
    """examples.json of `import`."""

    file_name = EXAMPLES_NAME
    remedy = IMPORT_REMEDY

    files: Positive
