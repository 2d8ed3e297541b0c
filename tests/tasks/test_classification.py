"""Metrics of answers for texts: classes, several classes, numbers; which evaluation is the better one."""

from __future__ import annotations

import numpy as np

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import RowPosition, Sequences, TextRow
from gaudi_bert.tasks.task import import_task_class
from tests.builders.agree import agree

ROWS = [TextRow(RowPosition(number), "text") for number in (1, 2, 3)]


def texts(target=None) -> Sequences:
    return Sequences(np.arange(3), np.array([0, 2, 4, 6]), np.full(6, 5, np.int32), np.zeros(6, np.int8), target=target)


def test_classification() -> None:
    task = import_task_class("classification")(TaskSettings(), ("no", "yes"))
    logits = np.array([[0.0, 0.0], [np.log(3.0), 0.0], [-100.0, 100.0]], np.float32)
    answers = list(task.make_predictions(logits, texts(), ROWS))
    assert [answer["label"] for answer in answers] == ["no", "no", "yes"]
    agree(answers[1]["probabilities"], {"no": 0.75, "yes": 0.25})
    found = task.compute_metrics(logits, texts(np.array([0, 1, 1], np.int32)), ROWS)
    agree(found, {"accuracy": 2 / 3, "f1_macro": 2 / 3, "matthews_correlation": 0.5})


def test_the_majority_baseline_answers_what_was_most_frequent_in_training() -> None:
    task = import_task_class("classification")(TaskSettings(), ("no", "yes"))
    learnt, measured = texts(np.array([1, 1, 0], np.int32)), texts(np.array([0, 1, 0], np.int32))
    agree(task.compute_baseline_metrics(learnt, measured), {"accuracy": 1 / 3})


def test_multi_label() -> None:
    task = import_task_class("multi-label")(TaskSettings(), ("a", "b", "c"))
    logits = np.array([[1.0, -1.0, 0.0], [-1.0, -1.0, -1.0], [-1.0, 5.0, -1.0]], np.float32)
    assert [answer["labels"] for answer in task.make_predictions(logits, texts(), ROWS)] == [["a", "c"], [], ["b"]]
    target = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]], np.float32)
    found = task.compute_metrics(logits, texts(target), ROWS)
    agree(found, {"f1_micro": 6 / 7, "f1_macro": (2 / 3 + 1 + 1) / 3, "accuracy": 2 / 3})


def test_regression() -> None:
    task = import_task_class("regression")(TaskSettings())
    logits = np.array([[1.0], [2.0], [4.0]], np.float32)
    assert list(task.make_predictions(logits, texts(), ROWS)) == [{"value": 1.0}, {"value": 2.0}, {"value": 4.0}]
    found = task.compute_metrics(logits, texts(np.array([0.0, 1.0, 3.0], np.float32)), ROWS)
    agree(found, {"pearson": 1.0, "spearman": 1.0, "mean_squared_error": 1.0})
    constant = task.compute_metrics(np.ones((3, 1), np.float32), texts(np.array([0.0, 1.0, 3.0], np.float32)), ROWS)
    assert constant["pearson"] == constant["spearman"] == 0.0
