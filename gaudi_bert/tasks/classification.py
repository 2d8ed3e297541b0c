"""Classification: one of several classes for a text, or for a pair of texts.

Head: BERT's pooled vector of the sequence, dropout, a dense layer (Devlin et al., 2019, section 4.1). Loss: negative log
likelihood, mean over sequences. Metrics: accuracy, F1 (mean over classes), Matthews' correlation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import pool
from gaudi_bert.model.parameters import ParameterSpec
from gaudi_bert.tasks.heads import classified, dense_head, head_scores
from gaudi_bert.tasks.packs import Placement
from gaudi_bert.tasks.rows.types import Row, Sequences
from gaudi_bert.tasks.task import Draw, Encoded, Task, Weighed, share_of_most_frequent

__all__ = ["Classification", "TextTask", "shares"]

SCOPE = "classifier"


def shares(logits: Float32Array) -> Float32Array:
    """The softmax over the last axis, in float64 on the way."""
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    softmax: Float32Array = (wide / wide.sum(axis=-1, keepdims=True)).astype(np.float32)
    return softmax


class TextTask(Task):
    """A task with one vector of answers for a whole text or pair, from BERT's pooled vector of the sequence."""

    architecture = "BertForSequenceClassification"
    pools = True
    places = "sequence_positions"

    def head_specs(self, config: BertConfig) -> dict[str, ParameterSpec]:
        """One dense layer."""
        return dense_head(SCOPE, config, self.width)

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`targets` [B, S] or [B, S, C], `target_weights` [B, S]: 1 for each sequence."""
        del draw
        weights = placed.each(np.ones(len(placed.sequences), np.float32))
        if sequences.target is None:
            return {"target_weights": weights}
        return {"targets": placed.each(sequences.target[placed.sequences]), "target_weights": weights}

    def logits(self, encoded: Encoded, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Wide, [B, S, C]."""
        packs, depth = batch["sequence_positions"].shape
        pooled_PH = pool(encoded.hidden_RH, encoded.parameters)
        return tf.reshape(head_scores(pooled_PH, encoded, SCOPE), [packs, depth, self.width])


class Classification(TextTask):
    """One of several classes."""

    name = "classification"
    problem_type = "single_label_classification"
    best_metric = "accuracy"
    metric_names = ("loss", "accuracy", "f1_macro", "matthews_correlation")

    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> Weighed:
        """Negative log likelihood over sequences."""
        return classified(logits, batch["targets"], batch["target_weights"])

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """accuracy, f1_macro (over the classes of the data), matthews_correlation."""
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        guesses, right = logits.argmax(axis=-1), np.asarray(sequences.target)
        return {
            "accuracy": float(accuracy_score(right, guesses)),
            "f1_macro": float(f1_score(right, guesses, average="macro", labels=np.unique(right), zero_division=0)),
            "matthews_correlation": float(matthews_corrcoef(right, guesses)),
        }

    def baseline(self, learnt: Sequences, measured: Sequences) -> dict[str, float]:
        """The accuracy of always answering the most frequent class."""
        return {"accuracy": share_of_most_frequent(np.asarray(learnt.target), np.asarray(measured.target))}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"label", "probabilities": {name: p}}`."""
        for shares_C in shares(logits).tolist():
            probabilities = dict(zip(self.labels, shares_C, strict=True))
            yield {"label": max(probabilities, key=probabilities.__getitem__), "probabilities": probabilities}
