"""How many sequences there are of each length: all that a packing algorithm needs to know of a data set.

Packing works on the histogram of lengths instead of on the sequences (paper F.2), so its cost depends on the maximum length
and not on the size of the data. `counts[0]` is the number of sequences of length 1. Beside the counts, `max_masked` holds
the most masked positions seen at each length: with it a plan can promise that no pack holds more of them than it has slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError

__all__ = ["MAX_TOKENS", "Histogram", "merge_histograms", "rescaled", "whole_numbers"]

MAX_TOKENS = 2**62  # so that every sum of tokens and every product in the certificate fits int64


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts per length, checked on creation.

    Attributes:
        max_sequence_length: capacity of a pack in tokens (L).
        counts: int64 [L], number of sequences of length 1 .. L.
        max_masked: int64 [L], most masked positions of any sequence of that length, or None where the data did not say.
    """

    max_sequence_length: int
    counts: IntArray
    max_masked: IntArray | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_sequence_length, bool) or not isinstance(self.max_sequence_length, (int, np.integer)):
            raise InputError(f"max_sequence_length is {self.max_sequence_length!r}; it must be a whole number from 1")
        if self.max_sequence_length < 1:
            raise InputError(f"max_sequence_length is {self.max_sequence_length}; it must be at least 1")
        for name in ("counts", "max_masked"):
            value = getattr(self, name)
            if name == "max_masked" and value is None:
                continue
            array = whole_numbers(value, name)
            if len(array) != self.max_sequence_length:
                raise InputError(
                    f"{name} has {len(array)} entries; it must have one for each length 1 .. {self.max_sequence_length}"
                )
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

    def masked_of(self, length: int) -> int:
        """Most masked positions of a sequence of `length`; 0 where the data did not say."""
        return 0 if self.max_masked is None else int(self.max_masked[length - 1])


def whole_numbers(values: Any, name: str) -> IntArray:
    """`values` as a new int64 array, refusing fractions, negative numbers, and what does not fit.

    Raises:
        InputError: with the first entry at fault; entry 0 is length 1.
    """
    if isinstance(values, (str, bytes, Mapping)) or np.ndim(values) != 1:
        raise InputError(f"{name} must be a list of whole numbers, one for each length")
    if isinstance(values, np.ndarray) and values.dtype.kind == "i":
        numbers = values.astype(np.int64)
    else:
        for length, value in enumerate(values, start=1):
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not whole or abs(value) >= 2**63:
                raise InputError(f"{name} holds {value!r} at length {length}; it must be a whole number from 0")
        numbers = np.asarray([int(value) for value in values], dtype=np.int64)
    if numbers.size and int(numbers.min()) < 0:
        length = int(np.argmax(numbers < 0)) + 1
        raise InputError(f"{name} holds {numbers[length - 1]} at length {length}; it must be 0 or more")
    return numbers


def merge_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """The histogram of all the sequences together.

    Raises:
        InputError: nothing to merge, or the maximum sequence lengths differ.
    """
    parts = list(histograms)
    if not parts:
        raise InputError("there is no histogram to merge; give at least one")
    lengths = sorted({part.max_sequence_length for part in parts})
    if len(lengths) > 1:
        raise InputError(f"histograms of different max_sequence_length cannot be merged: {', '.join(map(str, lengths))}")
    masked = [part.max_masked for part in parts if part.max_masked is not None]
    return Histogram(
        lengths[0],
        np.sum([part.counts for part in parts], axis=0, dtype=np.int64),
        np.max(masked, axis=0) if len(masked) == len(parts) else None,
    )


def rescaled(histogram: Histogram, max_sequence_length: int) -> Histogram:
    """The same sequences in packs of another capacity (paper Q).

    Raises:
        InputError: a sequence is longer than the new capacity.
    """
    longest = int(np.flatnonzero(histogram.counts)[-1]) + 1 if histogram.sequences else 0
    if longest > max_sequence_length:
        raise InputError(f"max_sequence_length {max_sequence_length} is less than the longest sequence, {longest} tokens")

    def resized(values: IntArray) -> IntArray:
        result = np.zeros(max_sequence_length, dtype=np.int64)
        kept = min(len(values), max_sequence_length)
        result[:kept] = values[:kept]
        return result

    masked = None if histogram.max_masked is None else resized(histogram.max_masked)
    return Histogram(max_sequence_length, resized(histogram.counts), masked)
