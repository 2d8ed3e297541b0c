"""Kernels that check and decode the values of a feature, eight bytes at a time, and functions that return dense arrays.

Values are varints. Each byte of a varint has seven bits of the value, and its high bit (bit 7) is set in all bytes but the
last. A padding value is one zero byte. If a list has `value_count` values in `size` bytes and only the first `used_count` of
them are non-padding, the non-padding values take `size - (value_count - used_count)` bytes. A varint is canonical if it has
no more bytes than necessary.

The kernels load words of eight bytes and use two tricks. The mask `_HIGH` selects bit 7 of each byte, which distinguishes
continuation bytes. `(w & 0x7F..) + 0x7F..` sets bit 7 of each byte whose lower seven bits are not zero, without carries
between bytes. At least eight bytes of the same record precede every field, so that a word that ends at the last byte of a
field never begins before the record.

The parameters `address` and `end` are memory addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gaudi_bert.common.arrays import NOT_PREDICTED, AnyArray, BoolArray, ByteArray, Float32Array, Int32Array, IntArray
from gaudi_bert.common.compiled import (
    add_words,
    address_of,
    as_word,
    byte_at,
    copy_bytes,
    count_bits,
    inlined_kernel,
    kernel_without_refcounts,
    load_u8,
    load_word,
    subtract_words,
    word_at,
)
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.wire.features import FeatureTable, locate_features, make_feature_table, read_varint
from gaudi_bert.tfrecords.wire.schema import FeatureSpec

_HIGH = as_word(-0x7F7F7F7F7F7F7F80)  # 0x8080808080808080
_LOW_SEVEN = as_word(0x7F7F7F7F7F7F7F7F)
_ONE_IN_EVERY_BYTE = as_word(0x0101010101010101)
_TWO_FLOATS = as_word(0x3F8000003F800000)
_BITS_OF_ONE = 7  # in 1.0 as float32, 0x3F800000


@inlined_kernel
def _mark_zero_bytes(word: int) -> int:
    """Mark the zero bytes of `word` by setting bit 7 of the same bytes in the result. The other bits are undefined."""
    return ~(add_words(word & _LOW_SEVEN, _LOW_SEVEN) | word)


@kernel_without_refcounts
def is_all_zero(address: int, size: int) -> bool:
    """Return whether all `size` bytes at `address` are zero."""
    combined = as_word(0)
    for number in range(size >> 3):
        combined |= word_at(address, number)
    if size & 7:
        combined |= load_word(address + size - 8) >> (8 * (8 - (size & 7)))
    return combined == 0


@kernel_without_refcounts
def _is_repeated_pattern(address: int, size: int, pattern: int) -> bool:
    """Return whether the `size` bytes at `address` repeat the eight-byte `pattern`.

    The period of the pattern (1, 2, 4 or 8 bytes) must divide `size`.
    """
    different = as_word(0)
    for number in range(size >> 3):
        different |= word_at(address, number) ^ pattern
    if size & 7:
        different |= (load_word(address + size - 8) ^ pattern) >> (8 * (8 - (size & 7)))
    return different == 0


@kernel_without_refcounts
def is_repeated_byte(address: int, size: int, value: int) -> bool:
    """Return whether all `size` bytes at `address` equal `value`."""
    return _is_repeated_pattern(address, size, value * _ONE_IN_EVERY_BYTE)


@kernel_without_refcounts
def _is_canonical_varint_list(address: int, size: int, value_count: int) -> bool:
    """Return whether the `size` bytes at `address` are exactly `value_count` canonical varints of up to three bytes."""
    if size == 0:
        return value_count == 0
    continued = as_word(0)
    wrong = as_word(0)
    for number in range(size >> 3):
        word, before = word_at(address, number), word_at(address - 1, number)
        zero_bytes = _mark_zero_bytes(word)
        wrong |= before & (zero_bytes | (word & word_at(address - 2, number)))
        continued += count_bits(word & _HIGH)
    end = address + size
    if size & 7:
        mask = _HIGH << (8 * (8 - (size & 7)))
        word, before = load_word(end - 8), load_word(end - 9)
        zero_bytes = _mark_zero_bytes(word)
        wrong |= before & (zero_bytes | (word & load_word(end - 10))) & mask
        continued += count_bits(word & mask)
    return (wrong & _HIGH) == 0 and size - continued == value_count and load_u8(end - 1) < 128


@kernel_without_refcounts
def compute_unpadded_size(address: int, padded_size: int, value_count: int, non_padding_count: int) -> int:
    """Check a list of varints, and return its size in bytes without the trailing padding.

    Args:
        address: The address of the list.
        padded_size: The size of the list in bytes, including padding.
        value_count: The number of values, including padding.
        non_padding_count: The number of values before the padding.

    Returns:
        The size, or -1 unless the list consists of `non_padding_count` canonical varints of at most three bytes, followed by
        zeros.
    """
    prefix = padded_size - (value_count - non_padding_count)
    if (
        prefix < non_padding_count
        or not is_all_zero(address + prefix, value_count - non_padding_count)
        or not _is_canonical_varint_list(address, prefix, non_padding_count)
    ):
        return -1
    return prefix


@kernel_without_refcounts
def _count_set_bits(address: int, size: int) -> int:
    """Return how many bits are set in the `size` bytes at `address`."""
    bits = 0
    for number in range(size >> 3):
        bits += count_bits(word_at(address, number))
    if size & 7:
        bits += count_bits(load_word(address + size - 8) & (as_word(-1) << (8 * (8 - (size & 7)))))
    return bits


@kernel_without_refcounts
def count_leading_ones(address: int, size: int) -> int:
    """Return the number of ones in a mask of `size` bytes, or -1 if the mask does not consist of ones followed by zeros."""
    # Let n be the number of set bits. If each of the first n bytes is 1, these bytes contain all set bits, so all other
    # bytes are zero.
    ones = _count_set_bits(address, size)
    return ones if ones <= size and _is_repeated_pattern(address, ones, _ONE_IN_EVERY_BYTE) else -1


@kernel_without_refcounts
def count_leading_one_floats(address: int, size: int) -> int:
    """Return the number of ones in `size` bytes of float32 weights, or -1 if the weights are not ones followed by zeros."""
    ones = _count_set_bits(address, size) // _BITS_OF_ONE
    if (
        4 * ones > size
        or not _is_repeated_pattern(address, 4 * ones, _TWO_FLOATS)
        or not is_all_zero(address + 4 * ones, size - 4 * ones)
    ):
        return -1
    return ones


@inlined_kernel
def _mark_invalid_masked_positions(position_bytes: int, previous_bytes: int, token_count: int) -> int:
    """Mark the bytes of `position_bytes` that end an invalid masked position.

    The mark is bit 7 of the same byte in the result. A position is invalid if it has three bytes, is not canonical, or is
    not less than `token_count`. The comparison of a byte b < 128 with a constant c sets bit 7 if b >= c, because
    (b | 128) - c never borrows from the next byte.

    Args:
        position_bytes: Eight bytes of the list of masked positions.
        previous_bytes: For each byte of `position_bytes`, the byte before it.
        token_count: The number of tokens of the sequence.
    """
    high, low = (token_count >> 7) * _ONE_IN_EVERY_BYTE, (token_count & 127) * _ONE_IN_EVERY_BYTE
    ends, follows = ~position_bytes, previous_bytes
    at_least_high = subtract_words(position_bytes | _HIGH, high)
    above_high = subtract_words(position_bytes | _HIGH, high + _ONE_IN_EVERY_BYTE)
    at_least_low = subtract_words(previous_bytes | _HIGH, low)
    zero_bytes = _mark_zero_bytes(position_bytes)
    two_bytes = ends & follows & (above_high | (at_least_high & at_least_low) | zero_bytes)
    one_byte = ends & ~follows & subtract_words(position_bytes | _HIGH, low)
    return two_bytes | (position_bytes & follows) | (one_byte if token_count < 128 else 0)


@kernel_without_refcounts
def compute_unpadded_positions_size(
    address: int, padded_size: int, value_count: int, non_padding_count: int, token_count: int
) -> int:
    """Check a list of masked positions, and return its size in bytes without the trailing padding.

    Args:
        address: The address of the list.
        padded_size: The size of the list in bytes, including padding.
        value_count: The number of positions, including padding.
        non_padding_count: The number of positions before the padding.
        token_count: The number of tokens of the sequence.

    Returns:
        The size, or -1 unless the list consists of `non_padding_count` canonical varints from 0 to `token_count` - 1,
        followed by zeros.
    """
    prefix = padded_size - (value_count - non_padding_count)
    if prefix < non_padding_count or not is_all_zero(address + prefix, value_count - non_padding_count):
        return -1
    continued, wrong = as_word(0), as_word(0)
    for number in range(prefix >> 3):
        word = word_at(address, number)
        wrong |= _mark_invalid_masked_positions(word, word_at(address - 1, number), token_count)
        continued += count_bits(word & _HIGH)
    end = address + prefix
    if prefix & 7:
        mask = _HIGH << (8 * (8 - (prefix & 7)))
        word = load_word(end - 8)
        wrong |= _mark_invalid_masked_positions(word, load_word(end - 9), token_count) & mask
        continued += count_bits(word & mask)
    if (wrong & _HIGH) != 0 or prefix - continued != non_padding_count or (prefix > 0 and load_u8(end - 1) >= 128):
        return -1
    return prefix


# --- decoding packed varints to int32
#
# Most lists of a record contain long runs of numbers with the same size. Masks and segment ids take one byte, and most
# positions and token ids take two. A word of eight bytes is therefore decoded to eight or four numbers at once if all
# numbers in it have one or two bytes. From any other word, two numbers are decoded without a branch on their sizes. A number
# that is longer than three bytes is decoded byte by byte.

_MAX_INT32 = 2**31 - 1
_LAST_OF_ONE = -0x7F7F7F7F7F7F7F80  # bit 7 of every byte
_LAST_OF_TWO = -0x7FFF7FFF7FFF8000  # bit 7 of every second byte
_LOW_OF_TWO, _HIGH_OF_TWO = 0x007F007F007F007F, 0x3F803F803F803F80
_LAST_BIT_OF_THREE_BYTES = 23  # bit 7 of the third byte


@inlined_kernel
def _find_lowest_set_bit(word: int) -> int:
    """Return the index of the lowest bit that is set in `word`."""
    return count_bits(~word & (word - 1))


@inlined_kernel
def _decode_first_varint(word: int, ends: int) -> int:
    """Return the value of the first varint in a word. The varint must have at most three bytes.

    Args:
        word: Eight bytes of a list of varints, which begin with the varint.
        ends: A word in which bit 7 of a byte is set if this byte ends a varint.
    """
    own = word & (ends ^ (ends - 1))
    return (own & 0x7F) | ((own >> 1) & 0x3F80) | ((own >> 2) & 0x1FC000)


@kernel_without_refcounts
def _decode_varints(address: int, end: int, output: Int32Array) -> bool:
    """Decode the varints in [address, end), and store their values in `output`.

    Returns:
        True if there are exactly as many varints as `output` has elements, each with at most five bytes and 31 bits.
    """
    if end - address == output.size:
        return _decode_one_byte_varints(address, output)
    number = 0
    while number + 8 <= output.size and address + 8 <= end:
        word = load_word(address)
        ends = ~word & _LAST_OF_ONE
        if ends == _LAST_OF_TWO:
            pairs = (word & _LOW_OF_TWO) | ((word >> 1) & _HIGH_OF_TWO)
            for lane in range(4):
                output[number + lane] = (pairs >> (16 * lane)) & 0x3FFF
            number += 4
            address += 8
        elif ends == _LAST_OF_ONE:
            for lane in range(8):
                output[number + lane] = (word >> (8 * lane)) & 0x7F
            number += 8
            address += 8
        else:
            first = second = _find_lowest_set_bit(ends)
            if first <= _LAST_BIT_OF_THREE_BYTES:
                # An arithmetic right shift fills the top bits with copies of bit 63. This is harmless, because at least five
                # bytes of the word remain valid, and the second number takes at most three.
                rest, rest_ends = word >> (first + 1), ends >> (first + 1)
                second = _find_lowest_set_bit(rest_ends)
                if second <= _LAST_BIT_OF_THREE_BYTES:
                    output[number] = _decode_first_varint(word, ends)
                    output[number + 1] = _decode_first_varint(rest, rest_ends)
                    number += 2
                    address += (first + second + 2) >> 3
            if second > _LAST_BIT_OF_THREE_BYTES:
                value, address = read_varint(address, end)
                if value < 0 or value > _MAX_INT32:
                    return False
                output[number] = value
                number += 1
    while number < output.size:
        value, address = read_varint(address, end)
        if value < 0 or value > _MAX_INT32:
            return False
        output[number] = value
        number += 1
    return address == end


@kernel_without_refcounts
def _decode_one_byte_varints(address: int, output: Int32Array) -> bool:
    """Decode varints of one byte each, and store their values in `output`. Return False if one of them is longer."""
    combined = 0
    for number in range(output.size):
        value = byte_at(address, number)
        output[number] = value
        combined |= value
    return combined < 128


# --- decoding serialised examples to dense arrays: one matrix for each feature, with one row for each record
#
# Letters of shapes: B is the number of packs, L max_sequence_length, Q masked_slots, and S depth.


def decode_examples_to_arrays(
    buffer: ByteArray, offsets: IntArray, lengths: IntArray, features: Sequence[FeatureSpec], source: str
) -> dict[str, AnyArray]:
    """Decode n serialised examples, and return one int32 or float32 array [n, size] per feature, by name.

    The examples must be encoded as this package and TensorFlow write them, with packed lists. The map entries may be in any
    order. Features that are not requested are skipped.

    Args:
        buffer: uint8, the bytes of the examples.
        offsets: int64 [n], the position of each payload in the buffer.
        lengths: int64 [n], the size of each payload in bytes.
        features: The features to decode.
        source: Where the examples come from, for the error message.

    Raises:
        InputError: An example does not have these features, or has another encoding.
    """
    columns = tuple(np.empty((len(offsets), spec.length), np.int32) for spec in features)
    is_float = np.array([spec.kind == "float32" for spec in features], np.bool_)
    failed_example = _decode_examples(
        buffer, offsets.astype(np.int64), lengths.astype(np.int64), make_feature_table(features), is_float, columns
    )
    if failed_example >= 0:
        expected = ", ".join(f"{spec.name}[{spec.length}]" for spec in features)
        raise InputError(
            f"{source}: record {failed_example}: expected the features {expected}, each with exactly this number of "
            "values and in the packed encoding of protobuf; write the records again"
        )
    return {
        spec.name: column.view(np.float32) if spec.kind == "float32" else column
        for spec, column in zip(features, columns, strict=True)
    }


@kernel_without_refcounts
def _decode_examples(
    buffer: ByteArray,
    offsets: IntArray,
    lengths: IntArray,
    table: FeatureTable,
    is_float: BoolArray,
    columns: tuple[Int32Array, ...],
) -> int:
    """Decode n serialised examples, and store the values of each feature in one array of `columns`.

    Args:
        buffer: uint8, the bytes of the examples.
        offsets: int64 [n], the position of each payload in the buffer.
        lengths: int64 [n], the size of each payload in bytes.
        table: The feature table of the examples.
        is_float: bool [features], whether each feature has float32 values.
        columns: The output, an int32 array [n, size] for each feature. Float values are stored as their bits.

    Returns:
        The index of the first example that cannot be decoded, or -1 if all were decoded.
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
    """The features of B packs that are needed to compute the columns of a packed table."""

    input_mask: Int32Array
    positions: Int32Array
    masked_lm_positions: Int32Array
    masked_lm_ids: Int32Array
    masked_lm_weights: Float32Array
    next_sentence_positions: Int32Array
    next_sentence_weights: Float32Array


