"""What is checked of every batch as it is read, before the model sees it.

A token id beyond the vocabulary is silently read as zeros by some devices, and a wrong position gathers another token: the
run would go on, on garbage. The check costs a few minima and maxima over small integers on the host.

Letters: B packs, L positions, Q masked slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.source import DataSource

__all__ = ["ValueLimits", "check_values"]


@dataclass(frozen=True)
class ValueLimits:
    """The largest value of each feature; the smallest is 0."""

    largest: Mapping[str, int]

    @classmethod
    def of(cls, source: DataSource, config: BertConfig) -> ValueLimits:
        """The limits that the data's sizes and the model set."""
        last = source.schema.max_sequence_length - 1
        return cls(
            {
                "input_ids": config.vocab_size - 1,
                "input_mask": source.depth,
                "segment_ids": config.type_vocab_size - 1,
                "positions": last,
                "masked_lm_positions": last,
                "masked_lm_ids": config.vocab_size - 1,
                "masked_lm_weights": source.depth,
                "next_sentence_positions": last,
                "next_sentence_labels": 1,
                "next_sentence_weights": 1,
            }
        )


def check_values(batch: BatchArrays, limits: ValueLimits, records: list[str]) -> None:
    """Check one packed batch.

    Args:
        batch: packed features, [B, ...].
        limits: what is allowed.
        records: what to call each of the B records in an error.

    Raises:
        InputError: a value is out of its range, or sequence numbers are not of the form 1..1 2..2 0..0.
    """
    for name, largest in limits.largest.items():
        values = batch[name]
        if values.min() < 0 or values.max() > largest or not np.isfinite(values).all():
            row, slot = np.argwhere(~((values >= 0) & (values <= largest)))[0]
            raise InputError(
                f"{records[row]}: {name}[{slot}] = {values[row, slot]:g}, allowed are 0 .. {largest}; "
                "the records do not belong to this model, or are damaged"
            )
    _check_sequence_numbers(batch["input_mask"], records)


def _check_sequence_numbers(mask_BL: Int32Array | Float32Array, records: list[str]) -> None:
    before, after = mask_BL[:, :-1], mask_BL[:, 1:]
    allowed = (after == before) | (after == 0) | ((after == before + 1) & (before > 0))
    allowed[:, 0] &= mask_BL[:, 0] == 1
    if not allowed.all():
        row, slot = np.argwhere(~allowed)[0]
        raise InputError(
            f"{records[row]}: input_mask is {mask_BL[row, slot]} at {slot} and {mask_BL[row, slot + 1]} at {slot + 1}; "
            "it must be 1..1, then 2..2 and so on, then 0..0; write the records again"
        )
