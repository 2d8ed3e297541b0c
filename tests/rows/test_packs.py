"""Packs as dense arrays: what lies where, and the model's outputs brought home."""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.rows.packs import BatchShape, PackedSequences
from gaudi_bert.rows.types import Sequences

# --- packs as dense arrays: what lies where, and what the model says brought home

SEQUENCES = Sequences(
    row=np.arange(4),
    offsets=np.array([0, 2, 5, 6, 9]),
    input_ids=np.array([11, 12, 21, 22, 23, 31, 41, 42, 43], np.int32),
    segment_ids=np.array([0, 1, 0, 0, 1, 0, 0, 1, 1], np.int8),
)
PACKED = PackedSequences(SEQUENCES, SampledPacks(np.array([3, 0, 2, 1]), np.array([0, 2, 4])))
BATCH = PACKED.build_batch(np.array([1, 0]), BatchShape(3, 7, 2))


def test_a_batch_spelt_out() -> None:
    assert {name: values.tolist() for name, values in BATCH.features().items()} == {
        "input_ids": [[31, 21, 22, 23, 0, 0, 0], [41, 42, 43, 11, 12, 0, 0], [0] * 7],
        "input_mask": [[1, 2, 2, 2, 0, 0, 0], [1, 1, 1, 2, 2, 0, 0], [0] * 7],
        "segment_ids": [[0, 0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0], [0] * 7],
        "positions": [[0, 0, 1, 2, 0, 0, 0], [0, 1, 2, 0, 1, 0, 0], [0] * 7],
        "sequence_positions": [[0, 1], [0, 3], [0, 0]],
        "last_positions": [[0, 3], [2, 4], [0, 0]],
        "sequence_weights": [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]],
    }


def test_what_is_said_of_a_sequence_or_a_token_goes_home() -> None:
    of_sequences = np.array([[[2.0], [1.0]], [[3.0], [0.0]], [[-1.0], [-1.0]]])
    out = np.full((4, 1), np.nan)
    BATCH.scatter_outputs(of_sequences, out, per_token=False)
    assert out[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    tokens = np.full((9, 1), np.nan)
    BATCH.scatter_outputs(BATCH.features()["input_ids"][:, :, np.newaxis].astype(np.float64), tokens, per_token=True)
    assert tokens[:, 0].tolist() == SEQUENCES.input_ids.tolist()


def test_no_packs_are_an_empty_batch() -> None:
    empty = PACKED.build_batch(np.zeros(0, np.int64), BatchShape(2, 7, 3))
    assert all(not values.any() for values in empty.features().values())
