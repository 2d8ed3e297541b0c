"""What a row of a packed table holds beyond a packed record, for many packs at once (a numba kernel).

Letters of shapes: B packs, L max_sequence_length, Q masked_slots, S depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Float32Array, Int32Array
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.errors import InputError

__all__ = ["NOT_PREDICTED", "PackRows", "pack_rows"]

NOT_PREDICTED = -100


class PackRows(NamedTuple):
    """Columns of packed tables, int32.

    Attributes:
        position_ids: [B, L], counted from 0 in every sequence, and in the padding.
        labels: [B, L], the id that was masked; `NOT_PREDICTED` elsewhere.
        seq_lens: [B, S], tokens of each sequence; 0 behind the last.
        sequences: [B], how many a pack holds.
    """

    position_ids: Int32Array
    labels: Int32Array
    seq_lens: Int32Array
    sequences: Int32Array


class _Packs(NamedTuple):
    input_mask: Int32Array
    positions: Int32Array
    masked_lm_positions: Int32Array
    masked_lm_ids: Int32Array
    masked_lm_weights: Float32Array
    next_sentence_positions: Int32Array
    next_sentence_weights: Float32Array


def pack_rows(packs: Mapping[str, AnyArray]) -> PackRows:
    """The columns that packed features say, int32 and float32 [B, L], [B, Q] or [B, S] by their names.

    `position_ids` takes the place of `positions`, which is not to be used any more.

    Raises:
        InputError: a pack predicts a token outside its row, or holds sequences in another order than that of its tokens.
    """
    given = _Packs(*(np.ascontiguousarray(packs[name]) for name in _Packs._fields))
    count, length = given.input_mask.shape
    labels = np.empty((count, length), np.int32)
    lengths, sequences = np.zeros(given.next_sentence_positions.shape, np.int32), np.empty(count, np.int32)
    if not _fill(given, labels, lengths, sequences):
        raise InputError("a pack predicts a token outside its row, or its sequences overlap; write the packs again")
    return PackRows(given.positions, labels, lengths, sequences)


@borrowing_kernel
def _fill(packs: _Packs, labels: Int32Array, lengths: Int32Array, sequences: Int32Array) -> bool:
    """Fill the columns, positions in their place; False at the first pack that cannot be."""
    slots = packs.input_mask.shape[1]
    for row in range(packs.input_mask.shape[0]):
        mask, positions, row_labels = packs.input_mask[row], packs.positions[row], labels[row]
        tokens = 0
        for slot in range(slots):
            tokens += mask[slot] != 0
        for slot in range(slots):
            positions[slot] = positions[slot] if mask[slot] > 0 else slot - tokens
            row_labels[slot] = NOT_PREDICTED
        for place in range(packs.masked_lm_ids.shape[1]):
            if packs.masked_lm_weights[row, place] > 0:
                slot = packs.masked_lm_positions[row, place]
                if slot < 0 or slot >= slots:
                    return False
                row_labels[slot] = packs.masked_lm_ids[row, place]
        count = 0
        for place in range(packs.next_sentence_weights.shape[1]):
            count += packs.next_sentence_weights[row, place] > 0
        sequences[row] = count
        end = tokens
        for place in range(count - 1, -1, -1):
            start = packs.next_sentence_positions[row, place]
            if start < 0 or start >= end:
                return False
            lengths[row, place] = end - start
            end = start
    return True
