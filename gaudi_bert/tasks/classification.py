"""Tasks with one prediction for a text or a pair (classification, multi-label, regression), or for each word.

The head for a text is BERT's pooled vector of the sequence, dropout, and a dense layer (Devlin et al., 2019, section 4.1).

- classification: one of several classes. The loss is the negative log likelihood. The metrics are accuracy, F1 (mean over
  classes) and Matthews' correlation.
- multi-label: any number of classes. The loss is the binary cross-entropy, as the mean over classes. A class is predicted if
  its probability is at least one half. The metrics are micro-averaged F1, macro-averaged F1 (mean over classes), and
  accuracy: the fraction of texts for which all classes are correct.
- regression: a number, such as the similarity of two sentences. The loss is the squared error. The metrics are Pearson's and
  Spearman's correlation and the mean squared error.

All losses are means over sequences. `TokenClassification` describes the task with a prediction for each word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, BatchArrays, Float32Array, IntArray
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.packs import PackBatch
from gaudi_bert.rows.predictions import (
    TagScheme,
    predict_classes,
    predict_entities,
    predict_labels,
    predict_values,
    predict_word_tags,
)
from gaudi_bert.rows.types import NO_WORD, Row, Sequences, TaggedRow
from gaudi_bert.tasks.ranking import compute_correlations
from gaudi_bert.tasks.task import NO_VOCABULARY, MaskKey, SequenceTask, Task, Vocabulary


class Classification(SequenceTask):
    """The task of predicting one of several classes for a text or a pair of texts."""

    name = "classification"
    problem_type = "single_label_classification"
    best_metric = "accuracy"
    metric_names = ("loss", "accuracy", "f1_macro", "matthews_correlation")

    def compute_metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return the accuracy, the macro-averaged F1 score and Matthews' correlation, by name."""
        from sklearn.metrics import accuracy_score, matthews_corrcoef

        guesses, right = logits.argmax(axis=-1), np.asarray(sequences.target)
        return {
            "accuracy": float(accuracy_score(right, guesses)),
            "f1_macro": _compute_macro_f1(right, guesses),
            "matthews_correlation": float(matthews_corrcoef(right, guesses)),
        }

    def compute_baseline_metrics(self, training_data: Sequences, evaluation_data: Sequences) -> dict[str, float]:
        """Return the accuracy of always predicting the class that is most frequent in the training data."""
        most_frequent = np.bincount(np.asarray(training_data.target)).argmax()
        return {"accuracy": float(np.mean(np.asarray(evaluation_data.target) == most_frequent))}

    def make_predictions(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Yield the predicted class and the probabilities of all classes for each text, as `{"label", "probabilities":
        {name: p}}`.
        """
        return predict_classes(logits, self.labels)


class MultiLabel(SequenceTask):
    """The task of predicting any number of classes for a text or a pair of texts."""

    name = "multi-label"
    problem_type = "multi_label_classification"
    best_metric = "f1_micro"
    metric_names = ("loss", "f1_micro", "f1_macro", "accuracy")

    def compute_metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return the micro- and macro-averaged F1 scores and the accuracy, by name."""
        from sklearn.metrics import accuracy_score, f1_score

        guesses, right = logits >= 0, np.asarray(sequences.target) > 0.5
        return {
            "f1_micro": float(f1_score(right, guesses, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(right, guesses, average="macro", zero_division=0)),
            "accuracy": float(accuracy_score(right, guesses)),
        }

    def make_predictions(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Yield the predicted classes and the probabilities of all classes for each text, as `{"labels", "probabilities":
        {name: p}}`.
        """
        return predict_labels(logits, self.labels)


class Regression(SequenceTask):
    """The task of predicting a number for a text or a pair of texts."""

    name = "regression"
    problem_type = "regression"
    best_metric = "pearson"
    metric_names = ("loss", "pearson", "spearman", "mean_squared_error")

    def compute_metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return the Pearson and Spearman correlations and the mean squared error, by name.

        A correlation is 0 if all predictions or all targets are equal.
        """
        guesses, right = logits[:, 0].astype(np.float64), np.asarray(sequences.target, np.float64)
        return {**compute_correlations(guesses, right), "mean_squared_error": float(np.mean(np.square(guesses - right)))}

    def make_predictions(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Yield the predicted number for each text, as `{"value"}`."""
        return predict_values(logits)


class TokenClassification(Task):
    """The task of predicting a tag for every word, such as the kind of a named entity or a part of speech.

    The first token of a word carries its tag. The other tokens of the word, [CLS] and [SEP] carry no tag (Devlin et al.,
    2019, section 5.3). A word that is in several windows of a long row counts in one of them. The head consists of dropout
    and a dense layer on the hidden state of every token. The loss is the negative log likelihood, as the mean over words. If
    the tags follow a chunk scheme (B-, I-), the metrics are precision, recall and F1 of complete entities, computed by
    seqeval, and the fraction of words with the correct tag. Otherwise, they are this fraction, and F1 as the mean over tags.
    """

    name = "token-classification"
    architecture = "BertForTokenClassification"
    best_metric = "f1"
    metric_names: tuple[str, ...] = ("loss", "f1", "precision", "recall", "accuracy")

    def __init__(self, settings: TaskSettings, labels: Sequence[str] = (), vocabulary: Vocabulary = NO_VOCABULARY) -> None:
        super().__init__(settings, labels, vocabulary)
        self._scheme = TagScheme(labels)
        if not self._scheme.has_chunks:
            self.best_metric, self.metric_names = "accuracy", ("loss", "accuracy", "f1_macro")

    def describe_unusual_data(self, rows: Sequence[Row]) -> str | None:
        """If no tag has a prefix such as B- or I-, return a note for the user. It states that metrics are computed per word
        instead of per entity.
        """
        if self._scheme.has_chunks:
            return None
        return "no tag has a prefix such as B- or I-: each word counts by itself, by accuracy and f1_macro"

    def make_targets_and_weights(self, batch: PackBatch, mask_key: MaskKey) -> BatchArrays:
        """Return the tags as `targets` [B, L], and weights as `target_weights` [B, L]. The weight is 1 for the first token
        of each tagged word, otherwise 0.

        Without targets, the weight is 1 for the first token of every word.
        """
        if batch.source.target is None:
            words = batch.scatter_token_values(cast(IntArray, batch.source.words), NO_WORD)
            return {"target_weights": (words != NO_WORD).astype(np.float32)}
        targets = batch.scatter_token_values(batch.source.target.astype(np.int32), NOT_PREDICTED)
        return {"targets": np.maximum(targets, 0), "target_weights": (targets != NOT_PREDICTED).astype(np.float32)}

    def compute_metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return the accuracy of words, and the F1 score, precision and recall of entities. If no tag has a prefix such as
        B-, return the macro-averaged F1 score of tags instead of the metrics of entities.

        A word that was truncated counts as predicted with the tag `O`.
        """
        guesses = [tags for tags, _ in predict_word_tags(logits, sequences, rows, self.labels)]
        right = [list(cast(TaggedRow, row).tags or ()) for row in rows]
        same = sum(one == other for a, b in zip(guesses, right, strict=True) for one, other in zip(a, b, strict=True))
        accuracy = same / max(1, sum(map(len, right)))
        if not self._scheme.has_chunks:
            return {"accuracy": accuracy, "f1_macro": _compute_macro_f1(list(chain(*right)), list(chain(*guesses)))}
        from seqeval.metrics import f1_score, precision_score, recall_score

        def chunks(rows_of_tags: Sequence[Sequence[str]]) -> list[list[str]]:
            """Convert tags to the notation that `seqeval` reads, such as `B-PER`."""
            return [["-".join(filter(None, self._scheme.split(tag))) for tag in tags] for tags in rows_of_tags]

        scores = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
        both = chunks(right), chunks(guesses)
        return {**{name: float(score(*both, zero_division=0)) for name, score in scores.items()}, "accuracy": accuracy}

    def make_predictions(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Yield the predicted entities of each row, as `{"tags": [{"start", "end", "tag", "score"}]}`. Words with the tag
        `O` are left out.

        `start` and `end` are character positions in the text of the row. If no tag has a prefix such as B-, each entry is a
        single word.
        """
        return predict_entities(logits, sequences, rows, self.labels)


def _compute_macro_f1(targets: AnyArray | list[str], predictions: AnyArray | list[str]) -> float:
    """Return the unweighted mean of the F1 scores of all classes that occur in the data."""
    from sklearn.metrics import f1_score

    return float(f1_score(targets, predictions, average="macro", labels=np.unique(targets), zero_division=0))
