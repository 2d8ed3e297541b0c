"""What a task is: the targets of its loss, its metrics and its answers. Its head and loss are the engine's.

A task sees packs, and treats each sequence of a pack as if it stood alone: whatever it computes for a sequence depends on
that sequence only. The model's output is a vector for every sequence (logits [B, S, C]) or for every token ([B, L, C]); put
back into the order of the sequences ([N, C] or [T, C]) it becomes metrics and answers, so these know nothing of packs.

Each task is a class in a file of this folder, listed in `TASKS`.

Letters: B packs, L positions, S depth, C values of a head, N and T all sequences and all their tokens.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, FloatArray, Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TASK_NAMES, TaskName, TaskSettings
from gaudi_bert.model.heads import Activation, TaskHead, TaskKind, VectorHead
from gaudi_bert.rows.packs import Placement
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.tasks.contrast import PairedRows
from gaudi_bert.training.objective import Objective

TASKS = {
    "classification": ("classification", "Classification"),
    "multi-label": ("classification", "MultiLabel"),
    "regression": ("classification", "Regression"),
    "token-classification": ("classification", "TokenClassification"),
    "question-answering": ("question_answering", "QuestionAnswering"),
    "reranking": ("retrieval", "Reranking"),
    "embedding": ("retrieval", "Embedding"),
    "masked-language-modelling": ("language_modelling", "MaskedLanguageModelling"),
    "causal-language-modelling": ("language_modelling", "CausalLanguageModelling"),
}
"""The file and the class of each task."""


def task_named(name: str) -> type[Task]:
    """The class of a task."""
    if name not in TASKS:
        raise InputError(f"task {name!r} is unknown; known: {', '.join(TASK_NAMES)}")
    module, class_name = TASKS[name]
    task: type[Task] = getattr(importlib.import_module(f"{__package__}.{module}"), class_name)
    return task


_SETTINGS_OF_TASKS: dict[str, tuple[str, ...]] = {
    "labels": ("classification", "multi-label", "token-classification"),
    "stride": ("token-classification", "question-answering", "masked-language-modelling", "causal-language-modelling"),
    **dict.fromkeys(("n_best", "max_answer_tokens", "null_score_threshold"), ("question-answering",)),
    "loss": ("embedding", "reranking"),
    **dict.fromkeys(("scale", "symmetric", "dimensions", "pooling", "query_prompt", "document_prompt"), ("embedding",)),
    "masked_lm_probability": ("masked-language-modelling",),
}
"""Settings that only some tasks have."""


def check_settings_apply(task: TaskName | None, settings: TaskSettings) -> None:
    """Refuse settings that somebody named and that change nothing of a task; None is plain texts."""
    fields = type(settings).model_fields
    for key, tasks in _SETTINGS_OF_TASKS.items():
        value = getattr(settings, key)
        if key in settings.named and task not in tasks and value != fields[key].default:
            what = task or "a text without a task"
            raise InputError(f"task.{key} = {value}: changes nothing of {what}, it is for {', '.join(tasks)}; leave it out")


EVALUATION_EPOCH = -1
"""That of masks for an evaluation."""


def learns_pairs(settings: TaskSettings) -> bool:
    """Whether a task is learnt from all rows of an update together."""
    return settings.name == "embedding" or (settings.name == "reranking" and settings.loss == "listwise")


# --- what a task has


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that masks are drawn from: how many there are, which of them are special, and [MASK]."""

    size: int
    special_ids: tuple[int, ...]
    mask_id: int

    @cached_property
    def ordinary_ids(self) -> Int32Array:
        """All others, int32."""
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), np.array(self.special_ids, np.int32))


NO_VOCABULARY = Vocabulary(0, (), 0)


class Draw(NamedTuple):
    """Key of drawn masks: the seed, and the epoch (-1 for an evaluation)."""

    seed: int
    epoch: int


