"""The base class of tasks. A task defines the targets of the loss, the metrics and the predictions. An engine computes the
head and the loss.

Everything that a task computes for a sequence depends only on this sequence, and not on the other sequences of its pack. The
model returns a vector for every sequence (logits [B, S, C]) or for every token ([B, L, C]). These are put back into the
order of the sequences ([N, C] or [T, C]) before metrics and predictions are computed, so that both are independent of packs.

`TASKS` lists the class of each task and the module in this folder that contains it.

Letters:
    B: packs in a batch.
    L: positions in a pack.
    S: depth, the largest number of sequences in a pack.
    C: values of a head.
    N: all sequences.
    T: all tokens.
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
from gaudi_bert.rows.packs import PackBatch
from gaudi_bert.rows.types import Row, Sequences
from gaudi_bert.tasks.contrast import RowGroups
from gaudi_bert.training.objective import Objective

# The module and the class that implement each task.
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


def import_task_class(name: str) -> type[Task]:
    """Return the class of the task with the given name, after importing its module.

    Raises:
        InputError: There is no task of this name.
    """
    if name not in TASKS:
        raise InputError(f"task {name!r}: the task must be one of {', '.join(TASK_NAMES)}")
    module, class_name = TASKS[name]
    return cast("type[Task]", getattr(importlib.import_module(f"{__package__}.{module}"), class_name))


# The tasks that each of these settings applies to. Settings that are not listed here apply to every task.
_SETTINGS_OF_TASKS: dict[str, tuple[str, ...]] = {
    "labels": ("classification", "multi-label", "token-classification"),
    "stride": ("token-classification", "question-answering", "masked-language-modelling", "causal-language-modelling"),
    **dict.fromkeys(("n_best", "max_answer_tokens", "null_score_threshold"), ("question-answering",)),
    "loss": ("embedding", "reranking"),
    **dict.fromkeys(("scale", "symmetric", "dimensions", "pooling", "query_prompt", "document_prompt"), ("embedding",)),
    "masked_lm_probability": ("masked-language-modelling",),
}


def check_settings_apply(task: TaskName | None, settings: TaskSettings) -> None:
    """Check that every task setting that the user has specified has an effect on the task.

    Args:
        task: The task, or None for plain texts.
        settings: The settings of the task.

    Raises:
        InputError: A setting would have no effect.
    """
    fields = type(settings).model_fields
    for key, tasks in _SETTINGS_OF_TASKS.items():
        value = getattr(settings, key)
        if key in settings.keys_set_by_user and task not in tasks and value != fields[key].default:
            what = task or "a text without a task"
            raise InputError(
                f"task.{key} = {value}: the setting has no effect on {what}, only on {', '.join(tasks)}; remove it"
            )


# Which tokens are masked depends on the epoch. Evaluations always use this epoch number, so that all evaluations of a run
# mask the same tokens.
EVALUATION_EPOCH = -1


def has_loss_across_rows(settings: TaskSettings) -> bool:
    """Return True if the loss of a task compares the rows of a weight update with each other, and False if each row has
    its own loss.
    """
    return settings.name == "embedding" or (settings.name == "reranking" and settings.loss == "listwise")


# --- tasks


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary for masking. Tokens that replace masked tokens are drawn from it.

    Attributes:
        size: The number of tokens.
        special_ids: The ids of the special tokens.
        mask_id: The id of [MASK].
    """

    size: int
    special_ids: tuple[int, ...]
    mask_id: int

    @cached_property
    def ordinary_ids(self) -> Int32Array:
        """The ids of all tokens that are not special, int32."""
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), np.array(self.special_ids, np.int32))


NO_VOCABULARY = Vocabulary(0, (), 0)


class MaskKey(NamedTuple):
    """The values that determine the random masks of an epoch. Equal keys give equal masks.

    Attributes:
        seed: The seed.
        epoch: The epoch. It is -1 for an evaluation.
    """

    seed: int
    epoch: int