def compute_packed_table_columns(packs: Mapping[str, AnyArray]) -> dict[str, Int32Array]:
    """Compute the columns that exist only in packed tables, from the features of B packed records.

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
    features = _Packs(*(np.ascontiguousarray(packs[name]) for name in _Packs._fields))
    count, length = features.input_mask.shape
    labels = np.empty((count, length), np.int32)
    lengths, sequence_counts = np.zeros(features.next_sentence_positions.shape, np.int32), np.empty(count, np.int32)
    if not _fill_packed_table_columns(features, labels, lengths, sequence_counts):
        raise InputError("a pack masks a position outside its row, or its sequences overlap; write the packs again")
    return {"position_ids": features.positions, "labels": labels, "seq_lens": lengths, "sequences": sequence_counts}


@kernel_without_refcounts
def _fill_packed_table_columns(packs: _Packs, labels: Int32Array, lengths: Int32Array, sequence_counts: Int32Array) -> bool:
    """Compute the columns of a packed table, and store them in the given arrays. The position ids overwrite
    `packs.positions`.

    Args:
        packs: The features of B packs.
        labels: int32 [B, L], receives the original ids at masked positions.
        lengths: int32 [B, S], receives the number of tokens of each sequence. Must contain zeros.
        sequence_counts: int32 [B], receives the number of sequences of each pack.

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
        sequence_counts[row] = count
        end = tokens
        for index in range(count - 1, -1, -1):
            start = packs.next_sentence_positions[row, index]
            if start < 0 or start >= end:
                return False
            lengths[row, index] = end - start
            end = start
    return True
