"""Kernels that check and decode the values of a feature, eight bytes at a time, and functions that return dense arrays.

Values are varints. Each byte of a varint has seven bits of the value, and its high bit (bit 7) is set in all bytes but the
last. A padding value is one zero byte. If a list has `values` values in `size` bytes and only the first `real` of them are
non-padding, the non-padding values take `size - (values - real)` bytes.

The kernels load words of eight bytes and use two tricks. The mask `_HIGH` selects bit 7 of each byte, which distinguishes
continuation bytes. `(w & 0x7F..) + 0x7F..` sets bit 7 of each byte whose lower seven bits are not zero, without carries
between bytes. At least eight bytes of the same record precede every field, so that a word that ends at the last byte of a
field never begins before the record.

Parameters named `at` and `end` are addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, BoolArray, ByteArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.memory import (
    add_words,
    address_of,
    as_word,
    byte_at,
    copy_bytes,
    count_bits,
    load_u8,
    load_word,
    subtract_words,
    word_at,
)
from gaudi_bert.tfrecords.wire.features import FeatureTable, feature_table, locate_features, read_varint
from gaudi_bert.tfrecords.wire.schema import FeatureSpec

_HIGH = as_word(-0x7F7F7F7F7F7F7F80)  # 0x8080808080808080
_LOW_SEVEN = as_word(0x7F7F7F7F7F7F7F7F)
_ONE_EACH = as_word(0x0101010101010101)
_TWO_FLOATS = as_word(0x3F8000003F800000)
_BITS_OF_ONE = 7  # in 1.0 as float32, 0x3F800000


@inlined_kernel
def _zero_bytes(word: int) -> int:
    """Return a word in which bit 7 of a byte is set if this byte of `word` is zero. The other bits are undefined."""
    return ~(add_words(word & _LOW_SEVEN, _LOW_SEVEN) | word)


@borrowing_kernel
def is_zero(at: int, size: int) -> bool:
    """Return whether all `size` bytes from `at` on are zero."""
    seen = as_word(0)
    for number in range(size >> 3):
        seen |= word_at(at, number)
    if size & 7:
        seen |= load_word(at + size - 8) >> (8 * (8 - (size & 7)))
    return seen == 0


@borrowing_kernel
def _all_words_are(at: int, size: int, pattern: int) -> bool:
    """Return whether `size` bytes from `at` on are repetitions of the eight bytes of `pattern`.

    The period of the pattern (1, 2, 4 or 8 bytes) must divide `size`.
    """
    different = as_word(0)
    for number in range(size >> 3):
        different |= word_at(at, number) ^ pattern
    if size & 7:
        different |= (load_word(at + size - 8) ^ pattern) >> (8 * (8 - (size & 7)))
    return different == 0


@borrowing_kernel
def all_bytes_are(at: int, size: int, value: int) -> bool:
    """Return whether all `size` bytes from `at` on are equal to `value`."""
    return _all_words_are(at, size, value * _ONE_EACH)


@borrowing_kernel
def _is_canonical(at: int, size: int, count: int) -> bool:
    """Return whether `size` bytes from `at` on are exactly `count` canonical varints of at most three bytes.

    A varint is canonical if it has no more bytes than necessary.
    """
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
    """Return the size of the non-padding values of a list, in bytes.

    Args:
        at: The address of the list.
        size: The size of the list in bytes.
        values: The number of values, including padding.
        real: The number of non-padding values.

    Returns:
        The size, or -1 unless the list consists of `real` canonical varints of at most three bytes, followed by zeros.
    """
    prefix = size - (values - real)
    if prefix < real or not is_zero(at + prefix, values - real) or not _is_canonical(at, prefix, real):
        return -1
    return prefix


@borrowing_kernel
def _set_bits(at: int, size: int) -> int:
    """Return the number of set bits in `size` bytes from `at` on."""
    bits = 0
    for number in range(size >> 3):
        bits += count_bits(word_at(at, number))
    if size & 7:
        bits += count_bits(load_word(at + size - 8) & (as_word(-1) << (8 * (8 - (size & 7)))))
    return bits


@borrowing_kernel
def count_leading_ones(at: int, size: int) -> int:
    """Return the number of ones in a mask of `size` bytes, or -1 if the mask is not ones followed by zeros.

    If n bits are set in total and the first n bytes are 1, all other bytes are zero.
    """
    ones = _set_bits(at, size)
    return ones if ones <= size and _all_words_are(at, ones, _ONE_EACH) else -1


@borrowing_kernel
def count_unit_floats(at: int, size: int) -> int:
    """Return the number of ones in a list of float32 weights of `size` bytes, or -1 if it is not ones followed by zeros."""
    ones = _set_bits(at, size) // _BITS_OF_ONE
    if 4 * ones > size or not _all_words_are(at, 4 * ones, _TWO_FLOATS) or not is_zero(at + 4 * ones, size - 4 * ones):
        return -1
    return ones


@inlined_kernel
def _wrong_positions(word: int, before: int, length: int) -> int:
    """Return a word in which bit 7 of a byte is set if this byte of `word` ends an invalid position.

    A position is invalid if it has three bytes, is not canonical, or is not less than `length`. A comparison of a byte b <
    128 with a constant c sets bit 7 if b >= c, because (b | 128) - c never borrows from the next byte.

    Args:
        word: Eight bytes of the list.
        before: For each byte of `word`, the byte before it.
        length: The number of tokens of the sequence.
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
    """Check masked positions, and return the size of the non-padding positions in bytes.

    Args:
        at: The address of the list.
        size: The size of the list in bytes.
        values: The number of positions, including padding.
        real: The number of non-padding positions.
        length: The number of tokens of the sequence.

    Returns:
        The size, or -1 unless the list consists of `real` canonical varints from 0 to `length` - 1, followed by zeros.
    """
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


