"""Packed varints to int32, eight bytes at a time (numba kernels).

Most lists of a record are runs of numbers of equal size: masks and segments take one byte each, positions and token ids
mostly two. A word of eight such bytes becomes eight numbers, or four, at once; of any other word two numbers are taken,
without a branch on their sizes, and what is longer than three bytes goes byte by byte.
"""

from __future__ import annotations

from gaudi_bert.common.arrays import Int32Array
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.records.wire.features import read_varint
from gaudi_bert.records.wire.memory import byte_at, count_bits, load_word

__all__ = ["decode_varints"]

_MOST = 2**31 - 1
_LAST_OF_ONE = -0x7F7F7F7F7F7F7F80  # the top bit of every byte
_LAST_OF_TWO = -0x7FFF7FFF7FFF8000  # that of every second byte
_LOW_OF_TWO, _HIGH_OF_TWO = 0x007F007F007F007F, 0x3F803F803F803F80
_LONGEST_QUICK = 23  # the top bit of the third byte


@inlined_kernel
def _bits_below(ends: int) -> int:
    """The number of the lowest set bit of a word."""
    return count_bits(~ends & (ends - 1))


@inlined_kernel
def _first_value(word: int, ends: int) -> int:
    """The first number of a word, of at most three bytes; `ends` has the top bits of the bytes that end a number."""
    own = word & (ends ^ (ends - 1))
    return (own & 0x7F) | ((own >> 1) & 0x3F80) | ((own >> 2) & 0x1FC000)


@borrowing_kernel
def decode_varints(at: int, end: int, values: Int32Array) -> bool:
    """Fill `values` with the numbers in [at, end).

    Returns:
        Whether these are exactly as many numbers, of at most five bytes and 31 bits each.
    """
    if end - at == values.size:
        return _decode_bytes(at, values)
    number = 0
    while number + 8 <= values.size and at + 8 <= end:
        word = load_word(at)
        ends = ~word & _LAST_OF_ONE
        if ends == _LAST_OF_TWO:
            pairs = (word & _LOW_OF_TWO) | ((word >> 1) & _HIGH_OF_TWO)
            for place in range(4):
                values[number + place] = (pairs >> (16 * place)) & 0x3FFF
            number += 4
            at += 8
        elif ends == _LAST_OF_ONE:
            for place in range(8):
                values[number + place] = (word >> (8 * place)) & 0x7F
            number += 8
            at += 8
        else:
            first = second = _bits_below(ends)
            if first <= _LONGEST_QUICK:
                # Shifts fill the top with copies of bit 63, behind the five bytes or more that are left.
                rest, rest_ends = word >> (first + 1), ends >> (first + 1)
                second = _bits_below(rest_ends)
                if second <= _LONGEST_QUICK:
                    values[number] = _first_value(word, ends)
                    values[number + 1] = _first_value(rest, rest_ends)
                    number += 2
                    at += (first + second + 2) >> 3
            if second > _LONGEST_QUICK:
                value, at = read_varint(at, end)
                if value < 0 or value > _MOST:
                    return False
                values[number] = value
                number += 1
    while number < values.size:
        value, at = read_varint(at, end)
        if value < 0 or value > _MOST:
            return False
        values[number] = value
        number += 1
    return at == end


@borrowing_kernel
def _decode_bytes(at: int, values: Int32Array) -> bool:
    """As many bytes as numbers: each is one, or it is none at all."""
    seen = 0
    for number in range(values.size):
        value = byte_at(at, number)
        values[number] = value
        seen |= value
    return seen < 128
