"""What all tasks have: settings that apply, and an order of evaluations."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.tasks.task import check_settings_apply, import_task_class


def test_equal_evaluations_are_ordered_by_the_loss() -> None:
    task = import_task_class("classification")(TaskSettings(), ("no", "yes"))
    worst_to_best = [{"accuracy": 0.5, "loss": 0.1}, {"accuracy": 0.6, "loss": 0.9}, {"accuracy": 0.6, "loss": 0.8}]
    ranks = [task.make_evaluation_sort_key(metrics, "accuracy") for metrics in worst_to_best]
    assert ranks == sorted(set(ranks))
    assert task.make_evaluation_sort_key(worst_to_best[0], "loss") > task.make_evaluation_sort_key(worst_to_best[2], "loss")


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("reranking", {"query_prompt": "find: "}),
        ("reranking", {"pooling": "mean"}),
        ("classification", {"dimensions": (8,)}),
        ("classification", {"n_best": 3}),
        ("regression", {"labels": "names.txt"}),
        ("multi-label", {"stride": 4}),
        ("question-answering", {"masked_lm_probability": 0.2}),
        (None, {"scale": 3.0}),
    ],
)
def test_settings_that_change_nothing_are_refused(task: Any, named: dict[str, Any]) -> None:
    (key,) = named
    with pytest.raises(InputError, match=f"task.{key} = "):
        check_settings_apply(task, TaskSettings(**named))
    check_settings_apply(task, TaskSettings(**{key: TaskSettings.model_fields[key].default}))
    check_settings_apply(task, TaskSettings(**named).copy_with_user_settings({"text": "a"}))  # those of a model's folder
