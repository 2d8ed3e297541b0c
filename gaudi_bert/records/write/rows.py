"""Dense matrices to framed records, all at once: the way back from `gaudi_bert.records.read.columns`.

Row n of every matrix makes one tf.train.Example, keys sorted and lists packed, byte-equal to what `encode_example` and
`frame` give for it. The kernel measures a record's lists first, because protobuf puts sizes before contents, then writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BoolArray, ByteArray, Int32Array, IntArray, RowArray
from gaudi_bert.common.compiled import kernel
from gaudi_bert.records.schema import FeatureSpec
from gaudi_bert.records.wire.encode import (
    SLACK_BYTES,
    content_size,
    finish_record,
    key_rows,
    start_record,
    store_entry_head,
    store_varint,
)
from gaudi_bert.records.wire.memory import address_of, as_word, store_u32

__all__ = ["encode_rows"]

_LONGEST_VARINT = 5  # of a value below 2^31
_HEAD_BYTES = 64  # key, tags and lengths around the values of one feature, at most
_FRAME_BYTES = 16


class _Rows(NamedTuple):
    """The values of all features side by side.

    Attributes:
        values: int32 [N, values]; floats as their bits.
        bounds: int64 [features + 1]: feature f is in columns bounds[f] .. bounds[f + 1] - 1.
        is_float: [features].
        keys: as `key_rows` gives them.
    """

    values: Int32Array
    bounds: IntArray
    is_float: BoolArray
    keys: RowArray


def encode_rows(features: Mapping[str, AnyArray]) -> tuple[ByteArray, IntArray]:
    """Serialise and frame N examples.

    Args:
        features: by name a matrix [N, k], float32, or of integers from 0 to 2^31 - 1.

    Returns:
        The framed records, one after the other (uint8), and the bytes of each (int64 [N]).

    Raises:
        ValueError: the matrices are not all of N rows, an integer is out of range, or a name is longer than 24 bytes.
    """
    matrices = {name: _as_bits(name, np.asarray(features[name])) for name in sorted(features)}
    is_float = [np.asarray(features[name]).dtype.kind == "f" for name in matrices]
    specs = [
        FeatureSpec(name, matrix.shape[1], "float32" if float_feature else "int64")
        for (name, matrix), float_feature in zip(matrices.items(), is_float, strict=True)
    ]
    bounds = np.cumsum([0, *(spec.length for spec in specs)])
    values = np.ascontiguousarray(np.concatenate(list(matrices.values()), axis=1))
    rows = _Rows(values, bounds, np.array(is_float), key_rows(specs))
    most = _FRAME_BYTES + _HEAD_BYTES * (len(specs) + 1) + _LONGEST_VARINT * values.shape[1]
    out = np.empty(len(values) * most + SLACK_BYTES, np.uint8)
    lengths = np.zeros(len(values), np.int64)
    return out[: _encode(rows, out, lengths)].copy(), lengths


def _as_bits(name: str, values: AnyArray) -> Int32Array:
    if values.dtype.kind == "f":
        return values.astype("<f4").view(np.int32)
    if values.size and not 0 <= values.min() <= values.max() < 2**31:
        raise ValueError(f"feature `{name}` holds {values.min()} .. {values.max()}; 0 .. {2**31 - 1} is allowed")
    return values.astype(np.int32)


@kernel
def _varint_bytes(values: Int32Array) -> int:
    """Bytes of the values as varints."""
    size = values.size
    for value in values:
        size += (value > 0x7F) + (value > 0x3FFF) + (value > 0x1FFFFF) + (value > 0xFFFFFFF)
    return size


@kernel
def _store_values(at: int, values: Int32Array, is_float: bool) -> int:
    """Write the values of one feature; the address after them."""
    for value in values:
        if is_float:
            store_u32(at, as_word(value))
            at += 4
        else:
            at = store_varint(at, as_word(value))
    return at


@kernel
def _encode(rows: _Rows, out: ByteArray, lengths: IntArray) -> int:
    """Write all rows and set `lengths` to the bytes of each; the bytes of all."""
    sizes = np.zeros(rows.keys.size, np.int64)
    begin = address_of(out)
    at = begin
    for number in range(len(rows.values)):
        for feature in range(sizes.size):
            values = rows.values[number, rows.bounds[feature] : rows.bounds[feature + 1]]
            sizes[feature] = 4 * values.size if rows.is_float[feature] else _varint_bytes(values)
        end = start_record(at, content_size(rows.keys, sizes))
        for feature in range(sizes.size):
            values = rows.values[number, rows.bounds[feature] : rows.bounds[feature + 1]]
            end = store_entry_head(end, rows.keys, feature, sizes[feature])
            end = _store_values(end, values, rows.is_float[feature])
        end = finish_record(at, end)
        lengths[number] = end - at
        at = end
    return at - begin
