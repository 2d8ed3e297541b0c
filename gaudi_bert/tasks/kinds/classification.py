"""Tasks with one answer for a text, or for a pair of texts: classification, multi-label, regression; or for a word.

Head of a text: BERT's pooled vector of the sequence, dropout, a dense layer (Devlin et al., 2019, section 4.1).

- classification: one of several classes. Loss: negative log likelihood. Metrics: accuracy, F1 (mean over classes), Matthews'
  correlation.
- multi-label: any number of classes. Loss: binary cross-entropy, mean over classes. Metrics: F1 over all answers (micro),
  mean over classes (macro), accuracy: the share of texts whose classes are all right.
- regression: a number, as the similarity of two sentences. Loss: squared error. Metrics: Pearson's and Spearman's
  correlation, mean squared error.

Losses are means over sequences. A class of a multi-label task is answered where its probability is at least one half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np

from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, BatchArrays, Float32Array, IntArray
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.answers import TagScheme, class_answers, multi_label_answers, number_answers, tag_answers, tagged_words
from gaudi_bert.rows.packs import Placement
from gaudi_bert.rows.types import NO_WORD, Row, Sequences, TaggedRow
from gaudi_bert.tasks.kinds.task import NO_VOCABULARY, Draw, Task, TextTask, Vocabulary
from gaudi_bert.tasks.ranking import correlations


class Classification(TextTask):
    """One of several classes."""

    name = "classification"
    problem_type = "single_label_classification"
    best_metric = "accuracy"
    metric_names = ("loss", "accuracy", "f1_macro", "matthews_correlation")

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """accuracy, f1_macro (over the classes of the data), matthews_correlation."""
        from sklearn.metrics import accuracy_score, matthews_corrcoef

        guesses, right = logits.argmax(axis=-1), np.asarray(sequences.target)
        return {
            "accuracy": float(accuracy_score(right, guesses)),
            "f1_macro": _mean_f1(right, guesses),
            "matthews_correlation": float(matthews_corrcoef(right, guesses)),
        }

    def baseline(self, learnt: Sequences, measured: Sequences) -> dict[str, float]:
        """The accuracy of always answering the most frequent class."""
        most_frequent = np.bincount(np.asarray(learnt.target)).argmax()
        return {"accuracy": float(np.mean(np.asarray(measured.target) == most_frequent))}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"label", "probabilities": {name: p}}`."""
        return class_answers(logits, self.labels)


class MultiLabel(TextTask):
    """Any of several classes."""

    name = "multi-label"
    problem_type = "multi_label_classification"
    best_metric = "f1_micro"
    metric_names = ("loss", "f1_micro", "f1_macro", "accuracy")

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """f1_micro, f1_macro, accuracy."""
        from sklearn.metrics import accuracy_score, f1_score

        guesses, right = logits >= 0, np.asarray(sequences.target) > 0.5
        return {
            "f1_micro": float(f1_score(right, guesses, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(right, guesses, average="macro", zero_division=0)),
            "accuracy": float(accuracy_score(right, guesses)),
        }

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"labels", "probabilities": {name: p}}`."""
        return multi_label_answers(logits, self.labels)


class Regression(TextTask):
    """A number."""

    name = "regression"
    problem_type = "regression"
    best_metric = "pearson"
    metric_names = ("loss", "pearson", "spearman", "mean_squared_error")

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """pearson, spearman (0 where one side is constant), mean_squared_error."""
        guesses, right = logits[:, 0].astype(np.float64), np.asarray(sequences.target, np.float64)
        return {**correlations(guesses, right), "mean_squared_error": float(np.mean(np.square(guesses - right)))}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"value"}`."""
        return number_answers(logits)


class TokenClassification(Task):
    """A tag for every word (named entities, parts of speech).

    The first word piece of a word carries its tag; the others, [CLS] and [SEP] carry none (Devlin et al., 2019, section
    5.3). A word that is in several windows of a long row counts in one of them. Head: dropout and a dense layer on the
    hidden state of every token. Loss: negative log likelihood, mean over words. Metrics of tags of a chunk scheme (B-, I-):
    precision, recall and F1 of complete entities, by seqeval, and the share of words with the right tag; of other tags:
    that share, and F1 as the mean over tags.
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

    def note(self, rows: Sequence[Row]) -> str | None:
        """Note that no tag is of a chunk scheme."""
        if self._scheme.has_chunks:
            return None
        return "no tag has a prefix such as B- or I-: each word counts by itself, by accuracy and f1_macro"

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`targets` and `target_weights`, [B, L]: the weight is 1 where a word begins that has a tag."""
        if sequences.target is None:
            words = placed.tokens(cast(IntArray, sequences.words), NO_WORD)
            return {"target_weights": (words != NO_WORD).astype(np.float32)}
        targets = placed.tokens(sequences.target.astype(np.int32), NOT_PREDICTED)
        return {"targets": np.maximum(targets, 0), "target_weights": (targets != NOT_PREDICTED).astype(np.float32)}

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """f1, precision, recall of entities, or f1_macro of tags; accuracy of words. A word that was cut off is outside."""
        guesses = [tags for tags, _ in tagged_words(logits, sequences, rows, self.labels)]
        right = [list(cast(TaggedRow, row).tags or ()) for row in rows]
        same = sum(one == other for a, b in zip(guesses, right, strict=True) for one, other in zip(a, b, strict=True))
        accuracy = same / max(1, sum(map(len, right)))
        if not self._scheme.has_chunks:
            return {"accuracy": accuracy, "f1_macro": _mean_f1(list(chain(*right)), list(chain(*guesses)))}
        from seqeval.metrics import f1_score, precision_score, recall_score

        def chunks(rows_of_tags: Sequence[Sequence[str]]) -> list[list[str]]:
            """The tags as `seqeval` reads them."""
            return [["-".join(filter(None, self._scheme.split(tag))) for tag in tags] for tags in rows_of_tags]

        scores = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
        both = chunks(right), chunks(guesses)
        of_entities = {name: float(score(*both, zero_division=0)) for name, score in scores.items()}
        return {**of_entities, "accuracy": accuracy}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """`{"tags": [{"start", "end", "tag", "score"}]}`: entities, with their characters in the text of the row."""
        return tag_answers(logits, sequences, rows, self.labels)


def _mean_f1(right: AnyArray | list[str], guesses: AnyArray | list[str]) -> float:
    """F1, the mean over the classes of the data."""
    from sklearn.metrics import f1_score

    return float(f1_score(right, guesses, average="macro", labels=np.unique(right), zero_division=0))
