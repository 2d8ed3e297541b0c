"""What a model is fed: packed features, unpacked ones as packs of one sequence, and both taken apart. No framework.

A batch maps names to arrays, integers int32 and weights float32; its shapes are static, so that a device compiles once.

Letters: B packs, L positions of a pack, Q masked slots of a pack, S depth (most sequences of a pack).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BatchArrays, Float32Array, Int32Array
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import UnpackedFeature

UNPACKED_FEATURES = tuple(feature.key for feature in UnpackedFeature)
"""Names of the features of an unpacked example."""

_MOST_LOGITS = 2**31 - 1


def as_packed(unpacked: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """A batch of unpacked examples as packs of depth 1; a row of padding alone counts as no sequence."""
    mask_BL = unpacked["input_mask"]
    packs, length = mask_BL.shape
    return {
        **{name: unpacked[name] for name in UNPACKED_FEATURES},
        "positions": np.arange(length, dtype=np.int32)[np.newaxis, :] * mask_BL,
        "next_sentence_positions": np.zeros((packs, 1), np.int32),
        "next_sentence_labels": unpacked["next_sentence_labels"].reshape(packs, 1),
        "next_sentence_weights": mask_BL[:, :1].astype(np.float32),
    }


def check_logits(packs: int, slots: int, words: int) -> None:
    """Refuse a batch that has more scores of words, one for each word in every slot of a pack, than int32 can number."""
    logits = packs * slots * words
    if logits > _MOST_LOGITS:
        raise InputError(
            f"batch: {packs} packs x {slots} slots x {words} words are {logits:,} logits, at most {_MOST_LOGITS:,} can be "
            "numbered by int32; make micro-batches smaller (training.micro_batch_packs, finetune.micro_batch_packs)"
        )


# --- packs taken apart into their sequences, and sequences joined to packs, one at a time: for proofs and small batches,
# plain rather than fast


@dataclass(frozen=True)
class Sequence:
    """One sequence as it stands alone; arrays are int32, `masked_positions` count from its own start."""

    input_ids: Int32Array
    segment_ids: Int32Array
    masked_positions: Int32Array
    masked_ids: Int32Array
    next_sentence_label: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)


@dataclass(frozen=True)
class PlacedSequence:
    """A sequence and where its inputs and outputs lie in a batch of packs."""

    sequence: Sequence
    pack: int
    number: int
    start: int
    masked_slots: Int32Array

    @property
    def positions(self) -> slice:
        """The positions of its tokens in the pack."""
        return slice(self.start, self.start + self.sequence.length)


def split_packs(batch: BatchArrays) -> list[PlacedSequence]:
    """Every sequence of a batch of packs (packed features as arrays), pack by pack."""
    return [
        _placed(batch, pack, number)
        for pack, mask_L in enumerate(batch["input_mask"])
        for number in range(1, int(mask_L.max(initial=0)) + 1)
    ]


def _placed(batch: BatchArrays, pack: int, number: int) -> PlacedSequence:
    positions = np.flatnonzero(batch["input_mask"][pack] == number)
    if not len(positions) or positions[-1] - positions[0] + 1 != len(positions):
        raise InputError(f"pack {pack}: the sequence number {number} in input_mask is missing or split; repack the data")
    start = int(positions[0])
    slots = np.flatnonzero(batch["masked_lm_weights"][pack] == number)
    sequence = Sequence(
        input_ids=batch["input_ids"][pack][positions].astype(np.int32),
        segment_ids=batch["segment_ids"][pack][positions].astype(np.int32),
        masked_positions=(batch["masked_lm_positions"][pack][slots] - start).astype(np.int32),
        masked_ids=batch["masked_lm_ids"][pack][slots].astype(np.int32),
        next_sentence_label=int(batch["next_sentence_labels"][pack][number - 1]),
    )
    return PlacedSequence(sequence, pack, number, start, slots)


def join_sequences(
    packs: SequenceOf[SequenceOf[Sequence]], length: int, masked_slots: int, depth: int
) -> dict[str, Int32Array | Float32Array]:
    """A batch of packs, one for each list of sequences, as the packed features (int32 and float32 arrays).

    They must fit. A depth of 1 joins nothing: every sequence has its own row.
    """
    rows_BL = np.zeros((4, len(packs), length), np.int32)
    slots_BQ = np.zeros((2, len(packs), masked_slots), np.int32)
    numbers_BQ = np.zeros((len(packs), masked_slots), np.float32)
    sentences_BS = np.zeros((2, len(packs), depth), np.int32)
    real_BS = np.zeros((len(packs), depth), np.float32)
    for pack, sequences in enumerate(packs):
        start = slot = 0
        for number, sequence in enumerate(sequences, start=1):
            here, used = slice(start, start + sequence.length), slice(slot, slot + len(sequence.masked_ids))
            own_positions = np.arange(sequence.length)
            for row_L, values in zip(
                rows_BL[:, pack], (sequence.input_ids, number, sequence.segment_ids, own_positions), strict=True
            ):
                row_L[here] = values
            slots_BQ[0, pack, used] = sequence.masked_positions + start
            slots_BQ[1, pack, used] = sequence.masked_ids
            numbers_BQ[pack, used] = number
            sentences_BS[:, pack, number - 1] = start, sequence.next_sentence_label
            real_BS[pack, number - 1] = 1
            start, slot = here.stop, used.stop
    return {
        **dict(zip(("input_ids", "input_mask", "segment_ids", "positions"), rows_BL, strict=True)),
        **dict(zip(("masked_lm_positions", "masked_lm_ids"), slots_BQ, strict=True)),
        "masked_lm_weights": numbers_BQ,
        **dict(zip(("next_sentence_positions", "next_sentence_labels"), sentences_BS, strict=True)),
        "next_sentence_weights": real_BS,
    }
