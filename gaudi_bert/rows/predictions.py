"""Turn the outputs of a model into predictions: one JSON object per row, as `predict` writes them.

Each function takes the logits of some rows and yields one dict for each row, in the order of the rows. `TagScheme` parses
the tags of token classification, so that words of the same entity are joined. Everything is computed with numpy, without
TensorFlow or PyTorch.

Letters:
    N: sequences.
    T: tokens of all sequences.
    C: classes.
    W: words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import Float32Array, IntArray
from gaudi_bert.rows.types import NO_WORD, OUTSIDE, Row, Sequences, TaggedRow


def _softmax(logits: Float32Array) -> Float32Array:
    """Return the softmax over the last axis, computed in float64 and rounded to float32."""
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return cast(Float32Array, (wide / wide.sum(axis=-1, keepdims=True)).astype(np.float32))


def predict_classes(logits_NC: Float32Array, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the predicted class of each text and the probabilities of all classes, as
    `{"label", "probabilities": {name: p}}`.
    """
    for best, probabilities_C in zip(logits_NC.argmax(axis=-1).tolist(), _softmax(logits_NC).tolist(), strict=True):
        yield {"label": labels[best], "probabilities": dict(zip(labels, probabilities_C, strict=True))}


def predict_labels(logits_NC: Float32Array, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the predicted labels of each text and the probabilities of all labels, as
    `{"labels", "probabilities": {name: p}}`.

    The probabilities are the sigmoids of the logits. `labels` lists the classes whose logit is at least 0, which may be
    none.
    """
    probabilities_NC = 1.0 / (1.0 + np.exp(-logits_NC.astype(np.float64)))
    for logits_C, probabilities_C in zip(logits_NC, probabilities_NC.astype(np.float32).tolist(), strict=True):
        chosen = [name for name, logit in zip(labels, logits_C, strict=True) if logit >= 0]
        yield {"labels": chosen, "probabilities": dict(zip(labels, probabilities_C, strict=True))}


def predict_values(logits_N1: Float32Array) -> Iterator[dict[str, Any]]:
    """Yield the number that a regression head predicts for each text, as `{"value"}`."""
    return ({"value": value} for value in logits_N1[:, 0].tolist())


def predict_entities(
    logits_TC: Float32Array, sequences: Sequences, rows: Sequence[Row], labels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the predicted entities of each row, as `{"tags": [{"start", "end", "tag", "score"}]}`.

    `start` and `end` are character positions in the text of the row. If the tags follow a chunk scheme, each entry is an
    entity, and otherwise it is a single word. Words with the tag `O` are left out.

    Args:
        logits_TC: The logits of all tokens.
        sequences: The sequences of the rows. Their `words` state which word each token represents.
        rows: The rows, each a `TaggedRow`.
        labels: The names of the classes.
    """
    scheme = TagScheme(labels)
    for row, tagged in zip(rows, predict_word_tags(logits_TC, sequences, rows, labels), strict=True):
        yield {"tags": list(_join_entities(cast(TaggedRow, row), *tagged, scheme))}


def predict_word_tags(
    logits_TC: Float32Array, sequences: Sequences, rows: Sequence[Row], labels: Sequence[str]
) -> Iterator[tuple[list[str], list[float]]]:
    """Yield two lists for each row: the predicted tags of its words, and the probabilities of these tags.

    A word that no token represents, because the row was truncated, gets the tag `O` and the probability 0.

    Args:
        logits_TC: The logits of all tokens.
        sequences: The sequences of the rows. Their `words` state which word each token represents.
        rows: The rows, each a `TaggedRow`.
        labels: The names of the classes.
    """
    words = cast(IntArray, sequences.words)
    carrying = np.flatnonzero(words != NO_WORD)
    probabilities_WC = _softmax(logits_TC[carrying])
    best_W = logits_TC[carrying].argmax(axis=-1)
    ends = np.searchsorted(np.repeat(sequences.row, sequences.lengths)[carrying], np.arange(len(rows) + 1))
    for number, row in enumerate(rows):
        count = len(cast(TaggedRow, row).tokens)
        tags, scores = [OUTSIDE] * count, [0.0] * count
        for index in range(ends[number], ends[number + 1]):
            word = int(words[carrying[index]])
            tags[word] = labels[best_W[index]]
            scores[word] = float(probabilities_WC[index, best_W[index]])
        yield tags, scores


def _join_entities(
    row: TaggedRow, tags: Sequence[str], scores: Sequence[float], scheme: TagScheme
) -> Iterator[dict[str, Any]]:
    """Join the tagged words of a row into entities, and yield the entities. If the tags follow no chunk scheme, yield every
    word with a tag other than `O`.
    """
    starts = row.word_starts()
    begin, (position_before, kind_before) = 0, ("", OUTSIDE)
    for word, tag in enumerate([*tags, OUTSIDE]):
        position, kind = scheme.split(tag)
        ends = kind != kind_before or position in ("B", "S") or position_before in ("E", "S") or not scheme.has_chunks
        if ends and kind_before != OUTSIDE:
            yield {
                "start": int(starts[begin]),
                "end": int(starts[word - 1]) + len(row.tokens[word - 1]),
                "tag": kind_before,
                "score": float(np.mean(scores[begin:word])),
            }
        if ends:
            begin = word
        position_before, kind_before = position, kind


# --- Tags of a chunk scheme: `B-x` begins an entity of kind x, `I-x` continues it, `E-x` or `L-x` ends it, and `S-x` or
# `U-x` marks an entity of one word. If there is only one kind, its name may be missing, as in `B` and `I`. All other tags,
# such as parts of speech, describe a single word.

_CHUNK = re.compile(r"([BIELSU])-(.+)", re.DOTALL)
_POSITIONS = {"L": "E", "U": "S"}
_UNNAMED = "_"


class TagScheme:
    """Parses the tags of words. In a chunk scheme, tags such as `B-PER` and `I-PER` mark the first and the next words of an
    entity.

    Attributes:
        has_chunks: Whether any tag belongs to a chunk scheme. Otherwise each word is an entity of its own.
        odd_tag: If the labels mix chunk tags with other tags, the first tag of the rarer of the two groups. Otherwise None.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        tags = [label for label in labels if label != OUTSIDE]
        self._has_unnamed_kind = {"B", "I"} <= set(tags) <= {"B", "I", "E", "S"}
        chunks, others = ([tag for tag in tags if bool(self.split(tag)[0]) == is_chunk] for is_chunk in (True, False))
        self.has_chunks = bool(chunks)
        self.odd_tag = min(others, chunks, key=len)[0] if chunks and others else None

    def split(self, tag: str) -> tuple[str, str]:
        """Split a tag such as `B-PER` into two parts: where its word is in the entity, and the kind of the entity.

        The position is B, I, E or S, or "" if the tag does not state it.
        """
        if self._has_unnamed_kind and tag != OUTSIDE:
            return tag, _UNNAMED
        match = _CHUNK.fullmatch(tag)
        return ("", tag) if match is None else (_POSITIONS.get(match[1], match[1]), match[2])
