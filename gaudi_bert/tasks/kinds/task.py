"""What a task is: the head on top of the encoder, its loss, its metrics and its answers; and BERT with such a head.

A task sees packs, and treats each sequence of a pack as if it stood alone: whatever it computes for a sequence depends on
that sequence only. The model's output is a vector for every sequence (logits [B, S, C]) or for every token ([B, L, C]); put
back into the order of the sequences ([N, C] or [T, C]) it becomes metrics and answers, so these know nothing of packs.

Each task is a class in a file of this folder, listed in `TASKS`.

Letters: B packs, L positions, S depth, P = B * S sequences (or B * L tokens), H hidden size, C values of a head, N and T all
sequences and all their tokens.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TASK_NAMES, TaskSettings
from gaudi_bert.model.bert import PackedBert, encode_packs
from gaudi_bert.model.config import BertConfig, ParameterSpec, parameter_specs
from gaudi_bert.model.dropout import ForwardPass
from gaudi_bert.model.inputs import MOST_LOGITS
from gaudi_bert.model.losses import cross_entropy
from gaudi_bert.model.operations import dense, dropout, widen
from gaudi_bert.rows.packs import Placement
from gaudi_bert.rows.types import Row, Sequences

TASKS = {
    "classification": ("classification", "Classification"),
    "multi-label": ("classification", "MultiLabel"),
    "regression": ("classification", "Regression"),
    "token-classification": ("classification", "TokenClassification"),
    "question-answering": ("question_answering", "QuestionAnswering"),
    "masked-language-modelling": ("language_modelling", "MaskedLanguageModelling"),
    "causal-language-modelling": ("language_modelling", "CausalLanguageModelling"),
}
"""The file and the class of each task."""

# Larger than the number of any dropout in an encoder.
_HEAD_DROPOUT_SITE = 1 << 20


def task_named(name: str) -> type[Task]:
    """The class of a task."""
    if name not in TASKS:
        raise InputError(f"task {name!r} is unknown; known: {', '.join(TASK_NAMES)}")
    module, class_name = TASKS[name]
    task: type[Task] = getattr(importlib.import_module(f"{__package__}.{module}"), class_name)
    return task


# --- what a task has


class Draw(NamedTuple):
    """What drawn masks are a function of: the seed, and the epoch (-1 for an evaluation)."""

    seed: int
    epoch: int


@dataclass(frozen=True)
class Encoded:
    """What a head works on: the hidden states that the task reads, and the variables by name.

    `hidden_RH` is that of every token, [B * L, H], or at the task's `read_positions`, [B * P, H].
    """

    hidden_RH: tf.Tensor
    parameters: Mapping[str, tf.Tensor]
    config: BertConfig
    forward_pass: ForwardPass


@dataclass(frozen=True)
class Vocabulary:
    """What masks are drawn from: how many tokens there are, which of them are special, and [MASK]."""

    size: int
    special_ids: tuple[int, ...]
    mask_id: int

    @property
    def ordinary_ids(self) -> Int32Array:
        """All others, int32."""
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), np.array(self.special_ids, np.int32))


class LossSums(NamedTuple):
    """A sum of losses, what it is divided by, and how many answers were right; scalars, float32."""

    loss: tf.Tensor
    weight: tf.Tensor
    right: tf.Tensor


_NO_VOCABULARY = Vocabulary(0, (), 0)


class Task(ABC):
    """Base of all tasks; `labels` are the names of its classes, the vocabulary is needed where masks are drawn.

    Attributes:
        architecture: the class of `transformers` that has the same weights.
        problem_type: what `config.json` calls it, where it does.
        pools: whether the model has BERT's pooler.
        read_positions: the feature [B, P] with the positions whose hidden states are read; None for those of all tokens.
        per_token: whether the model answers for each token, not for each sequence.
        keeps_logits: whether answers and metrics come from the logits of all sequences; else from sums alone.
        is_causal: whether a token sees only those before it.
        best_metric: the metric that decides which checkpoint is best, unless the settings name another.
        lower_is_better: metrics of which less is better.
    """

    name: ClassVar[str]
    architecture: ClassVar[str]
    problem_type: ClassVar[str | None] = None
    pools: ClassVar[bool] = False
    read_positions: ClassVar[str | None] = None
    per_token: ClassVar[bool] = False
    keeps_logits: ClassVar[bool] = True
    is_causal: ClassVar[bool] = False
    best_metric: ClassVar[str]
    metric_names: ClassVar[tuple[str, ...]]
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "mean_squared_error")

    def __init__(self, settings: TaskSettings, labels: Sequence[str] = (), vocabulary: Vocabulary = _NO_VOCABULARY) -> None:
        self.settings, self.labels, self.vocabulary = settings, tuple(labels), vocabulary

    @property
    def width(self) -> int:
        """Values of the head for each sequence or token (C)."""
        return len(self.labels)

    @abstractmethod
    def head_specs(self, config: BertConfig) -> dict[str, ParameterSpec]:
        """The variables of the head, by name."""

    @abstractmethod
    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """Features that the loss needs, in addition to those of the encoder (and `input_ids`, where they are masked).

        `target_weights` is among them: 1 for all that the loss is a mean of. So what the sums are divided by is known
        before anything is computed.
        """

    @abstractmethod
    def logits(self, encoded: Encoded, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Wide: [B, S, C], [B, L, C], or what `loss` takes."""

    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> LossSums:
        """The sum of the losses over a batch; here the negative log likelihood of the right classes.

        `logits` are [..., C], `targets` and `target_weights` of `batch` [...].
        """
        weights_P = tf.cast(tf.reshape(batch["target_weights"], [-1]), logits.dtype)
        classes_P = tf.reshape(batch["targets"], [-1])
        losses_P, guesses_P = cross_entropy(tf.reshape(logits, [-1, logits.shape[-1]]), classes_P)
        right_P = tf.cast(tf.equal(guesses_P, classes_P), logits.dtype)
        return LossSums(tf.reduce_sum(losses_P * weights_P), tf.reduce_sum(weights_P), tf.reduce_sum(right_P * weights_P))

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """How good the answers are, by name, without the loss.

        `logits`, [N, C] or [T, C], are in the order of the sequences, which come from all `rows`, labelled.
        """
        return {}

    def baseline(self, learnt: Sequences, measured: Sequences) -> dict[str, float]:
        """The metrics that one constant answer reaches on `measured`: the one that suits `learnt` best."""
        return {}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """One JSON object for each row, in the order of the rows."""
        raise InputError(f"task {self.name}: it has no answers to predict; embed its texts, or fine-tune another task")

    def config_json(self) -> dict[str, Any]:
        """The head's part of `config.json`, as transformers reads it."""
        content: dict[str, Any] = {"architectures": [self.architecture]}
        if self.labels:
            content["id2label"] = {str(number): name for number, name in enumerate(self.labels)}
            content["label2id"] = {name: number for number, name in enumerate(self.labels)}
        if self.problem_type is not None:
            content["problem_type"] = self.problem_type
        return content


