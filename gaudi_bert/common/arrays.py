"""Names for array types, seeded permutations, and checks of integers that users or files supply.

The type aliases say only the dtype; docstrings state shapes and units. Permutations are defined so that they never change
with a library version. The integer checks run before any conversion, because a conversion would wrap values that do not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.errors import ArgumentError, short_repr

BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
Float32Array = NDArray[np.float32]
FloatArray = NDArray[np.float64]
Int32Array = NDArray[np.int32]
IntArray = NDArray[np.int64]
RowArray = NDArray[np.void]
"""Rows with named fields (a structured dtype)."""
AnyArray = NDArray[Any]
"""An array of any dtype."""
BatchArrays = Mapping[str, Int32Array | Float32Array]
"""A batch on the host: the array of each feature, by name."""
WeightArrays = Mapping[str, Float32Array]
"""The values of the variables of a model, by name."""

# --- seeded permutations that never change with a library version
#
# Shuffle functions of libraries may change between versions, which would change artefacts. Here, a permutation of n is the
# stable argsort of n raw 64-bit outputs of `numpy.random.Philox`. This counter-based generator (Salmon et al., "Parallel
# random numbers: as easy as 1, 2, 3", 2011) is fully determined by its key, which is the SHA-256 of (seed, purpose,
# indices).


def philox(seed: int, purpose: str, *indices: int) -> np.random.Philox:
    """Return a bit generator keyed by a seed, a purpose and further integers, such as a group or epoch number."""
    text = ":".join([str(int(seed)), purpose, *(str(int(index)) for index in indices)])
    key = np.frombuffer(hashlib.sha256(text.encode("utf-8")).digest()[:16], dtype="<u8")
    return np.random.Philox(key=key)


def random_words(count: int, seed: int, purpose: str, *indices: int) -> NDArray[np.uint64]:
    """Return `count` random words, uint64 [count], for this seed, purpose and indices."""
    return philox(seed, purpose, *indices).random_raw(count)


def permutation(
    count: int, seed: int, purpose: str, *indices: int, dtype: type[np.signedinteger[Any]] = np.int64
) -> AnyArray:
    """Return a permutation of 0 .. count - 1 that depends only on the seed, the purpose and the indices.

    Args:
        count: The number of elements.
        seed: The seed of the run.
        purpose: What the permutation is for, so that different uses get independent permutations.
        indices: Further integers, such as a group or epoch number.
        dtype: The dtype of the result. With int32, ten million elements take 40 MB instead of 80 MB.
    """
    return _argsort_words(random_words(count, seed, purpose, *indices), dtype)


_SORTED_AT_ONCE = 1 << 19
"""More words than this are sorted in several ranges."""


def _argsort_words(words: NDArray[np.uint64], dtype: type[np.signedinteger[Any]]) -> AnyArray:
    """Return the stable argsort of uniformly distributed words.

    Sorting many words at once would take several times their memory, so they are sorted one range of values after the other.
    """
    ranges = min(words.size // _SORTED_AT_ONCE, 255).bit_length()
    if not ranges:
        return np.argsort(words, kind="stable").astype(dtype, copy=False)
    range_of = words.astype("<u8", copy=False).view(np.uint8)[7::8] >> (8 - ranges)
    order, done = np.empty(words.size, dtype), 0
    for number in range(1 << ranges):
        chosen = np.flatnonzero(range_of == number)
        order[done : done + chosen.size] = chosen[np.argsort(words[chosen], kind="stable")]
        done += chosen.size
    return order


def mix_words_with_counts(words: NDArray[np.uint64], counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a pseudorandom word for each pair of a word and a count, uint64, by the mixing function of splitmix64.

    The result depends only on the pair (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mixed: NDArray[np.uint64] = words + (counts + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


# --- checks of integers that users or files supply


def check_integer(name: str, value: object, min_value: int | None = None, max_value: int | None = None) -> int:
    """Return `value` as an int, after checking that it is an integer in the allowed range.

    Args:
        name: The name of the argument, for the message.
        value: An int or a numpy integer. A bool is rejected.
        min_value: The smallest allowed value, or None.
        max_value: The largest allowed value, or None.

    Raises:
        ArgumentError: `value` is not an integer or is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(f"{name} = {short_repr(value)}: must be an integer")
    number = int(value)
    if min_value is not None and max_value is not None and not min_value <= number <= max_value:
        raise ArgumentError(f"{name} = {short_repr(number)}: must be from {min_value} to {max_value}")
    if min_value is not None and number < min_value:
        raise ArgumentError(f"{name} = {short_repr(number)}: must be at least {min_value}")
    return number


MOST_TOKEN_ID = 2**31 - 1
"""The largest token id in a table. Models take token ids as int32."""
NOT_PREDICTED = -100
"""The label or target of a position at which nothing is predicted."""


def find_non_integer(values: AnyArray, min_value: int, max_value: int) -> int:
    """Return the index of the first element that is not an integer in the range, or -1 if all are.

    Call this before converting the array, because values that do not fit would wrap and a bool would count as 1.

    Args:
        values: An array of one dimension and any dtype.
        min_value: The smallest allowed value.
        max_value: The largest allowed value.
    """
    kind = values.dtype.kind
    if kind == "O":
        wrong = np.fromiter(
            (not is_integer_in_range(value, min_value, max_value) for value in values), np.bool_, values.size
        )
    elif kind in "iu" and (not values.size or (values.min() >= min_value and values.max() <= max_value)):
        return -1
    elif kind in "iuf":
        wrong = (values < min_value) | (values > max_value)
        wrong |= np.floor(values) != values if kind == "f" else False
    else:
        wrong = np.ones(values.size, np.bool_)
    return int(np.argmax(wrong)) if wrong.any() else -1


def is_integer_in_range(value: Any, min_value: int, max_value: int) -> bool:
    """Return whether a single Python or numpy value is an integer in the range; a bool is not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(min_value <= value <= max_value)
