"""Unpacked TFRecords from rows of arrays (a numba kernel): byte-equal to `encode_example` of the same features, framed.

All sizes are known before the first byte of a record is written, keys come in sorted order, and padding is a fill.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import ByteArray, IntArray, RowArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.common.memory import address_of, as_word, fill_bytes, store_u8, store_u32
from gaudi_bert.tfrecords.wire.example import (
    SLACK_BYTES,
    content_size,
    finish_record,
    key_rows,
    start_record,
    store_entry_head,
    store_varint,
    varint_size,
)
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES, MAX_TOKEN_ID, UnpackedSchema

_ONE_FLOAT = as_word(0x3F800000)


class UnpackedRows(NamedTuple):
    """Unpacked examples, whose values are in their ranges; all int64.

    Attributes:
        lengths, masked: [N], tokens and masked positions; what is behind them in a row is not read.
        input_ids, segment_ids: [N, L].
        masked_lm_positions, masked_lm_ids: [N, P].
        next_sentence_labels: [N].
    """

    lengths: IntArray
    masked: IntArray
    input_ids: IntArray
    segment_ids: IntArray
    masked_lm_positions: IntArray
    masked_lm_ids: IntArray
    next_sentence_labels: IntArray


def encode_rows(rows: UnpackedRows) -> tuple[ByteArray, IntArray]:
    """Framed records of N sequences, one after the other (uint8), and the bytes of each (int64 [N]).

    Raises:
        ValueError: a token id is out of range.
    """
    for name, ids in (("input_ids", rows.input_ids), ("masked_lm_ids", rows.masked_lm_ids)):
        if ids.size and not 0 <= ids.min() <= ids.max() <= MAX_TOKEN_ID:
            raise ValueError(f"feature `{name}` holds {ids.min()} .. {ids.max()}; at most {MAX_TOKEN_ID} is allowed")
    schema = UnpackedSchema(rows.input_ids.shape[1], rows.masked_lm_ids.shape[1])
    record_bytes = np.empty(len(rows.lengths), np.int64)
    out = np.empty(len(rows.lengths) * largest_record(schema), np.uint8)
    sizes = np.zeros(len(UnpackedFeature), np.int64)
    size = _encode(UnpackedRows(*map(np.ascontiguousarray, rows)), key_rows(schema.features), sizes, record_bytes, out)
    return out[:size].copy(), record_bytes


def largest_record(schema: UnpackedSchema) -> int:
    """A bound on the bytes of a record, and of what is touched behind it."""
    heads = 64 * len(UnpackedFeature)
    return 5 * schema.max_sequence_length + 9 * schema.max_predictions + heads + FRAME_BYTES + SLACK_BYTES


@borrowing_kernel
def _varint_sizes(values: IntArray) -> int:
    size = as_word(0)
    for value in values:
        size += varint_size(value)
    return size


@borrowing_kernel
def _store_values(at: int, values: IntArray, padding: int) -> int:
    for value in values:
        at = store_varint(at, value)
    fill_bytes(at, 0, padding)
    return at + padding


@borrowing_kernel
def _store_features(at: int, rows: UnpackedRows, row: int, keys: RowArray, sizes: IntArray) -> int:
    """Write the seven map entries in sorted order; the address after the last."""
    tokens, masked = rows.lengths[row], rows.masked[row]
    length, predictions = as_word(rows.input_ids.shape[1]), as_word(rows.masked_lm_ids.shape[1])
    padding, unused = length - tokens, predictions - masked
    at = store_entry_head(at, keys, UnpackedFeature.INPUT_IDS, sizes[UnpackedFeature.INPUT_IDS])
    at = _store_values(at, rows.input_ids[row, :tokens], padding)
    at = store_entry_head(at, keys, UnpackedFeature.INPUT_MASK, length)
    fill_bytes(at, 1, tokens)
    fill_bytes(at + tokens, 0, padding)
    at = store_entry_head(at + length, keys, UnpackedFeature.MASKED_LM_IDS, sizes[UnpackedFeature.MASKED_LM_IDS])
    at = _store_values(at, rows.masked_lm_ids[row, :masked], unused)
    at = store_entry_head(at, keys, UnpackedFeature.MASKED_LM_POSITIONS, sizes[UnpackedFeature.MASKED_LM_POSITIONS])
    at = _store_values(at, rows.masked_lm_positions[row, :masked], unused)
    at = store_entry_head(at, keys, UnpackedFeature.MASKED_LM_WEIGHTS, 4 * predictions)
    for _ in range(masked):
        store_u32(at, _ONE_FLOAT)
        at += 4
    fill_bytes(at, 0, 4 * unused)
    at = store_entry_head(at + 4 * unused, keys, UnpackedFeature.NEXT_SENTENCE_LABELS, 1)
    store_u8(at, rows.next_sentence_labels[row])
    at = store_entry_head(at + 1, keys, UnpackedFeature.SEGMENT_IDS, length)
    return _store_values(at, rows.segment_ids[row, :tokens], padding)


@borrowing_kernel
def _encode(rows: UnpackedRows, keys: RowArray, sizes: IntArray, record_bytes: IntArray, out: ByteArray) -> int:
    """Write all rows, and note the bytes of each; the bytes of all."""
    begin = address_of(out)
    at = begin
    sizes[UnpackedFeature.INPUT_MASK] = rows.input_ids.shape[1]
    sizes[UnpackedFeature.MASKED_LM_WEIGHTS] = 4 * rows.masked_lm_ids.shape[1]
    sizes[UnpackedFeature.NEXT_SENTENCE_LABELS] = 1
    sizes[UnpackedFeature.SEGMENT_IDS] = rows.input_ids.shape[1]
    for row in range(rows.lengths.size):
        tokens, masked = rows.lengths[row], rows.masked[row]
        padding, unused = rows.input_ids.shape[1] - tokens, rows.masked_lm_ids.shape[1] - masked
        sizes[UnpackedFeature.INPUT_IDS] = _varint_sizes(rows.input_ids[row, :tokens]) + padding
        sizes[UnpackedFeature.MASKED_LM_IDS] = _varint_sizes(rows.masked_lm_ids[row, :masked]) + unused
        sizes[UnpackedFeature.MASKED_LM_POSITIONS] = _varint_sizes(rows.masked_lm_positions[row, :masked]) + unused
        after = _store_features(start_record(at, content_size(keys, sizes)), rows, row, keys, sizes)
        after = finish_record(at, after)
        record_bytes[row] = after - at
        at = after
    return at - begin
