"""Masks of words, drawn again each epoch: which tokens are predicted, and what the model sees in their place. numpy.

Of the n tokens of a sequence that are not special, `share` * n are chosen, at least one: 80 % of them become [MASK], 10 %
another token, 10 % stay (Devlin et al., 2019; other masks each epoch: Liu et al., 2019).

Letters: T tokens of some sequences, M masked ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import BoolArray, Float32Array, Int32Array, IntArray


@dataclass(frozen=True)
class Vocabulary:
    """What masks are drawn from: how many tokens there are, which of them are special, and [MASK]."""

    size: int
    special_ids: tuple[int, ...]
    mask_id: int

    @cached_property
    def ordinary_ids(self) -> Int32Array:
        """All others, int32."""
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), np.array(self.special_ids, np.int32))


NO_VOCABULARY = Vocabulary(0, (), 0)


class Masks(NamedTuple):
    """Which tokens are predicted, [T], and the input ids with masks, int32 [T]."""

    is_masked: BoolArray
    input_ids: Int32Array


def draw_masks(
    ids_T: Int32Array,
    lengths: IntArray,
    share: float,
    vocabulary: Vocabulary,
    order_words_T: NDArray[np.uint64],
    kind_words_of: Callable[[IntArray], NDArray[np.uint64]],
) -> Masks:
    """The masks of sequences that lie one after the other, of these lengths.

    `order_words_T` are random words: of each sequence the tokens with the smallest are chosen. `kind_words_of` gives the
    random words of the chosen tokens, by their numbers among all T: they decide what becomes of these.
    """
    free = np.flatnonzero(~np.isin(ids_T, vocabulary.special_ids))
    sequence = np.repeat(np.arange(len(lengths)), lengths)[free]
    order = free[np.lexsort((order_words_T[free], sequence))]
    counts = np.bincount(sequence, minlength=len(lengths))
    chosen = np.minimum(counts, np.maximum(1, np.round(counts * share))).astype(np.int64)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    masked_M = np.sort(order[rank < np.repeat(chosen, counts)])
    other, kind = np.divmod(kind_words_of(masked_M) >> np.uint64(8), np.uint64(10))
    words = vocabulary.ordinary_ids
    changed_T = ids_T.copy()
    changed_T[masked_M[kind < 8]] = vocabulary.mask_id
    changed_T[masked_M[kind == 8]] = words[other[kind == 8] % np.uint64(len(words))]
    is_masked_T = np.zeros(len(ids_T), bool)
    is_masked_T[masked_M] = True
    return Masks(is_masked_T, changed_T)


def masked_slots(length: int, depth: int, share: float) -> int:
    """The most masked tokens of a pack of `length` tokens and `depth` sequences."""
    return min(length, int(np.ceil(share * length)) + depth)


def masked_features(masked_BL: BoolArray, ids_BL: Int32Array, slots: int) -> dict[str, Int32Array | Float32Array]:
    """`masked_positions`, `targets` and `target_weights`, [B, Q], of the masked tokens of packs."""
    packs, length = masked_BL.shape
    pack, position = np.divmod(np.flatnonzero(masked_BL), length)
    slot = np.arange(len(pack)) - np.searchsorted(pack, pack)
    positions_BQ, targets_BQ = (np.zeros((packs, slots), np.int32) for _ in range(2))
    weights_BQ = np.zeros((packs, slots), np.float32)
    positions_BQ[pack, slot], targets_BQ[pack, slot], weights_BQ[pack, slot] = position, ids_BL[pack, position], 1.0
    return {"masked_positions": positions_BQ, "targets": targets_BQ, "target_weights": weights_BQ}
