"""Features of a batch; packs apart and together again."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.features import UNPACKED_FEATURES, Sequence, as_packed, check_logits, join_sequences, split_packs
from tests.builders.model_packs import random_packs

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


def test_scores_of_words_that_int32_cannot_number_are_refused():
    check_logits(2, 2**15, 2**15 - 1)
    with pytest.raises(InputError, match="micro_batch_packs"):
        check_logits(2, 2**15, 2**15)


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


def test_split_numbers_are_refused():
    batch = join_sequences(random_packs(1, [[3, 2]]), 7, 4, 3)
    batch["input_mask"][0, 6] = 1
    with pytest.raises(InputError, match="missing or split"):
        split_packs(batch)
