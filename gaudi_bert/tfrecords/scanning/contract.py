"""The contract, value by value: the slow but general reader of records that the kernels do not take, which gives reasons.

Writers differ: lists may be unpacked (a tag for each value) or split, map entries repeated (the last wins),
messages merged, further features present, varints longer than need be. `decode_example` resolves all that by
protobuf's rules; here the values are held to the contract, and the record is encoded again in the one form
that the kernels read: exactly the features of the schema, keys sorted, lists packed. So there is one engine, and its
result does not depend on the writer.

What is ambiguous is refused with its reason, never guessed: a mask with holes or other values than 0 and 1,
padding that is not 0, weights that are not 0 or 1, a masked position outside its sequence, lists of unequal
length.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.schema import (
    MAX_SEGMENT_ID,
    MAX_TOKEN_ID,
    PackedSchema,
    RecordError,
    UnpackedSchema,
    check_features,
)


def canonical_example(payload: bytes | memoryview, schema: UnpackedSchema | PackedSchema) -> bytes:
    """`payload` encoded again: the features of `schema`, keys sorted, lists packed.

    Raises:
        RecordError: it is not an example of these sizes, or the first value that breaks the contract.
    """
    features = decode_example(payload)
    check_features(features, schema)
    if isinstance(schema, PackedSchema):
        _check_packed(features, schema)
    else:
        _check_unpacked(features)
        features["masked_lm_weights"] = features["masked_lm_weights"] + np.float32(0)  # -0.0 becomes 0.0
    return encode_example({spec.name: features[spec.name] for spec in schema.features})


def _check_unpacked(features: Mapping[str, AnyArray]) -> None:
    length = _prefix(features["input_mask"], "input_mask")
    if length == 0:
        raise RecordError("`input_mask` is all 0, so the sequence is empty; leave it out")
    masked = _prefix(features["masked_lm_weights"], "masked_lm_weights")
    _check_range("input_ids", features["input_ids"], length, MAX_TOKEN_ID)
    _check_range("segment_ids", features["segment_ids"], length, MAX_SEGMENT_ID)
    _check_range("masked_lm_ids", features["masked_lm_ids"], masked, MAX_TOKEN_ID)
    _check_range("masked_lm_positions", features["masked_lm_positions"], masked, length - 1)
    label = int(features["next_sentence_labels"][0])
    if label not in (0, 1):
        raise RecordError(f"`next_sentence_labels` is {label}, 0 (really next) or 1 (random) is allowed")


def _prefix(values: AnyArray, name: str) -> int:
    """n of n ones followed by zeros."""
    ones = int(np.count_nonzero(values == 1))
    odd = np.flatnonzero((values != 0) & (values != 1))
    if odd.size:
        raise RecordError(f"`{name}` holds {values[odd[0]]} at {odd[0]}, only 0 and 1 are allowed")
    if np.any(values[:ones] == 0):
        hole = int(np.flatnonzero(values[:ones] == 0)[0])
        raise RecordError(f"`{name}` is not 1..1 0..0: it holds 0 at {hole} and 1 after it; move the padding to the end")
    return ones


def _check_packed(features: Mapping[str, AnyArray], schema: PackedSchema) -> None:
    tokens = int(np.count_nonzero(features["input_mask"]))
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


def _check_equal(name: str, values: AnyArray, begin: AnyArray) -> None:
    """`values` are `begin`, and then 0."""
    expected = np.zeros(values.size)
    expected[: begin.size] = begin
    wrong = np.flatnonzero(values != expected)
    if wrong.size:
        position = int(wrong[0])
        raise RecordError(f"`{name}` holds {values[position]:g} at {position}, {expected[position]:g} is right there")


def _check_range(name: str, values: AnyArray, used: int, most: int) -> None:
    """The first `used` values lie in 0 .. most, and the rest is 0."""
    allowed = np.where(np.arange(values.size) < used, most, 0)
    wrong = np.flatnonzero((values < 0) | (values > allowed))
    if wrong.size:
        position = int(wrong[0])
        raise RecordError(f"`{name}` holds {values[position]} at {position}, 0 to {allowed[position]} is allowed there")
