"""Fingerprints: that two sets of sequences are the same, in any order and in constant memory (numba kernels).

Each sequence has a 64-bit hash of all that it is: tokens, segments, masked positions (relative to its start),
masked ids, label, length. A multiset of sequences has, for each of 4096 classes of hashes, the count and the
sum (modulo 2**64) of its hashes, which depend neither on the order nor on the file layout. Two different
multisets have the same sums with probability about 2**-64; where the sums differ, the classes that differ say
which sequences to look at in a second pass.

The hash runs over the canonical bytes of the values, sixteen at a time, with the multiply-and-fold step of wyhash (Wang
Yi, 2019). It is computed alike from an unpacked record (by its index row) and from a packed one, whose whole layout is
checked on the way: numbers, positions, starts, weights and padding must be exactly what packing makes.
"""

from __future__ import annotations

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.compiled import borrowing_kernel, inlined_kernel
from gaudi_bert.records.read.unpacked_index import IndexedSequences
from gaudi_bert.records.wire.memory import add_words, address_of, as_word, load_u8, load_word, multiply_mix

__all__ = [
    "CLASSES",
    "IDS_SEED",
    "MASKED_IDS_SEED",
    "POSITIONS_SEED",
    "SEGMENTS_SEED",
    "add_hashes",
    "class_of",
    "hash_bytes",
    "hash_positions",
    "hash_together",
    "hash_unpacked",
]

CLASSES = 4096

_FIRST_KEY = as_word(0x1F3D5B79A2C4E687)
_SECOND_KEY = as_word(0x6C8E944D1F123BB5)
_THIRD_KEY = as_word(0x2545F4914F6CDD1D)
# Where the chains of the parts start: never one of the keys, with which a product would be symmetric in its two words, or 0.
IDS_SEED = as_word(0x5851F42D4C957F2D)
SEGMENTS_SEED = as_word(0x14057B7EF767814F)
MASKED_IDS_SEED = as_word(0x369DEA0F31A53F85)
POSITIONS_SEED = as_word(0x4F1BBCDCBFA53E0B)
_OTHER_CHAIN = as_word(0x61C8864680B583EB)


@borrowing_kernel
def hash_bytes(at: int, size: int, state: int) -> int:
    """Mix `size` bytes into `state`; at least eight bytes of the same record lie before `at`."""
    end = at + size
    other = state ^ _OTHER_CHAIN
    while at + 32 <= end:  # two chains side by side, because a multiplication takes longer than it occupies the processor
        state = multiply_mix(load_word(at) ^ _FIRST_KEY, load_word(at + 8) ^ state)
        other = multiply_mix(load_word(at + 16) ^ _SECOND_KEY, load_word(at + 24) ^ other)
        at += 32
    if size >= 32:
        state = multiply_mix(state ^ _THIRD_KEY, other ^ _SECOND_KEY)
    if at + 16 <= end:
        state = multiply_mix(load_word(at) ^ _FIRST_KEY, load_word(at + 8) ^ state)
        at += 16
    first, second = as_word(0), as_word(0)
    rest = end - at
    if rest >= 8:
        first, second = load_word(at), load_word(end - 8)
    elif rest > 0:
        first = load_word(end - 8) >> (8 * (8 - rest))
    return multiply_mix(first ^ _FIRST_KEY, second ^ state ^ (size + 1))


@inlined_kernel
def hash_together(length: int, masked: int, label: int, ids: int, segments: int, masked_ids: int, positions: int) -> int:
    """The hash of a sequence from those of its parts, each of which has its own place in the chain."""
    state = multiply_mix((length | (masked << 16) | (label << 32)) ^ _SECOND_KEY, ids ^ _THIRD_KEY)
    state = multiply_mix(state ^ _FIRST_KEY, segments ^ _SECOND_KEY)
    state = multiply_mix(state ^ _SECOND_KEY, masked_ids ^ _THIRD_KEY)
    return multiply_mix(state ^ _THIRD_KEY, positions ^ _FIRST_KEY)


@borrowing_kernel
def hash_positions(at: int, count: int, offset: int, state: int) -> int:
    """Mix `count` masked positions, less `offset`, into `state`; they are varints of one or two bytes."""
    word = as_word(0)
    for number in range(count):
        value = load_u8(at)
        at += 1
        if value >= 128:
            value += (load_u8(at) - 1) << 7
            at += 1
        word = (word << 16) | (value - offset)
        if (number & 3) == 3:
            state = multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)
            word = as_word(0)
    return multiply_mix(word ^ _SECOND_KEY, state ^ _THIRD_KEY)


@borrowing_kernel
def hash_unpacked(sequences: IndexedSequences, count: int, hashes: IntArray) -> None:
    """Set `hashes` (int64) to the hashes of the first `count` sequences of an index."""
    base = address_of(sequences.buffer)
    for number in range(count):
        row = sequences.rows[number]
        payload = base + sequences.offsets[number]
        length, masked = as_word(row.length), as_word(row.masked)
        ids = hash_bytes(payload + row.ids, as_word(row.ids_bytes), IDS_SEED)
        segments = hash_bytes(payload + row.segments, length, SEGMENTS_SEED)
        masked_ids = hash_bytes(payload + row.masked_ids, as_word(row.masked_ids_bytes), MASKED_IDS_SEED)
        positions = hash_positions(payload + row.positions, masked, 0, POSITIONS_SEED)
        hashes[number] = hash_together(length, masked, as_word(row.label), ids, segments, masked_ids, positions)


@inlined_kernel
def class_of(value: int) -> int:
    """The class of a hash: twelve of its bits."""
    return (value >> 20) & 4095


@borrowing_kernel
def add_hashes(hashes: IntArray, count: int, sums: IntArray) -> None:
    """Add the first `count` hashes to `sums`, int64 [CLASSES, 2]: count and sum of each class."""
    for number in range(count):
        value = hashes[number]
        sums[class_of(value), 0] += 1
        mixed = multiply_mix(value ^ _FIRST_KEY, _THIRD_KEY)
        sums[class_of(value), 1] = add_words(sums[class_of(value), 1], mixed)
