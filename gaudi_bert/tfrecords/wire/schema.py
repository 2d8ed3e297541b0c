"""The contract of unpacked and packed examples, which specifies their features, the lengths of the features, and the
permitted values.

L is max_sequence_length, P is max_predictions (masked positions of a sequence), S is depth (sequences of a pack), and Q is
masked_slots (masked positions of a pack). Integers are int64 and weights are float32, as in the records of Google, MLPerf,
NVIDIA and Habana. The functions check decoded examples, and their errors name the first violation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.plan import WritablePlan
from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import Axis, PackedFeature, UnpackedFeature

MAX_SEQUENCE_LENGTH = 8192
MAX_TOKEN_ID = 2**21 - 1  # the largest number whose varint has three bytes
MAX_SEGMENT_ID = 127
FRAME_BYTES = 16
MAX_RECORD_BYTES = 4 * 2**20  # valid records are shorter, so a longer record is damaged or was written by another program


class RecordError(ValueError):
    """Raised if a record is not a valid example. The caller adds the file and the record number to its message."""


@dataclass(frozen=True)
class FeatureSpec:
    """The name, the number of values and the type of one feature in all examples.

    Attributes:
        name: The name of the feature.
        length: The number of its values.
        kind: The type of its values.
    """

    name: str
    length: int
    kind: Literal["int64", "float32"]

    @property
    def key_bytes(self) -> bytes:
        """The name of the feature as ASCII bytes."""
        return self.name.encode("ascii")


@dataclass(frozen=True)
class UnpackedSchema:
    """The feature sizes of unpacked examples. Each example contains one sequence, padded to L tokens.

    Attributes:
        max_sequence_length: L, the number of tokens in a row, including padding.
        max_predictions: P, the number of masked slots.

    Raises:
        InputError: A size is out of range.
    """

    max_sequence_length: int
    max_predictions: int

    def __post_init__(self) -> None:
        _check_range("max_sequence_length", self.max_sequence_length, MAX_SEQUENCE_LENGTH)
        _check_range("max_predictions", self.max_predictions, MAX_SEQUENCE_LENGTH)

    @functools.cached_property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The name, length and type of each feature, in the order of `UnpackedFeature`."""
        sizes: dict[Axis, int] = {"tokens": self.max_sequence_length, "masked": self.max_predictions, "sequences": 1}
        return tuple(FeatureSpec(feature.key, sizes[feature.axis], feature.kind) for feature in UnpackedFeature)


