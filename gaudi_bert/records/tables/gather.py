"""Rows of packs, gathered from the rows of a table (numba kernels).

Values are copied as bytes, whatever their type; what follows them in the row is copied from a row of padding. Positions and
the numbers of sequences are counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, ByteArray, Int32Array, IntArray
from gaudi_bert.common.compiled import borrowing_kernel
from gaudi_bert.records.wire.memory import address_of, as_word, copy_bytes

__all__ = ["PackSequences", "gather_values", "number_tokens"]


class PackSequences(NamedTuple):
    """The sequences of packs, in the order in which they are written: pack p holds those from offsets[p] to offsets[p + 1].

    Attributes:
        offsets: int64 [packs + 1].
        rows: int64 [sequences], the row of the group that each is of.
        starts: int32 [sequences], its first token in the row.
        lengths: int32 [sequences].
    """

    offsets: IntArray
    rows: IntArray
    starts: Int32Array
    lengths: Int32Array

    @property
    def packs(self) -> int:
        """Number of packs."""
        return self.offsets.size - 1


def gather_values(packs: PackSequences, first: int, last: int, addresses: IntArray, padding: AnyArray) -> AnyArray:
    """The values of one column in the packs `first` .. `last` - 1.

    Args:
        packs: which runs of which rows.
        first, last: which packs.
        addresses: int64 [rows], of the first value of each row.
        padding: [L], a row of nothing but padding, of the column's type.

    Returns:
        [(last - first) * L], one row after another.
    """
    values = np.empty((last - first) * padding.size, padding.dtype)
    _gather(packs, first, last, addresses, padding.view(np.uint8), padding.itemsize, values.view(np.uint8))
    return values


def number_tokens(packs: PackSequences, first: int, last: int, row_slots: int) -> tuple[Int32Array, Int32Array]:
    """The positions in the sequence, and the number of the sequence (from 1, 0 for padding), of every slot.

    The positions of padding count on from 0, as of one more sequence.
    """
    positions = np.empty((last - first) * row_slots, np.int32)
    numbers = np.empty((last - first) * row_slots, np.int32)
    _number(packs, first, last, row_slots, positions, numbers)
    return positions, numbers


@borrowing_kernel
def _gather(
    packs: PackSequences,
    first: int,
    last: int,
    addresses: IntArray,
    padding: ByteArray,
    value_bytes: int,
    out: ByteArray,
) -> None:
    at, pad = address_of(out), address_of(padding)
    for pack in range(first, last):
        end = at + padding.size
        for place in range(packs.offsets[pack], packs.offsets[pack + 1]):
            size = as_word(packs.lengths[place]) * value_bytes
            copy_bytes(at, addresses[packs.rows[place]] + as_word(packs.starts[place]) * value_bytes, size)
            at += size
        copy_bytes(at, pad, end - at)
        at = end


@borrowing_kernel
def _number(packs: PackSequences, first: int, last: int, row_slots: int, positions: Int32Array, numbers: Int32Array) -> None:
    at = 0
    for pack in range(first, last):
        end = at + row_slots
        begin = packs.offsets[pack]
        for place in range(begin, packs.offsets[pack + 1]):
            for position in range(packs.lengths[place]):
                positions[at + position] = position
                numbers[at + position] = place - begin + 1
            at += packs.lengths[place]
        for position in range(end - at):
            positions[at + position] = position
            numbers[at + position] = 0
        at = end
