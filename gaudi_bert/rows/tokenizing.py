"""Rows to token numbers, many at a time; `tokenizers` shares them among its threads.

[CLS] text [SEP], [CLS] text [SEP] second text [SEP], or with other special tokens, as the tokenizer has them. A row of more
tokens than a sequence may have is refused, cut (the longer text of a pair first), or taken in windows. A word is represented
by its first word piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import NOT_PREDICTED, Float32Array, Int32Array, IntArray
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import OnBadRow, TaskName, TaskSettings, TooLong
from gaudi_bert.rows.reading import sized_batches
from gaudi_bert.rows.tokenizer import RowTokenizer, TruncationSide
from gaudi_bert.rows.types import (
    LABELLED_TEXTS,
    NO_WORD,
    BadRow,
    IdsRow,
    QuestionRow,
    Row,
    RowPosition,
    Sequences,
    TaggedRow,
    TextRow,
    join_sequences,
    source_name,
)

_WITH_WINDOWS = ("token-classification", "question-answering", "masked-language-modelling", "causal-language-modelling")
_USUAL_STRIDE = 128
"""As in BERT's own script for SQuAD (Devlin et al., 2019), which has windows of 384."""


_CHARACTERS_OF_TOKEN = 16
"""So many characters of a text are read at first for each token of a sequence."""
_BATCH_CHARACTERS = 1 << 20
_WORDS_OF_PART, _WORDS_OF_BATCH = 1 << 10, 1 << 14
_MOST_NAMED = 5
_TO_LAST_SPACE, _TO_LAST_MARK = re.compile(r".*\s", re.DOTALL), re.compile(r".*\W", re.DOTALL)
_FROM_SPACE, _FROM_MARK = re.compile(r"\s"), re.compile(r"\W")


def policy_of(task: TaskName | None, settings: TaskSettings) -> TooLong:
    """Return what becomes of rows that are too long: windows lose nothing, where a task allows them."""
    return settings.too_long or ("window" if task in _WITH_WINDOWS else "truncate")


def check_policy(task: TaskName | None, settings: TaskSettings) -> None:
    """Refuse a `task.too_long` that is not possible for a task."""
    if settings.too_long == "window" and task not in _WITH_WINDOWS:
        raise InputError(f"task.too_long = window: {task or 'a text'} cannot be taken in windows; use truncate, or error")


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: RowTokenizer,
    *,
    task: TaskName | None,
    settings: TaskSettings,
    max_sequence_length: int,
    labels: Sequence[str] = (),
    file: str | Path = "-",
    length_key: str = "--max-sequence-length",
    truncation_side: TruncationSide | None = None,
) -> Sequences:
    """Tokenize the rows of one task, of which there is at least one.

    Args:
        rows: the rows. Questions are taken in windows, unless the settings say that they are to be cut.
        tokenizer: the tokenizer of the model.
        task: None for plain texts.
        settings: decide what becomes of rows that are too long.
        max_sequence_length: the most tokens of a sequence, with the special ones.
        labels: the names of the labels by number, for targets.
        file: where the rows are from, for messages.
        length_key: the option or setting that is the length, for messages.
        truncation_side: where tokens of a row that is too long are removed; None for the tokenizer's own side.

    Raises:
        InputError: a row is too long and may not be cut, or has a label that is not known.
    """
    check_policy(task, settings)
    numbers = {name: number for number, name in enumerate(labels)}
    side = truncation_side or tokenizer.truncation_side
    job = _Job(tokenizer, task, settings, max_sequence_length, source_name(file), length_key, side)
    if isinstance(rows[0], TextRow) and job.policy != "window":
        sequences = job.texts([row for row in rows if isinstance(row, TextRow)])
        target = _row_targets(rows, task, numbers, job.source) if task in LABELLED_TEXTS else None
        tokenized = Sequences(*sequences, target=target, cut_rows=job.cut_rows)
    else:
        pieces = list(chain.from_iterable(job.pieces(rows, numbers)))
        tokenized = replace(join_sequences(pieces, [0] * len(pieces)), cut_rows=job.cut_rows)
    _check_has_tokens(tokenized, rows, job.source)
    return tokenized


