"""Packed features, as records hold them, to rows with the names of packed tables.

    input_ids, token_type_ids, position_ids, sequence_ids, labels  [L]
    seq_lens, next_sentence_labels                                 [k], one value for each sequence of the pack

Positions of trailing pads count from 0, as if they were one more sequence; labels are -100 where no token was masked.

Letters: B packs, L positions, Q masked slots, S depth, k sequences of one pack.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import AnyArray

__all__ = ["NOT_PREDICTED", "Row", "rows_of_packs"]

NOT_PREDICTED = -100

Row = dict[str, AnyArray]
"""One pack."""


def rows_of_packs(packs: dict[str, AnyArray]) -> list[Row]:
    """Rows of the ten packed features of B packs, int32 and float32 matrices [B, L], [B, Q] or [B, S]."""
    mask_BL, starts_BS = packs["input_mask"], packs["next_sentence_positions"]
    count, length = mask_BL.shape
    tokens_B = np.count_nonzero(mask_BL, axis=1)
    positions_BL = np.where(mask_BL > 0, packs["positions"], np.arange(length, dtype=np.int32) - tokens_B[:, np.newaxis])
    labels_BL = np.full((count, length), NOT_PREDICTED, np.int32)
    rows_M, slots_M = np.nonzero(packs["masked_lm_weights"] > 0)
    labels_BL[rows_M, packs["masked_lm_positions"][rows_M, slots_M]] = packs["masked_lm_ids"][rows_M, slots_M]
    sequences_B = np.count_nonzero(packs["next_sentence_weights"] > 0, axis=1)
    ends_BS = np.append(starts_BS[:, 1:], np.zeros((count, 1), starts_BS.dtype), axis=1)
    ends_BS[np.arange(count), sequences_B - 1] = tokens_B
    lengths_BS = ends_BS - starts_BS
    dense = {
        "input_ids": packs["input_ids"],
        "token_type_ids": packs["segment_ids"],
        "position_ids": positions_BL.astype(np.int32, copy=False),
        "sequence_ids": mask_BL,
        "labels": labels_BL,
    }
    sentence_labels_BS = packs["next_sentence_labels"]
    return [
        {
            **{name: values[row] for name, values in dense.items()},
            "seq_lens": lengths_BS[row, :sequences],
            "next_sentence_labels": sentence_labels_BS[row, :sequences],
        }
        for row, sequences in enumerate(sequences_B.tolist())
    ]
