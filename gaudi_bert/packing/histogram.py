"""How many sequences there are of each length: all that a packing algorithm needs to know about a data set.

Packing works on the histogram of lengths instead of on the sequences (paper F.2), so its cost depends on the maximum length
and not on the size of the data. `counts[0]` is the number of sequences of length 1. Next to the counts, `max_masked` holds
the most masked positions seen at each length: with it a plan can promise that no pack holds more of them than it has slots.

Lengths come as users have them (lists, arrays of any kind, columns). What cannot be a length is rejected with its index and
value before anything is packed: 3.0 may be a length, but an array of floats is more often a column with nulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray, first_not_whole, permutation, whole_number
from gaudi_bert.common.errors import ArgumentError, InputError, shown

_MOST_INT64 = 2**63 - 1
MAX_TOKENS = 2**62  # so that every sum of tokens and every product in the certificate fits int64


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts per length, checked on creation."""

    max_sequence_length: int  # capacity of a pack in tokens (L)
    counts: IntArray  # int64 [L], number of sequences of length 1 .. L
    max_masked: IntArray | None = None  # int64 [L], most masked positions of any sequence of that length, or None if unknown

    def __post_init__(self) -> None:
        whole_number("max_sequence_length", self.max_sequence_length, 1)
        for name in ("counts",) if self.max_masked is None else ("counts", "max_masked"):
            given = _as_1d_array(getattr(self, name), name)
            wrong = first_not_whole(given, 0, _MOST_INT64) if _holds_integers(given) else 0
            if wrong >= 0:
                raise InputError(f"{name} holds {_format_entry(given, wrong)} at length {wrong + 1}; give integers from 0")
            array = given.astype(np.int64)  # a copy
            if len(array) != self.max_sequence_length:
                raise InputError(f"{name} has {len(array)} entries; {self.max_sequence_length} are needed, one a length")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if sum(int(n) * length for length, n in enumerate(self.counts, start=1) if n) > MAX_TOKENS:
            raise InputError(f"the histogram holds more than {MAX_TOKENS} tokens; split the data")

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return int(self.counts @ np.arange(1, self.max_sequence_length + 1))

    @property
    def token_bound(self) -> int:
        """Packs that the tokens alone need: the theoretical limit with no limit of depth."""
        return -(-self.tokens // self.max_sequence_length)

    def max_masked_at(self, length: int) -> int:
        """Most masked positions of a sequence of `length`; 0 if unknown."""
        return 0 if self.max_masked is None else int(self.max_masked[length - 1])


def _as_1d_array(values: Any, name: str) -> AnyArray:
    """`values` as an array of one dimension, of the type they have; of objects, where numpy's choice would change one."""
    if isinstance(values, np.ma.MaskedArray) and np.any(values.mask):  # numpy forgets the mask where it converts the array
        first = int(np.flatnonzero(values.mask)[0])
        raise ArgumentError(f"{name}[{first}] is masked; leave masked entries out: `{name}.compressed()`")
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.ndim != 1:
            raise ArgumentError(f"{name} has the shape {array.shape}; one dimension is needed, of integers")
        return array
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} is {shown(values)}; it must be a list or an array of integers")
    listed = list(values)
    if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in set(map(type, listed))):
        with suppress(OverflowError):
            return np.array(listed, np.int64)
    return np.fromiter(listed, object, len(listed))


def _holds_integers(array: AnyArray) -> bool:
    return array.dtype.kind in "iuO" or not array.size


def _format_entry(values: AnyArray, index: int) -> str:
    """One entry, as Python writes it."""
    value = values[index]
    return shown(value.item() if isinstance(value, np.generic) else value)


def resize_histogram(histogram: Histogram, max_sequence_length: int) -> Histogram:
    """Return the histogram of the same sequences in packs of another capacity (paper Q)."""
    longest = int(np.flatnonzero(histogram.counts)[-1]) + 1 if histogram.sequences else 0
    if longest > max_sequence_length:
        raise InputError(f"max_sequence_length {max_sequence_length} is less than the longest sequence, {longest} tokens")

    def resized(values: IntArray) -> IntArray:
        result = np.zeros(max_sequence_length, dtype=np.int64)
        common = min(len(values), max_sequence_length)
        result[:common] = values[:common]
        return result

    masked = None if histogram.max_masked is None else resized(histogram.max_masked)
    return Histogram(max_sequence_length, resized(histogram.counts), masked)


# --- lengths as users have them

