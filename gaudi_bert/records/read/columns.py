"""Serialised examples to dense arrays: one matrix per feature, one row per record.

Used where numbers are wanted instead of bytes, as for tables of other trainers. Records are taken in the encoding that the
scan takes (what this package and TensorFlow write): map entries in any order, other features skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BoolArray, ByteArray, Int32Array, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.schema import FeatureSpec
from gaudi_bert.records.wire.features import FeatureTable, feature_table, locate_features
from gaudi_bert.records.wire.memory import address_of, copy_bytes
from gaudi_bert.records.wire.varints import decode_varints

__all__ = ["decode_columns"]


def decode_columns(
    buffer: ByteArray, offsets: IntArray, lengths: IntArray, features: Sequence[FeatureSpec], source: str
) -> dict[str, AnyArray]:
    """The features of many examples.

    Args:
        buffer: uint8, holds the payloads.
        offsets: int64 [n], where each payload starts.
        lengths: int64 [n], how long it is.
        features: those that are wanted, with their names, sizes and types.
        source: what to call the buffer in an error.

    Returns:
        For each feature a matrix [n, size], int32 or float32.

    Raises:
        InputError: a record lacks a feature, has it in another size or encoding, or a value does not fit into
            32 bits.
    """
    columns = tuple(np.empty((len(offsets), spec.length), np.int32) for spec in features)
    is_float = np.array([spec.kind == "float32" for spec in features], np.bool_)
    table = feature_table(features)
    bad = _decode(buffer, offsets.astype(np.int64), lengths.astype(np.int64), table, is_float, columns)
    if bad >= 0:
        wanted = ", ".join(f"{spec.name}[{spec.length}]" for spec in features)
        raise InputError(
            f"{source}: record {bad}: is not an example of {wanted} in packed encoding; "
            "check that the sizes belong to this data"
        )
    return {
        spec.name: column.view(np.float32) if spec.kind == "float32" else column
        for spec, column in zip(features, columns, strict=True)
    }


@borrowing_kernel
def _fill_floats(at: int, end: int, row: Int32Array) -> bool:
    """Copy exactly row.size floats, as bits."""
    if end - at != 4 * row.size:
        return False
    copy_bytes(address_of(row), at, 4 * row.size)
    return True


@borrowing_kernel
def _decode(
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
            if not (_fill_floats(span.start, end, row) if is_float[feature] else decode_varints(span.start, end, row)):
                return record
    return -1
