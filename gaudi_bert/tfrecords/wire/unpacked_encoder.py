"""Unpacked TFRecords from arrays (a numba kernel): byte-equal to `encode_example` of the same features, framed.

All sizes are known before the first byte of a record is written, keys come in sorted order, and padding is a fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, ByteArray, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.common.memory import address_of, as_word, fill_bytes, store_u8, store_u32
from gaudi_bert.tfrecords.wire.example import (
    SLACK_BYTES,
    content_size,
    finish_record,
    key_rows,
    message_size,
    start_record,
    store_entry_head,
    store_varint,
    varint_size,
)
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, MAX_TOKEN_ID, UnpackedSchema

_BUFFER_BYTES = 1 << 20
_ONE_FLOAT = as_word(0x3F800000)


class SequenceArrays(NamedTuple):
    """Sequences without their padding, checked; all int64.

    Attributes:
        lengths: [sequences], tokens.
        ids: token ids of all of them, and what else is between.
        id_starts: [sequences], where those of each begin in `ids`.
        segments, segment_starts: the same of segment ids; no segments at all mean 0.
        masked: [sequences], masked positions.
        positions: of all of them, relative to the sequence.
        masked_ids: [as positions], the ids that belong there.
        masked_starts: [sequences], where those of each begin.
        labels: [sequences], 0 or 1.
    """

    lengths: IntArray
    ids: IntArray
    id_starts: IntArray
    segments: IntArray
    segment_starts: IntArray
    masked: IntArray
    positions: IntArray
    masked_ids: IntArray
    masked_starts: IntArray
    labels: IntArray


class UnpackedEncoder:
    """Encodes sequences as records of a schema into its own buffer."""

    def __init__(self, schema: UnpackedSchema) -> None:
        self._schema = schema
        self._out = np.zeros(max(_BUFFER_BYTES, 2 * largest_record(schema)), np.uint8)

    def encode(self, sequences: SequenceArrays, first: int) -> tuple[memoryview, int]:
        """Sequences from `first` on as TFRecords, as many as the buffer holds; and the number of the next one.

        Each must be of at most L tokens and P masked positions, with values in their ranges. The bytes are valid until the
        next call.
        """
        record_bytes = np.empty(sequences.lengths.size, np.int64)
        following, size = _encode_into(sequences, first, self._schema, record_bytes, self._out)
        return self._out[:size].data, following


def encode_rows(features: Mapping[str, AnyArray]) -> tuple[ByteArray, IntArray]:
    """Framed records of N sequences, one after the other (uint8), and the bytes of each (int64 [N]).

    Args:
        features: of unpacked examples, by name, [N, L], [N, P] or [N, 1]: integers, and weights of 0 or 1.

    Raises:
        ValueError: a token id is out of range.
    """
    flat = {name: np.ascontiguousarray(values, np.int64).reshape(-1) for name, values in features.items()}
    for name in ("input_ids", "masked_lm_ids"):
        if flat[name].size and not 0 <= flat[name].min() <= flat[name].max() <= MAX_TOKEN_ID:
            raise ValueError(
                f"feature `{name}` holds {flat[name].min()} .. {flat[name].max()}; at most {MAX_TOKEN_ID} is allowed"
            )
    schema = UnpackedSchema(features["input_ids"].shape[1], features["masked_lm_ids"].shape[1])
    lengths = np.count_nonzero(features["input_mask"], axis=1)
    masked = np.count_nonzero(features["masked_lm_weights"], axis=1)
    record_bytes = np.empty(len(lengths), np.int64)
    out = np.empty(len(lengths) * largest_record(schema), np.uint8)
    _, size = _encode_into(sequences_of_rows(schema, flat, lengths, masked), 0, schema, record_bytes, out)
    return out[:size].copy(), record_bytes


def sequences_of_rows(
    schema: UnpackedSchema, flat: Mapping[str, IntArray], lengths: IntArray, masked: IntArray
) -> SequenceArrays:
    """The sequences of padded rows, whose features, by name, lie one after the other in flat arrays, int64."""
    starts = np.arange(lengths.size) * schema.max_sequence_length
    return SequenceArrays(
        lengths=lengths,
        ids=flat["input_ids"],
        id_starts=starts,
        segments=flat["segment_ids"],
        segment_starts=starts,
        masked=masked,
        positions=flat["masked_lm_positions"],
        masked_ids=flat["masked_lm_ids"],
        masked_starts=np.arange(lengths.size) * schema.max_predictions,
        labels=flat["next_sentence_labels"],
    )


def largest_record(schema: UnpackedSchema) -> int:
    """A bound on the bytes of a record, and of what is touched behind it."""
    heads = 64 * len(UnpackedFeature)
    return 5 * schema.max_sequence_length + 9 * schema.max_predictions + heads + FRAME_BYTES + SLACK_BYTES


def _encode_into(
    sequences: SequenceArrays, first: int, schema: UnpackedSchema, record_bytes: IntArray, out: ByteArray
) -> tuple[int, int]:
    sizes = np.zeros(len(UnpackedFeature), np.int64)
    length, predictions, keys = schema.max_sequence_length, schema.max_predictions, key_rows(schema.features)
    following, size = _encode_sequences(sequences, first, length, predictions, keys, sizes, record_bytes, out)
    return following, size


@borrowing_kernel
def _varint_sizes(values: AnyArray, start: int, count: int) -> int:
    size = as_word(0)
    for value in values[start : start + count]:
        size += varint_size(value)
    return size


@borrowing_kernel
def _store_values(at: int, values: AnyArray, start: int, count: int, padding: int) -> int:
    for value in values[start : start + count]:
        at = store_varint(at, value)
    fill_bytes(at, 0, padding)
    return at + padding


@borrowing_kernel
def _store_features(
    at: int, sequences: SequenceArrays, row: int, length: int, predictions: int, keys: RowArray, sizes: IntArray
) -> int:
    """Write the seven map entries in sorted order; the address after the last."""
    tokens, masked, start = sequences.lengths[row], sequences.masked[row], sequences.masked_starts[row]
    padding, unused = length - tokens, predictions - masked
    at = store_entry_head(at, keys, UnpackedFeature.INPUT_IDS, sizes[UnpackedFeature.INPUT_IDS])
    at = _store_values(at, sequences.ids, sequences.id_starts[row], tokens, padding)
    at = store_entry_head(at, keys, UnpackedFeature.INPUT_MASK, length)
    fill_bytes(at, 1, tokens)
    fill_bytes(at + tokens, 0, padding)
    at = store_entry_head(at + length, keys, UnpackedFeature.MASKED_LM_IDS, sizes[UnpackedFeature.MASKED_LM_IDS])
    at = _store_values(at, sequences.masked_ids, start, masked, unused)
    at = store_entry_head(at, keys, UnpackedFeature.MASKED_LM_POSITIONS, sizes[UnpackedFeature.MASKED_LM_POSITIONS])
    at = _store_values(at, sequences.positions, start, masked, unused)
    at = store_entry_head(at, keys, UnpackedFeature.MASKED_LM_WEIGHTS, 4 * predictions)
    for _ in range(masked):
        store_u32(at, _ONE_FLOAT)
        at += 4
    fill_bytes(at, 0, 4 * unused)
    at = store_entry_head(at + 4 * unused, keys, UnpackedFeature.NEXT_SENTENCE_LABELS, 1)
    store_u8(at, sequences.labels[row])
    at = store_entry_head(at + 1, keys, UnpackedFeature.SEGMENT_IDS, length)
    if sequences.segments.size:
        return _store_values(at, sequences.segments, sequences.segment_starts[row], tokens, padding)
    fill_bytes(at, 0, length)
    return at + length


@borrowing_kernel
def _encode_sequences(
    sequences: SequenceArrays,
    first: int,
    length: int,
    predictions: int,
    keys: RowArray,
    sizes: IntArray,
    record_bytes: IntArray,
    out: ByteArray,
) -> tuple[int, int]:
    """Write sequences from `first` on, and note the bytes of each; (the next one, bytes written)."""
    begin = address_of(out)
    at, end = begin, begin + out.size
    length, predictions = as_word(length), as_word(predictions)
    sizes[UnpackedFeature.INPUT_MASK] = length
    sizes[UnpackedFeature.MASKED_LM_WEIGHTS] = 4 * predictions
    sizes[UnpackedFeature.NEXT_SENTENCE_LABELS] = 1
    sizes[UnpackedFeature.SEGMENT_IDS] = length
    for row in range(first, sequences.lengths.size):
        tokens, masked, start = sequences.lengths[row], sequences.masked[row], sequences.masked_starts[row]
        unused = predictions - masked
        sizes[UnpackedFeature.INPUT_IDS] = _varint_sizes(sequences.ids, sequences.id_starts[row], tokens) + length - tokens
        sizes[UnpackedFeature.MASKED_LM_IDS] = _varint_sizes(sequences.masked_ids, start, masked) + unused
        sizes[UnpackedFeature.MASKED_LM_POSITIONS] = _varint_sizes(sequences.positions, start, masked) + unused
        content = content_size(keys, sizes)
        if at + message_size(content) + FRAME_BYTES + SLACK_BYTES > end:
            return row, at - begin
        after = _store_features(start_record(at, content), sequences, row, length, predictions, keys, sizes)
        after = finish_record(at, after)
        record_bytes[row] = after - at
        at = after
    return sequences.lengths.size, at - begin
