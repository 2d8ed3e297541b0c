"""Masked-LM targets as BERT's `create_pretraining_data.py` chooses them, for many sequences at once.

Of a sequence of n tokens, min(P, max(1, round(0.15 n))) are predicted, chosen among all but [CLS] and [SEP]. A chosen token
is replaced by [MASK] (80 %), kept (10 %), or replaced by a random token of the vocabulary (10 %). With whole-word masking,
words (a token and the `##` continuations behind it) are taken in random order as long as they fit.

Random order: every position is given a random 64-bit key, and the smallest keys are chosen.

Letters of shapes: N sequences, L slots, P masked positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MaskedSequences", "mask_sequences", "prediction_counts"]

Integers: TypeAlias = NDArray[np.int64]
Slots: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]
Keys: TypeAlias = NDArray[np.uint64]

_NEVER = np.uint64(2**64 - 1)
_MASK_SHARE, _KEEP_SHARE = 0.8, 0.1


@dataclass(frozen=True)
class MaskedSequences:
    """What masking makes of N sequences.

    Args:
        input_ids: int32 [N, L] with the masks in place.
        positions: int32 [N, P], ascending, 0 where unused.
        ids: int32 [N, P], the original tokens, 0 where unused.
        counts: int64 [N], how many positions are used.
    """

    input_ids: Slots
    positions: Slots
    ids: Slots
    counts: Integers


def prediction_counts(lengths: Integers, probability: float, max_predictions: int) -> Integers:
    """How many tokens to predict in sequences of `lengths` tokens (int64 [N]); halves are rounded to even, as in Python."""
    rounded = np.rint(lengths * probability).astype(np.int64)
    candidates = np.maximum(lengths - 3, 0)
    return np.minimum(np.minimum(np.maximum(rounded, 1), max_predictions), candidates)


def mask_sequences(
    input_ids_NL: Slots,
    candidates_NL: Flags,
    counts: Integers,
    max_predictions: int,
    mask_id: int,
    vocabulary_size: int,
    generator: np.random.Philox,
    word_starts_NL: Flags | None = None,
) -> MaskedSequences:
    """Choose and replace tokens.

    Args:
        input_ids_NL: int32, the original sequences.
        candidates_NL: bool, where a token may be chosen.
        counts: int64 [N], how many to choose in each.
        max_predictions: P.
        mask_id: the number of [MASK].
        vocabulary_size: random replacements are uniform below it.
        generator: where the random words come from.
        word_starts_NL: bool, where a word starts; given for whole-word masking.
    """
    keys_NL = generator.random_raw(input_ids_NL.size).reshape(input_ids_NL.shape) >> np.uint64(1)
    keys_NL[~candidates_NL] = _NEVER
    if word_starts_NL is None:
        chosen_NL = _smallest_keys(keys_NL, counts, max_predictions)
    else:
        chosen_NL = _whole_words(keys_NL, word_starts_NL & candidates_NL, candidates_NL, counts)
    rows, columns = np.nonzero(chosen_NL)
    used = np.bincount(rows, minlength=len(counts))
    slots = np.arange(len(rows)) - np.repeat(np.cumsum(used) - used, used)
    positions_NP = np.zeros((len(counts), max_predictions), dtype=np.int32)
    ids_NP = np.zeros_like(positions_NP)
    positions_NP[rows, slots] = columns
    ids_NP[rows, slots] = input_ids_NL[rows, columns]
    masked_NL = input_ids_NL.copy()
    masked_NL[rows, columns] = _replacements(input_ids_NL[rows, columns], mask_id, vocabulary_size, generator)
    return MaskedSequences(masked_NL, positions_NP, ids_NP, used)


def _smallest_keys(keys_NL: Keys, counts: Integers, max_predictions: int) -> Flags:
    """bool [N, L]: the `counts[n]` smallest keys of each row."""
    most = min(max_predictions, keys_NL.shape[1])
    smallest_NP = np.sort(np.partition(keys_NL, most - 1, axis=1)[:, :most], axis=1)
    last_N = np.take_along_axis(smallest_NP, np.maximum(counts - 1, 0)[:, None], axis=1)
    return (keys_NL <= last_N) & (counts > 0)[:, None] & (keys_NL != _NEVER)


def _whole_words(keys_NL: Keys, starts_NL: Flags, candidates_NL: Flags, counts: Integers) -> Flags:
    """bool [N, L]: whole words in the order of the keys of their first tokens; one that does not fit is passed over."""
    chosen_NL = np.zeros(keys_NL.shape, dtype=bool)
    for row in range(len(counts)):
        starts = np.flatnonzero(starts_NL[row])
        # A word ends where the next one starts, or where candidates end ([SEP], padding).
        barriers = np.flatnonzero(starts_NL[row] | ~candidates_NL[row])
        behind = np.append(barriers, keys_NL.shape[1])[np.searchsorted(barriers, starts, side="right")]
        left = int(counts[row])
        order = np.argsort(keys_NL[row, starts])
        for start, stop in zip(starts[order].tolist(), behind[order].tolist(), strict=True):
            if stop - start <= left:
                chosen_NL[row, start:stop] = True
                left -= stop - start
                if left == 0:
                    break
    return chosen_NL


def _replacements(original: Slots, mask_id: int, vocabulary_size: int, generator: np.random.Philox) -> Slots:
    """What stands in the place of each chosen token."""
    choice = (generator.random_raw(len(original)) >> np.uint64(11)) * 2.0**-53
    drawn = ((generator.random_raw(len(original)) >> np.uint64(32)) * np.uint64(vocabulary_size)) >> np.uint64(32)
    replaced = np.where(choice < _MASK_SHARE, mask_id, drawn.astype(np.int64))
    kept = (choice >= _MASK_SHARE) & (choice < _MASK_SHARE + _KEEP_SHARE)
    return np.where(kept, original, replaced).astype(np.int32)
