"""Masked and causal language modelling, of the texts of rows and of packed tables.

Both tasks use the head of pretraining that scores words, and report loss, accuracy and perplexity. The loss is the negative
log likelihood, as the mean over the predicted tokens.

In masked language modelling, new masks are drawn for each epoch. Whether a token is masked depends only on the seed, the
epoch and the token's position in the data, and not on its pack. Therefore packed and unpacked evaluations mask the same
tokens.

In causal language modelling (Radford et al., 2018), the next token of the same sequence is predicted. Each token attends
only to the tokens of its own sequence up to itself. The last token of a sequence predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import (
    AnyArray,
    BatchArrays,
    BoolArray,
    Float32Array,
    Int32Array,
    IntArray,
    draw_random_uint64,
    hash_words_with_counts,
)
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.heads import TaskKind
from gaudi_bert.rows.packs import PackBatch
from gaudi_bert.rows.types import Sequences
from gaudi_bert.tasks.task import NO_VOCABULARY, MaskKey, Task, Vocabulary
from gaudi_bert.training.batches import Batch


class MaskedLanguageModelling(Task):
    """The task of predicting the original tokens at masked positions."""

    name = "masked-language-modelling"
    architecture = "BertForMaskedLM"
    best_metric = "loss"
    metric_names = ("loss", "accuracy", "perplexity")

    _kept_masks: tuple[MaskKey, Sequences, tuple[BoolArray, Int32Array]] | None = None

    def make_targets_and_weights(self, batch: PackBatch, mask_key: MaskKey) -> BatchArrays:
        """Mask random tokens of a batch. Return the token ids after masking, and the positions, original ids and loss
        weights of the masked tokens.

        The token ids are `input_ids` [B, L]. The others are `masked_positions`, `targets` and `target_weights`, all [B, Q],
        in which Q is the maximum number of masked tokens in a pack.
        """
        fraction, sequences = self.settings.masked_lm_probability, batch.source
        ids = sequences.input_ids
        if self._kept_masks is None or self._kept_masks[0] != mask_key or self._kept_masks[1] is not sequences:
            epoch = mask_key.epoch + 1
            masks = _mask_random_tokens(
                ids,
                sequences.lengths,
                fraction,
                self.vocabulary,
                draw_random_uint64(len(ids), mask_key.seed, "masked tokens", epoch),
                lambda masked: draw_random_uint64(len(masked), mask_key.seed, "masks", epoch),
            )
            self._kept_masks = mask_key, sequences, masks  # keep the masks of all sequences until the next epoch
        is_masked, changed_ids = self._kept_masks[2]
        slots = _max_masked_tokens(batch.shape.length, batch.shape.depth, fraction)
        return {
            **_gather_masked_tokens(batch.scatter_token_values(is_masked), batch.scatter_token_values(ids), slots),
            "input_ids": batch.scatter_token_values(changed_ids),
        }


class CausalLanguageModelling(Task):
    """The task of predicting the next token within a sequence."""

    name = "causal-language-modelling"
    architecture = "BertLMHeadModel"
    best_metric = "loss"
    metric_names = ("loss", "accuracy", "perplexity")

    def make_targets_and_weights(self, batch: PackBatch, mask_key: MaskKey) -> BatchArrays:
        """Return each token's successor as `targets` [B, L], and the weights of these targets as `target_weights` [B, L].

        The weight is 0 for padding and for the last token of a sequence, which has no next token.
        """
        next_ids = np.append(batch.source.input_ids[1:], np.int32(0))
        has_next = np.ones(len(next_ids), np.float32)
        has_next[batch.source.offsets[1:] - 1] = 0.0
        return {"targets": batch.scatter_token_values(next_ids), "target_weights": batch.scatter_token_values(has_next)}

    def make_config_json(self) -> dict[str, Any]:
        """Return what config.json contains about the head. The model is marked as a decoder, because transformers uses
        causal attention only in decoders.
        """
        return {**super().make_config_json(), "is_decoder": True}


# --- the same tasks for packed tables, whose packs are read instead of laid out
#
# The masks of a token depend only on the seed, the epoch, the table row that its sequence comes from, and its position in
# that row. They do not depend on its pack, on the number of processes, or on where a run was resumed.
#
# Letters: B packs, L positions, N sequences of a batch, T tokens of these sequences.


@dataclass(frozen=True)
class WordTargets:
    """Adds the targets of masked or causal language modelling to packs of a packed table.

    Attributes:
        kind: Whether masked tokens or the next token are predicted.
        seed: The seed of the masks.
        masked_fraction: The fraction of tokens that are masked.
        vocabulary: The tokens that masks are drawn from.
    """

    kind: TaskKind
    seed: int
    masked_fraction: float
    vocabulary: Vocabulary = NO_VOCABULARY

    def add_to_packs(self, packs: Sequence[Mapping[str, AnyArray]], epoch: int, length: int, depth: int) -> Batch:
        """Return the model inputs for some packs of a packed table together with their targets and weights, as arrays by
        name.

        Args:
            packs: The columns of each pack.
            epoch: The epoch, on which the masks depend.
            length: The number of positions in a pack.
            depth: The largest number of sequences in a pack.

        Raises:
            InputError: The columns of a pack contradict each other.
        """
        ids_BL, numbers_BL = (np.stack([pack[name] for pack in packs]) for name in ("input_ids", "sequence_ids"))
        ids_BL, numbers_BL = ids_BL.astype(np.int32), numbers_BL.astype(np.int32)
        positions_BL = np.stack([pack["position_ids"] for pack in packs]).astype(np.int32) * (numbers_BL > 0)
        segments = [pack["token_type_ids"] for pack in packs if "token_type_ids" in pack]
        counts_B = np.array([len(pack["seq_lens"]) for pack in packs])
        batch: Batch = {
            "input_ids": ids_BL,
            "input_mask": numbers_BL,
            "segment_ids": np.stack(segments).astype(np.int32) if segments else np.zeros_like(ids_BL),
            "positions": positions_BL,
            "sequence_weights": (np.arange(depth) < counts_B[:, np.newaxis]).astype(np.float32),
        }
        if self.kind == "causal-language-modelling":
            same_BL = np.pad((numbers_BL[:, 1:] == numbers_BL[:, :-1]) & (numbers_BL[:, 1:] > 0), [(0, 0), (0, 1)])
            following_BL = np.pad(ids_BL[:, 1:], [(0, 0), (0, 1)])
            return {**batch, "targets": following_BL * same_BL, "target_weights": same_BL.astype(np.float32)}
        real_BL, lengths_N = numbers_BL > 0, np.concatenate([pack["seq_lens"] for pack in packs]).astype(np.int64)
        if int(lengths_N.sum()) != np.count_nonzero(real_BL):
            raise InputError("the columns seq_lens and sequence_ids of a pack contradict each other; pack the table again")
        rows_N = np.concatenate([pack["indices"] for pack in packs]).astype(np.uint64)
        starts_N = np.concatenate([pack.get("starts", np.zeros(len(pack["seq_lens"]))) for pack in packs])
        at_T = (np.repeat(starts_N, lengths_N) + positions_BL[real_BL]).astype(np.uint64)
        order_T, kinds_T = (
            hash_words_with_counts(
                np.repeat(hash_words_with_counts(draw_random_uint64(1, self.seed, purpose, epoch + 1), rows_N), lengths_N),
                at_T,
            )
            for purpose in ("masked words", "kinds of masks")
        )
        masks = _mask_random_tokens(
            ids_BL[real_BL], lengths_N, self.masked_fraction, self.vocabulary, order_T, lambda masked: kinds_T[masked]
        )
        is_masked_BL, changed_BL = np.zeros_like(real_BL), ids_BL.copy()
        is_masked_BL[real_BL], changed_BL[real_BL] = masks
        slots = _max_masked_tokens(length, depth, self.masked_fraction)
        return {**batch, **_gather_masked_tokens(is_masked_BL, ids_BL, slots), "input_ids": changed_BL}


# --- masks: which tokens are predicted, and what the model sees instead of them
#
# Of the n tokens of a sequence that are not special, `masked_fraction` * n are chosen, but at least one. Of the chosen
# tokens, 80 % are replaced by [MASK], 10 % are replaced by another token, and 10 % stay unchanged (Devlin et al., 2019). The
# masks differ between epochs (Liu et al., 2019).
#
# Letters: T tokens of some sequences, M masked tokens.


def _mask_random_tokens(
    ids_T: Int32Array,
    lengths: IntArray,
    masked_fraction: float,
    vocabulary: Vocabulary,
    random_priorities_T: NDArray[np.uint64],
    draw_replacement_numbers: Callable[[IntArray], NDArray[np.uint64]],
) -> tuple[BoolArray, Int32Array]:
    """Choose random tokens to mask in some sequences, and choose the token that replaces each of them.

    Args:
        ids_T: The token ids of the sequences, one sequence after the other.
        lengths: The length of each sequence.
        masked_fraction: The fraction of tokens that are masked.
        vocabulary: The tokens that masks are drawn from.
        random_priorities_T: A random number for each token. The tokens of a sequence with the smallest numbers are masked.
        draw_replacement_numbers: Returns a random number for each masked token, given the positions of the masked tokens
            among all T tokens. The number determines what replaces the token.

    Returns:
        Whether each token is predicted, bool [T], and the masked token ids, int32 [T].
    """
    free = np.flatnonzero(~np.isin(ids_T, vocabulary.special_ids))
    sequence = np.repeat(np.arange(len(lengths)), lengths)[free]
    order = free[np.lexsort((random_priorities_T[free], sequence))]
    counts = np.bincount(sequence, minlength=len(lengths))
    chosen = np.minimum(counts, np.maximum(1, np.round(counts * masked_fraction))).astype(np.int64)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    masked_M = np.sort(order[rank < np.repeat(chosen, counts)])
    other, kind = np.divmod(draw_replacement_numbers(masked_M) >> np.uint64(8), np.uint64(10))
    words = vocabulary.ordinary_ids
    changed_T = ids_T.copy()
    changed_T[masked_M[kind < 8]] = vocabulary.mask_id
    changed_T[masked_M[kind == 8]] = words[other[kind == 8] % np.uint64(len(words))]
    is_masked_T = np.zeros(len(ids_T), bool)
    is_masked_T[masked_M] = True
    return is_masked_T, changed_T


def _max_masked_tokens(length: int, depth: int, masked_fraction: float) -> int:
    """Return an upper bound on the number of masked tokens in a pack of `length` tokens and `depth` sequences."""
    return min(length, int(np.ceil(masked_fraction * length)) + depth)


def _gather_masked_tokens(masked_BL: BoolArray, ids_BL: Int32Array, slots: int) -> dict[str, Int32Array | Float32Array]:
    """Collect the masked tokens of each pack, and return their positions, original ids and weights as arrays [B, Q] by name.

    Args:
        masked_BL: Whether each token is masked.
        ids_BL: The token ids without masks, which are the targets.
        slots: The number Q of masked tokens for which a pack has room.
    """
    packs, length = masked_BL.shape
    pack, position = np.divmod(np.flatnonzero(masked_BL), length)
    slot = np.arange(len(pack)) - np.searchsorted(pack, pack)
    positions_BQ, targets_BQ = (np.zeros((packs, slots), np.int32) for _ in range(2))
    weights_BQ = np.zeros((packs, slots), np.float32)
    positions_BQ[pack, slot], targets_BQ[pack, slot], weights_BQ[pack, slot] = position, ids_BL[pack, position], 1.0
    return {"masked_positions": positions_BQ, "targets": targets_BQ, "target_weights": weights_BQ}
