"""Types that the readers of rows, the tokenizer and the tasks exchange.

Rows are read one after the other and not kept. Tokenized sequences are stored in columns: flat arrays of values, and the
offset at which each sequence begins. A million sequences are therefore a few arrays instead of a million objects.

Letters:
    N: sequences.
    T: tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import AnyArray, Int32Array, IntArray
from gaudi_bert.common.errors import InputError

STANDARD_INPUT = "-"
TASKS_WITH_LABELS = ("classification", "multi-label", "token-classification")
# In these tasks, each text or pair has a single label field.
LABELLED_TEXTS = ("classification", "multi-label", "regression", "reranking")
# These tasks need no labels, because the model predicts tokens of the text.
LANGUAGE_MODELLING = ("masked-language-modelling", "causal-language-modelling")
# The tag of a word that belongs to no entity.
OUTSIDE = "O"
# In `Sequences.words`, this value marks a token that represents no word. In `Sequences.characters`, it marks a token outside
# the text.
NO_WORD = -1


class RowPosition(NamedTuple):
    """The position of a row in its file, as a row number and a line number.

    Attributes:
        number: The number of the row, from 1.
        line: The number of the first line of the row, from 1. None if the format has no lines.
    """

    number: int
    line: int | None = None

    def __str__(self) -> str:
        return f"row {self.number:,}" if self.line is None else f"line {self.line:,} (row {self.number:,})"


# A row before it is validated, as a mapping from column names or keys to values.
Record: TypeAlias = Mapping[str, Any]
# The position of a row, and its record. If the row cannot be read, an error takes the place of the record.
PlacedRecord: TypeAlias = tuple[RowPosition, Record | InputError]


class TextRow(NamedTuple):
    """A row with a text or a pair of texts, and with its label if it has one.

    Attributes:
        position: The position of the row in its file.
        text: The text.
        text_pair: The second text of a pair, or None.
        label: A name, a tuple of names for multi-label tasks, or a number for regression and reranking. None without a
            label.
    """

    position: RowPosition
    text: str
    text_pair: str | None = None
    label: str | tuple[str, ...] | float | None = None

    @property
    def input(self) -> str | tuple[str, str]:
        """The text or the pair of texts, in the form that the `tokenizers` library takes."""
        return self.text if self.text_pair is None else (self.text, self.text_pair)


class TupleRow(NamedTuple):
    """A row for training embeddings. It contains the texts that are compared by their embeddings.

    Attributes:
        position: The position of the row in its file.
        texts: An anchor, a positive and any number of negatives, or two texts if there is a score.
        score: The similarity of the two texts. None for an anchor with a positive and negatives.
    """

    position: RowPosition
    texts: tuple[str, ...]
    score: float | None = None


class TaggedRow(NamedTuple):
    """A row with a list of words, and with their tags if they are known.

    Attributes:
        position: The position of the row in its file.
        tokens: The words.
        tags: The tag of each word, or None.
        starts: The first character of each word in the text. None if the text is the words joined by single spaces.
    """

    position: RowPosition
    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    starts: tuple[int, ...] | None = None

    def word_starts(self) -> IntArray:
        """Return the position of the first character of each word in the text, int64 [words]."""
        if self.starts is not None:
            return np.asarray(self.starts, np.int64)
        lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens)) + 1
        starts: IntArray = np.cumsum(lengths) - lengths
        return starts


class QuestionRow(NamedTuple):
    """A question, and the context that may contain its answer.

    Attributes:
        position: The position of the row in its file.
        id: The id of the question.
        question: The question.
        context: The text that may contain the answer.
        answers: Pairs of (text, first character in the context). Empty if the question has no answer, and None if the
            answers are unknown.
    """

    position: RowPosition
    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None = None


class IdsRow(NamedTuple):
    """A row of token ids, for data that is already tokenized."""

    position: RowPosition
    input_ids: tuple[int, ...]


class BadRow(NamedTuple):
    """A row that cannot be read, with a description of the problem.

    It is yielded only if the caller reports such rows instead of stopping.
    """

    position: RowPosition
    problem: str


Row: TypeAlias = TextRow | TupleRow | TaggedRow | QuestionRow | IdsRow


@dataclass(frozen=True, eq=False)
class Sequences:
    """Tokenized sequences, stored in flat arrays. The tokens of sequence i are `[offsets[i] : offsets[i + 1]]` of every
    array [T].

    Attributes:
        row: int64 [N], the index of the row that each sequence comes from, among the rows that were tokenized together. It
            never decreases. A row that was split into windows has several sequences.
        offsets: int64 [N + 1], the first position of each sequence, and the end of the last sequence.
        input_ids: int32 [T], the token ids, with special tokens such as [CLS] and [SEP].
        segment_ids: int8 [T], 1 for the second text of a pair.
        characters: int32 [T, 2], the first character and the end of each token in the text of the row, or in the context of
            a question. -1 for tokens outside this text. None unless the task is token classification or question answering.
        words: int32 [T], the word of the row that a token represents, or -1. Each word is represented by its first token,
            and only in the window that shows the most context around it. None unless the task is token classification.
        target: The targets, or None without labels. int32 [N] for classification. float32 [N, labels] for multi-label tasks.
            float32 [N] for regression and reranking. int32 [T] for token classification, with -100 for tokens that represent
            no word. int32 [N, 2] for question answering: the first and last token of the answer within the sequence, both 0
            if the window does not contain the answer.
        cut_rows: The number of rows that were truncated or split into windows because they are too long.
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
        """The number of tokens in each sequence, int64 [N]."""
        return np.diff(self.offsets)


def sequences_from_ids(
    input_ids: SequenceOf[Int32Array], segment_ids: SequenceOf[NDArray[np.int8]], cut_rows: int = 0
) -> Sequences:
    """Return a `Sequences` object that contains the given token ids. Every sequence counts as a separate row.

    Args:
        input_ids: The token ids of each sequence.
        segment_ids: The segment ids of each sequence.
        cut_rows: The number of rows that were truncated.
    """
    return Sequences(
        row=np.arange(len(input_ids), dtype=np.int64),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum([len(ids) for ids in input_ids], dtype=np.int64)]),
        input_ids=np.concatenate(input_ids),
        segment_ids=np.concatenate(segment_ids),
        cut_rows=cut_rows,
    )


def concatenate_sequences(parts: SequenceOf[Sequences], rows_per_window: SequenceOf[int]) -> Sequences:
    """Concatenate the sequences of several consecutive windows, which are lists of rows, into one `Sequences` object.

    Args:
        parts: The sequences of each window. Either all or none of them have `characters`, `words` or `target`.
        rows_per_window: The number of rows in each window.
    """
    rows_before = np.cumsum(rows_per_window) - np.asarray(rows_per_window)
    optional: dict[str, Any] = {
        name: None if getattr(parts[0], name) is None else np.concatenate([getattr(part, name) for part in parts])
        for name in ("characters", "words", "target")
    }
    return Sequences(
        row=np.concatenate([part.row + before for part, before in zip(parts, rows_before, strict=True)]),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([part.lengths for part in parts]))]),
        input_ids=np.concatenate([part.input_ids for part in parts]),
        segment_ids=np.concatenate([part.segment_ids for part in parts]),
        **optional,
        cut_rows=sum(part.cut_rows for part in parts),
    )


def format_input_name(path: str | Path) -> str:
    """Return the name of an input file for messages, or "standard input" if the path is `-`."""
    return "standard input" if str(path) == STANDARD_INPUT else str(path)
