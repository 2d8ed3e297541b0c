"""What a task is: the head on top of the encoder, its loss, its metrics and its answers. One task, one file.

A task sees packs, and treats each sequence of a pack as if it stood alone: whatever it computes for a sequence depends on
that sequence only. What the model says is a vector for every sequence (logits [B, S, C]) or for every token ([B, L, C]); put
back into the order of the sequences ([N, C] or [T, C]) it becomes metrics and answers, which so know nothing of packs.

Letters: B packs, L positions, S depth, C values of a head, N sequences, T tokens of all sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BatchArrays, Float32Array, Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.tasks import TaskSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.parameters import ParameterSpec
from gaudi_bert.tasks.packs import Placement
from gaudi_bert.tasks.rows.types import Row, Sequences

if TYPE_CHECKING:
    import tensorflow as tf

    from gaudi_bert.model.forward_pass import ForwardPass

__all__ = ["Draw", "Encoded", "Task", "Vocabulary", "Weighed", "share_of_most_frequent"]


class Draw(NamedTuple):
    """What drawn masks are a function of: the seed, and the epoch (-1 for an evaluation)."""

    seed: int
    epoch: int


@dataclass(frozen=True)
class Encoded:
    """What a head works on: the hidden states that the task reads, and the variables by name.

    Attributes:
        hidden_RH: of every token, [B * L, H], or at the task's `places`, [B * P, H].
    """

    hidden_RH: tf.Tensor
    parameters: Mapping[str, tf.Tensor]
    config: BertConfig
    forward_pass: ForwardPass


@dataclass(frozen=True)
class Vocabulary:
    """What masks are drawn from: how many tokens there are, which of them are no words, and [MASK]."""

    size: int
    special_ids: tuple[int, ...]
    mask_id: int

    @property
    def ordinary_ids(self) -> Int32Array:
        """All others, int32."""
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), np.array(self.special_ids, np.int32))


class Weighed(NamedTuple):
    """A sum of losses, what it is divided by, and how many of those were answered rightly; scalars, float32."""

    loss: tf.Tensor
    weight: tf.Tensor
    right: tf.Tensor


NO_VOCABULARY = Vocabulary(0, (), 0)


class Task(ABC):
    """Base of all tasks.

    Args:
        settings: of the task.
        labels: names of its classes, none where it has none.
        vocabulary: of the tokenizer, where masks are drawn.

    Attributes:
        name: as users write it.
        architecture: the class of `transformers` that has the same weights.
        problem_type: what `config.json` calls it, where it does.
        pools: whether the model has BERT's pooler.
        places: the feature [B, P] with the positions whose hidden states are read; None for those of all tokens.
        per_token: whether the model answers for each token, not for each sequence.
        keeps_logits: whether answers and metrics are made from the logits of all sequences; else from sums alone.
        is_causal: whether a token sees only those before it.
        best_metric: the metric that tells the best checkpoint, unless the settings name another.
        metric_names: all of them.
        lower_is_better: metrics of which less is better.
    """

    name: ClassVar[str]
    architecture: ClassVar[str]
    problem_type: ClassVar[str | None] = None
    pools: ClassVar[bool] = False
    places: ClassVar[str | None] = None
    per_token: ClassVar[bool] = False
    keeps_logits: ClassVar[bool] = True
    is_causal: ClassVar[bool] = False
    best_metric: ClassVar[str]
    metric_names: ClassVar[tuple[str, ...]]
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "mean_squared_error")

    def __init__(self, settings: TaskSettings, labels: Sequence[str] = (), vocabulary: Vocabulary = NO_VOCABULARY) -> None:
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
        """Features of a batch that the loss needs, beside those of the encoder (and `input_ids`, where they are masked).

        `target_weights` is among them: 1 for all that the loss is a mean of. So what the sums are divided by is known
        before anything is computed.
        """

    @abstractmethod
    def logits(self, encoded: Encoded, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Wide: [B, S, C], [B, L, C], or what `loss` takes."""

    @abstractmethod
    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> Weighed:
        """The sum of the losses over a batch."""

    def metrics(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> dict[str, float]:
        """How good the answers are, by name, beside the loss.

        Args:
            logits: [N, C] or [T, C], in the order of the sequences.
            sequences: made from `rows`, with targets.
            rows: all of them, labelled.
        """
        del logits, sequences, rows
        return {}

    def baseline(self, learnt: Sequences, measured: Sequences) -> dict[str, float]:
        """What of the metrics one answer for everything reaches on `measured`: the one that suits `learnt` best."""
        del learnt, measured
        return {}

    def answers(self, logits: Float32Array, sequences: Sequences, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """One JSON object for each row, in the order of the rows."""
        raise InputError(f"task {self.name}: it has no answers to predict; embed its texts, or fine-tune another task")

    def config_json(self) -> dict[str, Any]:
        """What `config.json` says of the head, as transformers reads it."""
        content: dict[str, Any] = {"architectures": [self.architecture]}
        if self.labels:
            content["id2label"] = {str(number): name for number, name in enumerate(self.labels)}
            content["label2id"] = {name: number for number, name in enumerate(self.labels)}
        if self.problem_type is not None:
            content["problem_type"] = self.problem_type
        return content


def share_of_most_frequent(learnt: AnyArray, measured: AnyArray) -> float:
    """Of `measured`, the share of the number that is most frequent in `learnt`; both int, not negative."""
    return float(np.mean(measured == np.bincount(learnt).argmax()))
