"""Regression: a number for a text, or for a pair of texts (as the similarity of two sentences).

Head: as `classification`, with one value. Loss: squared error, mean over sequences. Metrics: Pearson's and Spearman's
correlation, and the mean squared error.
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

__all__ = ["Regression"]


class Regression(TextTask):
    """A number."""

    name = "regression"
    problem_type = "regression"
    best_metric = "pearson"
    metric_names = ("loss", "pearson", "spearman", "mean_squared_error")

    @property
    def width(self) -> int:
        """One value."""
        return 1

    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> Weighed:
        """Squared error; no answer is called right."""
        weights_BS = tf.cast(batch["target_weights"], logits.dtype)
        errors_BS = tf.squeeze(logits, axis=-1) - tf.cast(batch["targets"], logits.dtype)
        return Weighed(
            tf.reduce_sum(tf.square(errors_BS) * weights_BS), tf.reduce_sum(weights_BS), tf.zeros([], logits.dtype)
        )

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """pearson, spearman (0 where one side is constant), mean_squared_error."""
        from scipy.stats import pearsonr, spearmanr

        guesses, right = logits[:, 0].astype(np.float64), np.asarray(sequences.target, np.float64)
        varies = len(right) > 1 and np.ptp(guesses) > 0 and np.ptp(right) > 0
        return {
            "pearson": float(pearsonr(right, guesses)[0]) if varies else 0.0,
            "spearman": float(spearmanr(right, guesses)[0]) if varies else 0.0,
            "mean_squared_error": float(np.mean(np.square(guesses - right))),
        }

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"value"}`."""
        for value in logits[:, 0].tolist():
            yield {"value": value}

    def config_json(self) -> dict[str, Any]:
        """With one unnamed class, as transformers counts it."""
        return {**super().config_json(), "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
