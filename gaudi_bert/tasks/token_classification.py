"""Token classification: a tag for every word (named entities, parts of speech).

The first word piece of a word carries its tag; the others, [CLS] and [SEP] carry none (Devlin et al., 2019, section 5.3). A
word that is in several windows of a long row counts in one of them. Head: dropout and a dense layer on the hidden state of
every token. Loss: negative log likelihood, mean over words. Metrics: precision, recall and F1 of whole entities, by seqeval;
and the share of words with the right tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array, IntArray
from gaudi_bert.model.config import BertConfig, ParameterSpec
from gaudi_bert.tasks.packs import Placement
from gaudi_bert.tasks.rows.types import IGNORED, NO_WORD, Row, Sequences, TaggedRow
from gaudi_bert.tasks.task import Draw, Encoded, Task, dense_head, head_scores, softmax

_SCOPE = "classifier"
_OUTSIDE = "O"


class TokenClassification(Task):
    """A tag for every word."""

    name = "token-classification"
    architecture = "BertForTokenClassification"
    per_token = True
    best_metric = "f1"
    metric_names = ("loss", "f1", "precision", "recall", "accuracy")

    def head_specs(self, config: BertConfig) -> dict[str, ParameterSpec]:
        """One dense layer."""
        return dense_head(_SCOPE, config, self.width)

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`targets` and `target_weights`, [B, L]: the weight is 1 where a word begins that has a tag."""
        if sequences.target is None:
            words = placed.tokens(cast(IntArray, sequences.words), NO_WORD)
            return {"target_weights": (words != NO_WORD).astype(np.float32)}
        targets = placed.tokens(sequences.target.astype(np.int32), IGNORED)
        return {"targets": np.maximum(targets, 0), "target_weights": (targets != IGNORED).astype(np.float32)}

    def logits(self, encoded: Encoded, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Wide, [B, L, C]."""
        packs, length = batch["input_ids"].shape
        return tf.reshape(head_scores(encoded.hidden_RH, encoded, _SCOPE), [packs, length, self.width])

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """f1, precision and recall of entities (seqeval), accuracy of words; a word that was cut off counts as outside."""
        from seqeval.metrics import f1_score, precision_score, recall_score

        guesses = [words.tags for words in self._words(logits, sequences, rows)]
        right = [list(cast(TaggedRow, row).tags or ()) for row in rows]
        same = sum(one == other for a, b in zip(guesses, right, strict=True) for one, other in zip(a, b, strict=True))
        scores = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
        figures = {name: float(score(right, guesses, zero_division=0)) for name, score in scores.items()}
        return {**figures, "accuracy": same / max(1, sum(map(len, right)))}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"tags": [{"start", "end", "tag", "score"}]}`: entities, with their characters in the text of the row."""
        for row, words in zip(rows, self._words(logits, sequences, rows), strict=True):
            yield {"tags": list(_entities(cast(TaggedRow, row), words))}

    def _words(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[_Words]:
        """The tag of every word of every row, and how sure the model is of it."""
        words = cast(IntArray, sequences.words)
        carrying = np.flatnonzero(words != NO_WORD)
        probabilities_WC = softmax(logits[carrying])
        best_W = probabilities_WC.argmax(axis=-1)
        row_of_token = np.repeat(sequences.row, sequences.lengths)[carrying]
        ends = np.searchsorted(row_of_token, np.arange(len(rows) + 1))
        for number, row in enumerate(rows):
            count = len(cast(TaggedRow, row).tokens)
            tagged = _Words([_OUTSIDE] * count, [0.0] * count)
            for index in range(ends[number], ends[number + 1]):
                word = int(words[carrying[index]])
                tagged.tags[word] = self.labels[best_W[index]]
                tagged.scores[word] = float(probabilities_WC[index, best_W[index]])
            yield tagged


class _Words(NamedTuple):
    """Tag and probability of each word of a row."""

    tags: list[str]
    scores: list[float]


def _entities(row: TaggedRow, words: _Words) -> Iterator[dict[str, Any]]:
    """Words that belong together: `B-x` begins one of kind x, `I-x` goes on with it; other tags go on with their like."""
    starts = row.word_starts()
    begin, before = 0, _OUTSIDE
    for word, tag in enumerate([*words.tags, _OUTSIDE]):
        kind, kind_before = _kind(tag), _kind(before)
        if kind_before != _OUTSIDE and (kind != kind_before or tag.startswith("B-")):
            yield {
                "start": int(starts[begin]),
                "end": int(starts[word - 1]) + len(row.tokens[word - 1]),
                "tag": kind_before,
                "score": float(np.mean(words.scores[begin:word])),
            }
            begin = word
        elif kind_before == _OUTSIDE:
            begin = word
        before = tag


def _kind(tag: str) -> str:
    return tag[2:] if tag.startswith(("B-", "I-")) else tag
