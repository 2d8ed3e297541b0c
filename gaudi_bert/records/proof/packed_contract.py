"""The contract of a packed example, value by value: the slow reader behind the kernel, which gives reasons.

What the kernel of `fingerprint` does not take comes here: it is either a legal example in an unusual
encoding, which is encoded again, or it is refused with the first thing that is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.records.schema import MAX_SEGMENT_ID, MAX_TOKEN_ID, PackedSchema, RecordError, check_features
from gaudi_bert.records.wire.example import decode_example, encode_example

__all__ = ["canonical_packed", "check_packed_values"]


def canonical_packed(payload: bytes, schema: PackedSchema) -> bytes:
    """`payload` encoded again: the ten features of `schema`, keys sorted, lists packed.

    Raises:
        RecordError: it is not a packed example of these sizes, or its values break the contract.
    """
    features = decode_example(payload)
    check_features(features, schema)
    check_packed_values(features, schema)
    return encode_example({spec.name: features[spec.name] for spec in schema.features})


def check_packed_values(features: Mapping[str, AnyArray], schema: PackedSchema) -> None:
    """Hold the values of a decoded packed example to the contract.

    Raises:
        RecordError: the first value that breaks it.
    """
    numbers = features["input_mask"]
    tokens = int(np.count_nonzero(numbers))
    count = int(np.count_nonzero(features["next_sentence_weights"]))
    if tokens == 0 or count == 0:
        raise RecordError("the pack is empty")
    starts = features["next_sentence_positions"][:count]
    ends = np.append(starts[1:], tokens)
    if starts[0] != 0 or np.any(ends <= starts):
        raise RecordError(f"`next_sentence_positions` {starts.tolist()} do not ascend from 0 within {tokens} tokens")
    lengths = ends - starts
    expected = {
        "input_mask": np.repeat(np.arange(1, count + 1), lengths),
        "positions": np.concatenate([np.arange(length) for length in lengths]),
        "next_sentence_positions": starts,
        "next_sentence_weights": np.ones(count),
    }
    for name, values in expected.items():
        _check_equal(name, features[name], values)
    _check_range("input_ids", features["input_ids"], tokens, MAX_TOKEN_ID)
    _check_range("segment_ids", features["segment_ids"], tokens, MAX_SEGMENT_ID)
    _check_range("next_sentence_labels", features["next_sentence_labels"], count, 1)
    _check_masked(features, starts, ends, schema)


def _check_masked(features: Mapping[str, AnyArray], starts: AnyArray, ends: AnyArray, schema: PackedSchema) -> None:
    weights, positions = features["masked_lm_weights"], features["masked_lm_positions"]
    used = int(np.count_nonzero(weights))
    owners = weights[:used].astype(np.int64)
    if np.any(owners != weights[:used]) or np.any(np.diff(owners) < 0) or np.any((owners < 1) | (owners > starts.size)):
        raise RecordError("`masked_lm_weights` are not the numbers of the pack's sequences in ascending order, then 0")
    _check_range("masked_lm_ids", features["masked_lm_ids"], used, MAX_TOKEN_ID)
    outside = np.flatnonzero((positions[:used] < starts[owners - 1]) | (positions[:used] >= ends[owners - 1]))
    if outside.size:
        slot = int(outside[0])
        raise RecordError(
            f"`masked_lm_positions` holds {positions[slot]} at {slot}, outside of sequence {owners[slot]},"
            f" which is {starts[owners[slot] - 1]} to {ends[owners[slot] - 1] - 1}"
        )
    _check_range("masked_lm_positions", positions, used, int(ends[-1]) - 1)
    most = int(np.bincount(owners).max(initial=0))
    if most > schema.max_predictions:
        raise RecordError(f"a sequence has {most} masked positions, at most {schema.max_predictions} is allowed")


def _check_equal(name: str, found: AnyArray, expected: AnyArray) -> None:
    """`found` begins with `expected` and is 0 after it."""
    wanted = np.zeros(found.size)
    wanted[: expected.size] = expected
    wrong = np.flatnonzero(found != wanted)
    if wrong.size:
        place = int(wrong[0])
        raise RecordError(f"`{name}` holds {found[place]:g} at {place}, {wanted[place]:g} is right there")


def _check_range(name: str, values: AnyArray, used: int, most: int) -> None:
    """The first `used` values lie in 0 .. most, and the rest is 0."""
    allowed = np.where(np.arange(values.size) < used, most, 0)
    wrong = np.flatnonzero((values < 0) | (values > allowed))
    if wrong.size:
        place = int(wrong[0])
        raise RecordError(f"`{name}` holds {values[place]} at {place}, 0 to {allowed[place]} is allowed there")