class Task(ABC):
    """Base of all tasks; `labels` are the names of its classes, the vocabulary is needed where masks are drawn.

    Attributes:
        architecture: the class of `transformers` that has the same weights.
        problem_type: what `config.json` calls it, where it does.
        best_metric: the metric that decides which checkpoint is best, unless the settings name another.
        lower_is_better: metrics of which less is better.
        activation: what turns the logit of a pair into its score, in reranking.
    """

    name: ClassVar[TaskName]
    architecture: ClassVar[str]
    problem_type: ClassVar[str | None] = None
    best_metric: str
    metric_names: tuple[str, ...]
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "mean_squared_error")

    activation: Activation = "Sigmoid"

    def __init__(self, settings: TaskSettings, labels: Sequence[str] = (), vocabulary: Vocabulary = NO_VOCABULARY) -> None:
        self.settings, self.labels, self.vocabulary = settings, tuple(labels), vocabulary

    @property
    def head(self) -> TaskHead | VectorHead:
        """Return what an engine computes."""
        return TaskHead(cast(TaskKind, self.name), self.width)

    @property
    def width(self) -> int:
        """Values of the head for each sequence or token (C)."""
        return len(self.labels)

    def note(self, rows: Sequence[Row]) -> str | None:
        """Return what people should know of these rows, or of how they are measured, if anything."""
        return None

    @abstractmethod
    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """Features that the loss needs, in addition to those of the encoder (and `input_ids`, where they are masked).

        `target_weights` is among them: 1 for all that the loss is a mean of. So what the sums are divided by is known
        before anything is computed.
        """

    def paired(self, sequences: Sequences, rows: Sequence[Row]) -> PairedRows | None:
        """The rows of training data whose loss is one of all rows of an update; None where it is a sum over sequences."""
        return None

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Return how good the answers are, by name; `loss` only where it is not that of the head.

        `logits`, [N, C] or [T, C], are in the order of the sequences, which come from all `rows`, labelled.
        """
        return {}

    def rank(self, metrics: Mapping[str, float], best_metric: str) -> tuple[float, float]:
        """Return what orders evaluations, the best one last: the metric, and among equal ones the loss."""
        sign = -1.0 if best_metric in self.lower_is_better else 1.0
        return sign * metrics[best_metric], -metrics.get("loss", 0.0)

    def baseline(self, learnt: Sequences, measured: Sequences) -> dict[str, float]:
        """The metrics that one constant answer reaches on `measured`: the one that suits `learnt` best."""
        return {}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """One JSON object for each row, in the order of the rows."""
        raise InputError(f"task {self.name}: it has no answers to predict; embed its texts, or fine-tune another task")

    def predictions(self, outputs: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Return what `predictions.jsonl` holds of each labelled row: what is answered, or more."""
        return self.answers(outputs, sequences, rows)

    def config_json(self) -> dict[str, Any]:
        """The head's part of `config.json`, as transformers reads it."""
        content: dict[str, Any] = {"architectures": [self.architecture]}
        if self.labels:
            content["id2label"] = {str(number): name for number, name in enumerate(self.labels)}
            content["label2id"] = {name: number for number, name in enumerate(self.labels)}
        if self.problem_type is not None:
            content["problem_type"] = self.problem_type
        return content


class TextTask(Task):
    """A task with one vector of answers for a text or pair, from BERT's pooled vector of the sequence."""

    architecture = "BertForSequenceClassification"

    @property
    def width(self) -> int:
        """A value for each class; one where the answer is a number."""
        return len(self.labels) or 1

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`targets` [B, S] or [B, S, C], `target_weights` [B, S]: 1 for each sequence."""
        weights = placed.each(np.ones(len(placed.sequences), np.float32))
        if sequences.target is None:
            return {"target_weights": weights}
        return {"targets": placed.each(sequences.target[placed.sequences]), "target_weights": weights}

    def config_json(self) -> dict[str, Any]:
        """With one unnamed class for a number, as transformers counts it."""
        unnamed = {} if self.labels else {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {**super().config_json(), **unnamed}


# --- what training for a task minimises: like the losses of pretraining, a sum and what it is divided by


@dataclass(frozen=True)
class TaskFigures:
    """Mean loss of a task, and the share of right answers; None where answers are not right or wrong."""

    loss: float
    accuracy: float | None

    def as_json(self) -> dict[str, float]:
        """Return the figures by name, as in `metrics.jsonl`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def line(self) -> str:
        """For people."""
        return ", ".join(f"{name} {value:.4f}" for name, value in self.as_json().items())


@dataclass(frozen=True)
class TaskObjective(Objective):
    """The loss of a task; the sums are those of `model.heads.TaskHead`: the loss, its weight, and what is answered right.

    `has_answers`: whether answers are right or wrong.
    """

    task: Task
    has_answers: bool = True

    def denominators(self, batch: BatchArrays) -> FloatArray:
        """Return what the loss is a mean of, the only loss."""
        return np.array([batch["target_weights"].sum(dtype=np.float64), 1.0])

    def figures(self, sums: FloatArray) -> TaskFigures:
        """The loss, and the share of right answers where the task has such."""
        loss, _, right = sums / max(sums[1], 1.0)
        return TaskFigures(float(loss), float(right) if self.has_answers else None)
