"""A model's outputs as answers: one JSON object for each row, as `predict` writes them. No TensorFlow, no PyTorch.

Letters: N sequences, T tokens of all of them, C classes, W words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from gaudi_bert.common.arrays import Float32Array, IntArray
from gaudi_bert.rows.types import NO_WORD, Row, Sequences, TaggedRow

OUTSIDE = "O"


def softmax(logits: Float32Array) -> Float32Array:
    """The softmax over the last axis, computed in float64."""
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    probabilities: Float32Array = (wide / wide.sum(axis=-1, keepdims=True)).astype(np.float32)
    return probabilities


def class_answers(logits_NC: Float32Array, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """`{"label", "probabilities": {name: p}}`."""
    for probabilities_C in softmax(logits_NC).tolist():
        probabilities = dict(zip(labels, probabilities_C, strict=True))
        yield {"label": max(probabilities, key=probabilities.__getitem__), "probabilities": probabilities}


def multi_label_answers(logits_NC: Float32Array, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """`{"labels", "probabilities": {name: p}}`."""
    probabilities_NC = 1.0 / (1.0 + np.exp(-logits_NC.astype(np.float64)))
    for logits_C, probabilities_C in zip(logits_NC, probabilities_NC.astype(np.float32).tolist(), strict=True):
        chosen = [name for name, logit in zip(labels, logits_C, strict=True) if logit >= 0]
        yield {"labels": chosen, "probabilities": dict(zip(labels, probabilities_C, strict=True))}


def number_answers(logits_N1: Float32Array) -> Iterator[dict[str, Any]]:
    """`{"value"}`."""
    for value in logits_N1[:, 0].tolist():
        yield {"value": value}


def score_answers(logits_N1: Float32Array) -> Iterator[dict[str, Any]]:
    """`{"score"}`, the probability that a document answers its query."""
    for score in (1.0 / (1.0 + np.exp(-logits_N1[:, 0].astype(np.float64)))).astype(np.float32).tolist():
        yield {"score": score}


def tag_answers(
    logits_TC: Float32Array, sequences: Sequences, rows: Sequence[Row], labels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """`{"tags": [{"start", "end", "tag", "score"}]}`: entities, with their characters in the text of the row."""
    for row, words in zip(rows, tagged_words(logits_TC, sequences, rows, labels), strict=True):
        yield {"tags": list(_entities(cast(TaggedRow, row), words))}


class _TaggedWords(NamedTuple):
    """Tag and probability of each word of a row."""

    tags: list[str]
    scores: list[float]


def tagged_words(
    logits_TC: Float32Array, sequences: Sequences, rows: Sequence[Row], labels: Sequence[str]
) -> Iterator[_TaggedWords]:
    """The tag of every word of every row, and how sure the model is of it."""
    words = cast(IntArray, sequences.words)
    carrying = np.flatnonzero(words != NO_WORD)
    probabilities_WC = softmax(logits_TC[carrying])
    best_W = probabilities_WC.argmax(axis=-1)
    row_of_token = np.repeat(sequences.row, sequences.lengths)[carrying]
    ends = np.searchsorted(row_of_token, np.arange(len(rows) + 1))
    for number, row in enumerate(rows):
        count = len(cast(TaggedRow, row).tokens)
        tagged = _TaggedWords([OUTSIDE] * count, [0.0] * count)
        for index in range(ends[number], ends[number + 1]):
            word = int(words[carrying[index]])
            tagged.tags[word] = labels[best_W[index]]
            tagged.scores[word] = float(probabilities_WC[index, best_W[index]])
        yield tagged


def _entities(row: TaggedRow, words: _TaggedWords) -> Iterator[dict[str, Any]]:
    """Words that belong together: `B-x` begins one of kind x, `I-x` continues it; other tags continue an equal one."""
    starts = row.word_starts()
    begin, before = 0, OUTSIDE
    for word, tag in enumerate([*words.tags, OUTSIDE]):
        kind, kind_before = _kind(tag), _kind(before)
        if kind_before != OUTSIDE and (kind != kind_before or tag.startswith("B-")):
            yield {
                "start": int(starts[begin]),
                "end": int(starts[word - 1]) + len(row.tokens[word - 1]),
                "tag": kind_before,
                "score": float(np.mean(words.scores[begin:word])),
            }
            begin = word
        elif kind_before == OUTSIDE:
            begin = word
        before = tag


def _kind(tag: str) -> str:
    return tag[2:] if tag.startswith(("B-", "I-")) else tag
