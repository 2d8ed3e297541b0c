"""Losses and accuracies by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.bert import PretrainingOutputs
from gaudi_bert.model.losses import pretraining_sums

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
    assert float(sums.masked_lm_sum) == pytest.approx(-np.log(0.5) - np.log(0.75) - np.log(0.25), rel=1e-6)
    assert float(sums.masked_lm_weight) == 3
    assert float(sums.next_sentence_sum) == pytest.approx(-np.log(0.8) - np.log(0.4), rel=1e-6)
    assert float(sums.next_sentence_weight) == 2
    assert float(sums.masked_lm_count) == 3
    assert (float(sums.next_sentence_correct), float(sums.next_sentence_count)) == (1, 2)


def test_per_sequence_by_hand():
    sums = pretraining_sums(OUTPUTS, BATCH, "sequence")
    assert float(sums.masked_lm_sum) == pytest.approx((-np.log(0.5) - np.log(0.25)) / 2 - np.log(0.75), rel=1e-6)
    assert float(sums.masked_lm_weight) == 2
    assert float(sums.next_sentence_weight) == 2


@pytest.mark.parametrize(("loss", "correct", "count"), [("token", 2, 3), ("sequence", 1.5, 2)])
def test_accuracy_follows_the_loss(loss, correct, count):
    sums = pretraining_sums(outputs([0.9, 0.1, 0.2, 0.9], [(0.2, 0.8)] * 3), BATCH, loss)
    assert (float(sums.masked_lm_correct), float(sums.masked_lm_count)) == (correct, count)


def test_a_sequence_without_masked_positions_counts_for_next_sentence_alone():
    batch = {**BATCH, "masked_lm_weights": tf.constant([[1.0, 0.0, 1.0, 0.0]])}
    sums = pretraining_sums(OUTPUTS, batch, "sequence")
    assert (float(sums.masked_lm_weight), float(sums.next_sentence_weight)) == (1, 2)


def test_unknown_loss_is_refused():
    with pytest.raises(InputError, match="token or sequence"):
        pretraining_sums(OUTPUTS, BATCH, "pack")
