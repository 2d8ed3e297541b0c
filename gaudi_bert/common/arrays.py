"""Names for the types of arrays, whose shape and unit a docstring states; and seeded permutations."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.errors import ArgumentError, shown

BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
Float32Array = NDArray[np.float32]
FloatArray = NDArray[np.float64]
Int32Array = NDArray[np.int32]
IntArray = NDArray[np.int64]
RowArray = NDArray[np.void]
"""Of rows with named fields (a structured type)."""
AnyArray = NDArray[Any]
"""Of any element type."""
BatchArrays = Mapping[str, Int32Array | Float32Array]
"""A batch on the host: each feature by its name."""
WeightArrays = Mapping[str, Float32Array]
"""The values of a model's variables by their names."""

# --- seeded permutations that never change with a library's version
#
# `numpy.random.Philox` is a counter-based bit generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
# whose raw output is fixed by its key. The key is the SHA-256 of (seed, purpose, indices); a permutation of n is the stable
# argsort of n raw 64-bit outputs. Library shuffles may change between versions; this definition cannot.


def philox(seed: int, purpose: str, *indices: int) -> np.random.Philox:
    """A bit generator keyed by `seed`, `purpose` and `indices` (any integers, e.g. the number of a group or an epoch)."""
    text = ":".join([str(int(seed)), purpose, *(str(int(index)) for index in indices)])
    key = np.frombuffer(hashlib.sha256(text.encode("utf-8")).digest()[:16], dtype="<u8")
    return np.random.Philox(key=key)


def random_words(count: int, seed: int, purpose: str, *indices: int) -> NDArray[np.uint64]:
    """`count` raw uint64 words."""
    return philox(seed, purpose, *indices).random_raw(count)


def permutation(
    count: int, seed: int, purpose: str, *indices: int, kind: type[np.signedinteger[Any]] = np.int64
) -> AnyArray:
    """A permutation of 0 .. count - 1, fixed for ever by its arguments; of int32, ten million numbers take 40 MB, not 80."""
    return _order_of_words(random_words(count, seed, purpose, *indices), kind)


_SORTED_AT_ONCE = 1 << 19


def _order_of_words(words: NDArray[np.uint64], kind: type[np.signedinteger[Any]]) -> AnyArray:
    """The stable argsort of uniform words; of many, those of one range after the other, for memory's sake."""
    ranges = min(words.size // _SORTED_AT_ONCE, 255).bit_length()
    if not ranges:
        return np.argsort(words, kind="stable").astype(kind, copy=False)
    range_of = words.astype("<u8", copy=False).view(np.uint8)[7::8] >> (8 - ranges)
    order, done = np.empty(words.size, kind), 0
    for number in range(1 << ranges):
        chosen = np.flatnonzero(range_of == number)
        order[done : done + chosen.size] = chosen[np.argsort(words[chosen], kind="stable")]
        done += chosen.size
    return order


def mixed_words(words: NDArray[np.uint64], counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A raw word for each pair of a word and a count: a function of both alone, by the mixing of splitmix64.

    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.)
    """
    mixed: NDArray[np.uint64] = words + (counts + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


# --- integers as others wrote them


def whole_number(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int; refused, by `name`, where it is something else (a truth value too) or out of range."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(f"{name} = {shown(value)}: an integer is needed")
    number = int(value)
    if least is not None and most is not None and not least <= number <= most:
        raise ArgumentError(f"{name} = {shown(number)}: {least} to {most} is allowed")
    if least is not None and number < least:
        raise ArgumentError(f"{name} = {shown(number)}: at least {least} is needed")
    return number


MOST_TOKEN_ID = 2**31 - 1
"""Of a token in a table: token ids are int32 wherever a model takes them."""
NOT_PREDICTED = -100
"""In labels and targets, where nothing is to be predicted."""


def first_not_whole(values: AnyArray, least: int, most: int) -> int:
    """Index of the first of `values` (one-dimensional) that is not an integer in `least` .. `most`; -1 where all are.

    Checked before numbers change their type: one that does not fit would wrap, and a truth value would count as 1.
    """
    kind = values.dtype.kind
    if kind == "O":
        wrong = np.fromiter((not is_whole(value, least, most) for value in values), np.bool_, values.size)
    elif kind in "iu" and (not values.size or (values.min() >= least and values.max() <= most)):
        return -1
    elif kind in "iuf":
        wrong = (values < least) | (values > most)
        wrong |= np.floor(values) != values if kind == "f" else False
    else:
        wrong = np.ones(values.size, np.bool_)
    return int(np.argmax(wrong)) if wrong.any() else -1


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether one value of Python or numpy is an integer in `least` .. `most`."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(least <= value <= most)
