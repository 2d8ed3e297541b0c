"""Lengths as users have them (lists, arrays of any kind, columns) as one checked array, and how many there are of each.

Whatever cannot be a length is refused by its index and its value before anything is packed: a float that is whole may be
a length, but an array of floats is more often a column that holds nulls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray
from gaudi_bert.common.errors import ArgumentError, shown
from gaudi_bert.packing.histogram import Histogram

__all__ = ["checked_lengths", "histogram_of", "whole_number"]

MOST_SLOTS = 2**24
"""The longest row; a histogram has a counter for each length."""


def whole_number(value: Any, name: str, least: int, most: int | None = None) -> int:
    """`value` as a whole number.

    Raises:
        ArgumentError: it is none, or outside `least` .. `most`.
    """
    wanted = f"a whole number from {least}" + (f" to {most}" if most is not None else "")
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name} is {shown(value)}; it must be {wanted}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        raise ArgumentError(f"{name} is {shown(number)}; it must be {wanted}")
    return number


def checked_lengths(lengths: Any, max_sequence_length: int, name: str = "lengths") -> AnyArray:
    """The lengths as uint16 or int32 [sequences], whichever holds the longest.

    Args:
        lengths: anything one-dimensional that holds whole numbers: an array, a list, a column, an iterable.
        max_sequence_length: tokens in a pack, which no length may exceed.
        name: how errors call `lengths`.

    Raises:
        ArgumentError: there is none, or one is no whole number from 1 to `max_sequence_length`; with its index and value.
    """
    longest = whole_number(max_sequence_length, "max_sequence_length", 1, MOST_SLOTS)
    values = _as_array(lengths, longest, name)
    if values.ndim != 1:
        raise ArgumentError(
            f"{name} has {values.ndim} dimensions, shape {values.shape}; it must have one, with a whole number per sequence"
        )
    if values.size == 0:
        raise ArgumentError(f"{name} is empty; give the length of at least one sequence")
    if values.dtype.kind not in "iu":
        raise _not_whole(values, longest, name)
    if int(values.min()) < 1 or int(values.max()) > longest:
        index = int(np.argmax((values < 1) | (values > longest)))
        raise _outside(int(values[index]), index, longest, name)
    return values.astype(np.uint16 if longest < 2**16 else np.int32)


def histogram_of(lengths: AnyArray, max_sequence_length: int) -> Histogram:
    """How many of the checked lengths there are of each."""
    counts: IntArray = np.bincount(lengths, minlength=max_sequence_length + 1)[1:]
    return Histogram(max_sequence_length, counts)


def _as_array(lengths: Any, longest: int, name: str) -> AnyArray:
    """`lengths` as an array of whatever they hold."""
    if hasattr(lengths, "__array__"):
        array = np.asarray(lengths)
        if array.dtype.kind != "O":
            return array
        lengths = array.tolist()
    if isinstance(lengths, (str, bytes, Mapping)) or not isinstance(lengths, Iterable):
        raise ArgumentError(f"{name} is {shown(lengths)}; it must be a list or an array with a whole number per sequence")
    values = list(lengths)
    for kind in set(map(type, values)):
        if issubclass(kind, bool) or not issubclass(kind, (int, np.integer)):
            index = list(map(type, values)).index(kind)
            raise ArgumentError(f"{name}[{index}] is {shown(values[index])}; {_wanted(longest)}")
    if values and (min(values) < 1 or max(values) > longest):
        index = next(index for index, value in enumerate(values) if not 1 <= value <= longest)
        raise _outside(int(values[index]), index, longest, name)
    return np.array(values, dtype=np.int64)


def _not_whole(values: AnyArray, longest: int, name: str) -> ArgumentError:
    """What to say of an array of floats, truth values, text, dates."""
    index, remedy = 0, _wanted(longest)
    if values.dtype.kind == "f":
        broken = np.flatnonzero(~np.isfinite(values) | (values != np.floor(values)))
        if broken.size:
            index = int(broken[0])
        else:
            remedy += f", of a type for them: `{name}.astype(int)`"
    return ArgumentError(f"{name}[{index}] is {shown(values[index].item())}, of type {values.dtype}; {remedy}")


def _outside(value: int, index: int, longest: int, name: str) -> ArgumentError:
    if value < 1:
        return ArgumentError(f"{name}[{index}] is {shown(value)}; {_wanted(longest)}: leave empty sequences out")
    return ArgumentError(
        f"{name}[{index}] is {shown(value)}, longer than max_sequence_length {longest}; cut it, split it or leave it out, or"
        " give longer rows"
    )


def _wanted(longest: int) -> str:
    return f"a length must be a whole number from 1 to {longest}"
