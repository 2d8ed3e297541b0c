"""Features of a batch; packs apart and together again."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.features import UNPACKED_FEATURES, Sequence, as_packed, check_batch, join_sequences, split_packs
from tests.builders.model_packs import random_packs, small_config


def small_batch(masked_slots: int = 17, depth: int = 3) -> dict[str, np.ndarray]:
    return join_sequences(random_packs(1, [[11, 5, 13], [17, 9]]), 31, masked_slots, depth)


# --- batches


def test_unpacked_batch_is_packs_of_depth_one_and_a_row_of_padding_no_sequence():
    sequences = [[sequence] for pack in random_packs(3, [[7, 11, 2]]) for sequence in pack]
    expected = join_sequences([*sequences, []], 13, 5, 1)
    unpacked = {name: expected[name] for name in UNPACKED_FEATURES}
    packed = as_packed({**unpacked, "next_sentence_labels": unpacked["next_sentence_labels"].reshape(-1)})
    assert packed.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(packed[name], value, strict=True)
    assert packed["next_sentence_weights"].tolist() == [[1], [1], [1], [0]]
    assert as_packed(packed) == packed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "positions is missing"),
        ({"input_ids": np.zeros((2, 31), np.int64)}, "input_ids is int64, it must be int32"),
        ({"segment_ids": np.zeros((2, 30), np.int32)}, "segment_ids has the shape .* but L is 31"),
        ({"masked_lm_ids": np.zeros(34, np.int32)}, r"must be \[B, Q\]"),
    ],
)
def test_batches_that_do_not_fit_are_refused(change, message):
    batch = {name: value for name, value in {**small_batch(), **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        check_batch(batch, small_config())


def test_sizes_come_from_the_batch_and_must_fit_the_model():
    assert check_batch(small_batch(masked_slots=19, depth=7), small_config()) == (2, 31, 19, 7)
    with pytest.raises(InputError, match="max_position_embeddings is 30"):
        check_batch(small_batch(), small_config(max_position_embeddings=30))


# --- packs apart and together again


def sequence(ids, segments, positions, masked_ids, label) -> Sequence:
    return Sequence(*(np.array(values, np.int32) for values in (ids, segments, positions, masked_ids)), label)


def test_join_by_hand():
    pack = [sequence([7, 8, 9], [0, 0, 1], [0, 2], [4, 5], 1), sequence([6, 3], [0, 1], [1], [2], 0)]
    expected = {
        "input_ids": [7, 8, 9, 6, 3, 0, 0],
        "input_mask": [1, 1, 1, 2, 2, 0, 0],
        "segment_ids": [0, 0, 1, 0, 1, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0],
        "masked_lm_positions": [0, 2, 4, 0],
        "masked_lm_ids": [4, 5, 2, 0],
        "masked_lm_weights": [1, 1, 2, 0],
        "next_sentence_positions": [0, 3, 0],
        "next_sentence_labels": [1, 0, 0],
        "next_sentence_weights": [1, 1, 0],
    }
    assert {name: value[0].tolist() for name, value in join_sequences([pack], 7, 4, 3).items()} == expected


def test_split_is_the_inverse_of_join():
    packs = random_packs(1, [[11, 5, 13], [], [17, 9]])
    placed = split_packs(join_sequences(packs, 31, 17, 4))
    where = [(0, 1, 0), (0, 2, 11), (0, 3, 16), (2, 1, 0), (2, 2, 17)]
    assert [(each.pack, each.number, each.start) for each in placed] == where
    for each, original in zip(placed, [original for pack in packs for original in pack], strict=True):
        for name, value in vars(original).items():
            np.testing.assert_array_equal(getattr(each.sequence, name), value)


@pytest.mark.parametrize(
    ("sizes", "message"), [((15, 9, 2), "16 tokens"), ((16, 1, 2), "masked positions"), ((16, 9, 1), "2 sequences")]
)
def test_packs_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        join_sequences(random_packs(1, [[11, 5]]), *sizes)


def test_split_numbers_are_refused():
    batch = join_sequences(random_packs(1, [[3, 2]]), 7, 4, 3)
    batch["input_mask"][0, 6] = 1
    with pytest.raises(InputError, match="missing or split"):
        split_packs(batch)
