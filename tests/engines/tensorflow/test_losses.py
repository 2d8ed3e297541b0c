"""Losses and accuracies by hand; sequences laid side by side and taken apart."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.bert import PretrainingOutputs
from gaudi_bert.engines.tensorflow.losses import pretraining_sums
from gaudi_bert.model.sequences import Sequence, join_sequences, split_packs
from tests.builders.agree import agree
from tests.builders.model_packs import random_packs

# One pack of two sequences: masked slots 0 and 2 belong to the first, slot 1 to the second, slot 3 is unused. Two words.
BATCH = {
    "masked_lm_ids": tf.constant([[0, 1, 0, 0]], tf.int32),
    "masked_lm_weights": tf.constant([[1.0, 2.0, 1.0, 0.0]]),
    "next_sentence_positions": tf.constant([[0, 5, 0]], tf.int32),
    "next_sentence_labels": tf.constant([[1, 0, 0]], tf.int32),
    "next_sentence_weights": tf.constant([[1.0, 1.0, 0.0]]),
}


def outputs(word_shares, sentence_shares) -> PretrainingOutputs:
    return PretrainingOutputs(
        tf.zeros([1, 1, 1]),
        tf.math.log([[[share, 1 - share] for share in word_shares]]),
        tf.math.log([[list(s) for s in sentence_shares]]),
    )


OUTPUTS = outputs([0.5, 0.25, 0.25, 0.1], [(0.2, 0.8), (0.4, 0.6), (0.5, 0.5)])


def test_token_weighted_by_hand():
    sums = pretraining_sums(OUTPUTS, BATCH, "token")
    agree(float(sums[0]), -np.log(0.5) - np.log(0.75) - np.log(0.25), 1e-6)
    assert float(sums[1]) == 3
    agree(float(sums[2]), -np.log(0.8) - np.log(0.4), 1e-6)
    assert float(sums[3]) == 2
    assert float(sums[5]) == 3
    assert (float(sums[6]), float(sums[7])) == (1, 2)


def test_per_sequence_by_hand():
    sums = pretraining_sums(OUTPUTS, BATCH, "sequence")
    agree(float(sums[0]), (-np.log(0.5) - np.log(0.25)) / 2 - np.log(0.75), 1e-6)
    assert float(sums[1]) == 2
    assert float(sums[3]) == 2


@pytest.mark.parametrize(("loss", "correct", "count"), [("token", 2, 3), ("sequence", 1.5, 2)])
def test_accuracy_follows_the_loss(loss, correct, count):
    sums = pretraining_sums(outputs([0.9, 0.1, 0.2, 0.9], [(0.2, 0.8)] * 3), BATCH, loss)
    assert (float(sums[4]), float(sums[5])) == (correct, count)


def test_a_sequence_without_masked_positions_counts_for_next_sentence_alone():
    batch = {**BATCH, "masked_lm_weights": tf.constant([[1.0, 0.0, 1.0, 0.0]])}
    sums = pretraining_sums(OUTPUTS, batch, "sequence")
    assert (float(sums[1]), float(sums[3])) == (1, 2)


def test_unknown_loss_is_refused():
    with pytest.raises(InputError, match="token or sequence"):
        pretraining_sums(OUTPUTS, BATCH, "pack")


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
    batch = join_sequences([pack], 7, 4, 3)
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name], [values], err_msg=name)


def test_split_is_the_inverse_of_join():
    packs = random_packs(1, [[11, 5, 13], [], [17, 9]])
    placed = split_packs(join_sequences(packs, 31, 17, 4))
    assert [(each.pack, each.number, each.start) for each in placed] == [
        (0, 1, 0),
        (0, 2, 11),
        (0, 3, 16),
        (2, 1, 0),
        (2, 2, 17),
    ]
    for each, original in zip(placed, [original for pack in packs for original in pack], strict=True):
        for name in ("input_ids", "segment_ids", "masked_positions", "masked_ids", "next_sentence_label"):
            np.testing.assert_array_equal(getattr(each.sequence, name), getattr(original, name))


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
