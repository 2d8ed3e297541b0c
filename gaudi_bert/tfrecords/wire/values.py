"""The values of a feature in the record, checked or decoded eight bytes at a time (numba kernels).

Values are varints: seven bits a byte, the high bit set on all bytes but the last. Padding is one zero byte a
value, so a list of `values` of which the first `real` are not padding takes `size - (values - real)` bytes
for those: no scan is needed to find where they end, only one to make sure. Tricks on words: bits 7 of each
byte (`_HIGH`) tell continuation bytes apart; `(w & 0x7F..) + 0x7F..` sets bit 7 of each byte that is not
zero, without carries between bytes.

Preconditions: a field is preceded by at least eight bytes of the same record (its headers and key), so the
word that ends with a field's last byte is in the record.
"""

from __future__ import annotations

from gaudi_bert.common.arrays import Int32Array
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.memory import add_words, as_word, byte_at, count_bits, load_u8, load_word, subtract_words, word_at
from gaudi_bert.tfrecords.wire.features import read_varint

_HIGH = as_word(-0x7F7F7F7F7F7F7F80)  # 0x8080808080808080
_LOW_SEVEN = as_word(0x7F7F7F7F7F7F7F7F)
_ONE_EACH = as_word(0x0101010101010101)
_TWO_FLOATS = as_word(0x3F8000003F800000)
_BITS_OF_ONE = 7  # in 1.0 as float32, 0x3F800000


@inlined_kernel
def _zero_bytes(word: int) -> int:
    """Bit 7 of each byte of `word` that is zero (the other bits mean nothing)."""
    return ~(add_words(word & _LOW_SEVEN, _LOW_SEVEN) | word)


@borrowing_kernel
def is_zero(at: int, size: int) -> bool:
    """Whether `size` bytes are all zero."""
    seen = as_word(0)
    for number in range(size >> 3):
        seen |= word_at(at, number)
    if size & 7:
        seen |= load_word(at + size - 8) >> (8 * (8 - (size & 7)))
    return seen == 0


@borrowing_kernel
def _all_words_are(at: int, size: int, pattern: int) -> bool:
    """Whether `size` bytes repeat the eight bytes of `pattern`, whose period divides `size`."""
    different = as_word(0)
    for number in range(size >> 3):
        different |= word_at(at, number) ^ pattern
    if size & 7:
        different |= (load_word(at + size - 8) ^ pattern) >> (8 * (8 - (size & 7)))
    return different == 0


@borrowing_kernel
def all_bytes_are(at: int, size: int, value: int) -> bool:
    """Whether `size` bytes all equal `value`."""
    return _all_words_are(at, size, value * _ONE_EACH)


@borrowing_kernel
def _is_canonical(at: int, size: int, count: int) -> bool:
    """Whether `size` bytes are exactly `count` varints of at most three bytes, none longer than need be."""
    if size == 0:
        return count == 0
    continued = as_word(0)
    wrong = as_word(0)
    for number in range(size >> 3):
        word, before = word_at(at, number), word_at(at - 1, number)
        zero_bytes = _zero_bytes(word)
        wrong |= before & (zero_bytes | (word & word_at(at - 2, number)))
        continued += count_bits(word & _HIGH)
    end = at + size
    if size & 7:
        mask = _HIGH << (8 * (8 - (size & 7)))
        word, before = load_word(end - 8), load_word(end - 9)
        zero_bytes = _zero_bytes(word)
        wrong |= before & (zero_bytes | (word & load_word(end - 10))) & mask
        continued += count_bits(word & mask)
    return (wrong & _HIGH) == 0 and size - continued == count and load_u8(end - 1) < 128


@borrowing_kernel
def real_bytes(at: int, size: int, values: int, real: int) -> int:
    """Return how many bytes the first `real` of `values` varints take, when the others are zero; -1 when it is not so."""
    prefix = size - (values - real)
    if prefix < real or not is_zero(at + prefix, values - real) or not _is_canonical(at, prefix, real):
        return -1
    return prefix


@borrowing_kernel
def _set_bits(at: int, size: int) -> int:
    bits = 0
    for number in range(size >> 3):
        bits += count_bits(word_at(at, number))
    if size & 7:
        bits += count_bits(load_word(at + size - 8) & (as_word(-1) << (8 * (8 - (size & 7)))))
    return bits


@borrowing_kernel
def count_leading_ones(at: int, size: int) -> int:
    """n of a mask of `size` bytes that is n ones and then zeros; -1 for anything else.

    With n bits set in all, and the first n bytes 1, the rest is zero.
    """
    ones = _set_bits(at, size)
    return ones if ones <= size and _all_words_are(at, ones, _ONE_EACH) else -1


