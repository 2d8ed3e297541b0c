"""The contract of unpacked and packed examples: their features, the lengths of these, and the permitted values.

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
    """Raised if a record is not a valid example. The caller adds the file and the number of the record to the message."""


@dataclass(frozen=True)
class FeatureSpec:
    """A feature of fixed length.

    Attributes:
        name: The key of the feature.
        length: The number of its values.
        kind: The type of its values.
    """

    name: str
    length: int
    kind: Literal["int64", "float32"]

    @property
    def key_bytes(self) -> bytes:
        """The name as the bytes that a record contains."""
        return self.name.encode("ascii")


@dataclass(frozen=True)
class UnpackedSchema:
    """The sizes of an unpacked example, which contains one sequence, padded to L tokens.

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
        """The features of an unpacked example, in the order of `UnpackedFeature`."""
        sizes: dict[Axis, int] = {"tokens": self.max_sequence_length, "masked": self.max_predictions, "sequences": 1}
        return tuple(FeatureSpec(feature.key, sizes[feature.axis], feature.kind) for feature in UnpackedFeature)


@dataclass(frozen=True)
class PackedSchema:
    """The sizes of a packed example, which contains one to S sequences in a row of L tokens.

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
    def of(cls, sizes: WritablePlan | RecordMetadata) -> PackedSchema:
        """Return the schema of the packed records that a plan or the metadata of a packed folder describes."""
        return cls(sizes.max_sequence_length, sizes.masked_slots, sizes.depth, sizes.max_predictions)

    @property
    def unpacked(self) -> UnpackedSchema:
        """The schema of the sequences before they were packed."""
        return UnpackedSchema(self.max_sequence_length, self.max_predictions)

    def __post_init__(self) -> None:
        _check_range("max_sequence_length", self.max_sequence_length, MAX_SEQUENCE_LENGTH)
        _check_range("masked_slots", self.masked_slots, 4 * MAX_SEQUENCE_LENGTH)
        _check_range("depth", self.depth, MAX_SEQUENCE_LENGTH)
        _check_range("max_predictions", self.max_predictions, MAX_SEQUENCE_LENGTH)

    @functools.cached_property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The features of a packed example, in the order of `PackedFeature`."""
        sizes: dict[Axis, int] = {"tokens": self.max_sequence_length, "masked": self.masked_slots, "sequences": self.depth}
        return tuple(FeatureSpec(feature.key, sizes[feature.axis], feature.kind) for feature in PackedFeature)


def unpacked_schema_of(features: Mapping[str, AnyArray]) -> UnpackedSchema:
    """Return the sizes of a decoded unpacked example.

    Raises:
        RecordError: The example is packed, or lacks a feature that determines a size, or a size is out of range.
    """
    if "positions" in features and "next_sentence_positions" in features:
        raise RecordError("this is a packed example; give the unpacked records")
    return UnpackedSchema(_length_of(features, "input_ids"), _length_of(features, "masked_lm_positions"))


def packed_schema_of(features: Mapping[str, AnyArray]) -> PackedSchema:
    """Return the sizes of a decoded packed example.

    A packed example does not contain max_predictions. It is assumed to be Q - S, but at least 1.

    Raises:
        RecordError: The example lacks a feature that determines a size, or a size is out of range.
    """
    length = _length_of(features, "input_ids")
    slots, depth = _length_of(features, "masked_lm_positions"), _length_of(features, "next_sentence_positions")
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
            raise RecordError(f"feature `{spec.name}` is {kind}, {spec.kind} is needed")
        if values.size != spec.length:
            raise RecordError(f"feature `{spec.name}` has {values.size} values, {spec.length} are needed")


def _length_of(features: Mapping[str, AnyArray], name: str) -> int:
    """Return the number of values of a feature.

    Raises:
        RecordError: The feature is missing, empty, or has more than `MAX_SEQUENCE_LENGTH` values.
    """
    if name not in features:
        raise RecordError(f"feature `{name}` is missing")
    size = int(features[name].size)
    if not 1 <= size <= MAX_SEQUENCE_LENGTH:
        raise RecordError(f"feature `{name}` has {size} values, 1 to {MAX_SEQUENCE_LENGTH} are allowed")
    return size


def _check_range(name: str, value: int, most: int) -> None:
    """Check that a size is from 1 to `most`.

    Raises:
        InputError: It is not.
    """
    if not 1 <= value <= most:
        raise InputError(f"{name} = {value}: 1 to {most} is allowed")


# --- checking the values
#
# An ambiguous example is rejected with a reason, because a guess could silently change the training data. Examples are a
# mask with holes or with values other than 0 and 1, padding that is not 0, weights other than 0 and 1, and a masked position
# outside its sequence.


