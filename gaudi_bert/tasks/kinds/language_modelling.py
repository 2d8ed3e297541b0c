"""Masked and causal language modelling: short texts, no sentence pairs.

Both have pretraining's head that scores words, and the metrics loss, accuracy, perplexity. Loss: negative log likelihood,
mean over the tokens that are predicted.

Masked (other masks each epoch: Liu et al., 2019): of the n tokens of a sequence that are not special,
`masked_lm_probability` * n are chosen (at least one): 80 % of them become [MASK], 10 % another token, 10 % stay. The masks
of a token are a function of seed, epoch and the token's position in the data, never of its pack, so packed and unpacked
evaluations mask the same tokens.

Causal (Radford et al., 2018): the next token, within each sequence of a pack. A token sees those before it in its own
sequence. Every token but the last of a sequence has a next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, BoolArray, Int32Array, random_words
from gaudi_bert.rows.packs import Placement
from gaudi_bert.rows.types import Sequences
from gaudi_bert.tasks.kinds.task import Draw, Task


class _LanguageModelling(Task):
    """Words; the matrix of the head is the word embeddings."""

    best_metric = "loss"
    metric_names = ("loss", "accuracy", "perplexity")


@dataclass(frozen=True)
class _Masks:
    """The masks of all sequences in one epoch: which tokens are predicted, and the input ids with masks."""

    draw: Draw
    sequences: Sequences
    is_masked: BoolArray
    input_ids: Int32Array


class MaskedLanguageModelling(_LanguageModelling):
    """Words that were masked."""

    name = "masked-language-modelling"
    architecture = "BertForMaskedLM"

    _drawn: _Masks | None = None

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`input_ids` with masks; `masked_positions`, `targets` and `target_weights`, [B, Q]."""
        if self._drawn is None or self._drawn.draw != draw or self._drawn.sequences is not sequences:
            self._drawn = self._draw(sequences, draw)
        packs, length, depth = placed.shape
        slots = min(length, int(np.ceil(self.settings.masked_lm_probability * length)) + depth)
        is_masked = np.zeros(packs * length, bool)
        is_masked[placed.slots] = self._drawn.is_masked[placed.sources]
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


class CausalLanguageModelling(_LanguageModelling):
    """The next token."""

    name = "causal-language-modelling"
    architecture = "BertLMHeadModel"

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`targets` [B, L], the next token; `target_weights` 0 where there is none."""
        following = np.append(sequences.input_ids[1:], np.int32(0))
        has_next = np.ones(len(following), np.float32)
        has_next[sequences.offsets[1:] - 1] = 0.0
        return {"targets": placed.tokens(following), "target_weights": placed.tokens(has_next)}

    def config_json(self) -> dict[str, Any]:
        """A decoder, as transformers calls what attends backwards only."""
        return {**super().config_json(), "is_decoder": True}
