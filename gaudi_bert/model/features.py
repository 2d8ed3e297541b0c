"""What a model is fed: packed features, and unpacked ones as packs of one sequence. No framework.

A batch maps names to arrays, integers int32 and weights float32; its shapes are static, so that a device compiles once.

Letters: B packs, L positions of a pack, Q masked slots of a pack, S depth (most sequences of a pack).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BatchArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackedFeature, UnpackedFeature
from gaudi_bert.model.config import BertConfig

_AXES = {"tokens": "L", "masked": "Q", "sequences": "S"}
_TYPES = {"int64": "int32", "float32": "float32"}

PACKED_FEATURES: dict[str, tuple[str, str]] = {
    feature.key: (f"B{_AXES[feature.axis]}", _TYPES[feature.kind]) for feature in PackedFeature
}
"""Name of each packed feature, the letters of its shape, its type."""

UNPACKED_FEATURES = tuple(feature.key for feature in UnpackedFeature)
"""Names of the features of an unpacked example."""


_MOST_LOGITS = 2**31 - 1


class BatchSizes(NamedTuple):
    """Packs, positions, masked slots and depth of a batch."""

    packs: int
    positions: int
    masked_slots: int
    depth: int


def packed_shapes(sizes: BatchSizes) -> dict[str, tuple[list[int], str]]:
    """The shape and type of every packed feature in a batch of these sizes."""
    letters = dict(zip("BLQS", sizes, strict=True))
    return {name: ([letters[letter] for letter in shape], kind) for name, (shape, kind) in PACKED_FEATURES.items()}


def as_packed(unpacked: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """A batch of unpacked examples as packs of depth 1; a batch that is packed already is returned as it is.

    `next_sentence_labels` are [B, 1] or [B]. A row of padding alone counts as no sequence.
    """
    if "positions" in unpacked:
        return dict(unpacked)
    missing = [name for name in UNPACKED_FEATURES if name not in unpacked]
    if missing:
        raise InputError(f"batch: the feature {missing[0]} is missing; an unpacked batch has {', '.join(UNPACKED_FEATURES)}")
    mask_BL = unpacked["input_mask"]
    packs, length = mask_BL.shape
    return {
        **{name: unpacked[name] for name in UNPACKED_FEATURES},
        "positions": np.arange(length, dtype=np.int32)[np.newaxis, :] * mask_BL,
        "next_sentence_positions": np.zeros((packs, 1), np.int32),
        "next_sentence_labels": unpacked["next_sentence_labels"].reshape(packs, 1),
        "next_sentence_weights": mask_BL[:, :1].astype(np.float32),
    }


def check_batch(batch: BatchArrays, config: BertConfig) -> BatchSizes:
    """The sizes of a packed batch, checked; arrays, or whatever has their `shape` and `dtype.name`."""
    sizes: dict[str, int] = {}
    for name, (letters, dtype) in PACKED_FEATURES.items():
        if name not in batch:
            raise InputError(f"batch: the feature {name} is missing; a packed batch has {', '.join(PACKED_FEATURES)}")
        array = batch[name]
        if array.dtype.name != dtype:
            raise InputError(f"batch: {name} is {array.dtype.name}, it must be {dtype}; cast it as it is read")
        shape = tuple(array.shape)
        if len(shape) != 2 or None in shape:
            raise InputError(f"batch: {name} has the shape {shape}; it must be [{', '.join(letters)}] with every size known")
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise InputError(f"batch: {name} has the shape {shape}, but {letter} is {sizes[letter]} in another feature")
    if sizes["L"] > config.max_position_embeddings:
        raise InputError(
            f"batch: packs have {sizes['L']} positions, the model's max_position_embeddings is "
            f"{config.max_position_embeddings}; give the model at least as many"
        )
    check_logits(sizes["B"], sizes["Q"], config.vocab_size)
    return BatchSizes(packs=sizes["B"], positions=sizes["L"], masked_slots=sizes["Q"], depth=sizes["S"])


def check_logits(packs: int, slots: int, words: int) -> None:
    """Refuse a batch that has more scores of words, one for each word in every slot of a pack, than int32 can number."""
    logits = packs * slots * words
    if logits > _MOST_LOGITS:
        raise InputError(
            f"batch: {packs} packs x {slots} slots x {words} words are {logits:,} logits, at most {_MOST_LOGITS:,} can be "
            "numbered by int32; make micro-batches smaller (training.micro_batch_packs, finetune.micro_batch_packs)"
        )