@borrowing_kernel
def count_unit_floats(at: int, size: int) -> int:
    """n of float32 weights in `size` bytes that are n ones and then zeros; -1 for anything else."""
    ones = _set_bits(at, size) // _BITS_OF_ONE
    if 4 * ones > size or not _all_words_are(at, 4 * ones, _TWO_FLOATS) or not is_zero(at + 4 * ones, size - 4 * ones):
        return -1
    return ones


@inlined_kernel
def _wrong_positions(word: int, before: int, length: int) -> int:
    """Bit 7 of each byte of `word` that ends a position of three bytes, not canonical, or not below `length`.

    `before` holds the byte before each byte. The comparisons set bit 7 of a byte b < 128 where b >= c, because
    (b | 128) - c never borrows.
    """
    high, low = (length >> 7) * _ONE_EACH, (length & 127) * _ONE_EACH
    ends, follows = ~word, before
    at_least_high = subtract_words(word | _HIGH, high)
    above_high = subtract_words(word | _HIGH, high + _ONE_EACH)
    at_least_low = subtract_words(before | _HIGH, low)
    zero_bytes = _zero_bytes(word)
    two_bytes = ends & follows & (above_high | (at_least_high & at_least_low) | zero_bytes)
    one_byte = ends & ~follows & subtract_words(word | _HIGH, low)
    return two_bytes | (word & follows) | (one_byte if length < 128 else 0)


@borrowing_kernel
def scan_positions(at: int, size: int, values: int, real: int, length: int) -> int:
    """Bytes of the first `real` of `values` positions; -1 unless each is in 0 .. length - 1 and the rest is zero."""
    prefix = size - (values - real)
    if prefix < real or not is_zero(at + prefix, values - real):
        return -1
    continued, wrong = as_word(0), as_word(0)
    for number in range(prefix >> 3):
        word = word_at(at, number)
        wrong |= _wrong_positions(word, word_at(at - 1, number), length)
        continued += count_bits(word & _HIGH)
    end = at + prefix
    if prefix & 7:
        mask = _HIGH << (8 * (8 - (prefix & 7)))
        word = load_word(end - 8)
        wrong |= _wrong_positions(word, load_word(end - 9), length) & mask
        continued += count_bits(word & mask)
    if (wrong & _HIGH) != 0 or prefix - continued != real or (prefix > 0 and load_u8(end - 1) >= 128):
        return -1
    return prefix


# --- packed varints to int32
#
# Most lists of a record are runs of numbers of equal size: masks and segments take one byte each, positions and token ids
# mostly two. A word of eight such bytes becomes eight numbers, or four, at once; of any other word two numbers are taken,
# without a branch on their sizes, and what is longer than three bytes goes byte by byte.

_MOST = 2**31 - 1
_LAST_OF_ONE = -0x7F7F7F7F7F7F7F80  # the top bit of every byte
_LAST_OF_TWO = -0x7FFF7FFF7FFF8000  # that of every second byte
_LOW_OF_TWO, _HIGH_OF_TWO = 0x007F007F007F007F, 0x3F803F803F803F80
_LONGEST_QUICK = 23  # the top bit of the third byte


@inlined_kernel
def _bits_below(ends: int) -> int:
    return count_bits(~ends & (ends - 1))


@inlined_kernel
def _first_value(word: int, ends: int) -> int:
    """The first number of a word, of at most three bytes; `ends` has the top bits of the bytes that end a number."""
    own = word & (ends ^ (ends - 1))
    return (own & 0x7F) | ((own >> 1) & 0x3F80) | ((own >> 2) & 0x1FC000)


@borrowing_kernel
def decode_varints(at: int, end: int, values: Int32Array) -> bool:
    """Fill `values` with the numbers in [at, end); whether they are exactly as many, of at most five bytes and 31 bits."""
    if end - at == values.size:
        return _decode_bytes(at, values)
    number = 0
    while number + 8 <= values.size and at + 8 <= end:
        word = load_word(at)
        ends = ~word & _LAST_OF_ONE
        if ends == _LAST_OF_TWO:
            pairs = (word & _LOW_OF_TWO) | ((word >> 1) & _HIGH_OF_TWO)
            for lane in range(4):
                values[number + lane] = (pairs >> (16 * lane)) & 0x3FFF
            number += 4
            at += 8
        elif ends == _LAST_OF_ONE:
            for lane in range(8):
                values[number + lane] = (word >> (8 * lane)) & 0x7F
            number += 8
            at += 8
        else:
            first = second = _bits_below(ends)
            if first <= _LONGEST_QUICK:
                # Shifts fill the top with copies of bit 63, behind the five bytes or more that remain.
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
    """Decode as many bytes as numbers: each is one, or it is none at all."""
    seen = 0
    for number in range(values.size):
        value = byte_at(at, number)
        values[number] = value
        seen |= value
    return seen < 128
