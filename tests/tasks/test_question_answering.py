"""The best answers of all windows of a question, and SQuAD's own way to compare them."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.types import QuestionRow, RowPosition, Sequences
from gaudi_bert.tasks.question_answering import _compute_squad_metrics
from gaudi_bert.tasks.task import import_task_class
from tests.builders.agree import agree


def question(threshold: float | None, n_best: int = 3):
    """Two windows of one row: `ab cd` and `cd ef`; [CLS], the question, [SEP], then two words."""
    settings = TaskSettings(null_score_threshold=threshold, n_best=n_best, max_answer_tokens=2)
    task = import_task_class("question-answering")(settings)
    outside = [-1, -1]
    characters = np.array(
        [outside, outside, outside, [0, 2], [3, 5], outside, *[outside] * 3, [3, 5], [6, 8], outside], np.int32
    )
    logits = np.zeros((12, 2), np.float32)
    logits[1] = 99.0  # the question is no answer
    logits[3, 0], logits[4, 1], logits[10] = 4.0, 5.0, (3.0, 3.0)
    logits[0], logits[6] = (1.0, 1.0), (20.0, 20.0)  # the least of the windows counts: 2
    sequences = Sequences(
        np.zeros(2, np.int64), np.array([0, 6, 12]), np.full(12, 5, np.int32), np.zeros(12, np.int8), characters
    )
    return task, logits, sequences, [QuestionRow(RowPosition(1), "q", "what?", "ab cd ef", (("ab cd", 0),))]


def test_the_best_answers_of_all_windows() -> None:
    task, logits, sequences, rows = question(None)
    (answer,) = task.make_predictions(logits, sequences, rows)
    assert [(each["text"], each["start"], each["end"]) for each in answer["answers"]] == [
        ("ab cd", 0, 5),
        ("ef", 6, 8),
        ("cd", 3, 5),
    ]
    scores = [each["score"] for each in answer["answers"]]
    assert scores == sorted(scores, reverse=True)
    agree(scores[1] / scores[0], np.exp(-3.0))
    assert task.compute_metrics(logits, sequences, rows) == {"exact_match": 100.0, "f1": 100.0}


@pytest.mark.parametrize(("threshold", "best"), [(0.0, "ab cd"), (-8.0, "")])
def test_no_answer_is_an_answer_where_the_data_has_such(threshold: float, best: str) -> None:
    task, logits, sequences, rows = question(threshold, n_best=20)
    (answer,) = task.make_predictions(logits, sequences, rows)
    assert answer["answers"][0]["text"] == best
    agree(sum(each["score"] for each in answer["answers"]), 1.0)
    assert sorted(each["text"] for each in answer["answers"]).count("") == 1


def test_squad_compares_as_squad_does() -> None:
    found = _compute_squad_metrics(["The cat!", "", "x y", "left"], [["cat"], [], ["y z", "q"], []])
    agree(found, {"exact_match": 50.0, "f1": 100 * (1 + 1 + 0.5 + 0) / 4})