class Task(ABC):
    """The base class of all tasks. A task defines the targets of the loss, the metrics and the predictions.

    Args:
        settings: The settings of the task.
        labels: The names of the classes.
        vocabulary: The tokens that masks are drawn from, for masked language modelling.

    Attributes:
        name: The name of the task.
        architecture: The class of `transformers` that has the same weights.
        problem_type: The name of the task in `config.json`, if it has one.
        best_metric: The metric that selects the best checkpoint, unless the settings name another.
        metric_names: The names of all metrics.
        lower_is_better: Metrics for which a lower value is better.
        activation: In reranking, the function that turns the logit of a pair into its score.
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
        """The head of the model: the layers that turn the vectors of the encoder into the outputs of this task."""
        return TaskHead(cast(TaskKind, self.name), self.output_width)

    @property
    def output_width(self) -> int:
        """The number of values C that the head returns for each sequence or token."""
        return len(self.labels)

    def describe_unusual_data(self, rows: Sequence[Row]) -> str | None:
        """Return a note for the user if the training data is unusual for this task, otherwise None."""
        return None

    @abstractmethod
    def make_targets_and_weights(self, batch: PackBatch, mask_key: MaskKey) -> BatchArrays:
        """Return the targets of the loss and their weights for a batch, as arrays by name.

        The array `target_weights` is 1 for everything that the loss is averaged over, so that the divisor is known before
        the loss is computed. If the task masks tokens, the features also contain the masked `input_ids`.

        Args:
            batch: A batch of packs.
            mask_key: The key from which masks are drawn.
        """

    def group_rows_for_loss(self, sequences: Sequences, rows: Sequence[Row]) -> RowGroups | None:
        """Return groups of sequences that must belong to the same weight update, and a function that computes their loss.
        Return None if each sequence has its own loss.

        Args:
            sequences: The sequences of the training data.
            rows: The rows of the training data.
        """
        return None

    def compute_metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """Compute the metrics of the model's outputs, and return them by name. Include the metric `loss` only if it replaces
        the loss that the head computes.

        Args:
            logits: [N, C] or [T, C], in the order of the sequences.
            sequences: The sequences of all rows, with targets.
            rows: The labelled rows.
        """
        return {}

    def make_evaluation_sort_key(self, metrics: Mapping[str, float], best_metric: str) -> tuple[float, float]:
        """Return a sort key for the metrics of an evaluation. A better evaluation has a larger key, and a lower loss breaks
        ties.
        """
        sign = -1.0 if best_metric in self.lower_is_better else 1.0
        return sign * metrics[best_metric], -metrics.get("loss", 0.0)

    def compute_baseline_metrics(self, training_data: Sequences, evaluation_data: Sequences) -> dict[str, float]:
        """Return the metrics of always predicting the same class, by name. The class is chosen on `training_data`, and the
        metrics are computed on `evaluation_data`.

        By default, there are no baseline metrics.
        """
        return {}

    def make_predictions(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Yield the prediction for each row as a JSON object, in the order of the rows.

        Args:
            logits: [N, C] or [T, C], in the order of the sequences.
            sequences: The sequences of the rows.
            rows: The rows.

        Raises:
            InputError: The task has no predictions.
        """
        raise InputError(
            f"task {self.name}: this task has no predictions; run `gaudi-bert embed`, or fine-tune another task"
        )

    def make_labelled_predictions(
        self, outputs: Float32Array, sequences: Sequences, rows: Sequence[Row]
    ) -> Iterator[dict[str, Any]]:
        """Yield one JSON object per labelled row for the file `predictions.jsonl`. Unless a task overrides this method, the
        objects are the predictions that `make_predictions` yields.

        Args:
            outputs: The outputs of the model, in the order of the sequences.
            sequences: The sequences of the rows.
            rows: The labelled rows.
        """
        return self.make_predictions(outputs, sequences, rows)

    def make_config_json(self) -> dict[str, Any]:
        """Return what `config.json` contains about the head, in the format that transformers reads."""
        content: dict[str, Any] = {"architectures": [self.architecture]}
        if self.labels:
            content["id2label"] = {str(number): name for number, name in enumerate(self.labels)}
            content["label2id"] = {name: number for number, name in enumerate(self.labels)}
        if self.problem_type is not None:
            content["problem_type"] = self.problem_type
        return content


class SequenceTask(Task):
    """The base class of tasks with one prediction per text or text pair. The prediction is computed from BERT's pooled
    vector.
    """

    architecture = "BertForSequenceClassification"

    @property
    def output_width(self) -> int:
        """The number of classes, or 1 if the task predicts a number."""
        return len(self.labels) or 1

    def make_targets_and_weights(self, batch: PackBatch, mask_key: MaskKey) -> BatchArrays:
        """Return the labels as `targets` [B, S] or [B, S, C], and `target_weights` [B, S], which are 1 for each sequence."""
        weights = batch.scatter_sequence_values(np.ones(len(batch.members), np.float32))
        target = batch.source.target
        if target is None:
            return {"target_weights": weights}
        return {"targets": batch.scatter_sequence_values(target[batch.members]), "target_weights": weights}

    def make_config_json(self) -> dict[str, Any]:
        """Return what `config.json` contains about the head. A head that predicts a number has one unnamed class, as in
        transformers.
        """
        unnamed = {} if self.labels else {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {**super().make_config_json(), **unnamed}


# --- the objective of training for a task: like the losses of pretraining, sums and their divisors


@dataclass(frozen=True)
class TaskMetrics:
    """The mean loss of a task, and its accuracy.

    Attributes:
        loss: The mean loss.
        accuracy: The fraction of correct predictions. None if predictions are not right or wrong.
    """

    loss: float
    accuracy: float | None

    def as_json(self) -> dict[str, float]:
        """Return the metrics by name, as in `metrics.jsonl`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def format_line(self) -> str:
        """Return the metrics as one line for the user."""
        return ", ".join(f"{name} {value:.4f}" for name, value in self.as_json().items())


@dataclass(frozen=True)
class TaskObjective(Objective):
    """The training objective of a task. It computes the loss and the accuracy from values that were summed over the batches.

    `model.heads.TaskHead` returns these sums, which are the loss, its weight, and the number of correct predictions.

    Attributes:
        task: The task.
        has_answers: Whether predictions are right or wrong, so that an accuracy exists.
    """

    task: Task
    has_answers: bool = True

    def compute_loss_denominators(self, batch: BatchArrays) -> FloatArray:
        """Return the divisors of the summed losses, float64 [2]. A task has a single loss, so the second divisor is 1."""
        return np.array([batch["target_weights"].sum(dtype=np.float64), 1.0])

    def compute_metrics(self, sums: FloatArray) -> TaskMetrics:
        """Return the mean loss, and the accuracy if the task has one, computed from values that were summed over the
        batches.
        """
        loss, _, right = sums / max(sums[1], 1.0)
        return TaskMetrics(float(loss), float(right) if self.has_answers else None)