# --- decoding packed varints to int32
#
# Most lists of a record contain long runs of numbers with the same size. Masks and segment ids take one byte, and most
# positions and token ids take two. A word of eight bytes is therefore decoded to eight or four numbers at once if all
# numbers in it have one or two bytes. From any other word, two numbers are decoded without a branch on their sizes. A number
# that is longer than three bytes is decoded byte by byte.

_MOST = 2**31 - 1
_LAST_OF_ONE = -0x7F7F7F7F7F7F7F80  # bit 7 of every byte
_LAST_OF_TWO = -0x7FFF7FFF7FFF8000  # bit 7 of every second byte
_LOW_OF_TWO, _HIGH_OF_TWO = 0x007F007F007F007F, 0x3F803F803F803F80
_LONGEST_QUICK = 23  # bit 7 of the third byte


@inlined_kernel
def _bits_below(ends: int) -> int:
    """Return the index of the lowest set bit in `ends`."""
    return count_bits(~ends & (ends - 1))


@inlined_kernel
def _first_value(word: int, ends: int) -> int:
    """Return the first number in a word. It must have at most three bytes.

    `ends` is the word in which bit 7 of each byte that ends a number is set.
    """
    own = word & (ends ^ (ends - 1))
    return (own & 0x7F) | ((own >> 1) & 0x3F80) | ((own >> 2) & 0x1FC000)


@borrowing_kernel
def _decode_varints(at: int, end: int, values: Int32Array) -> bool:
    """Decode the varints in [at, end) into `values`.

    Returns:
        Whether there are exactly as many varints as `values` has elements, each with at most five bytes and 31 bits.
    """
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
                # The shifts are arithmetic and copy bit 63 into the top bits. This does no harm, because at least five valid
                # bytes remain in the word, and the second number uses only three of them.
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
    """Decode a list that has as many bytes as numbers, and return whether each byte is a complete number."""
    seen = 0
    for number in range(values.size):
        value = byte_at(at, number)
        values[number] = value
        seen |= value
    return seen < 128


# --- decoding serialised examples to dense arrays: one matrix for each feature, with one row for each record
#
# Letters of shapes: B is the number of packs, L max_sequence_length, Q masked_slots, and S depth.


def decode_columns(
    buffer: ByteArray, offsets: IntArray, lengths: IntArray, features: Sequence[FeatureSpec], source: str
) -> dict[str, AnyArray]:
    """Decode n examples, and return their features by name, int32 or float32 [n, size].

    The examples must be encoded as this package and TensorFlow write them, with packed lists. The map entries may be in any
    order. Other features are skipped.

    Args:
        buffer: uint8, the bytes of the examples.
        offsets: int64 [n], the position of each payload in the buffer.
        lengths: int64 [n], the size of each payload in bytes.
        features: The features to decode.
        source: The origin of the examples, for the error.

    Raises:
        InputError: An example does not have these features, or has another encoding.
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
    """Decode n examples into `columns`.

    Args:
        buffer: uint8, the bytes of the examples.
        offsets: int64 [n], the position of each payload in the buffer.
        lengths: int64 [n], the size of each payload in bytes.
        table: The feature table of the examples.
        is_float: bool [features], whether each feature has float32 values.
        columns: The output, an int32 array [n, size] for each feature. Float values are stored as their bits.

    Returns:
        The number of the first example that cannot be decoded, or -1 if there is none.
    """
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
            elif not _decode_varints(span.start, end, row):
                return record
    return -1


# --- the columns of packed tables that packed records do not contain


class _Packs(NamedTuple):
    """The features of B packs from which the columns are computed, in the form that the kernel expects."""

    input_mask: Int32Array
    positions: Int32Array
    masked_lm_positions: Int32Array
    masked_lm_ids: Int32Array
    masked_lm_weights: Float32Array
    next_sentence_positions: Int32Array
    next_sentence_weights: Float32Array


def pack_rows(packs: Mapping[str, AnyArray]) -> dict[str, Int32Array]:
    """Compute the columns of packed tables from the features of B packs.

    Args:
        packs: The features by name, [B, L], [B, Q] or [B, S]. The array `positions` may be overwritten, so that the caller
            must not use it afterwards.

    Returns:
        Four int32 arrays by name. `position_ids` [B, L] counts from 0 in every sequence, and again in the padding. `labels`
        [B, L] contains the original id at masked positions, and `NOT_PREDICTED` elsewhere. `seq_lens` [B, S] contains the
        number of tokens of each sequence, and 0 after the last sequence. `sequences` [B] is the number of sequences of each
        pack.

    Raises:
        InputError: A masked position is outside the row, or the sequences overlap.
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
    """Fill the columns of `pack_rows`, and overwrite `packs.positions` with the position ids.

    Returns:
        False if a masked position is outside the row or the sequences of a pack overlap, otherwise True.
    """
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
