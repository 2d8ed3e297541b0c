"""Rows to token numbers, many at a time; `tokenizers` shares them among its threads.

[CLS] text [SEP], or [CLS] text [SEP] second text [SEP]. A row of more tokens than a sequence may have is refused, cut (the
longer text of a pair first), or taken in windows. For words the first word piece stands for the word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.tasks import TaskName, TaskSettings
from gaudi_bert.tasks.rows.labels import label_number, numbers_of_labels, row_targets
from gaudi_bert.tasks.rows.tokenizer import RowTokenizer
from gaudi_bert.tasks.rows.types import (
    IGNORED,
    NO_WORD,
    IdsRow,
    QuestionRow,
    Row,
    Sequences,
    TaggedRow,
    TextRow,
    source_name,
)
from gaudi_bert.tasks.rows.windows import best_windows, window_bounds

__all__ = ["tokenize_rows"]

WITH_WINDOWS = ("token-classification", "question-answering", "masked-language-modelling", "causal-language-modelling")


class _Piece(NamedTuple):
    """One sequence; arrays as in `Sequences`."""

    row: int
    input_ids: Int32Array
    segment_ids: NDArray[np.int8]
    characters: Int32Array
    words: Int32Array
    target: Int32Array


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: RowTokenizer,
    *,
    task: TaskName | None,
    settings: TaskSettings,
    max_sequence_length: int,
    labels: Sequence[str] = (),
    file: str | Path = "-",
) -> Sequences:
    """Tokenize rows of one task.

    Args:
        rows: at least one.
        tokenizer: the model's.
        task: None for plain texts.
        settings: what becomes of long rows; questions are always taken in windows, unless they are to be cut.
        max_sequence_length: most tokens of a sequence.
        labels: the names of the model's labels.
        file: where the rows are from, for errors.

    Raises:
        InputError: a row is too long, or has a label that is not in `labels`.
    """
    if settings.too_long == "window" and task not in WITH_WINDOWS:
        raise InputError(
            f"task.too_long = window: a row of {task or 'plain text'} has one answer and cannot be taken in windows; "
            "use truncate, or error"
        )
    job = _Job(tokenizer, task, settings, max_sequence_length, source_name(file))
    if isinstance(rows[0], TextRow) and settings.too_long != "window":
        sequences = job.texts([row for row in rows if isinstance(row, TextRow)])
        numbers = numbers_of_labels(labels)
        target = row_targets(rows, task, numbers, file) if task in ("classification", "multi-label", "regression") else None
        return Sequences(*sequences, target=target, cut_rows=job.cut_rows)
    pieces = list(chain.from_iterable(job.pieces(rows, numbers_of_labels(labels))))
    return _joined(pieces, task, _labelled(rows), job.cut_rows)


class _Job:
    """One call of `tokenize_rows`; counts the rows that are too long."""

    def __init__(
        self, tokenizer: RowTokenizer, task: TaskName | None, settings: TaskSettings, most: int, source: str
    ) -> None:
        self.tokenizer, self.task, self.settings, self.most, self.source = tokenizer, task, settings, most, source
        self.cut_rows = 0

    def texts(self, rows: Sequence[TextRow]) -> tuple[IntArray, IntArray, Int32Array, NDArray[np.int8]]:
        """Row numbers, offsets, token numbers and segments of whole texts, by the tokenizer's own template."""
        inputs = [row.text if row.text_pair is None else (row.text, row.text_pair) for row in rows]
        tokenizer = self.tokenizer.tokenizer
        if self.settings.too_long == "truncate":
            tokenizer.enable_truncation(self.most)
        try:
            encoded = tokenizer.encode_batch_fast(inputs)
        finally:
            tokenizer.no_truncation()
        ids = [encoding.ids for encoding in encoded]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        if self.settings.too_long == "truncate":
            full = np.flatnonzero(lengths == self.most)
            self.cut_rows += sum(bool(encoded[place].overflowing) for place in full)
        elif lengths.max() > self.most:
            place = int(np.argmax(lengths > self.most))
            raise self._too_long(rows[place].number, int(lengths[place]))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        segments = np.zeros(int(offsets[-1]), np.int8)
        if any(row.text_pair is not None for row in rows):
            segments = np.fromiter(chain.from_iterable(encoding.type_ids for encoding in encoded), np.int8, len(segments))
        flat = np.fromiter(chain.from_iterable(ids), np.int32, len(segments))
        return np.arange(len(rows), dtype=np.int64), offsets, flat, segments

    def pieces(self, rows: Sequence[Row], numbers: Mapping[str, int]) -> Iterator[Iterable[_Piece]]:
        """The sequences of each row, for rows that may become several."""
        if isinstance(rows[0], QuestionRow):
            questions = [row for row in rows if isinstance(row, QuestionRow)]
            contexts = self._encoded(dict.fromkeys(row.context for row in questions))
            asked = self._encoded(dict.fromkeys(row.question for row in questions))
            for place, question in enumerate(questions):
                yield self._question(place, question, asked[question.question], contexts[question.context])
        elif isinstance(rows[0], TaggedRow):
            tagged = [row for row in rows if isinstance(row, TaggedRow)]
            words = self.tokenizer.tokenizer.encode_batch(
                [list(row.tokens) for row in tagged], is_pretokenized=True, add_special_tokens=False
            )
            for place, (sentence, encoding) in enumerate(zip(tagged, words, strict=True)):
                yield self._words(place, sentence, encoding, numbers)
        else:
            for place, row in enumerate(rows):
                yield self._language(place, row)

    def _encoded(self, texts: Iterable[str]) -> dict[str, Any]:
        """Each text with its encoding, without [CLS] and [SEP]."""
        listed = list(texts)
        encoded = self.tokenizer.tokenizer.encode_batch(listed, add_special_tokens=False)
        return dict(zip(listed, encoded, strict=True))

    def _bounds(self, number: int, tokens: int, room: int, stride: int | None, always: bool = False) -> IntArray:
        """The windows of a row, or the one that is left where rows are cut."""
        if tokens > room:
            if self.settings.too_long == "error" and not always:
                raise self._too_long(number, tokens + self.most - room)
            self.cut_rows += 1
            if self.settings.too_long == "truncate":
                return np.array([[0, max(room, 0)]], np.int64)
        return window_bounds(tokens, room, stride, f"{self.source}: row {number}")

    def _too_long(self, number: int, tokens: int) -> InputError:
        also = ", or window" if self.task in WITH_WINDOWS else ""
        return InputError(
            f"{self.source}: row {number}: has {tokens:,} tokens, a sequence has at most {self.most:,}; shorten it, raise "
            f"max_sequence_length, or say what becomes of it: --set task.too_long=truncate{also}"
        )

    def _framed(self, ids: Int32Array) -> Int32Array:
        ends = self.tokenizer.cls_id, self.tokenizer.sep_id
        return np.concatenate([[ends[0]], ids, [ends[1]]]).astype(np.int32)

    def _words(self, place: int, row: TaggedRow, encoding: Any, numbers: Mapping[str, int]) -> Iterator[_Piece]:
        ids = np.array(encoding.ids, np.int32)
        word_of = np.array(encoding.word_ids, np.int64).reshape(-1)
        first = np.flatnonzero(np.diff(word_of, prepend=NO_WORD))
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2) + row.word_starts()[word_of][:, np.newaxis]
        bounds = self._bounds(row.number, len(ids), self.most - 2, self.settings.stride)
        chosen = best_windows(first, bounds)
        tags = self._tags(row, numbers)
        for window, (start, end) in enumerate(bounds.tolist()):
            words = np.full(end - start + 2, NO_WORD, np.int32)
            own = first[(chosen == window) & (first >= start) & (first < end)]
            words[own - start + 1] = word_of[own]
            target = np.full(len(words), IGNORED, np.int32)
            target[own - start + 1] = tags[word_of[own]]
            spans = np.full((len(words), 2), NO_WORD, np.int32)
            spans[1:-1] = characters[start:end]
            yield _Piece(place, self._framed(ids[start:end]), np.zeros(len(words), np.int8), spans, words, target)

    def _tags(self, row: TaggedRow, numbers: Mapping[str, int]) -> Int32Array:
        if row.tags is None:
            return np.full(len(row.tokens), IGNORED, np.int32)
        return np.array([label_number(numbers, tag, row.number, self.source) for tag in row.tags], np.int32)

    def _question(self, place: int, row: QuestionRow, question: Any, context: Any) -> Iterator[_Piece]:
        asked = self._framed(np.array(question.ids, np.int32))
        room = self.most - len(asked) - 1
        if room < 1:
            raise InputError(
                f"{self.source}: row {row.number}: the question has {len(question.ids):,} tokens, which leaves no room for "
                f"its context in {self.most:,}; shorten it, or raise max_sequence_length"
            )
        ids, characters = np.array(context.ids, np.int32), np.array(context.offsets, np.int64).reshape(-1, 2)
        for start, end in self._bounds(row.number, len(ids), room, self.settings.stride, always=True).tolist():
            input_ids = np.concatenate([asked, ids[start:end], [self.tokenizer.sep_id]]).astype(np.int32)
            segments = np.repeat(np.array([0, 1], np.int8), [len(asked), end - start + 1])
            spans = np.full((len(input_ids), 2), NO_WORD, np.int32)
            spans[len(asked) : -1] = characters[start:end]
            words = np.full(len(input_ids), NO_WORD, np.int32)
            target = _answer_tokens(row, characters[start:end]) + (len(asked) if end > start else 0)
            yield _Piece(place, input_ids, segments, spans, words, np.where(target < len(asked), 0, target))

    def _language(self, place: int, row: Row) -> Iterator[_Piece]:
        if isinstance(row, IdsRow):
            ids, room = np.array(row.input_ids, np.int32), self.most
            if ids.max() >= self.tokenizer.vocabulary_size:
                raise InputError(
                    f"{self.source}: row {row.number}: the token {ids.max()} is not of this vocabulary of "
                    f"{self.tokenizer.vocabulary_size:,}; tokenize it with the model's own tokenizer"
                )
        else:
            text = row.text if isinstance(row, TextRow) else ""
            ids, room = np.array(self._encoded([text])[text].ids, np.int32), self.most - 2
        for start, end in self._bounds(row.number, len(ids), room, 0).tolist():
            part = ids[start:end] if isinstance(row, IdsRow) else self._framed(ids[start:end])
            nothing = np.full((len(part), 2), NO_WORD, np.int32)
            yield _Piece(place, part, np.zeros(len(part), np.int8), nothing, nothing[:, 0], nothing[0])