MAX_ROW_LENGTH = 2**24
"""The longest row: a histogram has a counter for each length."""


def validate_lengths(lengths: Any, max_sequence_length: int) -> AnyArray:
    """The lengths as uint16 or int32 [sequences], whichever holds the longest; given as anything that holds numbers."""
    longest = whole_number("max_sequence_length", max_sequence_length, 1, MAX_ROW_LENGTH)
    values = _as_1d_array(lengths, "lengths")
    wrong, is_integer = first_not_whole(values, 1, longest), _holds_integers(values)
    if wrong >= 0 or not is_integer:
        index = max(wrong, 0)
        remedy = "cut or split longer ones, leave empty ones out" if is_integer else "such as `lengths.astype(int)`"
        value = _format_entry(values, index) + ("" if is_integer else f", of type {values.dtype}")
        raise ArgumentError(f"lengths[{index}] is {value}; integers from 1 to {longest} (a row) are allowed: {remedy}")
    return values.astype(np.uint16 if longest < 2**16 else np.int32)


def count_lengths(lengths: AnyArray, max_sequence_length: int) -> Histogram:
    """Count the checked lengths of each value."""
    counts: IntArray = np.bincount(lengths, minlength=max_sequence_length + 1)[1:]
    return Histogram(max_sequence_length, counts)


# --- groups of files: what is read once, held in memory, and packed within itself
#
# Memory is bounded by a group and not by the data set, and groups need nothing from each other, so any worker can take any
# group. Files are dealt by a seeded permutation of their sorted names, so that a group mixes all regions of a corpus; from
# 100,000 sequences on a group packs as well as all the data, to about 0.0002 in efficiency.


class _SizedFile(Protocol):
    """Properties of a file, or of a part of one, that groups need."""

    @property
    def name(self) -> str:
        """Relative to the folder of records."""

    @property
    def bytes(self) -> int: ...
    @property
    def sequences(self) -> int: ...


File = TypeVar("File", bound=_SizedFile)


def form_groups(files: Sequence[File], group_sequences: int, group_bytes: int, seed: int) -> list[list[File]]:
    """Deal files, in any order, to groups of nearly equal size within the limits; a group is in the order of the names.

    A file that is larger than a limit is a group alone (`find_oversized_files` names those).
    """
    ordered = sorted(files, key=lambda file: file.name)
    dealt = [ordered[index] for index in permutation(len(ordered), seed, "groups")]
    # As few groups as the limits allow, as even as that number allows: a small last group would pack badly.
    fewest = _split_into_groups(dealt, group_sequences, group_bytes, 1)
    even = _split_into_groups(dealt, group_sequences, group_bytes, len(fewest))
    groups = even if len(even) == len(fewest) else fewest
    return [sorted(group, key=lambda file: file.name) for group in groups]


def _split_into_groups(dealt: list[File], group_sequences: int, group_bytes: int, parts: int) -> list[list[File]]:
    """Cut the list where a limit would be passed, and wherever the next of `parts` equal shares is reached."""
    total = sum(file.sequences for file in dealt)
    groups: list[list[File]] = []
    sequences = size = seen = 0
    for file in dealt:
        full = sequences + file.sequences > group_sequences or size + file.bytes > group_bytes
        share_reached = len(groups) < parts and seen * parts >= total * len(groups)
        if not groups or full or share_reached:
            groups.append([])
            sequences = size = 0
        groups[-1].append(file)
        sequences, size, seen = sequences + file.sequences, size + file.bytes, seen + file.sequences
    return groups


def find_oversized_files(files: Sequence[File], group_sequences: int, group_bytes: int) -> list[File]:
    """The files that are larger than a group may be."""
    return [file for file in files if file.sequences > group_sequences or file.bytes > group_bytes]


def build_group_histogram(counts_of_files: Iterable[IntArray], max_sequence_length: int) -> Histogram:
    """The histogram of the sequences of some files, with the most masked positions at each length.

    The counts of a file are int64 [pairs, 3]: length, masked positions, number of sequences.
    """
    counts = np.zeros(max_sequence_length, dtype=np.int64)
    max_masked = np.zeros(max_sequence_length, dtype=np.int64)
    for rows in counts_of_files:
        lengths, masked, sequences = rows.T
        np.add.at(counts, lengths - 1, sequences)
        np.maximum.at(max_masked, lengths - 1, masked)
    return Histogram(max_sequence_length, counts, max_masked)
