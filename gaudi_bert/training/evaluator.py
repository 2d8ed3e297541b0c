"""How good a model is on a whole set: exactly weighted, the same figures for packed and for unpacked records.

Sums and weights are added in float64 over every record (the last batch is filled up with packs of weight zero, nothing is
dropped) and divided once. Beside each accuracy stands a baseline: the accuracy of the best constant answer on this very set.
For masked tokens that is the *unigram baseline*, the share of the most frequent one among them; for next sentences, the
share of the more frequent label. No constant learnt from training data can do better, so the bar is never too low, and it
needs nothing but the set itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from gaudi_bert.artefacts.training import EvaluationFigures
from gaudi_bert.common.arrays import Float32Array, FloatArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.model.losses import Loss, pretraining_sums
from gaudi_bert.rows.packs import place_packs
from gaudi_bert.tasks.kinds.task import BertForTask, Draw
from gaudi_bert.tasks.task_data import EVALUATION_EPOCH, TaskData
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.input.batches import Batch, evaluation_batches, value_limits
from gaudi_bert.training.input.source import DataSource
from gaudi_bert.training.objective import PretrainingObjective


def majority_share(label_counts: FloatArray) -> float:
    """The share of the most frequent label, 0 where there is none: the accuracy of always giving that answer."""
    total = label_counts.sum()
    return float(label_counts.max() / total) if total else 0.0


class PretrainingEvaluator:
    """Evaluates one model on one set; the graph is traced once.

    `take_packs` limits it to the first records.
    """

    def __init__(
        self,
        model: BertForPretraining,
        source: DataSource,
        communicator: Communicator,
        *,
        loss: Loss,
        batch_packs: int,
        take_packs: int | None = None,
    ) -> None:
        self._model, self._source, self._communicator = model, source, communicator
        self._loss, self._batch_packs, self._take_packs = loss, batch_packs, take_packs
        self._limits = value_limits(source, model.config)
        self._sums = tf.function(self._trace_sums, autograph=False, reduce_retracing=False)

    def run(self) -> EvaluationFigures:
        """Evaluate."""
        vocabulary = self._model.config.vocab_size
        sums = np.zeros(8, np.float64)
        token_counts = np.zeros(vocabulary, np.float64)
        next_counts = np.zeros(2, np.float64)
        for number, batch in enumerate(self._batches()):
            self._communicator.note("an evaluation", slow=number == 0)
            inputs = {name: tf.constant(values) for name, values in batch.items()}
            sums += self._sums(inputs).numpy().astype(np.float64)
            tokens = batch["masked_lm_ids"][batch["masked_lm_weights"] > 0]
            token_counts += np.bincount(tokens, minlength=vocabulary)
            labels = batch["next_sentence_labels"][batch["next_sentence_weights"] > 0]
            next_counts += np.bincount(labels, minlength=2)
        totals = self._communicator.sum_array(np.concatenate([sums, next_counts, token_counts]))
        sums, next_counts, token_counts = np.split(totals, [8, 10])
        if not next_counts.any():
            raise InputError(f"{self._source.path}: holds no sequence to evaluate on; prepare more text")
        return EvaluationFigures(
            **dict(PretrainingObjective(self._loss).figures(sums)),
            unigram_baseline=majority_share(token_counts),
            next_sentence_baseline=majority_share(next_counts),
            sequences=int(next_counts.sum()),
            masked_tokens=int(token_counts.sum()),
        )

    def _batches(self) -> Iterable[Batch]:
        rank, size = self._communicator.rank, self._communicator.size
        return evaluation_batches(self._source, self._limits, self._batch_packs, rank, size, self._take_packs)

    def _trace_sums(self, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return tf.stack(pretraining_sums(self._model(batch, dropout_seed=None), batch, self._loss))


# --- A task: every sequence once, the same figures packed or not, on any number of processes
#
# The processes share the batches. The model's outputs for each sequence (or token) are put back into the order of the data,
# added up over the processes, where all but one hold zeros, and only then measured. So no figure is a mean of means.


@dataclass(frozen=True)
class _TaskEvaluation:
    """The result.

    `sequences` counts windows of long rows each; `logits`, [N, C] or [T, C], are in the order of the data, and None for a
    task without answers.
    """

    figures: Mapping[str, float]
    best_metric: str
    sequences: int
    rows: int
    logits: Float32Array | None = field(repr=False)

    @property
    def accuracy(self) -> float:
        """The metric that tells the best checkpoint."""
        return self.figures[self.best_metric]

    def as_json(self) -> dict[str, float]:
        """By name, as in `metrics.json` and `metrics.jsonl`."""
        return {**self.figures, "evaluated_rows": self.rows, "evaluated_sequences": self.sequences}

    def line(self) -> str:
        """For people."""
        figures = ", ".join(f"{name} {value:.4f}" for name, value in self.figures.items())
        return f"{figures}; over {self.rows:,} rows"


class TaskEvaluator:
    """Evaluates one model on one set; the graph is traced once.

    `seed` is that of masks, where the task draws some.
    """

    def __init__(
        self,
        model: BertForTask,
        data: TaskData,
        communicator: Communicator,
        *,
        batch_packs: int,
        seed: int,
        best_metric: str,
    ) -> None:
        self._model, self._data, self._communicator = model, data, communicator
        self._shape = data.shape(min(batch_packs, max(1, data.packing.packs)))
        self._draw, self._best_metric = Draw(seed, EVALUATION_EPOCH), best_metric
        self._outputs = tf.function(self._trace, autograph=False, reduce_retracing=False)

    def run(self) -> _TaskEvaluation:
        """Evaluate; every process calls it at the same time."""
        data, task, communicator = self._data, self._model.task, self._communicator
        sequences = data.sequences
        packs = data.packs_of(self._draw.seed, self._draw.epoch)
        count = len(sequences.input_ids) if task.per_token else len(sequences)
        logits = np.zeros((count, task.width), np.float32) if task.keeps_logits else None
        sums = np.zeros(3, np.float64)
        batch_packs = self._shape.packs
        for first in range(communicator.rank * batch_packs, len(packs), communicator.size * batch_packs):
            communicator.note("an evaluation", slow=first < communicator.size * batch_packs)
            chosen = np.arange(first, min(first + batch_packs, len(packs)))
            placed = place_packs(sequences, packs, chosen, self._shape)
            batch = {**placed.features(sequences), **task.target_features(sequences, placed, self._draw)}
            values, weighed = self._outputs({name: tf.constant(each) for name, each in batch.items()})
            sums += weighed.numpy().astype(np.float64)
            if logits is not None:
                scatter = placed.scatter_tokens if task.per_token else placed.scatter_sequences
                scatter(values.numpy(), logits)
        loss, weight, right = communicator.sum_array(sums)
        figures = {"loss": loss / max(weight, 1.0)}
        if logits is not None:
            if communicator.size > 1:
                logits = communicator.sum_array(logits).astype(np.float32)
            figures.update(task.metrics(logits, sequences, data.rows))
        else:
            figures.update(accuracy=right / max(weight, 1.0), perplexity=math.exp(min(figures["loss"], 700.0)))
        rows = len(data.rows)
        return _TaskEvaluation({n: float(v) for n, v in figures.items()}, self._best_metric, len(sequences), rows, logits)

    def _trace(self, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self._model(batch)
        weighed = tf.stack(self._model.task.loss(logits, batch))
        return (logits if self._model.task.keeps_logits else tf.zeros([])), weighed
