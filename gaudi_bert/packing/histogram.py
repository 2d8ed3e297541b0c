"""Histograms of sequence lengths, which are the only input that a packing algorithm needs.

Algorithms pack the histogram instead of the sequences (paper F.2), so their cost depends on the maximum length and not on
the size of the data. `counts[0]` is the number of sequences of length 1. A histogram may also contain `max_masked`, the most
masked positions seen at each length, so that a plan can guarantee that no pack contains more masked positions than it has
slots for.

Users pass lengths as lists, arrays or columns of many types. Values that cannot be lengths are rejected with their index
before anything is packed. Float arrays are rejected as well, even if all values are whole numbers, because they are usually
columns with nulls. The last part of this file assigns input files to groups, each of which is packed on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray, check_integer, find_index_of_invalid_integer, permutation
from gaudi_bert.common.errors import ArgumentError, InputError, short_repr

_MOST_INT64 = 2**63 - 1
# The maximum number of tokens in a histogram, so that all sums and products in the proof of a lower bound fit in int64.
MAX_TOKENS = 2**62


@dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram of sequence lengths. The constructor validates and copies the arrays, and makes the copies read-only.

    Raises:
        InputError: an entry is not an integer from 0, an array has the wrong length, or there are more than `MAX_TOKENS`
            tokens.
    """

    max_sequence_length: int  # slots of a pack, in tokens (L)
    counts: IntArray  # int64 [L], the number of sequences of length 1 .. L
    max_masked: IntArray | None = None  # int64 [L], the largest number of masked positions at each length; None if unknown

    def __post_init__(self) -> None:
        check_integer("max_sequence_length", self.max_sequence_length, 1)
        for name in ("counts",) if self.max_masked is None else ("counts", "max_masked"):
            given = _convert_to_1d_array(getattr(self, name), name)
            wrong = find_index_of_invalid_integer(given, 0, _MOST_INT64) if _is_integer_array(given) else 0
            if wrong >= 0:
                raise InputError(
                    f"{name} contains {_format_entry(given, wrong)} for length {wrong + 1}; "
                    "counts must be non-negative integers"
                )
            array = given.astype(np.int64)  # a copy
            if len(array) != self.max_sequence_length:
                raise InputError(f"{name} has {len(array)} entries; expected {self.max_sequence_length}, one per length")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if sum(int(n) * length for length, n in enumerate(self.counts, start=1) if n) > MAX_TOKENS:
            raise InputError(f"the histogram contains more than {MAX_TOKENS} tokens; split the data into smaller parts")

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Number of non-padding tokens."""
        return int(self.counts @ np.arange(1, self.max_sequence_length + 1))

    @property
    def min_packs_by_tokens(self) -> int:
        """The total number of tokens divided by the pack length, rounded up. No packing can use fewer packs."""
        return -(-self.tokens // self.max_sequence_length)

    def max_masked_positions(self, length: int) -> int:
        """Return the largest number of masked positions in any sequence of this length, or 0 if it is unknown."""
        return 0 if self.max_masked is None else int(self.max_masked[length - 1])


def _convert_to_1d_array(values: Any, name: str) -> AnyArray:
    """Convert a list-like value to a one-dimensional numpy array that preserves every element exactly.

    Lists become int64 arrays if all elements are integers that fit, otherwise object arrays, because numpy could convert
    elements silently.

    Raises:
        ArgumentError: `values` is not a list-like collection, has more than one dimension, or contains masked entries.
    """
    if isinstance(values, np.ma.MaskedArray) and np.any(values.mask):  # np.asarray would drop the mask silently
        first = int(np.flatnonzero(values.mask)[0])
        raise ArgumentError(f"{name}[{first}] is masked; drop masked entries with `{name}.compressed()`")
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.ndim != 1:
            raise ArgumentError(f"{name} has the shape {array.shape}; pass a one-dimensional array of integers")
        return array
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} is {short_repr(values)}; pass a list or an array of integers")
    listed = list(values)
    if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in set(map(type, listed))):
        with suppress(OverflowError):
            return np.array(listed, np.int64)
    return np.fromiter(listed, object, len(listed))


def _is_integer_array(array: AnyArray) -> bool:
    """Return whether an array may contain integers, judging by its dtype. Object arrays are accepted, because their elements
    are checked later.
    """
    return array.dtype.kind in "iuO" or not array.size


def _format_entry(values: AnyArray, index: int) -> str:
    """Format one element of an array as a Python literal."""
    value = values[index]
    return short_repr(value.item() if isinstance(value, np.generic) else value)


def resize_histogram(histogram: Histogram, max_sequence_length: int) -> Histogram:
    """Return a histogram of the same sequences for packs of a different length.

    Raises:
        InputError: a sequence is longer than `max_sequence_length`.
    """
    longest = int(np.flatnonzero(histogram.counts)[-1]) + 1 if histogram.sequences else 0
    if longest > max_sequence_length:
        raise InputError(
            f"max_sequence_length is {max_sequence_length}, but the longest sequence has {longest} tokens; increase it"
        )

    def resize(values: IntArray) -> IntArray:
        """Return a copy of an array that is truncated to the new length or extended with zeros."""
        result = np.zeros(max_sequence_length, dtype=np.int64)
        common = min(len(values), max_sequence_length)
        result[:common] = values[:common]
        return result

    max_masked = histogram.max_masked
    return Histogram(max_sequence_length, resize(histogram.counts), max_masked if max_masked is None else resize(max_masked))


# --- validation of the lengths that users pass

# The maximum number of tokens in a row. A histogram has one counter per length, so longer rows would take too much memory.
MAX_ROW_LENGTH = 2**24


def validate_lengths(lengths: Any, max_sequence_length: int) -> AnyArray:
    """Validate the sequence lengths that a user passed, and return them as a uint16 or int32 array.

    Args:
        lengths: a list, an array or any iterable of integers.
        max_sequence_length: the largest length allowed, from 1 to `MAX_ROW_LENGTH`.

    Returns:
        uint16 or int32 [sequences], the smaller type that holds `max_sequence_length`.

    Raises:
        ArgumentError: a length is not an integer from 1 to `max_sequence_length`. The message names the first such index.
    """
    longest = check_integer("max_sequence_length", max_sequence_length, 1, MAX_ROW_LENGTH)
    values = _convert_to_1d_array(lengths, "lengths")
    wrong, is_integer = find_index_of_invalid_integer(values, 1, longest), _is_integer_array(values)
    if wrong >= 0 or not is_integer:
        index = max(wrong, 0)
        remedy = "truncate or split longer sequences, and drop empty ones" if is_integer else "use `lengths.astype(int)`"
        value = _format_entry(values, index) + ("" if is_integer else f", of type {values.dtype}")
        raise ArgumentError(
            f"lengths[{index}] is {value}; lengths must be integers from 1 to the row length, {longest}; {remedy}"
        )
    return values.astype(np.uint16 if longest < 2**16 else np.int32)


def count_lengths(lengths: AnyArray, max_sequence_length: int) -> Histogram:
    """Count sequence lengths that have already been validated, and return their histogram."""
    counts: IntArray = np.bincount(lengths, minlength=max_sequence_length + 1)[1:]
    return Histogram(max_sequence_length, counts)


# --- groups of files: each group is read once, held in memory, and packed on its own
#
# Packing all data at once would need memory in proportion to the data set, so files are divided into groups. Groups do not
# depend on each other, so any worker can process any group. Files are assigned by a seeded permutation of their sorted
# names, so that a group contains files from all parts of a corpus. From 100,000 sequences on, a group packs as well as all
# the data, to within about 0.0002 in efficiency.


class _SizedFile(Protocol):
    """A file, or a part of a file, with the sizes that limit how many files form a group. Each group of files is packed
    separately.
    """

    @property
    def name(self) -> str:
        """The path of the file, relative to the folder that contains the records."""

    @property
    def bytes(self) -> int: ...
    @property
    def sequences(self) -> int: ...


File = TypeVar("File", bound=_SizedFile)


def divide_files_into_groups(files: Sequence[File], group_sequences: int, group_bytes: int, seed: int) -> list[list[File]]:
    """Divide files into groups of nearly equal size. Every group is packed separately.

    Args:
        files: the files in any order.
        group_sequences: the maximum number of sequences per group.
        group_bytes: the maximum number of bytes per group.
        seed: the seed of the assignment.

    Returns:
        The groups, each sorted by file name. A file that exceeds a limit is a group of its own; `find_oversized_files` lists
            these files.
    """
    ordered = sorted(files, key=lambda file: file.name)
    shuffled = [ordered[index] for index in permutation(len(ordered), seed, "groups")]
    # A small last group would pack badly. Therefore find the smallest possible number of groups first, and then form that
    # many groups of similar size.
    fewest = _split_into_groups(shuffled, group_sequences, group_bytes, 1)
    even = _split_into_groups(shuffled, group_sequences, group_bytes, len(fewest))
    return [sorted(group, key=lambda file: file.name) for group in (even if len(even) == len(fewest) else fewest)]


def _split_into_groups(files: list[File], group_sequences: int, group_bytes: int, min_groups: int) -> list[list[File]]:
    """Divide a list of files into consecutive groups within the size limits. Form at least `min_groups` groups if there are
    enough files.
    """
    total = sum(file.sequences for file in files)
    groups: list[list[File]] = []
    sequences = size = seen = 0
    for file in files:
        full = sequences + file.sequences > group_sequences or size + file.bytes > group_bytes
        share_reached = len(groups) < min_groups and seen * min_groups >= total * len(groups)
        if not groups or full or share_reached:
            groups.append([])
            sequences = size = 0
        groups[-1].append(file)
        sequences, size, seen = sequences + file.sequences, size + file.bytes, seen + file.sequences
    return groups


def find_oversized_files(files: Sequence[File], group_sequences: int, group_bytes: int) -> list[File]:
    """Return the files that exceed the size limits of a group on their own."""
    return [file for file in files if file.sequences > group_sequences or file.bytes > group_bytes]


def build_group_histogram(counts_of_files: Iterable[IntArray], max_sequence_length: int) -> Histogram:
    """Build the histogram of a group of files, including the largest number of masked positions at each length.

    Args:
        counts_of_files: for each file int64 [pairs, 3] with the columns length, masked positions, number of sequences.
        max_sequence_length: slots of a pack, in tokens.
    """
    counts = np.zeros(max_sequence_length, dtype=np.int64)
    max_masked = np.zeros(max_sequence_length, dtype=np.int64)
    for rows in counts_of_files:
        lengths, masked, sequences = rows.T
        np.add.at(counts, lengths - 1, sequences)
        np.maximum.at(max_masked, lengths - 1, masked)
    return Histogram(max_sequence_length, counts, max_masked)
