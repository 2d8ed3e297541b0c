"""What an unpacked and a packed example may hold: what breaks the contract is refused with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.wire.schema import (
    PackedSchema,
    RecordError,
    UnpackedSchema,
    check_features,
    check_values,
)
from tests.oracles.packed_record import pack_sequences
from tests.oracles.wire import FLOAT_KEYS


def check(features: Mapping[str, list], schema: UnpackedSchema | PackedSchema) -> None:
    floats = (*FLOAT_KEYS, "next_sentence_weights")
    arrays = {name: np.array(values, np.float32 if name in floats else np.int64) for name, values in features.items()}
    check_features(arrays, schema)
    check_values(arrays, schema)


def broken(**changes) -> dict:
    """A sequence of 6 tokens with 2 masked positions, and one thing wrong."""
    features = {
        "input_ids": [7, 8, 9, 10, 11, 12] + [0] * 7,
        "input_mask": [1] * 6 + [0] * 7,
        "segment_ids": [0] * 3 + [1] * 3 + [0] * 7,
        "masked_lm_positions": [1, 4, 0, 0, 0],
        "masked_lm_ids": [20, 21, 0, 0, 0],
        "masked_lm_weights": [1.0, 1.0, 0.0, 0.0, 0.0],
        "next_sentence_labels": [1],
    }
    for key, (place, value) in changes.items():
        features[key][place] = value
    return features


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        (
            broken(input_mask=(2, 0)),
            "`input_mask` must contain ones and then zeros, but contains a one after the 0 at position 2",
        ),
        (broken(input_mask=(3, 2)), "`input_mask` must contain only 0 and 1, but contains 2 at position 3"),
        ({**broken(), "input_mask": [0] * 13}, "the sequence is empty"),
        (broken(input_ids=(9, 5)), "`input_ids` must contain 0 to 0 at position 9, but contains 5"),
        (broken(input_ids=(2, -5)), "at position 2, but contains -5"),
        (broken(segment_ids=(1, 128)), "`segment_ids` must contain 0 to 127 at position 1, but contains 128"),
        (broken(masked_lm_positions=(1, 6)), "`masked_lm_positions` must contain 0 to 5 at position 1, but contains 6"),
        (broken(masked_lm_positions=(4, 2)), "`masked_lm_positions` must contain 0 to 0 at position 4, but contains 2"),
        (
            broken(masked_lm_weights=(1, 0.5)),
            "`masked_lm_weights` must contain only 0 and 1, but contains 0.5 at position 1",
        ),
        (broken(masked_lm_weights=(1, float("nan"))), "but contains nan at position 1"),
        (
            broken(next_sentence_labels=(0, 2)),
            "`next_sentence_labels` must be 0 (next sentence) or 1 (random sentence), but is 2",
        ),
        ({**broken(), "input_ids": [1] * 12}, "`input_ids` must have 13 values, but has 12"),
        ({key: value for key, value in broken().items() if key != "segment_ids"}, "`segment_ids` is missing"),
    ],
)
def test_what_is_ambiguous_is_refused_with_its_reason(features: dict, reason: str) -> None:
    with pytest.raises(RecordError, match=re.escape(reason)):
        check(features, UnpackedSchema(13, 5))


@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        ("input_mask", 0, 2, "`input_mask` must contain 1 at position 0, but contains 2"),
        ("positions", 13, 1, "`positions` must contain 0 at position 13, but contains 1"),
        ("input_ids", 13, 9, "`input_ids` must contain 0 to 0 at position 13, but contains 9"),
        ("next_sentence_positions", 1, 0, "must begin with 0 and ascend"),
        ("next_sentence_weights", 0, 0.5, "`next_sentence_weights` must contain 1 at position 0, but contains 0.5"),
        ("next_sentence_labels", 1, 2, "`next_sentence_labels` must contain 0 to 1 at position 1, but contains 2"),
        ("masked_lm_positions", 0, 6, "contains 6 at position 0, which is outside sequence 1 (tokens 0 to 5)"),
        ("masked_lm_weights", 1, 3, "`masked_lm_weights` must contain the sequence numbers"),
    ],
)
def test_a_pack_that_breaks_the_contract_is_refused(name: str, place: int, value: float, reason: str) -> None:
    schema, pack = PackedSchema(14, 5, 3, 2), pack_sequences([broken(), broken()], 13, 5, 3)
    pack = {key: [*values, 0] if len(values) == 13 else values for key, values in pack.items()}
    check(pack, schema)
    with pytest.raises(RecordError, match="at most 1 masked positions, but one has 2"):
        check(pack, PackedSchema(14, 5, 3, 1))
    pack[name][place] = value
    with pytest.raises(RecordError, match=re.escape(reason)):
        check(pack, schema)


@pytest.mark.parametrize(
    ("sizes", "said"), [((8193, 10, 3, 7), "max_sequence_length = 8193"), ((128, 10, 0, 7), "depth = 0")]
)
def test_sizes_out_of_range_are_refused(sizes: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PackedSchema(*sizes)