def check_values(features: Mapping[str, AnyArray], schema: UnpackedSchema | PackedSchema) -> None:
    """Check the values of an example that has passed `check_features`.

    Raises:
        RecordError: A value violates the contract. The message names the first such value.
    """
    if isinstance(schema, PackedSchema):
        _check_packed(features, schema)
    else:
        _check_unpacked(features)


def _check_unpacked(features: Mapping[str, AnyArray]) -> None:
    """Check the values of an unpacked example.

    Raises:
        RecordError: A value violates the contract.
    """
    length = _prefix(features["input_mask"], "input_mask")
    if length == 0:
        raise RecordError("`input_mask` is all 0, so the sequence is empty; leave it out")
    masked = _prefix(features["masked_lm_weights"], "masked_lm_weights")
    _check_values("input_ids", features["input_ids"], length, MAX_TOKEN_ID)
    _check_values("segment_ids", features["segment_ids"], length, MAX_SEGMENT_ID)
    _check_values("masked_lm_ids", features["masked_lm_ids"], masked, MAX_TOKEN_ID)
    _check_values("masked_lm_positions", features["masked_lm_positions"], masked, length - 1)
    label = int(features["next_sentence_labels"][0])
    if label not in (0, 1):
        raise RecordError(f"`next_sentence_labels` is {label}, 0 (really next) or 1 (random) is allowed")


def _prefix(values: AnyArray, name: str) -> int:
    """Return the number of ones in a list of ones followed by zeros.

    Raises:
        RecordError: The list contains another value, or a one after a zero.
    """
    ones = int(np.count_nonzero(values == 1))
    odd = np.flatnonzero((values != 0) & (values != 1))
    if odd.size:
        raise RecordError(f"`{name}` holds {values[odd[0]]} at {odd[0]}, only 0 and 1 are allowed")
    if np.any(values[:ones] == 0):
        hole = int(np.flatnonzero(values[:ones] == 0)[0])
        raise RecordError(f"`{name}` is not 1..1 0..0: it holds 0 at {hole} and 1 after it; move the padding to the end")
    return ones


def _check_packed(features: Mapping[str, AnyArray], schema: PackedSchema) -> None:
    """Check the values of a packed example.

    Raises:
        RecordError: A value violates the contract.
    """
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
    for name, begin in expected.items():
        values = features[name]
        right = np.zeros(values.size)
        right[: begin.size] = begin
        wrong = np.flatnonzero(values != right)
        if wrong.size:
            position = int(wrong[0])
            raise RecordError(f"`{name}` holds {values[position]:g} at {position}, {right[position]:g} is right there")
    _check_values("input_ids", features["input_ids"], tokens, MAX_TOKEN_ID)
    _check_values("segment_ids", features["segment_ids"], tokens, MAX_SEGMENT_ID)
    _check_values("next_sentence_labels", features["next_sentence_labels"], count, 1)
    _check_masked(features, starts, ends, schema)


def _check_masked(features: Mapping[str, AnyArray], starts: AnyArray, ends: AnyArray, schema: PackedSchema) -> None:
    """Check the masked positions, ids and weights of a packed example.

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
        raise RecordError("`masked_lm_weights` are not the numbers of the pack's sequences in ascending order, then 0")
    _check_values("masked_lm_ids", features["masked_lm_ids"], used, MAX_TOKEN_ID)
    outside = np.flatnonzero((positions[:used] < starts[owners - 1]) | (positions[:used] >= ends[owners - 1]))
    if outside.size:
        slot = int(outside[0])
        raise RecordError(
            f"`masked_lm_positions` holds {positions[slot]} at {slot}, outside of sequence {owners[slot]},"
            f" which is {starts[owners[slot] - 1]} to {ends[owners[slot] - 1] - 1}"
        )
    _check_values("masked_lm_positions", positions, used, int(ends[-1]) - 1)
    most = int(np.bincount(owners).max(initial=0))
    if most > schema.max_predictions:
        raise RecordError(f"a sequence has {most} masked positions, at most {schema.max_predictions} is allowed")


def _check_values(name: str, values: AnyArray, used: int, most: int) -> None:
    """Check that the first `used` values are from 0 to `most`, and all others are 0.

    Raises:
        RecordError: A value is out of range. The message names the first such value.
    """
    allowed = np.where(np.arange(values.size) < used, most, 0)
    wrong = np.flatnonzero((values < 0) | (values > allowed))
    if wrong.size:
        position = int(wrong[0])
        raise RecordError(f"`{name}` holds {values[position]} at {position}, 0 to {allowed[position]} is allowed there")
