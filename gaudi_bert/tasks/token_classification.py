"""Token classification: a tag for every word (named entities, parts of speech).

The first word piece of a word carries its tag; the others, [CLS] and [SEP] carry none (Devlin et al., 2019, section 5.3). A
word that is in several windows of a long row counts in one of them. Head: dropout and a dense layer on the hidden state of
every token. Loss: negative log likelihood, mean over words. Metrics: precision, recall and F1 of whole entities, by seqeval;
and the share of words with the right tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array, IntArray
from gaudi_bert.model.config import BertConfig, ParameterSpec
from gaudi_bert.tasks.answers import tag_answers, tagged_words
from gaudi_bert.tasks.packs import Placement
from gaudi_bert.tasks.rows.types import IGNORED, NO_WORD, Row, Sequences, TaggedRow
from gaudi_bert.tasks.task import Draw, Encoded, Task, dense_head, head_scores

_SCOPE = "classifier"


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

        guesses = [words.tags for words in tagged_words(logits, sequences, rows, self.labels)]
        right = [list(cast(TaggedRow, row).tags or ()) for row in rows]
        same = sum(one == other for a, b in zip(guesses, right, strict=True) for one, other in zip(a, b, strict=True))
        scores = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
        figures = {name: float(score(right, guesses, zero_division=0)) for name, score in scores.items()}
        return {**figures, "accuracy": same / max(1, sum(map(len, right)))}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"tags": [{"start", "end", "tag", "score"}]}`: entities, with their characters in the text of the row."""
        return tag_answers(logits, sequences, rows, self.labels)
