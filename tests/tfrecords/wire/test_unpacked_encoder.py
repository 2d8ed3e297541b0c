"""Rows of matrices encoded at once, against the encoder of single examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.tfrecords.wire.example import encode_example
from gaudi_bert.tfrecords.wire.framing import frame
from gaudi_bert.tfrecords.wire.schema import MAX_TOKEN_ID
from gaudi_bert.tfrecords.wire.unpacked_encoder import encode_rows
from tests.builders.properties import examples


def matrices(rows: int, length: int, predictions: int, bits: int, seed: int) -> dict[str, np.ndarray]:
    """The features of random sequences; all behind their tokens and masked positions is 0."""
    generator = np.random.default_rng(seed)
    mask = np.arange(length) < generator.integers(1, length + 1, (rows, 1))
    used = np.arange(predictions) < generator.integers(0, predictions + 1, (rows, 1))
    return {
        "input_ids": mask * generator.integers(0, 2**bits, mask.shape),
        "input_mask": mask,
        "segment_ids": mask * generator.integers(0, 128, mask.shape),
        "masked_lm_positions": used * generator.integers(0, mask.sum(axis=1, keepdims=True), used.shape),
        "masked_lm_ids": used * generator.integers(0, 2**bits, used.shape),
        "masked_lm_weights": used.astype(np.float32),
        "next_sentence_labels": generator.integers(0, 2, (rows, 1)),
    }


@examples(60)
@given(st.integers(0, 7), st.integers(1, 300), st.integers(1, 40), st.integers(0, 21), st.integers(0, 2**31))
def test_rows_are_what_the_single_encoder_writes(rows: int, length: int, predictions: int, bits: int, seed: int) -> None:
    features = matrices(rows, length, predictions, bits, seed)
    records, lengths = encode_rows(features)
    expected = [frame(encode_example({name: values[row] for name, values in features.items()})) for row in range(rows)]
    assert records.tobytes() == b"".join(expected)
    assert lengths.tolist() == [len(record) for record in expected]


@pytest.mark.parametrize("value", [-1, MAX_TOKEN_ID + 1])
def test_values_out_of_range_are_refused(value: int) -> None:
    features = matrices(2, 9, 3, 12, seed=1)
    features["input_ids"][1, 0] = value
    with pytest.raises(ValueError, match="feature `input_ids` holds"):
        encode_rows(features)
