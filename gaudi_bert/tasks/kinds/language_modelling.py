"""Masked and causal language modelling: short texts, no sentence pairs.

Both have pretraining's head that scores words, and the metrics loss, accuracy, perplexity. Loss: negative log likelihood,
mean over the tokens that are predicted.

Masked: `model/masking.py` draws the masks, other ones each epoch. Those of a token are a function of seed, epoch and the
token's position in the data, never of its pack, so packed and unpacked evaluations mask the same tokens.

Causal (Radford et al., 2018): the next token, within each sequence of a pack. A token sees those before it in its own
sequence. Every token but the last of a sequence has a next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BatchArrays, BoolArray, Int32Array, mixed_words, random_words
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.heads import TaskKind
from gaudi_bert.model.masking import NO_VOCABULARY, Masks, Vocabulary, draw_masks, masked_features, masked_slots
from gaudi_bert.rows.packs import Placement
from gaudi_bert.rows.types import Sequences
from gaudi_bert.tasks.kinds.task import Draw, Task
from gaudi_bert.training.input.batches import Batch


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


# --- the same of packed tables, whose packs are read, not laid out
#
# The masks of a token are a function of the seed, the epoch, the row of the table that its sequence is from, and its
# position there: never of its pack, of the processes, or of where a run was resumed.
#
# Letters: B packs, L positions, N sequences of a batch, T tokens of these.


@dataclass(frozen=True)
class WordTargets:
    """What is predicted: words that were masked, or the next one."""

    kind: TaskKind
    seed: int
    share: float
    vocabulary: Vocabulary = NO_VOCABULARY

    def of_packs(self, packs: Sequence[Mapping[str, AnyArray]], epoch: int, length: int, depth: int) -> Batch:
        """The features of packs [B, ...], with targets and their weights, in the form of `model.heads.TaskHead`."""
        ids_BL, numbers_BL = (np.stack([pack[name] for pack in packs]) for name in ("input_ids", "sequence_ids"))
        ids_BL, numbers_BL = ids_BL.astype(np.int32), numbers_BL.astype(np.int32)
        positions_BL = np.stack([pack["position_ids"] for pack in packs]).astype(np.int32) * (numbers_BL > 0)
        segments = [pack.get("token_type_ids") for pack in packs]
        given = [each for each in segments if each is not None]
        counts_B = np.array([len(pack["seq_lens"]) for pack in packs])
        batch: Batch = {
            "input_ids": ids_BL,
            "input_mask": numbers_BL,
            "segment_ids": np.stack(given).astype(np.int32) if given else np.zeros_like(ids_BL),
            "positions": positions_BL,
            "sequence_weights": (np.arange(depth) < counts_B[:, np.newaxis]).astype(np.float32),
        }
        if self.kind == "causal-language-modelling":
            same_BL = np.pad((numbers_BL[:, 1:] == numbers_BL[:, :-1]) & (numbers_BL[:, 1:] > 0), [(0, 0), (0, 1)])
            following_BL = np.pad(ids_BL[:, 1:], [(0, 0), (0, 1)])
            return {**batch, "targets": following_BL * same_BL, "target_weights": same_BL.astype(np.float32)}
        slots = masked_slots(length, depth, self.share)
        return {**batch, **self._masked(packs, ids_BL, numbers_BL > 0, positions_BL, epoch, slots)}

    def _masked(
        self,
        packs: Sequence[Mapping[str, AnyArray]],
        ids_BL: Int32Array,
        real_BL: BoolArray,
        positions_BL: Int32Array,
        epoch: int,
        slots: int,
    ) -> Batch:
        lengths_N = np.concatenate([pack["seq_lens"] for pack in packs]).astype(np.int64)
        if int(lengths_N.sum()) != np.count_nonzero(real_BL):
            raise InputError("seq_lens and sequence_ids of a pack differ; pack the table again")
        rows_N = np.concatenate([pack["indices"] for pack in packs]).astype(np.uint64)
        starts_N = np.concatenate([pack.get("starts", np.zeros(len(pack["seq_lens"]))) for pack in packs])
        at_T = (np.repeat(starts_N, lengths_N) + positions_BL[real_BL]).astype(np.uint64)
        order_T, kinds_T = (
            mixed_words(np.repeat(mixed_words(random_words(1, self.seed, purpose, epoch + 1), rows_N), lengths_N), at_T)
            for purpose in ("masked words", "kinds of masks")
        )
        masks = draw_masks(ids_BL[real_BL], lengths_N, self.share, self.vocabulary, order_T, lambda masked: kinds_T[masked])
        is_masked_BL, changed_BL = np.zeros_like(real_BL), ids_BL.copy()
        is_masked_BL[real_BL], changed_BL[real_BL] = masks.is_masked, masks.input_ids
        return {**masked_features(is_masked_BL, ids_BL, slots), "input_ids": changed_BL}