def _check_has_tokens(sequences: Sequences, rows: Sequence[Row], source: str) -> None:
    """Refuse rows without any token, such as an empty text with a tokenizer that adds no special tokens.

    Raises:
        InputError: The message names the first rows. A model has no output for them.
    """
    empty = sequences.row[sequences.lengths == 0]
    if len(empty):
        named = ", ".join(str(rows[row].position) for row in empty[:_MOST_NAMED])
        more = f" and {format_count(len(empty) - _MOST_NAMED, 'more row')}" if len(empty) > _MOST_NAMED else ""
        raise InputError(
            f"{source}: {named}{more}: the text has no token, and the tokenizer adds none, so there is nothing to compute; "
            "write a text there, or leave the row out"
        )


def tokenize_readable(
    window: Sequence[Row | BadRow], on_bad_row: OnBadRow, tokenize: Callable[[list[Row]], Sequences | None]
) -> tuple[list[Row], Sequences | None, dict[int, str]]:
    """The rows that `tokenize` takes, their sequences (None of no row), and the others' problems by their index.

    `tokenize` refuses a window for one of its rows: with `skip`, each is then tried by itself.
    """
    problems = {index: row.problem for index, row in enumerate(window) if isinstance(row, BadRow)}
    good = {index: row for index, row in enumerate(window) if not isinstance(row, BadRow)}
    try:
        return list(good.values()), tokenize(list(good.values())), problems
    except InputError:
        if on_bad_row == "stop":
            raise
    for index, row in list(good.items()):
        try:
            tokenize([row])
        except InputError as error:
            problems[index] = str(error)
            del good[index]
    return list(good.values()), tokenize(list(good.values())), problems