def _answer_tokens(row: QuestionRow, characters: IntArray) -> Int32Array:
    """First and last token of the first answer in a window of the context; far below 0 where it is not all there."""
    absent = np.full(2, -(2**30), np.int32)
    if not row.answers or not len(characters):
        return absent
    text, begin = row.answers[0]
    end = begin + len(text)
    if characters[0, 0] > begin or characters[-1, 1] < end:
        return absent
    first = np.searchsorted(characters[:, 0], begin, side="right") - 1
    last = np.searchsorted(characters[:, 1], end, side="left")
    return np.array([first, last], np.int32)


def _labelled(rows: Sequence[Row]) -> bool:
    """Whether the rows have tags or answers; they were read with them or without."""
    first = rows[0]
    return (first.tags if isinstance(first, TaggedRow) else getattr(first, "answers", None)) is not None


def _joined(pieces: Sequence[_Piece], task: TaskName | None, labelled: bool, cut_rows: int) -> Sequences:
    lengths = [len(piece.input_ids) for piece in pieces]
    tokens, questions = task == "token-classification", task == "question-answering"
    target: Int32Array | None = None
    if labelled and tokens:
        target = np.concatenate([piece.target for piece in pieces])
    elif labelled and questions:
        target = np.stack([piece.target for piece in pieces])
    return Sequences(
        row=np.array([piece.row for piece in pieces], np.int64),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        input_ids=np.concatenate([piece.input_ids for piece in pieces]),
        segment_ids=np.concatenate([piece.segment_ids for piece in pieces]),
        characters=np.concatenate([piece.characters for piece in pieces]) if tokens or questions else None,
        words=np.concatenate([piece.words for piece in pieces]) if tokens else None,
        target=target,
        cut_rows=cut_rows,
    )
