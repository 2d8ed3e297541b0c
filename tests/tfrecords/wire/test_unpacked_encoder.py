"""Rows of matrices encoded at once, against the encoder of single examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.tfrecords.wire.example import encode_example
from gaudi_bert.tfrecords.wire.framing import frame
from gaudi_bert.tfrecords.wire.schema import MAX_TOKEN_ID
from gaudi_bert.tfrecords.wire.unpacked_encoder import UnpackedRows, encode_rows
from tests.builders.properties import examples


def random_rows(count: int, length: int, predictions: int, bits: int, seed: int) -> UnpackedRows:
    """Random sequences; behind their tokens and masked positions is what must not be read."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, length + 1, count)
    return UnpackedRows(
        lengths=lengths,
        masked=generator.integers(0, predictions + 1, count),
        input_ids=generator.integers(0, 2**bits, (count, length)),
        segment_ids=generator.integers(0, 128, (count, length)),
        masked_lm_positions=generator.integers(0, lengths[:, None], (count, predictions)),
        masked_lm_ids=generator.integers(0, 2**bits, (count, predictions)),
        next_sentence_labels=generator.integers(0, 2, count),
    )


def features_of(rows: UnpackedRows, row: int) -> dict[str, np.ndarray]:
    """The example of a row; all behind its tokens and masked positions is 0."""
    mask = np.arange(rows.input_ids.shape[1]) < rows.lengths[row]
    used = np.arange(rows.masked_lm_ids.shape[1]) < rows.masked[row]
    along = {name: mask * getattr(rows, name)[row] for name in ("input_ids", "segment_ids")}
    masked = {name: used * getattr(rows, name)[row] for name in ("masked_lm_positions", "masked_lm_ids")}
    others = {"masked_lm_weights": used.astype(np.float32), "next_sentence_labels": rows.next_sentence_labels[[row]]}
    return {**along, **masked, **others, "input_mask": mask}


@examples(60)
@given(st.integers(0, 7), st.integers(1, 300), st.integers(1, 40), st.integers(0, 21), st.integers(0, 2**31))
def test_rows_are_what_the_single_encoder_writes(count: int, length: int, predictions: int, bits: int, seed: int) -> None:
    rows = random_rows(count, length, predictions, bits, seed)
    records, lengths = encode_rows(rows)
    expected = [frame(encode_example(features_of(rows, row))) for row in range(count)]
    assert records.tobytes() == b"".join(expected)
    assert lengths.tolist() == [len(record) for record in expected]


@pytest.mark.parametrize("value", [-1, MAX_TOKEN_ID + 1])
def test_values_out_of_range_are_refused(value: int) -> None:
    rows = random_rows(2, 9, 3, 12, seed=1)
    rows.input_ids[1, 0] = value
    with pytest.raises(ValueError, match="feature `input_ids` holds"):
        encode_rows(rows)