class _Job:
    """One call of `tokenize_rows`; counts the rows that are too long."""

    def __init__(
        self,
        tokenizer: RowTokenizer,
        task: TaskName | None,
        settings: TaskSettings,
        most: int,
        source: str,
        length_key: str,
        side: TruncationSide,
    ) -> None:
        self.tokenizer, self.task, self.settings, self.most, self.source = tokenizer, task, settings, most, source
        self.length_key, self.policy, self.side = length_key, policy_of(task, settings), side
        self.cut_rows = 0

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        return self.tokenizer.frame()

    @cached_property
    def _pair_frame(self) -> tuple[list[int], list[int], list[int], int, int]:
        return self.tokenizer.pair_frame()

    def texts(self, rows: Sequence[TextRow]) -> tuple[IntArray, IntArray, Int32Array, NDArray[np.int8]]:
        """Row numbers, offsets, token numbers and segments of texts, by the tokenizer's own template."""
        tokenizer = self.tokenizer.tokenizer
        if self.policy == "truncate":
            tokenizer.enable_truncation(self.most, direction=self.side)
        try:
            # As far as texts are read first: an encoding is 100 times as large.
            batches = sized_batches(
                rows,
                lambda row: min(len(row.text), _CHARACTERS_OF_TOKEN * self.most) + len(row.text_pair or ""),
                _BATCH_CHARACTERS,
            )
            encoded = list(chain.from_iterable(map(self._encoded_texts, batches)))
        finally:
            tokenizer.no_truncation()
        if self.cut_rows and not self.tokenizer.can_cut_pairs:
            for row, (input_ids, _, _) in zip(rows, encoded, strict=True):
                if row.text_pair is not None and len(input_ids) >= self.most:
                    problem = f"has {self.most:,} tokens or more, and pairs of an ESM model are not cut"
                    raise InputError(f"{self.source}: {row.position}: {problem}; shorten it, or raise {self.length_key}")
        lengths = np.fromiter((len(input_ids) for input_ids, _, _ in encoded), np.int64, len(encoded))
        if lengths.max() > self.most:
            index = int(np.argmax(lengths > self.most))
            more_than = "more than " if encoded[index][2] else ""
            raise self._too_long(rows[index].position, int(lengths[index]), more_than)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        flat, segments = (np.concatenate([text[which] for text in encoded]) for which in (0, 1))
        return np.arange(len(rows), dtype=np.int64), offsets, flat, segments

    def _encoded_texts(self, rows: Sequence[TextRow]) -> list[tuple[Int32Array, NDArray[np.int8], bool]]:
        """Return the tokens and segments of each row, and whether only a part of its text was read.

        Of a text that is far too long, only the side that remains is read. A part that is divided from the rest between
        words and gives twice the tokens of a sequence decides all tokens of a sequence. A part that gives fewer tokens is
        taken four times as long. Both texts of a pair are read to their end: their lengths decide where each is cut.
        """
        encoded: dict[int, tuple[Int32Array, NDArray[np.int8], bool]] = {}
        waiting, size = list(range(len(rows))), _CHARACTERS_OF_TOKEN * self.most
        while waiting:
            is_partial = {index: rows[index].text_pair is None and len(rows[index].text) > size for index in waiting}
            inputs: list[str | tuple[str, str]] = []
            for index in waiting:
                inputs.append(_side_of_text(rows[index].text, size, self.side) if is_partial[index] else rows[index].input)
            for index, encoding in zip(waiting, self.tokenizer.tokenizer.encode_batch_fast(inputs), strict=True):
                input_ids = np.array(encoding.ids, np.int32)
                rest = encoding.overflowing if len(input_ids) == self.most else []
                if not is_partial[index] or len(input_ids) + sum(map(len, rest)) >= 2 * self.most:
                    segment_ids = np.zeros(len(input_ids), np.int8)
                    if rows[index].text_pair is not None and self.tokenizer.has_segments:
                        segment_ids = np.array(encoding.type_ids, np.int8)
                    encoded[index] = input_ids, segment_ids, is_partial[index]
                    self.cut_rows += bool(rest)
            waiting, size = [index for index in waiting if index not in encoded], 4 * size
        return [encoded[index] for index in range(len(rows))]

    def pieces(self, rows: Sequence[Row], numbers: Mapping[str, int]) -> Iterator[Iterable[Sequences]]:
        """The sequences of each row, for rows that may become several; all rows have tags or answers, or none has."""
        if isinstance(rows[0], QuestionRow):
            questions = [row for row in rows if isinstance(row, QuestionRow)]
            contexts = self._encoded(dict.fromkeys(row.context for row in questions))
            question_encodings = self._encoded(dict.fromkeys(row.question for row in questions))
            for index, question in enumerate(questions):
                yield self._question(index, question, question_encodings[question.question], contexts[question.context])
        elif isinstance(rows[0], TaggedRow):
            tagged = [row for row in rows if isinstance(row, TaggedRow)]
            ids, word_of, spans = self._encoded_words(chain.from_iterable(row.tokens for row in tagged))
            first_words = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row.tokens) for row in tagged])])
            offsets = np.searchsorted(word_of, first_words)
            for index, sentence in enumerate(tagged):
                own = slice(offsets[index], offsets[index + 1])
                of_row = word_of[own] - np.int32(first_words[index])
                yield self._words(index, sentence, ids[own], of_row, spans[own], numbers)
        else:
            for index, row in enumerate(rows):
                yield self._language(index, row)

    def _encoded(self, texts: Iterable[str]) -> dict[str, Any]:
        """Each text with its encoding, without [CLS] and [SEP]."""
        listed = list(texts)
        encoded = self.tokenizer.tokenizer.encode_batch(listed, add_special_tokens=False)
        return dict(zip(listed, encoded, strict=True))

    def _bounds(self, position: RowPosition, tokens: int, room: int, stride: int | None, always: bool = False) -> IntArray:
        """The windows of a row, or its one window where rows are cut."""
        if tokens > room:
            if self.policy == "error" and not always:
                raise self._too_long(position, tokens + self.most - room)
            self.cut_rows += 1
            if self.policy == "truncate":
                first = tokens - max(room, 0) if self.side == "left" else 0
                return np.array([[first, first + max(room, 0)]], np.int64)
        return _window_bounds(tokens, room, stride, f"{self.source}: {position}", self.length_key)

    def _too_long(self, position: RowPosition, tokens: int, more_than: str = "") -> InputError:
        also = ", or window" if self.task in _WITH_WINDOWS else ""
        return InputError(
            f"{self.source}: {position}: has {more_than}{tokens:,} tokens, a sequence has at most {self.most:,}; shorten "
            f"it, raise {self.length_key}, or say what becomes of it: --too-long truncate{also}"
        )

    def _framed(self, ids: Int32Array) -> Int32Array:
        before, after = self._frame
        return np.concatenate([before, ids, after]).astype(np.int32)

    def _encoded_words(self, words: Iterable[str]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return the T tokens of words: their numbers [T], the word of each [T], and its characters in that word [T, 2].

        The library's encoding takes some hundred bytes per token, so only a few thousand words are encoded at a time. That
        changes nothing, because a word becomes the same tokens whatever its neighbours are.
        """
        tokenizer, remaining, words_before = self.tokenizer.for_words(), iter(words), 0
        ids, word_of, spans = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)]
        parts = iter(lambda: list(islice(remaining, _WORDS_OF_PART)), [])
        for batch in sized_batches(parts, len, _WORDS_OF_BATCH):
            encodings = tokenizer.encode_batch(batch, is_pretokenized=True, add_special_tokens=False)
            for part, encoding in zip(batch, encodings, strict=True):
                ids.append(np.array(encoding.ids, np.int32))
                word_of.append(np.array(encoding.word_ids, np.int32).reshape(-1) + np.int32(words_before))
                spans.append(np.array(encoding.offsets, np.int32).reshape(-1, 2))
                words_before += len(part)
        return np.concatenate(ids), np.concatenate(word_of), np.concatenate(spans)

    def _words(
        self,
        index: int,
        row: TaggedRow,
        ids: Int32Array,
        word_of: Int32Array,
        spans_in_words: Int32Array,
        numbers: Mapping[str, int],
    ) -> Iterator[Sequences]:
        """Yield the windows of a row of words, from what `_encoded_words` returns for it."""
        first = np.flatnonzero(np.diff(word_of, prepend=NO_WORD))
        characters = spans_in_words + row.word_starts()[word_of].astype(np.int32)[:, np.newaxis]
        before, after = self._frame
        bounds = self._bounds(row.position, len(ids), self.most - len(before) - len(after), self.settings.stride)
        # The chosen windows ascend, so the words of each window are consecutive.
        word_bounds = np.searchsorted(_best_windows(first, bounds), np.arange(len(bounds) + 1))
        tags = np.full(len(row.tokens), NOT_PREDICTED, np.int32)
        if row.tags is not None:
            tags[:] = [_label_number(numbers, tag, row.position, self.source) for tag in row.tags]
        for window, (start, end) in enumerate(bounds.tolist()):
            words = np.full(len(before) + end - start + len(after), NO_WORD, np.int32)
            own = first[word_bounds[window] : word_bounds[window + 1]]
            own = own[(own >= start) & (own < end)]  # a row that is cut has one window, and words outside it
            words[own - start + len(before)] = word_of[own]
            target = np.full(len(words), NOT_PREDICTED, np.int32)
            target[own - start + len(before)] = tags[word_of[own]]
            spans = np.full((len(words), 2), NO_WORD, np.int32)
            spans[len(before) : len(words) - len(after)] = characters[start:end]
            framed, known = self._framed(ids[start:end]), None if row.tags is None else target
            yield _piece(index, framed, characters=spans, words=words, target=known)

    def _question(self, index: int, row: QuestionRow, question: Any, context: Any) -> Iterator[Sequences]:
        before, between, after, *segments = self._pair_frame
        framed = np.array([*before, *question.ids, *between], np.int32)
        room = self.most - len(framed) - len(after)
        if room < 1:
            problem = f"the question has {len(question.ids):,} tokens, and {self.most:,} leave no room for its context"
            raise InputError(f"{self.source}: {row.position}: {problem}; shorten it, or raise {self.length_key}")
        ids, characters = np.array(context.ids, np.int32), np.array(context.offsets, np.int64).reshape(-1, 2)
        for start, end in self._bounds(row.position, len(ids), room, self.settings.stride, always=True).tolist():
            input_ids = np.concatenate([framed, ids[start:end], after]).astype(np.int32)
            segment_ids = np.repeat(np.array(segments, np.int8), [len(framed), len(input_ids) - len(framed)])
            spans = np.full((len(input_ids), 2), NO_WORD, np.int32)
            spans[len(framed) : len(framed) + end - start] = characters[start:end]
            target: Int32Array | None = None
            if row.answers is not None:
                tokens = _answer_tokens(row, characters[start:end]) + (len(framed) if end > start else 0)
                target = np.where(tokens < len(framed), 0, tokens)[np.newaxis]
            yield _piece(index, input_ids, segment_ids=segment_ids, characters=spans, target=target)

    def _language(self, index: int, row: Row) -> Iterator[Sequences]:
        if isinstance(row, IdsRow):
            ids, room = np.array(row.input_ids, np.int32), self.most
            if ids.max() >= self.tokenizer.vocabulary_size:
                problem = f"the token {ids.max()} is not of this vocabulary of {self.tokenizer.vocabulary_size:,}"
                raise InputError(f"{self.source}: {row.position}: {problem}; use the model's own tokenizer")
        else:
            text = row.text if isinstance(row, TextRow) else ""
            added = sum(map(len, self._frame))
            ids, room = np.array(self._encoded([text])[text].ids, np.int32), self.most - added
        for start, end in self._bounds(row.position, len(ids), room, 0).tolist():
            yield _piece(index, ids[start:end] if isinstance(row, IdsRow) else self._framed(ids[start:end]))


def _side_of_text(text: str, characters: int, side: TruncationSide) -> str:
    """Return at most so many characters of a side of a text: to a space, or else to a character that is not of a word."""
    if side == "left":
        match = _FROM_SPACE.search(text, len(text) - characters) or _FROM_MARK.search(text, len(text) - characters)
        return text[match.start() :] if match else ""
    match = _TO_LAST_SPACE.match(text, 0, characters) or _TO_LAST_MARK.match(text, 0, characters)
    return match[0] if match else ""


def _answer_tokens(row: QuestionRow, characters: IntArray) -> Int32Array:
    """First and last token of the first answer in a window of the context; far below 0 where part of it is missing."""
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


def _piece(index: int, input_ids: Int32Array, segment_ids: NDArray[np.int8] | None = None, **others: Any) -> Sequences:
    segments = np.zeros(len(input_ids), np.int8) if segment_ids is None else segment_ids
    return Sequences(np.array([index]), np.array([0, len(input_ids)]), input_ids, segments, **others)


# --- targets


def _row_targets(
    rows: Sequence[Row], task: TaskName, numbers: Mapping[str, int], source: str
) -> Int32Array | Float32Array | None:
    """Return targets of texts: int32 [rows], float32 [rows, labels] of 0 and 1, or float32 [rows]; None without labels."""
    labels = [row.label if isinstance(row, TextRow) else None for row in rows]
    if None in labels:
        return None
    if task in ("regression", "reranking"):
        return np.array(labels, np.float32)
    if task == "multi-label":
        targets = np.zeros((len(rows), len(numbers)), np.float32)
        for index, (row, names) in enumerate(zip(rows, labels, strict=True)):
            for name in names if isinstance(names, tuple) else ():
                targets[index, _label_number(numbers, name, row.position, source)] = 1
        return targets
    return np.array(
        [_label_number(numbers, str(label), row.position, source) for row, label in zip(rows, labels, strict=True)], np.int32
    )


def _label_number(numbers: Mapping[str, int], name: str, position: RowPosition, source: str) -> int:
    if name not in numbers:
        known = ", ".join(list(numbers)[:8]) + (", ..." if len(numbers) > 8 else "")
        raise InputError(f"{source}: {position}: the label {short_repr(name)} is unknown, known are {known}; fix it")
    return numbers[name]


# --- windows of long texts


def _window_bounds(
    tokens: int, room: int, stride: int | None, row: str, length_key: str = "--max-sequence-length"
) -> IntArray:
    """First token of each window and the one after its last, int64 [windows, 2]; one window where all fits.

    A window has `room` tokens and shares `stride` with its neighbour; None for `_USUAL_STRIDE`, or half of a window that is
    too short for that. `row` is its name in errors, `length_key` that of the length.
    """
    if tokens <= room:
        return np.array([[0, tokens]], np.int64)
    if stride is None:
        stride = min(_USUAL_STRIDE, max(room, 0) // 2)
    if stride >= room:
        windows = f"{tokens:,} tokens for windows of {max(room, 0)}"
        raise InputError(f"{row}: has {windows}, which cannot share {stride}; lower task.stride, or raise {length_key}")
    count = -(-(tokens - room) // (room - stride)) + 1
    starts = np.arange(count, dtype=np.int64) * (room - stride)
    return np.stack([starts, np.minimum(starts + room, tokens)], axis=1)


def _best_windows(tokens: IntArray, bounds: IntArray) -> IntArray:
    """Return the window of each token that shows most context on the token's poorer side, int64 [P], the first of equals.

    Args:
        tokens: P tokens of a text by their positions in it, int64 [P], ascending. The result ascends too.
        bounds: the windows of the text, as `_window_bounds` returns them.
    """
    starts, ends = bounds[:, 0], bounds[:, 1]

    def poorer_side(windows: IntArray) -> IntArray:
        return np.minimum(tokens - starts[windows], ends[windows] - 1 - tokens)

    # From window to window, the context before a token shrinks and the context after it grows, so the best window is one of
    # the two between which the larger side changes.
    later = np.minimum(np.searchsorted(starts + ends, 2 * tokens + 1), len(bounds) - 1)
    earlier = np.maximum(later - 1, 0)
    best: IntArray = np.where(poorer_side(earlier) >= poorer_side(later), earlier, later)
    return best
