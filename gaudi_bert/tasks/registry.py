"""Every task by name. A task's file is imported when its task is asked for: it brings TensorFlow."""

from __future__ import annotations

import importlib

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.tasks import TASK_NAMES
from gaudi_bert.tasks.task import Task

__all__ = ["TASKS", "task_named"]

TASKS = {
    "classification": ("classification", "Classification"),
    "multi-label": ("multi_label", "MultiLabel"),
    "regression": ("regression", "Regression"),
    "token-classification": ("token_classification", "TokenClassification"),
    "question-answering": ("question_answering", "QuestionAnswering"),
    "masked-language-modelling": ("masked_language_modelling", "MaskedLanguageModelling"),
    "causal-language-modelling": ("causal_language_modelling", "CausalLanguageModelling"),
}
"""The file and the class of each task."""


def task_named(name: str) -> type[Task]:
    """The class of a task.

    Raises:
        InputError: there is none of that name.
    """
    if name not in TASKS:
        raise InputError(f"task {name!r} is unknown; known: {', '.join(TASK_NAMES)}")
    module, kind = TASKS[name]
    found: type[Task] = getattr(importlib.import_module(f"gaudi_bert.tasks.{module}"), kind)
    return found
