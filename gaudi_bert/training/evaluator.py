"""How good a model is on a data set: exactly weighted, the same figures for packed and for unpacked records.

Sums and weights are added in float64 over every record (the last batch is filled up with packs of weight zero, nothing is
dropped) and divided once. Each accuracy comes with a baseline: the accuracy of the best constant answer on this very set.
For masked tokens that is the *unigram baseline*, the share of the most frequent one among them; for next sentences, the
share of the more frequent label. No constant learnt from training data can do better, so the bar is never too low, and it
needs nothing but the set itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gaudi_bert.artefacts.training import EvaluationFigures
from gaudi_bert.common.arrays import FloatArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.protocol import Model
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.batches import Batch, evaluation_batches, value_limits
from gaudi_bert.training.input.source import DataSource
from gaudi_bert.training.objective import PretrainingObjective


def majority_share(label_counts: FloatArray) -> float:
    """The share of the most frequent label, 0 where there is none: the accuracy of always giving that answer."""
    total = label_counts.sum()
    return float(label_counts.max() / total) if total else 0.0


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
        sums = np.zeros(8, np.float64)
        token_counts = np.zeros(vocabulary, np.float64)
        next_counts = np.zeros(2, np.float64)
        for number, batch in enumerate(self._batches()):
            self._communicator.note("an evaluation", slow=number == 0)
            sums += self._model.evaluate(batch)[1].astype(np.float64)
            tokens = batch["masked_lm_ids"][batch["masked_lm_weights"] > 0]
            token_counts += np.bincount(tokens, minlength=vocabulary)
            labels = batch["next_sentence_labels"][batch["next_sentence_weights"] > 0]
            next_counts += np.bincount(labels, minlength=2)
        totals = self._communicator.sum_array(np.concatenate([sums, next_counts, token_counts]))
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
