"""What passes between the readers of rows, the tokenizer and the tasks.

Rows are read one after the other and forgotten; many sequences are columnar (flat values, and where each sequence
starts), so a million sequences are a few arrays and not a million objects.

Letters: N sequences, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import AnyArray, Int32Array, IntArray
from gaudi_bert.common.errors import InputError

STANDARD_INPUT = "-"
TASKS_WITH_LABELS = ("classification", "multi-label", "token-classification")
LABELLED_TEXTS = ("classification", "multi-label", "regression", "reranking")
"""Tasks with one label for a text or pair."""
LANGUAGE_MODELLING = ("masked-language-modelling", "causal-language-modelling")
"""Tasks whose rows need no label: what is to be answered is in the text."""
OUTSIDE = "O"
"""The tag of a word that is of no entity."""
NO_WORD = -1
"""In `Sequences.words`, a token that represents no word; in `characters`, one outside the text."""


class RowPosition(NamedTuple):
    """Position of a row in its file, from 1: its number among the rows, and where there are lines, that it begins in."""

    number: int
    line: int | None = None

    def __str__(self) -> str:
        return f"row {self.number:,}" if self.line is None else f"line {self.line:,} (row {self.number:,})"


Record: TypeAlias = Mapping[str, Any]
"""What a row is in its file: values by the names of their columns, or keys."""
PlacedRecord: TypeAlias = tuple[RowPosition, Record | InputError]


class TextRow(NamedTuple):
    """One text or a pair, and its label: a name, several names, or a number; None where there is none."""

    position: RowPosition
    text: str
    text_pair: str | None = None
    label: str | tuple[str, ...] | float | None = None

    @property
    def input(self) -> str | tuple[str, str]:
        """Return what the library `tokenizers` takes."""
        return self.text if self.text_pair is None else (self.text, self.text_pair)


class TupleRow(NamedTuple):
    """Texts whose vectors are compared: an anchor, what answers it, and what does not; or two texts and their score."""

    position: RowPosition
    texts: tuple[str, ...]
    score: float | None = None


class TaggedRow(NamedTuple):
    """Words with their tags; `starts` are their positions in the text, None for words with one space between."""

    position: RowPosition
    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    starts: tuple[int, ...] | None = None

    def word_starts(self) -> IntArray:
        """Return where each word starts in the text, in characters, int64."""
        if self.starts is not None:
            return np.asarray(self.starts, np.int64)
        lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens)) + 1
        starts: IntArray = np.cumsum(lengths) - lengths
        return starts


class QuestionRow(NamedTuple):
    """A question about a context; `answers` are pairs (text, first character), () if it has none, None if not known."""

    position: RowPosition
    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None = None


class IdsRow(NamedTuple):
    """A sequence that is tokenized already."""

    position: RowPosition
    input_ids: tuple[int, ...]


class BadRow(NamedTuple):
    """A row that cannot be read, and why; only where such rows are to be named instead of refused."""

    position: RowPosition
    problem: str


Row: TypeAlias = TextRow | TupleRow | TaggedRow | QuestionRow | IdsRow


@dataclass(frozen=True, eq=False)
class Sequences:
    """Tokenized sequences: the tokens of sequence i are `offsets[i] : offsets[i + 1]` of every array [T].

    Attributes:
        row: int64 [N], which of the rows that were tokenized together it is (a window of); never decreasing.
        offsets: int64 [N + 1].
        input_ids: int32 [T], with [CLS] and [SEP].
        segment_ids: int8 [T], 1 for the second text of a pair.
        characters: int32 [T, 2], begin and end in the row's text (the context of a question), -1 for what is not of it; None
            for tasks with one answer per text.
        words: token classification: int32 [T], which word of the row a token represents: the first word piece of each word,
            in one window only, the one that shows most around it; else -1. None for other tasks.
        target: what is to be learnt, None without labels. classification int32 [N]; multi-label float32 [N, labels];
            regression float32 [N]; token classification int32 [T], -100 where `words` is -1; question answering int32
            [N, 2], first and last token within the sequence, 0 and 0 where the window does not hold the answer.
        cut_rows: rows that were cut, or taken in several windows, because they are too long.
    """

    row: IntArray
    offsets: IntArray
    input_ids: Int32Array
    segment_ids: NDArray[np.int8]
    characters: Int32Array | None = None
    words: Int32Array | None = None
    target: AnyArray | None = None
    cut_rows: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sequence, int64 [N]."""
        return np.diff(self.offsets)


def separate_sequences(
    input_ids: SequenceOf[Int32Array], segment_ids: SequenceOf[NDArray[np.int8]], cut_rows: int = 0
) -> Sequences:
    """Return sequences of which each is a row of its own, from the tokens and segments of each."""
    return Sequences(
        row=np.arange(len(input_ids), dtype=np.int64),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum([len(ids) for ids in input_ids], dtype=np.int64)]),
        input_ids=np.concatenate(input_ids),
        segment_ids=np.concatenate(segment_ids),
        cut_rows=cut_rows,
    )


def join_sequences(parts: SequenceOf[Sequences], rows_of_parts: SequenceOf[int]) -> Sequences:
    """Sequences of consecutive windows of rows (`rows_of_parts[i]` rows in window i) as one."""
    rows_before = np.cumsum(rows_of_parts) - np.asarray(rows_of_parts)

    def joined(name: str) -> AnyArray | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else np.concatenate(columns)

    return Sequences(
        row=np.concatenate([part.row + before for part, before in zip(parts, rows_before, strict=True)]),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([part.lengths for part in parts]))]),
        input_ids=np.concatenate([part.input_ids for part in parts]),
        segment_ids=np.concatenate([part.segment_ids for part in parts]),
        characters=joined("characters"),
        words=joined("words"),
        target=joined("target"),
        cut_rows=sum(part.cut_rows for part in parts),
    )


def source_name(path: object) -> str:
    """The name of a source of rows in errors."""
    return "standard input" if str(path) == STANDARD_INPUT else str(path)
