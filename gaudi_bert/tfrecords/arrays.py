"""Dense arrays of serialised examples: one matrix per feature, one row per record.

Letters of shapes: B packs, L max_sequence_length, Q masked_slots, S depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, BoolArray, ByteArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.memory import address_of, copy_bytes
from gaudi_bert.tfrecords.wire.features import FeatureTable, feature_table, locate_features
from gaudi_bert.tfrecords.wire.schema import FeatureSpec
from gaudi_bert.tfrecords.wire.values import decode_varints


def decode_columns(
    buffer: ByteArray, offsets: IntArray, lengths: IntArray, features: Sequence[FeatureSpec], source: str
) -> dict[str, AnyArray]:
    """The features of many examples, by name: int32 or float32 [n, size].

    Records must be encoded as the scan takes them (and as this package and TensorFlow write them): map entries in any order,
    other features skipped. Payloads start at `offsets` of the buffer and have these `lengths`, int64 [n] both.
    """
    columns = tuple(np.empty((len(offsets), spec.length), np.int32) for spec in features)
    is_float = np.array([spec.kind == "float32" for spec in features], np.bool_)
    table = feature_table(features)
    bad = _decode_records(buffer, offsets.astype(np.int64), lengths.astype(np.int64), table, is_float, columns)
    if bad >= 0:
        expected = ", ".join(f"{spec.name}[{spec.length}]" for spec in features)
        raise InputError(f"{source}: record {bad}: is not an example of {expected}, in packed encoding; check the sizes")
    return {
        spec.name: column.view(np.float32) if spec.kind == "float32" else column
        for spec, column in zip(features, columns, strict=True)
    }


@borrowing_kernel
def _decode_records(
    buffer: ByteArray,
    offsets: IntArray,
    lengths: IntArray,
    table: FeatureTable,
    is_float: BoolArray,
    columns: tuple[Int32Array, ...],
) -> int:
    """Decode all records; -1, or the number of the first that is refused."""
    for record in range(offsets.size):
        start = address_of(buffer) + offsets[record]
        if offsets[record] < 0 or lengths[record] < 0 or offsets[record] + lengths[record] > buffer.size:
            return record
        if not locate_features(start, start + lengths[record], table):
            return record
        for feature in range(len(columns)):
            span = table.spans[feature]
            row = columns[feature][record]
            end = span.start + span.bytes
            if is_float[feature]:
                if span.bytes != 4 * row.size:
                    return record
                copy_bytes(address_of(row), span.start, 4 * row.size)  # as bits
            elif not decode_varints(span.start, end, row):
                return record
    return -1


# --- what a row of a packed table holds beyond a packed record


class _Packs(NamedTuple):
    input_mask: Int32Array
    positions: Int32Array
    masked_lm_positions: Int32Array
    masked_lm_ids: Int32Array
    masked_lm_weights: Float32Array
    next_sentence_positions: Int32Array
    next_sentence_weights: Float32Array


def pack_rows(packs: Mapping[str, AnyArray]) -> dict[str, Int32Array]:
    """Return the columns of packed tables, by the features of packs, [B, L], [B, Q] or [B, S], by their names.

    `position_ids` [B, L] counts from 0 in every sequence, and in the padding; it replaces `positions`, which is not to be
    used any more. `labels` [B, L] is the id that was masked, `NOT_PREDICTED` elsewhere. `seq_lens` [B, S] are the tokens of
    each sequence, 0 behind the last; `sequences` [B] is how many a pack holds.
    """
    given = _Packs(*(np.ascontiguousarray(packs[name]) for name in _Packs._fields))
    count, length = given.input_mask.shape
    labels = np.empty((count, length), np.int32)
    lengths, sequences = np.zeros(given.next_sentence_positions.shape, np.int32), np.empty(count, np.int32)
    if not _fill_columns(given, labels, lengths, sequences):
        raise InputError("a pack predicts a token outside its row, or its sequences overlap; write the packs again")
    return {"position_ids": given.positions, "labels": labels, "seq_lens": lengths, "sequences": sequences}


@borrowing_kernel
def _fill_columns(packs: _Packs, labels: Int32Array, lengths: Int32Array, sequences: Int32Array) -> bool:
    """Fill the columns, and overwrite positions; False at the first pack for which this is impossible."""
    slots = packs.input_mask.shape[1]
    for row in range(packs.input_mask.shape[0]):
        mask, positions, row_labels = packs.input_mask[row], packs.positions[row], labels[row]
        tokens = 0
        for slot in range(slots):
            tokens += mask[slot] != 0
        for slot in range(slots):
            positions[slot] = positions[slot] if mask[slot] > 0 else slot - tokens
            row_labels[slot] = NOT_PREDICTED
        for index in range(packs.masked_lm_ids.shape[1]):
            if packs.masked_lm_weights[row, index] > 0:
                slot = packs.masked_lm_positions[row, index]
                if slot < 0 or slot >= slots:
                    return False
                row_labels[slot] = packs.masked_lm_ids[row, index]
        count = 0
        for index in range(packs.next_sentence_weights.shape[1]):
            count += packs.next_sentence_weights[row, index] > 0
        sequences[row] = count
        end = tokens
        for index in range(count - 1, -1, -1):
            start = packs.next_sentence_positions[row, index]
            if start < 0 or start >= end:
                return False
            lengths[row, index] = end - start
            end = start
    return True
