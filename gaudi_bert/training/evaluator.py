"""How good a model is on a data set: exactly weighted, the same figures for packed and for unpacked records.

Sums and weights are added in float64 over every record (the last batch is filled up with packs of weight zero, nothing is
dropped) and divided once. Each accuracy comes with a baseline: the accuracy of the best constant answer on this very set.
For masked tokens that is the *unigram baseline*, the share of the most frequent one among them; for next sentences, the
share of the more frequent label. No constant learnt from training data can do better, so the bar is never too low, and it
needs nothing but the set itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from gaudi_bert.artefacts.training import EvaluationFigures
from gaudi_bert.common.arrays import AnyArray, FloatArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.protocol import Communicator, Model
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.batches import Batch, evaluation_batches, value_limits
from gaudi_bert.training.input.source import DataSource
from gaudi_bert.training.objective import PretrainingObjective


def majority_share(label_counts: FloatArray) -> float:
    """The share of the most frequent label, 0 where there is none: the accuracy of always giving that answer."""
    total = label_counts.sum()
    return float(label_counts.max() / total) if total else 0.0


def count_values(values: AnyArray, weights: AnyArray, size: int) -> FloatArray:
    """How often each number below `size` is among the values that have a weight, float64 [size]."""
    return np.bincount(values[weights > 0], minlength=size).astype(np.float64)


def sums_over(
    batches: Iterable[Batch],
    model: Model,
    communicator: Communicator,
    counted: Callable[[Batch], FloatArray],
    size: int,
) -> FloatArray:
    """The sums of a model's head, and behind them what is `counted`, over the batches of all processes, float64 [size]."""
    totals = np.zeros(size, np.float64)
    for number, batch in enumerate(batches):
        communicator.note("an evaluation", slow=number == 0)
        totals += np.concatenate([model.evaluate(batch)[1].astype(np.float64), counted(batch)])
    return communicator.sum_array(totals)


class PretrainingEvaluator:
    """Evaluates one model on one set.

    `take_packs` limits it to the first records.
    """

    def __init__(
        self,
        model: Model,
        config: BertConfig,
        source: DataSource,
        communicator: Communicator,
        *,
        batch_packs: int,
        take_packs: int | None = None,
    ) -> None:
        self._model, self._source, self._communicator = model, source, communicator
        self._batch_packs, self._take_packs, self._config = batch_packs, take_packs, config
        self._limits = value_limits(source, config)

    def run(self) -> EvaluationFigures:
        """Evaluate."""
        vocabulary = self._config.vocab_size

        def labels(batch: Batch) -> FloatArray:
            sentences = count_values(batch["next_sentence_labels"], batch["next_sentence_weights"], 2)
            words = count_values(batch["masked_lm_ids"], batch["masked_lm_weights"], vocabulary)
            return np.concatenate([sentences, words])

        totals = sums_over(self._batches(), self._model, self._communicator, labels, 8 + 2 + vocabulary)
        sums, next_counts, token_counts = np.split(totals, [8, 10])
        if not next_counts.any():
            raise InputError(f"{self._source.path}: holds no sequence to evaluate on; prepare more text")
        return EvaluationFigures(
            **dict(PretrainingObjective().figures(sums)),
            unigram_baseline=majority_share(token_counts),
            next_sentence_baseline=majority_share(next_counts),
            sequences=int(next_counts.sum()),
            masked_tokens=int(token_counts.sum()),
        )

    def _batches(self) -> Iterable[Batch]:
        rank, size = self._communicator.rank, self._communicator.size
        return evaluation_batches(self._source, self._limits, self._batch_packs, rank, size, self._take_packs)
