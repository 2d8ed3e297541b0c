"""Tags as entities with their characters."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.arrays import NOT_PREDICTED
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import NO_WORD, RowPosition, Sequences, TaggedRow
from gaudi_bert.tasks.task import import_task_class
from tests.builders.agree import agree


def test_tags_are_entities_with_their_characters() -> None:
    task = import_task_class("token-classification")(TaskSettings(), ("O", "B-x", "I-x", "B-y"))
    rows = [
        TaggedRow(RowPosition(1), ("New", "York", "is", "x"), ("B-x", "I-x", "O", "B-y")),
        TaggedRow(RowPosition(2), ("Rome",), ("B-y",)),
    ]
    words = np.array([NO_WORD, 0, NO_WORD, 1, 2, 3, NO_WORD, NO_WORD, 0, NO_WORD], np.int32)
    target = np.array([NOT_PREDICTED, 1, NOT_PREDICTED, 2, 0, 3, NOT_PREDICTED, NOT_PREDICTED, 3, NOT_PREDICTED], np.int32)
    logits = np.zeros((10, 4), np.float32)
    for token, tag in ((1, 1), (3, 2), (4, 0), (5, 1), (8, 3)):
        logits[token, tag] = 50.0
    sequences = Sequences(
        np.array([0, 1]), np.array([0, 7, 10]), np.full(10, 5, np.int32), np.zeros(10, np.int8), words=words, target=target
    )
    one = [{"start": 0, "end": 8, "tag": "x", "score": 1.0}, {"start": 12, "end": 13, "tag": "x", "score": 1.0}]
    other = [{"start": 0, "end": 4, "tag": "y", "score": 1.0}]
    agree(list(task.make_predictions(logits, sequences, rows)), [{"tags": one}, {"tags": other}])
    found = task.compute_metrics(logits, sequences, rows)
    agree(found, {"f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3, "accuracy": 0.8})


def tagged(tags: tuple[str, ...], guessed: tuple[str, ...], labels: tuple[str, ...]):
    """One row of words of one letter, a token each, with the model's outputs for `guessed`."""
    row = TaggedRow(1, tuple("abcdefgh"[: len(tags)]), tags)
    target, words = np.array([labels.index(tag) for tag in tags], np.int32), np.arange(len(tags), dtype=np.int32)
    logits = 50.0 * np.eye(len(labels), dtype=np.float32)[[labels.index(tag) for tag in guessed]]
    ids = np.full(len(tags), 5, np.int32)
    bounds = np.array([0, len(tags)])
    return logits, Sequences(np.array([0]), bounds, ids, np.zeros(len(tags), np.int8), words=words, target=target), [row]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("labels", "right", "guessed", "spans", "expected"),
    [
        # no prefix: a span for each word, and no entities in the metrics
        ("O P Q", "O P Q P", "O P P P", [(2, 3, "P"), (4, 5, "P"), (6, 7, "P")], {"accuracy": 3 / 4, "f1_macro": 1.8 / 3}),
        ("B N V", "B N V", "B N V", [(0, 1, "B"), (2, 3, "N"), (4, 5, "V")], {"accuracy": 1.0, "f1_macro": 1.0}),
        ("O B-x I-x", "B-x I-x O B-x", "B-x I-x O O", [(0, 3, "x")], {"f1": 2 / 3, "precision": 1.0, "recall": 0.5}),
        ("O B-x I-x E-x S-x", "B-x E-x S-x O", "B-x E-x S-x O", [(0, 3, "x"), (4, 5, "x")], {"f1": 1.0}),
        ("O B-x I-x L-x U-x", "B-x L-x U-x U-x", "B-x L-x U-x O", [(0, 3, "x"), (4, 5, "x")], {"f1": 0.8, "recall": 2 / 3}),
        ("O B I", "B I B O", "B I B O", [(0, 3, "_"), (4, 5, "_")], {"f1": 1.0, "accuracy": 1.0}),
    ],
)
def test_tags_of_every_scheme(labels, right, guessed, spans, expected) -> None:
    names = tuple(labels.split())
    task = import_task_class("token-classification")(TaskSettings(), names)
    given = tagged(tuple(right.split()), tuple(guessed.split()), names)
    found = task.compute_metrics(*given)
    agree({name: found[name] for name in expected}, expected)
    assert {"loss", *found} == set(task.metric_names)
    assert (task.describe_unusual_data(()) is None) == (task.best_metric == "f1")
    (answer,) = task.make_predictions(*given)
    assert [(tag["start"], tag["end"], tag["tag"]) for tag in answer["tags"]] == spans
