"""Names for array types, seeded permutations, and checks of integers that users or files supply.

The type aliases state only the dtype. Docstrings state shapes and units. Permutations do not depend on the version of any
library. Integers are checked before they are converted to another dtype, because a conversion would wrap large values.
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
# An array of rows with named fields, which numpy calls a structured dtype.
RowArray = NDArray[np.void]
AnyArray = NDArray[Any]
# A batch in host memory, as a mapping from feature names to arrays.
BatchArrays = Mapping[str, Int32Array | Float32Array]
# The weights of a model, as a mapping from variable names to arrays.
WeightArrays = Mapping[str, Float32Array]

# --- seeded permutations that do not depend on the version of a library
#
# The shuffle functions of libraries may change between versions, which would change our artefacts. Here, a permutation of n
# numbers is the stable argsort of n raw 64-bit outputs of `numpy.random.Philox`. The output of this generator depends only
# on its key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The key is the start of the SHA-256 of the
# seed, the purpose and the indices.


def make_bit_generator(seed: int, purpose: str, *indices: int) -> np.random.Philox:
    """Return a numpy bit generator that produces the same random numbers whenever it gets the same arguments.

    Args:
        seed: The seed of the run.
        purpose: What the random numbers are for, so that different uses get independent numbers.
        *indices: Further integers, such as a group or epoch number.
    """
    text = ":".join([str(int(seed)), purpose, *(str(int(index)) for index in indices)])
    return np.random.Philox(key=np.frombuffer(hashlib.sha256(text.encode("utf-8")).digest()[:16], dtype="<u8"))


def draw_random_uint64(count: int, seed: int, purpose: str, *indices: int) -> NDArray[np.uint64]:
    """Return random 64-bit words, uint64 [count]. The same arguments always give the same words."""
    return make_bit_generator(seed, purpose, *indices).random_raw(count)


def permutation(
    count: int, seed: int, purpose: str, *indices: int, dtype: type[np.signedinteger[Any]] = np.int64
) -> AnyArray:
    """Return a random permutation of 0 .. count - 1. The same arguments always give the same permutation.

    Args:
        count: The number of elements.
        seed: The seed of the run.
        purpose: What the permutation is for, so that different uses get independent permutations.
        *indices: Further integers, such as a group or epoch number.
        dtype: The dtype of the result. With int32, ten million elements take 40 MB instead of 80 MB.
    """
    return _argsort_words(draw_random_uint64(count, seed, purpose, *indices), dtype)


# Sorting many random words at once would need several times their memory. If there are more words than this, they are sorted
# one range of values after another.
_SORTED_AT_ONCE = 1 << 19


def _argsort_words(words: NDArray[np.uint64], dtype: type[np.signedinteger[Any]]) -> AnyArray:
    """Return the stable argsort of uniformly distributed random words.

    Sorting many words at once would need several times their memory, so they are sorted one range of values after another.
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


def hash_words_with_counts(words: NDArray[np.uint64], counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each word together with its count, and return the 64-bit hashes.

    The words are computed with the mixing function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", 2014).
    """
    mixed: NDArray[np.uint64] = words + (counts + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


# --- checks of integers that users or files supply


def check_integer(name: str, value: object, min_value: int | None = None, max_value: int | None = None) -> int:
    """Check that `value` is an integer in the allowed range, and return it as an int.

    Args:
        name: The name of the argument, for the message.
        value: An int or a numpy integer. A bool is rejected.
        min_value: The smallest allowed value, or None for no limit.
        max_value: The largest allowed value, or None for no limit.

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


# The largest token id that is accepted. Models take token ids as int32.
MOST_TOKEN_ID = 2**31 - 1
# In a batch, this label or target marks a position that the model does not have to predict. The loss ignores it.
NOT_PREDICTED = -100


def find_index_of_invalid_integer(values: AnyArray, min_value: int, max_value: int) -> int:
    """Return the index of the first element that is not an integer in the given range, or -1 if there is none.

    Call this before the array is converted to another dtype, because a conversion would wrap large values and turn a bool
    into 0 or 1.

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
    """Return whether a Python or numpy value is an integer in the given range. Return False for a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(min_value <= value <= max_value)
