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
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.parameters import ParameterSpec
from gaudi_bert.tasks.classification import SCOPE, shares
from gaudi_bert.tasks.heads import classified, dense_head, head_scores
from gaudi_bert.tasks.packs import Placement
from gaudi_bert.tasks.rows.types import IGNORED, NO_WORD, Row, Sequences, TaggedRow
from gaudi_bert.tasks.task import Draw, Encoded, Task, Weighed

__all__ = ["TokenClassification"]

OUTSIDE = "O"


class TokenClassification(Task):
    """A tag for every word."""

    name = "token-classification"
    architecture = "BertForTokenClassification"
    per_token = True
    best_metric = "f1"
    metric_names = ("loss", "f1", "precision", "recall", "accuracy")

    def head_specs(self, config: BertConfig) -> dict[str, ParameterSpec]:
        """One dense layer."""
        return dense_head(SCOPE, config, self.width)

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`targets` and `target_weights`, [B, L]: the weight is 1 where a word begins that has a tag."""
        del draw
        if sequences.target is None:
            words = placed.tokens(cast(IntArray, sequences.words), NO_WORD)
            return {"target_weights": (words != NO_WORD).astype(np.float32)}
        targets = placed.tokens(sequences.target.astype(np.int32), IGNORED)
        return {"targets": np.maximum(targets, 0), "target_weights": (targets != IGNORED).astype(np.float32)}

    def logits(self, encoded: Encoded, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Wide, [B, L, C]."""
        packs, length = batch["input_ids"].shape
        return tf.reshape(head_scores(encoded.hidden_RH, encoded, SCOPE), [packs, length, self.width])

    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> Weighed:
        """Negative log likelihood over words."""
        return classified(logits, batch["targets"], batch["target_weights"])

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
        shares_WC = shares(logits[carrying])
        best_W = shares_WC.argmax(axis=-1)
        row_of_token = np.repeat(sequences.row, sequences.lengths)[carrying]
        ends = np.searchsorted(row_of_token, np.arange(len(rows) + 1))
        for number, row in enumerate(rows):
            tagged = _Words.outside(len(cast(TaggedRow, row).tokens))
            for place in range(ends[number], ends[number + 1]):
                word = int(words[carrying[place]])
                tagged.tags[word] = self.labels[best_W[place]]
                tagged.scores[word] = float(shares_WC[place, best_W[place]])
            yield tagged


class _Words(NamedTuple):
    """Tag and probability of each word of a row."""

    tags: list[str]
    scores: list[float]

    @classmethod
    def outside(cls, count: int) -> _Words:
        return cls([OUTSIDE] * count, [0.0] * count)


def _entities(row: TaggedRow, words: _Words) -> Iterator[dict[str, Any]]:
    """Words that belong together: `B-x` begins one of kind x, `I-x` goes on with it; other tags go on with their like."""
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
