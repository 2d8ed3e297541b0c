"""Multi-label classification: any number of classes for a text, or for a pair of texts.

Head: as `classification`. Loss: binary cross-entropy of every class, mean over sequences and classes. A class is answered
where its probability is at least one half. Metrics: F1 over all answers (micro), mean over classes (macro), and the share of
texts whose classes are all right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.tasks.classification import TextTask
from gaudi_bert.tasks.rows.types import Row, Sequences
from gaudi_bert.tasks.task import Weighed

__all__ = ["MultiLabel"]


class MultiLabel(TextTask):
    """Any of several classes."""

    name = "multi-label"
    problem_type = "multi_label_classification"
    best_metric = "f1_micro"
    metric_names = ("loss", "f1_micro", "f1_macro", "accuracy")

    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> Weighed:
        """Binary cross-entropy, for each sequence the mean over its classes; right are sequences without a wrong class."""
        targets_BSC = tf.cast(batch["targets"], logits.dtype)
        weights_BS = tf.cast(batch["target_weights"], logits.dtype)
        losses_BSC = tf.nn.sigmoid_cross_entropy_with_logits(labels=targets_BSC, logits=logits)
        same_BSC = tf.cast(tf.equal(logits >= 0, targets_BSC > 0.5), logits.dtype)
        right_BS = tf.reduce_min(same_BSC, axis=-1)
        return Weighed(
            tf.reduce_sum(tf.reduce_mean(losses_BSC, axis=-1) * weights_BS),
            tf.reduce_sum(weights_BS),
            tf.reduce_sum(right_BS * weights_BS),
        )

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """f1_micro, f1_macro, accuracy (all classes of a text right)."""
        from sklearn.metrics import accuracy_score, f1_score

        guesses, right = logits >= 0, np.asarray(sequences.target) > 0.5
        return {
            "f1_micro": float(f1_score(right, guesses, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(right, guesses, average="macro", zero_division=0)),
            "accuracy": float(accuracy_score(right, guesses)),
        }

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"labels", "probabilities": {name: p}}`."""
        probabilities_NC = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
        for logits_C, shares_C in zip(logits, probabilities_NC.astype(np.float32).tolist(), strict=True):
            labels = [name for name, logit in zip(self.labels, logits_C, strict=True) if logit >= 0]
            yield {"labels": labels, "probabilities": dict(zip(self.labels, shares_C, strict=True))}
