"""Tokenize rows, many at a time, on the threads of the library `tokenizers`.

A text becomes [CLS] text [SEP], and a pair becomes [CLS] text [SEP] second text [SEP]. Other tokenizers use other special
tokens. A row with more tokens than a sequence may have is rejected, truncated or split into windows. Truncating a pair
shortens the longer text first. In token classification, each word is represented by its first token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import NOT_PREDICTED, Float32Array, Int32Array, IntArray
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import OnBadRow, TaskName, TaskSettings, TooLong
from gaudi_bert.rows.reading import batch_by_size
from gaudi_bert.rows.tokenizer import PairSpecialTokens, RowTokenizer, TextSpecialTokens, TruncationSide
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
    concatenate_sequences,
    format_input_name,
    sequences_from_ids,
)

_TASKS_WITH_WINDOWS = (
    "token-classification",
    "question-answering",
    "masked-language-modelling",
    "causal-language-modelling",
)
# Neighbouring windows share this number of tokens by default, as in BERT's script for SQuAD (Devlin et al., 2019).
_USUAL_STRIDE = 128


# Most of a very long text would be truncated, so only a part of it is tokenized. At first, this part contains 16 characters
# for each token of a sequence.
_CHARACTERS_OF_TOKEN = 16
_BATCH_CHARACTERS = 1 << 20
_WORDS_OF_PART, _WORDS_OF_BATCH = 1 << 10, 1 << 14
_MAX_NAMED_ROWS = 5
_TO_LAST_SPACE, _TO_LAST_MARK = re.compile(r".*\s", re.DOTALL), re.compile(r".*\W", re.DOTALL)
_FROM_SPACE, _FROM_MARK = re.compile(r"\s"), re.compile(r"\W")


def resolve_long_row_policy(task: TaskName | None, settings: TaskSettings) -> TooLong:
    """Return how rows that are too long are handled: they are truncated, split into windows or rejected.

    The default is windows, which lose nothing, if the task supports them.
    """
    return settings.too_long or ("window" if task in _TASKS_WITH_WINDOWS else "truncate")


def check_long_row_policy(task: TaskName | None, settings: TaskSettings) -> None:
    """Raise an InputError if the task does not support the setting `task.too_long`.

    Raises:
        InputError: The policy is "window", and the task does not support windows.
    """
    if settings.too_long == "window" and task not in _TASKS_WITH_WINDOWS:
        raise InputError(
            f"task.too_long = window: {task or 'texts without a task'} cannot be split into windows; set truncate or error"
        )


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
    """Tokenize one or more rows for a task, and return the sequences.

    Args:
        rows: The rows. Questions are split into windows unless the settings specify truncation.
        tokenizer: The tokenizer of the model.
        task: The task, or None for plain texts.
        settings: The settings of the task, which determine what happens to rows that are too long.
        max_sequence_length: The largest number of tokens in a sequence, including special tokens.
        labels: The names of the labels by number, for the targets.
        file: The file of the rows, for messages.
        length_key: The option or setting that sets the length, for messages.
        truncation_side: The side on which tokens are removed from a row that is too long. None for the tokenizer's own side.

    Returns:
        The sequences, in the order of the rows. They have targets if the rows have labels.

    Raises:
        InputError: A row is too long and must not be truncated, has an unknown label, or has no token.
    """
    check_long_row_policy(task, settings)
    label_numbers = {name: number for number, name in enumerate(labels)}
    side = truncation_side or tokenizer.truncation_side
    job = _RowEncoder(tokenizer, task, settings, max_sequence_length, format_input_name(file), length_key, side)
    if isinstance(rows[0], TextRow) and job.policy != "window":
        tokenized = job.tokenize_texts([row for row in rows if isinstance(row, TextRow)])
        if task in LABELLED_TEXTS:
            tokenized = replace(tokenized, target=_make_text_targets(rows, task, label_numbers, job.source))
    else:
        windows = list(chain.from_iterable(job.tokenize_into_windows(rows, label_numbers)))
        tokenized = replace(concatenate_sequences(windows, [0] * len(windows)), cut_rows=job.cut_rows)
    _check_no_empty_sequence(tokenized, rows, job.source)
    return tokenized


def _check_no_empty_sequence(sequences: Sequences, rows: Sequence[Row], source: str) -> None:
    """Raise an InputError if a sequence contains no tokens, because a model has no output for an empty sequence.

    A sequence may be empty if a text is empty and the tokenizer adds no special tokens.

    Raises:
        InputError: A sequence is empty. The message names the first such rows.
    """
    empty = sequences.row[sequences.lengths == 0]
    if len(empty):
        named = ", ".join(str(rows[row].position) for row in empty[:_MAX_NAMED_ROWS])
        more = f" and {format_count(len(empty) - _MAX_NAMED_ROWS, 'more row')}" if len(empty) > _MAX_NAMED_ROWS else ""
        raise InputError(
            f"{source}: {named}{more}: the text has no tokens, and the tokenizer adds no special tokens; "
            "write a longer text, or remove the row"
        )


def tokenize_readable_rows(
    window: Sequence[Row | BadRow], on_bad_row: OnBadRow, tokenize: Callable[[list[Row]], Sequences]
) -> tuple[list[Row], Sequences | None, dict[int, str]]:
    """Tokenize the given rows, and return their sequences. Also return an error message for each row that cannot be read or
    tokenized. If no row can be tokenized, the sequences are None.

    If `tokenize` raises an exception for all rows together and `on_bad_row` is "skip", each row is tried separately.

    Args:
        window: The rows, including any `BadRow`.
        on_bad_row: "stop" raises the exception of `tokenize`. "skip" leaves out the rows that cannot be tokenized.
        tokenize: Returns the sequences of the given rows. There is at least one row.

    Returns:
        The rows that were tokenized, their sequences, and the problem of every other row by its index in `window`.

    Raises:
        InputError: A row cannot be tokenized, and `on_bad_row` is "stop".
    """
    problems = {index: row.problem for index, row in enumerate(window) if isinstance(row, BadRow)}
    good = {index: row for index, row in enumerate(window) if not isinstance(row, BadRow)}
    try:
        return list(good.values()), tokenize(list(good.values())) if good else None, problems
    except InputError:
        if on_bad_row == "stop":
            raise
    for index, row in list(good.items()):
        try:
            tokenize([row])
        except InputError as error:
            problems[index] = str(error)
            del good[index]
    return list(good.values()), tokenize(list(good.values())) if good else None, problems


class _EncodedText(NamedTuple):
    """The tokens of a text or of a pair of texts.

    Attributes:
        input_ids: int32, the token ids, with special tokens.
        segment_ids: int8, 1 for the second text of a pair.
        is_partial: Whether only a part of the text was tokenized, because the text is far too long.
    """

    input_ids: Int32Array
    segment_ids: NDArray[np.int8]
    is_partial: bool


class _EncodedWords(NamedTuple):
    """The T tokens of a list of words, without special tokens.

    Attributes:
        ids: int32 [T], the token ids.
        word_indices: int32 [T], the index of the word that each token belongs to.
        spans_in_words: int32 [T, 2], the first character and the end of each token in its word.
    """

    ids: Int32Array
    word_indices: Int32Array
    spans_in_words: Int32Array


class _RowEncoder:
    """Tokenizes the rows of one `tokenize_rows` call, which have the same tokenizer, task and maximum length.

    Attributes:
        cut_rows: The number of rows so far that were truncated or split into windows.
    """

    def __init__(
        self,
        tokenizer: RowTokenizer,
        task: TaskName | None,
        settings: TaskSettings,
        max_tokens: int,
        source: str,
        length_key: str,
        side: TruncationSide,
    ) -> None:
        self.tokenizer, self.task, self.settings, self.max_tokens, self.source = (
            tokenizer,
            task,
            settings,
            max_tokens,
            source,
        )
        self.length_key, self.policy, self.side = length_key, resolve_long_row_policy(task, settings), side
        self.cut_rows = 0

    @cached_property
    def _special_tokens_around_text(self) -> TextSpecialTokens:
        """The ids of the special tokens before a text and after a text."""
        return self.tokenizer.special_tokens_around_text()

    @cached_property
    def _special_tokens_around_pair(self) -> PairSpecialTokens:
        """The special tokens before, between and after the texts of a pair, and the segment ids of the two texts."""
        return self.tokenizer.special_tokens_around_pair()

    def tokenize_texts(self, rows: Sequence[TextRow]) -> Sequences:
        """Tokenize texts and pairs that are not split into windows, and return one sequence per row, without targets.

        Raises:
            InputError: A row is too long and must not be truncated.
        """
        tokenizer = self.tokenizer.tokenizer
        if self.policy == "truncate":
            tokenizer.enable_truncation(self.max_tokens, direction=self.side)
        try:
            # Tokenizing takes about 100 times as much memory as the text itself, so limit the number of characters in a
            # batch. Only the beginning of a long text is tokenized first, so only the beginning counts.
            batches = batch_by_size(
                rows,
                lambda row: min(len(row.text), _CHARACTERS_OF_TOKEN * self.max_tokens) + len(row.text_pair or ""),
                _BATCH_CHARACTERS,
            )
            encoded = list(chain.from_iterable(map(self._encode_texts, batches)))
        finally:
            tokenizer.no_truncation()
        if self.cut_rows and not self.tokenizer.can_truncate_pairs:
            for row, text in zip(rows, encoded, strict=True):
                if row.text_pair is not None and len(text.input_ids) >= self.max_tokens:
                    raise InputError(
                        f"{self.source}: {row.position}: the pair has {self.max_tokens:,} tokens or more, and pairs cannot "
                        f"be truncated for ESM models; shorten it, or raise {self.length_key}"
                    )
        for row, text in zip(rows, encoded, strict=True):
            if len(text.input_ids) > self.max_tokens:
                raise self._too_long_error(row.position, len(text.input_ids), "more than " if text.is_partial else "")
        return sequences_from_ids(
            [text.input_ids for text in encoded], [text.segment_ids for text in encoded], self.cut_rows
        )

    def _encode_texts(self, rows: Sequence[TextRow]) -> list[_EncodedText]:
        """Tokenize a batch of texts and pairs, and return the result for each row.

        If a text is far too long, only the side that remains is read. The part ends between two words. If it gives at least
        twice as many tokens as a sequence has, it determines all tokens of the sequence. Otherwise a part of four times the
        length is read. The texts of a pair are read completely, because their lengths decide where each is truncated.
        """
        encoded: dict[int, _EncodedText] = {}
        waiting, size = list(range(len(rows))), _CHARACTERS_OF_TOKEN * self.max_tokens
        while waiting:
            is_partial = {index: rows[index].text_pair is None and len(rows[index].text) > size for index in waiting}
            inputs = [
                _truncate_between_words(rows[index].text, size, self.side) if is_partial[index] else rows[index].input
                for index in waiting
            ]
            for index, encoding in zip(waiting, self.tokenizer.tokenizer.encode_batch_fast(inputs), strict=True):
                input_ids = np.array(encoding.ids, np.int32)
                rest = encoding.overflowing if len(input_ids) == self.max_tokens else []
                if not is_partial[index] or len(input_ids) + sum(map(len, rest)) >= 2 * self.max_tokens:
                    segment_ids = np.zeros(len(input_ids), np.int8)
                    if rows[index].text_pair is not None and self.tokenizer.has_segments:
                        segment_ids = np.array(encoding.type_ids, np.int8)
                    encoded[index] = _EncodedText(input_ids, segment_ids, is_partial[index])
                    self.cut_rows += bool(rest)
            waiting, size = [index for index in waiting if index not in encoded], 4 * size
        return [encoded[index] for index in range(len(rows))]

    def tokenize_into_windows(self, rows: Sequence[Row], label_numbers: Mapping[str, int]) -> Iterator[Iterable[Sequences]]:
        """Tokenize rows that may be split into windows, and yield the sequences of each row.

        Either all rows have tags or answers, or none has.
        """
        if isinstance(rows[0], QuestionRow):
            questions = [row for row in rows if isinstance(row, QuestionRow)]
            contexts = self._encode_without_special_tokens(dict.fromkeys(row.context for row in questions))
            question_encodings = self._encode_without_special_tokens(dict.fromkeys(row.question for row in questions))
            for index, question in enumerate(questions):
                yield self._iterate_question_windows(
                    index, question, question_encodings[question.question], contexts[question.context]
                )
        elif isinstance(rows[0], TaggedRow):
            tagged = [row for row in rows if isinstance(row, TaggedRow)]
            ids, word_indices, spans = self._encode_words(chain.from_iterable(row.tokens for row in tagged))
            first_words = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row.tokens) for row in tagged])])
            offsets = np.searchsorted(word_indices, first_words)
            for index, sentence in enumerate(tagged):
                own = slice(offsets[index], offsets[index + 1])
                words = _EncodedWords(ids[own], word_indices[own] - np.int32(first_words[index]), spans[own])
                yield self._iterate_word_windows(index, sentence, words, label_numbers)
        else:
            for index, row in enumerate(rows):
                yield self._iterate_language_modelling_windows(index, row)

    def _encode_without_special_tokens(self, texts: Iterable[str]) -> dict[str, Any]:
        """Tokenize texts without special tokens such as [CLS] and [SEP], and return their encodings by text."""
        listed = list(texts)
        return dict(zip(listed, self.tokenizer.tokenizer.encode_batch(listed, add_special_tokens=False), strict=True))

    def _compute_window_bounds(
        self, position: RowPosition, tokens: int, window_size: int, stride: int | None, always_split: bool = False
    ) -> IntArray:
        """Return the first token and the end of each window of a row, int64 [windows, 2]. A truncated row has a single
        window.

        Args:
            position: The position of the row, for messages.
            tokens: The number of tokens in the row, without special tokens.
            window_size: The number of tokens in a full window.
            stride: The number of tokens that neighbouring windows share. None for the default.
            always_split: Whether a row that is too long is split into windows even if the policy is to reject it.
        """
        if tokens > window_size:
            if self.policy == "error" and not always_split:
                raise self._too_long_error(position, tokens + self.max_tokens - window_size)
            self.cut_rows += 1
            if self.policy == "truncate":
                first = tokens - max(window_size, 0) if self.side == "left" else 0
                return np.array([[first, first + max(window_size, 0)]], np.int64)
        return _split_into_windows(tokens, window_size, stride, f"{self.source}: {position}", self.length_key)

    def _too_long_error(self, position: RowPosition, tokens: int, more_than: str = "") -> InputError:
        """Return the error for a row that has more tokens than a sequence may have."""
        also = ", or window" if self.task in _TASKS_WITH_WINDOWS else ""
        return InputError(
            f"{self.source}: {position}: the row has {more_than}{tokens:,} tokens, but a sequence may have at most "
            f"{self.max_tokens:,}; shorten it, raise {self.length_key}, or pass --too-long truncate{also}"
        )

    def _add_special_tokens(self, ids: Int32Array) -> Int32Array:
        """Return the token ids of a text with the special tokens before and after it."""
        before, after = self._special_tokens_around_text
        return np.concatenate([before, ids, after]).astype(np.int32)

    def _encode_words(self, words: Iterable[str]) -> _EncodedWords:
        """Tokenize words one by one, and return the tokens of all words.

        The library's encoding takes several hundred bytes per token, so only a few thousand words are encoded at a time.
        This does not change the result, because the tokens of a word do not depend on its neighbours.
        """
        tokenizer, remaining, words_before = self.tokenizer.tokenizer_for_words(), iter(words), 0
        ids, word_indices, spans = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)]
        parts = iter(lambda: list(islice(remaining, _WORDS_OF_PART)), [])
        for batch in batch_by_size(parts, len, _WORDS_OF_BATCH):
            encodings = tokenizer.encode_batch(batch, is_pretokenized=True, add_special_tokens=False)
            for part, encoding in zip(batch, encodings, strict=True):
                ids.append(np.array(encoding.ids, np.int32))
                word_indices.append(np.array(encoding.word_ids, np.int32).reshape(-1) + np.int32(words_before))
                spans.append(np.array(encoding.offsets, np.int32).reshape(-1, 2))
                words_before += len(part)
        return _EncodedWords(np.concatenate(ids), np.concatenate(word_indices), np.concatenate(spans))

    def _iterate_word_windows(
        self, index: int, row: TaggedRow, encoded: _EncodedWords, label_numbers: Mapping[str, int]
    ) -> Iterator[Sequences]:
        """Yield one sequence for each window of a row of words.

        Args:
            index: The index of the row.
            row: The row.
            encoded: The tokens of the words of this row.
            label_numbers: The number of each label name.
        """
        ids, word_indices, spans_in_words = encoded
        first = np.flatnonzero(np.diff(word_indices, prepend=NO_WORD))
        characters = spans_in_words + row.word_starts()[word_indices].astype(np.int32)[:, np.newaxis]
        before, after = self._special_tokens_around_text
        bounds = self._compute_window_bounds(
            row.position, len(ids), self.max_tokens - len(before) - len(after), self.settings.stride
        )
        # A later word is never assigned to an earlier window, so the words of a window are consecutive.
        word_bounds = np.searchsorted(_choose_window_of_each_token(first, bounds), np.arange(len(bounds) + 1))
        tags = np.full(len(row.tokens), NOT_PREDICTED, np.int32)
        if row.tags is not None:
            tags[:] = [_find_label_number(label_numbers, tag, row.position, self.source) for tag in row.tags]
        for window, (start, end) in enumerate(bounds.tolist()):
            words = np.full(len(before) + end - start + len(after), NO_WORD, np.int32)
            own = first[word_bounds[window] : word_bounds[window + 1]]
            own = own[(own >= start) & (own < end)]  # a truncated row has words outside its only window
            words[own - start + len(before)] = word_indices[own]
            target = np.full(len(words), NOT_PREDICTED, np.int32)
            target[own - start + len(before)] = tags[word_indices[own]]
            spans = np.full((len(words), 2), NO_WORD, np.int32)
            spans[len(before) : len(words) - len(after)] = characters[start:end]
            framed, known = self._add_special_tokens(ids[start:end]), None if row.tags is None else target
            yield _make_sequence(index, framed, characters=spans, words=words, target=known)

    def _iterate_question_windows(self, index: int, row: QuestionRow, question: Any, context: Any) -> Iterator[Sequences]:
        """Yield one sequence for each window of a question's context. Every sequence contains the complete question and a
        part of the context.
        """
        before, between, after, *segments = self._special_tokens_around_pair
        framed = np.array([*before, *question.ids, *between], np.int32)
        window_size = self.max_tokens - len(framed) - len(after)
        if window_size < 1:
            raise InputError(
                f"{self.source}: {row.position}: the question has {len(question.ids):,} tokens, so a sequence of "
                f"{self.max_tokens:,} has no room for the context; shorten it, or raise {self.length_key}"
            )
        ids, characters = np.array(context.ids, np.int32), np.array(context.offsets, np.int64).reshape(-1, 2)
        for start, end in self._compute_window_bounds(
            row.position, len(ids), window_size, self.settings.stride, always_split=True
        ).tolist():
            input_ids = np.concatenate([framed, ids[start:end], after]).astype(np.int32)
            segment_ids = np.repeat(np.array(segments, np.int8), [len(framed), len(input_ids) - len(framed)])
            spans = np.full((len(input_ids), 2), NO_WORD, np.int32)
            spans[len(framed) : len(framed) + end - start] = characters[start:end]
            target: Int32Array | None = None
            if row.answers is not None:
                tokens = _find_answer_tokens(row, characters[start:end]) + (len(framed) if end > start else 0)
                target = np.where(tokens < len(framed), 0, tokens)[np.newaxis]
            yield _make_sequence(index, input_ids, segment_ids=segment_ids, characters=spans, target=target)

    def _iterate_language_modelling_windows(self, index: int, row: Row) -> Iterator[Sequences]:
        """Yield one sequence for each window of a text or of token ids. The windows do not overlap."""
        if isinstance(row, IdsRow):
            ids, window_size = np.array(row.input_ids, np.int32), self.max_tokens
            if ids.max() >= self.tokenizer.vocabulary_size:
                raise InputError(
                    f"{self.source}: {row.position}: the token id {ids.max()} is not in the vocabulary of "
                    f"{self.tokenizer.vocabulary_size:,} tokens; tokenize the data with the tokenizer of this model"
                )
        else:
            text = row.text if isinstance(row, TextRow) else ""
            ids, window_size = (
                np.array(self._encode_without_special_tokens([text])[text].ids, np.int32),
                self.max_tokens - sum(map(len, self._special_tokens_around_text)),
            )
        for start, end in self._compute_window_bounds(row.position, len(ids), window_size, 0).tolist():
            yield _make_sequence(
                index, ids[start:end] if isinstance(row, IdsRow) else self._add_special_tokens(ids[start:end])
            )


def _truncate_between_words(text: str, max_characters: int, side: TruncationSide) -> str:
    """Cut a long text between two words, and return a part of at most `max_characters` characters. It is the end of the text
    if truncation removes tokens on the left side, and otherwise its beginning.

    The cut is at a whitespace character or, if there is none, at another character that is not part of a word. Return "" if
    there is no such character.
    """
    if side == "left":
        start = len(text) - max_characters
        match = _FROM_SPACE.search(text, start) or _FROM_MARK.search(text, start)
        return text[match.start() :] if match else ""
    match = _TO_LAST_SPACE.match(text, 0, max_characters) or _TO_LAST_MARK.match(text, 0, max_characters)
    return match[0] if match else ""


def _find_answer_tokens(row: QuestionRow, characters: IntArray) -> Int32Array:
    """Find the first answer to a question in a window of the context, and return the indices of its first and last token,
    int32 [2].

    If a part of the answer is outside the window, both indices are far below 0.
    """
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


def _make_sequence(
    index: int, input_ids: Int32Array, segment_ids: NDArray[np.int8] | None = None, **others: Any
) -> Sequences:
    """Return a `Sequences` object with a single sequence, which comes from the row with this index. The segment ids default
    to 0.
    """
    segments = np.zeros(len(input_ids), np.int8) if segment_ids is None else segment_ids
    return Sequences(np.array([index]), np.array([0, len(input_ids)]), input_ids, segments, **others)


# --- targets


def _make_text_targets(
    rows: Sequence[Row], task: TaskName, label_numbers: Mapping[str, int], source: str
) -> Int32Array | Float32Array | None:
    """Return the training targets of texts, or None if a row has no label.

    Returns:
        int32 [rows] for classification, float32 [rows, labels] of 0 and 1 for multi-label tasks, float32 [rows] for
        regression and reranking.
    """
    labels = [row.label if isinstance(row, TextRow) else None for row in rows]
    if None in labels:
        return None
    if task in ("regression", "reranking"):
        return np.array(labels, np.float32)
    if task == "multi-label":
        targets = np.zeros((len(rows), len(label_numbers)), np.float32)
        for index, (row, names) in enumerate(zip(rows, labels, strict=True)):
            for name in names if isinstance(names, tuple) else ():
                targets[index, _find_label_number(label_numbers, name, row.position, source)] = 1
        return targets
    return np.array(
        [
            _find_label_number(label_numbers, str(label), row.position, source)
            for row, label in zip(rows, labels, strict=True)
        ],
        np.int32,
    )


def _find_label_number(label_numbers: Mapping[str, int], name: str, position: RowPosition, source: str) -> int:
    """Return the number of the label with the given name. Raise an InputError if the name is unknown."""
    if name not in label_numbers:
        known = ", ".join(list(label_numbers)[:8]) + (", ..." if len(label_numbers) > 8 else "")
        raise InputError(f"{source}: {position}: the label {short_repr(name)} is unknown; use one of {known}")
    return label_numbers[name]


# --- windows of long texts


def _split_into_windows(
    tokens: int, window_size: int, stride: int | None, row: str, length_key: str = "--max-sequence-length"
) -> IntArray:
    """Divide the tokens of a row into overlapping windows, or into a single window if all tokens fit. Return the first token
    and the end of each window, int64 [windows, 2].

    Args:
        tokens: The number of tokens in the row.
        window_size: The number of tokens in a full window.
        stride: The number of tokens that neighbouring windows share. None for `_USUAL_STRIDE`, or for half a window if that
            is less.
        row: The name of the row, for messages.
        length_key: The option or setting that sets the length, for messages.

    Raises:
        InputError: The stride is not smaller than the window.
    """
    if tokens <= window_size:
        return np.array([[0, tokens]], np.int64)
    if stride is None:
        stride = min(_USUAL_STRIDE, max(window_size, 0) // 2)
    if stride >= window_size:
        raise InputError(
            f"{row}: windows of {max(window_size, 0)} tokens cannot overlap by {stride} tokens; lower task.stride, or raise "
            f"{length_key}"
        )
    count = -(-(tokens - window_size) // (window_size - stride)) + 1
    starts = np.arange(count, dtype=np.int64) * (window_size - stride)
    return np.stack([starts, np.minimum(starts + window_size, tokens)], axis=1)


def _choose_window_of_each_token(tokens: IntArray, bounds: IntArray) -> IntArray:
    """For each of P tokens, return the window that shows the most context on both sides of the token, int64 [P].

    The amount of context is the number of tokens on the shorter side. If several windows are equally good, return the first.

    Args:
        tokens: int64 [P], positions of tokens in the text, ascending. The result is ascending too.
        bounds: int64 [windows, 2], the windows of the text, as `_split_into_windows` returns them.
    """
    starts, ends = bounds[:, 0], bounds[:, 1]

    def count_context(windows: IntArray) -> IntArray:
        """For each token, return how many tokens of the given window come before it or after it, whichever number is
        smaller.
        """
        return np.minimum(tokens - starts[windows], ends[windows] - 1 - tokens)

    # From one window to the next, the number of tokens before a given token shrinks, and the number after it grows. The
    # smaller of both is therefore largest in one of two windows: the last with more tokens before than after, or the next
    # window.
    later = np.minimum(np.searchsorted(starts + ends, 2 * tokens + 1), len(bounds) - 1)
    earlier = np.maximum(later - 1, 0)
    return np.where(count_context(earlier) >= count_context(later), earlier, later)
