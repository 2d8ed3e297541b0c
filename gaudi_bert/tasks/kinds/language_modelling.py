"""Masked and causal language modelling: short texts, no sentence pairs.

Both have pretraining's head that scores words, and the metrics loss, accuracy, perplexity. Loss: negative log likelihood,
mean over the tokens that are predicted.

Masked: `model/masking.py` draws the masks, other ones each epoch. Those of a token are a function of seed, epoch and the
token's position in the data, never of its pack, so packed and unpacked evaluations mask the same tokens.

Causal (Radford et al., 2018): the next token, within each sequence of a pack. A token sees those before it in its own
sequence. Every token but the last of a sequence has a next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, random_words
from gaudi_bert.model.masking import Masks, draw_masks, masked_features, masked_slots
from gaudi_bert.rows.packs import Placement
from gaudi_bert.rows.types import Sequences
from gaudi_bert.tasks.kinds.task import Draw, Task


class _LanguageModelling(Task):
    """Words; the matrix of the head is the word embeddings."""

    best_metric = "loss"
    metric_names = ("loss", "accuracy", "perplexity")


class MaskedLanguageModelling(_LanguageModelling):
    """Words that were masked."""

    name = "masked-language-modelling"
    architecture = "BertForMaskedLM"

    _drawn: tuple[Draw, Sequences, Masks] | None = None

    def target_features(self, sequences: Sequences, placed: Placement, draw: Draw) -> BatchArrays:
        """`input_ids` with masks; `masked_positions`, `targets` and `target_weights`, [B, Q]."""
        slots = masked_slots(placed.shape.length, placed.shape.depth, self.settings.masked_lm_probability)
        masks = self._masks(sequences, draw)
        is_masked_BL, ids_BL = placed.tokens(masks.is_masked), placed.tokens(sequences.input_ids)
        return {**masked_features(is_masked_BL, ids_BL, slots), "input_ids": placed.tokens(masks.input_ids)}

    def _masks(self, sequences: Sequences, draw: Draw) -> Masks:
        """Those of all sequences in an epoch, drawn at once and stored until the next one."""
        if self._drawn is None or self._drawn[0] != draw or self._drawn[1] is not sequences:
            epoch, ids = draw.epoch + 1, sequences.input_ids
            masks = draw_masks(
                ids,
                sequences.lengths,
                self.settings.masked_lm_probability,
                self.vocabulary,
                random_words(len(ids), draw.seed, "masked tokens", epoch),
                lambda masked: random_words(len(masked), draw.seed, "masks", epoch),
            )
            self._drawn = draw, sequences, masks
        return self._drawn[2]


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
