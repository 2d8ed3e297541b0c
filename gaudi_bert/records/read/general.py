"""The slow but general reader of unpacked records, for what is legal protobuf but not what the fast kernels
take.

Writers differ: lists may be unpacked (a tag for each value) or split, map entries repeated (the last wins),
messages merged, further features present, varints longer than need be. `decode_example` resolves all that by
protobuf's rules; here the values are held to the contract, and the record is encoded again in the one form
that the kernels read: exactly the seven features, keys sorted, lists packed. So there is one engine, and its
result does not depend on the writer.

What is ambiguous is refused with its reason, never guessed: a mask with holes or other values than 0 and 1,
padding that is not 0, weights that are not 0 or 1, a masked position outside its sequence, lists of unequal
length.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.records.schema import MAX_SEGMENT_ID, MAX_TOKEN_ID, RecordError, UnpackedSchema, check_features
from gaudi_bert.records.wire.example import decode_example, encode_example

__all__ = ["canonical_example", "check_unpacked_values"]


def canonical_example(payload: bytes | memoryview, schema: UnpackedSchema) -> bytes:
    """`payload` encoded again: the seven features of `schema`, keys sorted, lists packed.

    Raises:
        RecordError: it is not an unpacked example of these sizes, or its values break the contract.
    """
    features = decode_example(payload)
    check_features(features, schema)
    check_unpacked_values(features)
    canonical = {spec.name: features[spec.name] for spec in schema.features}
    canonical["masked_lm_weights"] = features["masked_lm_weights"] + np.float32(0)  # -0.0 becomes 0.0
    return encode_example(canonical)


def check_unpacked_values(features: Mapping[str, AnyArray]) -> tuple[int, int]:
    """Hold the values of a decoded unpacked example to the contract.

    Args:
        features: the seven features, in the sizes and types of the schema.

    Returns:
        The length of the sequence, n, and its number of masked positions, k.

    Raises:
        RecordError: the first value that breaks it, with what is allowed.
    """
    length = _prefix(features["input_mask"], "input_mask")
    if length == 0:
        raise RecordError("`input_mask` is all 0, so the sequence is empty; leave it out")
    masked = _prefix(features["masked_lm_weights"], "masked_lm_weights")
    _check_part(features["input_ids"], "input_ids", length, MAX_TOKEN_ID, "padding")
    _check_part(features["segment_ids"], "segment_ids", length, MAX_SEGMENT_ID, "padding")
    _check_part(features["masked_lm_ids"], "masked_lm_ids", masked, MAX_TOKEN_ID, "unused slots")
    _check_part(features["masked_lm_positions"], "masked_lm_positions", masked, length - 1, "unused slots")
    label = int(features["next_sentence_labels"][0])
    if label not in (0, 1):
        raise RecordError(f"`next_sentence_labels` is {label}, 0 (really next) or 1 (random) is allowed")
    return length, masked


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


def _check_part(values: AnyArray, name: str, used: int, most: int, rest: str) -> None:
    """The first `used` values lie in 0 .. most, and the rest is 0."""
    outside = np.flatnonzero((values[:used] < 0) | (values[:used] > most))
    if outside.size:
        place = int(outside[0])
        raise RecordError(f"`{name}` holds {values[place]} at {place}, 0 to {most} is allowed")
    if np.any(values[used:] != 0):
        place = used + int(np.flatnonzero(values[used:])[0])
        raise RecordError(f"`{name}` holds {values[place]} at {place}, in the {rest}, where only 0 is allowed")