# --- what several tasks share


def dense_head(scope: str, config: BertConfig, width: int) -> dict[str, ParameterSpec]:
    """The variables of a dense layer on hidden states."""
    return {
        f"{scope}/kernel": ParameterSpec((config.hidden_size, width), "normal"),
        f"{scope}/bias": ParameterSpec((width,), "zeros"),
    }


def head_scores(inputs_PH: tf.Tensor, encoded: Encoded, scope: str, *, drops: bool = True) -> tf.Tensor:
    """Wide scores [P, C] of the dense layer `scope`, with the dropout that BERT's heads have before it."""
    if drops:
        rate = encoded.config.hidden_dropout_prob
        drawn = encoded.forward_pass.draw(inputs_PH.shape, rate, _HEAD_DROPOUT_SITE)
        inputs_PH = dropout(inputs_PH, drawn, rate, encoded.forward_pass.compiled)
    with tf.name_scope("KEEP_FP32_PRECISION"):
        return dense(widen(inputs_PH), encoded.parameters[f"{scope}/kernel"], encoded.parameters[f"{scope}/bias"])


# --- the model


def task_specs(config: BertConfig, task: Task) -> dict[str, ParameterSpec]:
    """The variables of a BERT with the head of `task`: no more than transformers' class of the same architecture has."""
    encoder = {
        name: spec
        for name, spec in parameter_specs(config).items()
        if name.startswith("bert/") and (task.pools or not name.startswith("bert/pooler/"))
    }
    return {**encoder, **task.head_specs(config)}


class BertForTask(PackedBert):
    """BERT for a task; arguments as `PackedBert`."""

    def __init__(
        self,
        config: BertConfig,
        task: Task,
        *,
        seed: int | None,
        compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        compiled: bool = False,
    ) -> None:
        specs = task_specs(config, task)
        super().__init__(config, specs, seed=seed, compute_dtype=compute_dtype, compiled=compiled)
        self.task = task

    def __call__(self, batch: Mapping[str, tf.Tensor], *, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """The logits of the task, wide.

        Args:
            batch: features of `Placement.features` and `Task.target_features`, shapes static.
            dropout_seed: int32 [2], another one for every pass of a training run; None for no dropout.
        """
        packs, length = batch["input_ids"].shape
        if not self.task.keeps_logits and packs * length * self.config.vocab_size > MOST_LOGITS:
            raise InputError(
                f"batch: {packs} packs of {length} have more than {MOST_LOGITS:,} logits of {self.config.vocab_size} words; "
                "make finetune.micro_batch_packs smaller"
            )
        parameters, forward_pass = self.parameters(), ForwardPass(dropout_seed, self.compiled)
        positions_BP = None if self.task.read_positions is None else batch[self.task.read_positions]
        hidden_RH = encode_packs(batch, parameters, self.config, self.compute_dtype, forward_pass, positions_BP)
        return self.task.logits(Encoded(hidden_RH, parameters, self.config, forward_pass), batch)