@dataclass(frozen=True)
class PackedSchema:
    """The feature sizes of packed examples. Each example contains one to S sequences in a row of L tokens.

    Attributes:
        max_sequence_length: L, the number of tokens in a row, including padding.
        masked_slots: Q, the number of masked slots.
        depth: S, the maximum number of sequences.
        max_predictions: P, the maximum number of masked positions in each sequence.

    Raises:
        InputError: A size is out of range.
    """

    max_sequence_length: int
    masked_slots: int
    depth: int
    max_predictions: int

    @classmethod
    def from_sizes(cls, sizes: WritablePlan | RecordMetadata) -> PackedSchema:
        """Return the schema of the packed records that a plan or a packed folder's metadata describes."""
        return cls(sizes.max_sequence_length, sizes.masked_slots, sizes.depth, sizes.max_predictions)

    @property
    def unpacked_schema(self) -> UnpackedSchema:
        """The schema of the unpacked examples from which the packs were made."""
        return UnpackedSchema(self.max_sequence_length, self.max_predictions)

    def __post_init__(self) -> None:
        _check_range("max_sequence_length", self.max_sequence_length, MAX_SEQUENCE_LENGTH)
        _check_range("masked_slots", self.masked_slots, 4 * MAX_SEQUENCE_LENGTH)
        _check_range("depth", self.depth, MAX_SEQUENCE_LENGTH)
        _check_range("max_predictions", self.max_predictions, MAX_SEQUENCE_LENGTH)

    @functools.cached_property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The name, length and type of each feature, in the order of `PackedFeature`."""
        sizes: dict[Axis, int] = {"tokens": self.max_sequence_length, "masked": self.masked_slots, "sequences": self.depth}
        return tuple(FeatureSpec(feature.key, sizes[feature.axis], feature.kind) for feature in PackedFeature)


def infer_unpacked_schema(features: Mapping[str, AnyArray]) -> UnpackedSchema:
    """Infer the feature sizes of unpacked examples from the features of one example.

    Raises:
        RecordError: The example is packed, or lacks a feature that determines a size, or a size is out of range.
    """
    if "positions" in features and "next_sentence_positions" in features:
        raise RecordError("expected an unpacked record, found a packed one; pass the unpacked records")
    return UnpackedSchema(
        _count_feature_values(features, "input_ids"), _count_feature_values(features, "masked_lm_positions")
    )


def infer_packed_schema(features: Mapping[str, AnyArray]) -> PackedSchema:
    """Infer the feature sizes of packed examples from the features of one example.

    A packed example does not contain P, max_predictions. It is assumed to be Q - S, but at least 1.

    Raises:
        RecordError: The example lacks a feature that determines a size, or a size is out of range.
    """
    length, slots, depth = (
        _count_feature_values(features, name) for name in ("input_ids", "masked_lm_positions", "next_sentence_positions")
    )
    return PackedSchema(length, slots, depth, max(1, slots - depth))


def check_features(features: Mapping[str, AnyArray], schema: UnpackedSchema | PackedSchema) -> None:
    """Check that a decoded example has every feature of `schema`, with the correct type and length.

    Raises:
        RecordError: A feature is missing, or has another type or length. The message names the first such feature.
    """
    for spec in schema.features:
        if spec.name not in features:
            raise RecordError(f"feature `{spec.name}` is missing")
        values = features[spec.name]
        if values.dtype != np.dtype(spec.kind) and values.size:
            kind = "bytes" if values.dtype == object else str(values.dtype)
            raise RecordError(f"feature `{spec.name}` must be {spec.kind}, but is {kind}")
        if values.size != spec.length:
            raise RecordError(f"feature `{spec.name}` must have {spec.length} values, but has {values.size}")


def _count_feature_values(features: Mapping[str, AnyArray], feature_name: str) -> int:
    """Return how many values a feature of an example has.

    Raises:
        RecordError: The feature is missing, empty, or has more than `MAX_SEQUENCE_LENGTH` values.
    """
    if feature_name not in features:
        raise RecordError(f"feature `{feature_name}` is missing")
    count = int(features[feature_name].size)
    if not 1 <= count <= MAX_SEQUENCE_LENGTH:
        raise RecordError(f"feature `{feature_name}` must have 1 to {MAX_SEQUENCE_LENGTH} values, but has {count}")
    return count


def _check_range(name: str, value: int, max_value: int) -> None:
    """Check that a size is from 1 to `max_value`.

    Raises:
        InputError: The size is smaller or larger.
    """
    if not 1 <= value <= max_value:
        raise InputError(f"{name} = {value}: the value must be from 1 to {max_value}")


# --- checking the values
#
# Guessing what an ambiguous example means could silently change the training data, so the example is rejected with a reason.
# Ambiguous are, for example, a mask with holes or with values other than 0 and 1, padding that is not 0, weights other than
# 0 and 1, and a masked position outside its sequence.


def check_values(features: Mapping[str, AnyArray], schema: UnpackedSchema | PackedSchema) -> None:
    """Check that the values of an example are valid. The example must already have passed `check_features`.

    Raises:
        RecordError: A value violates the contract. The message names the first such value.
    """
    if isinstance(schema, PackedSchema):
        _reject_invalid_packed_values(features, schema)
    else:
        _reject_invalid_unpacked_values(features)


def _reject_invalid_unpacked_values(features: Mapping[str, AnyArray]) -> None:
    """Check that the values of an unpacked example are valid.

    Raises:
        RecordError: A value violates the contract.
    """
    length = _count_leading_ones(features["input_mask"], "input_mask")
    if length == 0:
        raise RecordError("`input_mask` contains only 0, so the sequence is empty; remove the record")
    masked = _count_leading_ones(features["masked_lm_weights"], "masked_lm_weights")
    _check_value_range("input_ids", features["input_ids"], length, MAX_TOKEN_ID)
    _check_value_range("segment_ids", features["segment_ids"], length, MAX_SEGMENT_ID)
    _check_value_range("masked_lm_ids", features["masked_lm_ids"], masked, MAX_TOKEN_ID)
    _check_value_range("masked_lm_positions", features["masked_lm_positions"], masked, length - 1)
    label = int(features["next_sentence_labels"][0])
    if label not in (0, 1):
        raise RecordError(f"`next_sentence_labels` must be 0 (next sentence) or 1 (random sentence), but is {label}")


def _count_leading_ones(values: AnyArray, feature_name: str) -> int:
    """Check that a feature consists of ones followed by zeros, and return the number of ones.

    Raises:
        RecordError: The feature contains a value that is neither 0 nor 1, or a one after a zero.
    """
    ones = int(np.count_nonzero(values == 1))
    odd = np.flatnonzero((values != 0) & (values != 1))
    if odd.size:
        raise RecordError(f"`{feature_name}` must contain only 0 and 1, but contains {values[odd[0]]} at position {odd[0]}")
    if np.any(values[:ones] == 0):
        hole = int(np.flatnonzero(values[:ones] == 0)[0])
        raise RecordError(
            f"`{feature_name}` must contain ones and then zeros, but contains a one after the 0 at position {hole};"
            " move the padding to the end"
        )
    return ones


def _reject_invalid_packed_values(features: Mapping[str, AnyArray], schema: PackedSchema) -> None:
    """Check that the values of a packed example are valid.

    Raises:
        RecordError: A value violates the contract.
    """
    tokens = int(np.count_nonzero(features["input_mask"]))
    count = int(np.count_nonzero(features["next_sentence_weights"]))
    if tokens == 0 or count == 0:
        raise RecordError("the pack contains no sequence or no token")
    starts = features["next_sentence_positions"][:count]
    ends = np.append(starts[1:], tokens)
    if starts[0] != 0 or np.any(ends <= starts):
        raise RecordError(
            f"`next_sentence_positions` must begin with 0 and ascend within the {tokens} tokens, but are {starts.tolist()}"
        )
    lengths = ends - starts
    expected = {
        "input_mask": np.repeat(np.arange(1, count + 1), lengths),
        "positions": np.concatenate([np.arange(length) for length in lengths]),
        "next_sentence_positions": starts,
        "next_sentence_weights": np.ones(count),
    }
    for name, begin in expected.items():
        values = features[name]
        expected_values = np.zeros(values.size)
        expected_values[: begin.size] = begin
        wrong = np.flatnonzero(values != expected_values)
        if wrong.size:
            position = int(wrong[0])
            raise RecordError(
                f"`{name}` must contain {expected_values[position]:g} at position {position}, but contains"
                f" {values[position]:g}"
            )
    _check_value_range("input_ids", features["input_ids"], tokens, MAX_TOKEN_ID)
    _check_value_range("segment_ids", features["segment_ids"], tokens, MAX_SEGMENT_ID)
    _check_value_range("next_sentence_labels", features["next_sentence_labels"], count, 1)
    _check_masked_positions(features, starts, ends, schema)


def _check_masked_positions(
    features: Mapping[str, AnyArray], starts: AnyArray, ends: AnyArray, schema: PackedSchema
) -> None:
    """Check that the masked positions, ids and weights of a packed example are valid.

    Args:
        features: The decoded features.
        starts: int [sequences], the position of each sequence's first token.
        ends: int [sequences], the position after each sequence's last token.
        schema: The sizes of the example.

    Raises:
        RecordError: A value violates the contract.
    """
    weights, positions = features["masked_lm_weights"], features["masked_lm_positions"]
    used = int(np.count_nonzero(weights))
    owners = weights[:used].astype(np.int64)
    if np.any(owners != weights[:used]) or np.any(np.diff(owners) < 0) or np.any((owners < 1) | (owners > starts.size)):
        raise RecordError(
            "`masked_lm_weights` must contain the sequence numbers of the masked positions in ascending order, then zeros"
        )
    _check_value_range("masked_lm_ids", features["masked_lm_ids"], used, MAX_TOKEN_ID)
    outside = np.flatnonzero((positions[:used] < starts[owners - 1]) | (positions[:used] >= ends[owners - 1]))
    if outside.size:
        slot = int(outside[0])
        raise RecordError(
            f"`masked_lm_positions` contains {positions[slot]} at position {slot}, which is outside sequence {owners[slot]}"
            f" (tokens {starts[owners[slot] - 1]} to {ends[owners[slot] - 1] - 1})"
        )
    _check_value_range("masked_lm_positions", positions, used, int(ends[-1]) - 1)
    most_masked = int(np.bincount(owners).max(initial=0))
    if most_masked > schema.max_predictions:
        raise RecordError(
            f"a sequence must have at most {schema.max_predictions} masked positions, but one has {most_masked}"
        )


def _check_value_range(feature_name: str, values: AnyArray, used_count: int, max_value: int) -> None:
    """Check that the first `used_count` values of a feature are from 0 to `max_value`, and all others are 0.

    Raises:
        RecordError: A value is out of range. The message names the first such value.
    """
    allowed = np.where(np.arange(values.size) < used_count, max_value, 0)
    wrong = np.flatnonzero((values < 0) | (values > allowed))
    if wrong.size:
        position = int(wrong[0])
        raise RecordError(
            f"`{feature_name}` must contain 0 to {allowed[position]} at position {position}, but contains {values[position]}"
        )
