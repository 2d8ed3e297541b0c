"""Masked language modelling: whole short texts, no sentence pairs, masks drawn anew each epoch (Liu et al., 2019).

Of the n tokens of a sequence that are not special, `masked_lm_probability` * n are chosen (at least one): 80 % of them
become [MASK], 10 % another token, 10 % stay. What is drawn for a token is a function of seed, epoch and the token's place in
the data, never of its pack, so that packed and unpacked evaluations mask the same tokens. Loss: negative log likelihood,
mean over masked tokens. Metrics: loss, accuracy, perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, BoolArray, Int32Array
from gaudi_bert.common.permutation import random_words
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import masked_lm_logits
from gaudi_bert.model.parameters import ParameterSpec, parameter_specs
from gaudi_bert.tasks.heads import classified
from gaudi_bert.tasks.packs import Placement
from gaudi_bert.tasks.rows.types import Sequences
from gaudi_bert.tasks.task import Draw, Encoded, Task, Weighed

__all__ = ["MaskedLanguageModelling", "word_head_specs"]


def word_head_specs(config: BertConfig) -> dict[str, ParameterSpec]:
    """The variables of the head that scores words; its matrix is the word embeddings."""
    return {name: spec for name, spec in parameter_specs(config).items() if name.startswith("cls/predictions/")}


@dataclass(frozen=True)
class _Masks:
    """The masks of all sequences in one epoch: which tokens are to be found out, and what stands in their place."""

    draw: Draw
    sequences: Sequences
    is_masked: BoolArray
    input_ids: Int32Array


class MaskedLanguageModelling(Task):
    """Words that were masked."""

    name = "masked-language-modelling"
    architecture = "BertForMaskedLM"
    places = "masked_positions"
    keeps_logits = False
    best_metric = "loss"
    metric_names = ("loss", "accuracy", "perplexity")

    _drawn: _Masks | None = None

    def head_specs(self, config: BertConfig) -> dict[str, ParameterSpec]:
        """The head of pretraining."""
        return word_head_specs(config)

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`input_ids` with masks; `masked_positions`, `targets` and `target_weights`, [B, Q]."""
        if self._drawn is None or self._drawn.draw != draw or self._drawn.sequences is not sequences:
            self._drawn = self._draw(sequences, draw)
        packs, length, depth = placed.shape
        slots = min(length, int(np.ceil(self.settings.masked_lm_probability * length)) + depth)
        is_masked = np.zeros(packs * length, bool)
        is_masked[placed.places] = self._drawn.is_masked[placed.sources]
        pack, position = np.divmod(np.flatnonzero(is_masked), length)
        slot = np.arange(len(pack)) - np.searchsorted(pack, pack)
        ids = placed.tokens(sequences.input_ids)
        features = {name: np.zeros((packs, slots), np.int32) for name in ("masked_positions", "targets")}
        weights = np.zeros((packs, slots), np.float32)
        features["masked_positions"][pack, slot] = position
        features["targets"][pack, slot] = ids[pack, position]
        weights[pack, slot] = 1.0
        return {**features, "target_weights": weights, "input_ids": placed.tokens(self._drawn.input_ids)}

    def _draw(self, sequences: Sequences, draw: Draw) -> _Masks:
        """Draw for all tokens at once: of each sequence the tokens with the smallest numbers are chosen."""
        ids = sequences.input_ids
        epoch = draw.epoch + 1
        numbers = random_words(len(ids), draw.seed, "masked tokens", epoch)
        free = np.flatnonzero(~np.isin(ids, self.vocabulary.special_ids))
        sequence = np.repeat(np.arange(len(sequences)), sequences.lengths)[free]
        order = free[np.lexsort((numbers[free], sequence))]
        counts = np.bincount(sequence, minlength=len(sequences))
        chosen = np.minimum(counts, np.maximum(1, np.round(counts * self.settings.masked_lm_probability))).astype(np.int64)
        rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        masked = np.sort(order[rank < np.repeat(chosen, counts)])
        kind, other = np.divmod(random_words(len(masked), draw.seed, "masks", epoch) >> np.uint64(8), np.uint64(10))[::-1]
        words = self.vocabulary.ordinary_ids
        changed = ids.copy()
        changed[masked[kind < 8]] = self.vocabulary.mask_id
        changed[masked[kind == 8]] = words[other[kind == 8] % np.uint64(len(words))]
        is_masked = np.zeros(len(ids), bool)
        is_masked[masked] = True
        return _Masks(draw, sequences, is_masked, changed)

    def logits(self, encoded: Encoded, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Wide scores of all words at the masked places, [B * Q, V]."""
        return masked_lm_logits(encoded.hidden_RH, encoded.parameters, encoded.config, encoded.forward_pass.compiled)

    def loss(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> Weighed:
        """Negative log likelihood over masked tokens."""
        return classified(logits, batch["targets"], batch["target_weights"])
