"""Metrics of answers for texts: classes, several classes, numbers; which evaluation is the better one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import RowPosition, Sequences, TextRow
from gaudi_bert.tasks.task import import_task_class
from tests.builders.agree import agree

ROWS = [TextRow(RowPosition(number), "text") for number in (1, 2, 3)]


def texts(target=None) -> Sequences:
    return Sequences(np.arange(3), np.array([0, 2, 4, 6]), np.full(6, 5, np.int32), np.zeros(6, np.int8), target=target)


@pytest.mark.parametrize(
    ("name", "labels", "logits", "targets", "answers", "metrics"),
    [
        (
            "classification",
            ("no", "yes"),
            [[0.0, 0.0], [np.log(3.0), 0.0], [-100.0, 100.0]],
            [0, 1, 1],
            [
                {"label": "no", "probabilities": {"no": 0.5, "yes": 0.5}},
                {"label": "no", "probabilities": {"no": 0.75, "yes": 0.25}},
                {"label": "yes", "probabilities": {"no": 0.0, "yes": 1.0}},
            ],
            {"accuracy": 2 / 3, "f1_macro": 2 / 3, "matthews_correlation": 0.5},
        ),
        (
            "multi-label",
            ("a", "b", "c"),
            [[np.log(3.0), -np.log(3.0), 0.0], [-np.log(3.0), -100.0, -100.0], [-100.0, 100.0, -100.0]],
            [[1, 0, 1], [0, 0, 0], [1, 1, 0]],
            [
                {"labels": ["a", "c"], "probabilities": {"a": 0.75, "b": 0.25, "c": 0.5}},
                {"labels": [], "probabilities": {"a": 0.25, "b": 0.0, "c": 0.0}},
                {"labels": ["b"], "probabilities": {"a": 0.0, "b": 1.0, "c": 0.0}},
            ],
            {"f1_micro": 6 / 7, "f1_macro": (2 / 3 + 1 + 1) / 3, "accuracy": 2 / 3},
        ),
        (
            "regression",
            (),
            [[1.0], [2.0], [4.0]],
            [0.0, 1.0, 3.0],
            [{"value": 1.0}, {"value": 2.0}, {"value": 4.0}],
            {"pearson": 1.0, "spearman": 1.0, "mean_squared_error": 1.0},
        ),
        (
            "regression",
            (),
            [[1.0], [1.0], [1.0]],
            [0.0, 1.0, 3.0],
            [{"value": 1.0}] * 3,
            {"pearson": 0.0, "spearman": 0.0, "mean_squared_error": 5 / 3},
        ),
    ],
    ids=["classification", "multi-label", "regression", "regression to a constant"],
)
def test_answers_and_metrics(
    name: str, labels: tuple[str, ...], logits: Any, targets: Any, answers: Any, metrics: dict[str, float]
) -> None:
    task, outputs = import_task_class(name)(TaskSettings(), labels), np.array(logits, np.float32)
    agree(list(task.make_predictions(outputs, texts(), ROWS)), answers)
    agree(task.compute_metrics(outputs, texts(np.array(targets)), ROWS), metrics)


def test_the_majority_baseline_answers_what_was_most_frequent_in_training() -> None:
    task = import_task_class("classification")(TaskSettings(), ("no", "yes"))
    learnt, measured = texts(np.array([1, 1, 0], np.int32)), texts(np.array([0, 1, 0], np.int32))
    agree(task.compute_baseline_metrics(learnt, measured), {"accuracy": 1 / 3})
