"""Seeded permutations, and numbers that fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.arrays import draw_random_uint64, find_index_of_invalid_integer, permutation
from tests.builders.properties import examples


@given(count=st.integers(0, 997), seed=st.integers(-(2**70), 2**70), index=st.integers(0, 2**40))
@examples(100)
def test_it_is_a_permutation(count: int, seed: int, index: int) -> None:
    assert sorted(permutation(count, seed, "test", index)) == list(range(count))


def test_it_never_changes_and_purpose_seed_and_indices_all_matter() -> None:
    assert permutation(11, 12345, "packs", 0).tolist() == [8, 2, 5, 9, 6, 0, 7, 10, 4, 1, 3]
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a", 0, 1), (1, "a", 1, 0)]
    assert len({tuple(draw_random_uint64(4, *key).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize("count", [0, 1, 524_287, 524_288, 1_300_001])
def test_a_large_permutation_is_sorted_range_by_range_and_the_same(count: int) -> None:
    plain = np.argsort(draw_random_uint64(count, 5, "large", 2), kind="stable")
    for kind in (np.int32, np.int64):
        sorted_words = permutation(count, 5, "large", 2, dtype=kind)
        assert sorted_words.dtype == kind
        assert np.array_equal(sorted_words, plain)


NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([7, -7, 2**31, 2**32 + 7, 2**40, 2**63 - 1, -(2**63)]))


@given(values=st.lists(NUMBERS, max_size=9), kind=st.sampled_from(["i8", "i4", "u4", "u8", "f4", "f8", "O"]))
@examples(100)
def test_the_first_number_that_would_wrap_is_found(values: list[int], kind: str) -> None:
    fitting = [value for value in values if kind[0] in "fO" or np.iinfo(kind).min <= value <= np.iinfo(kind).max]
    array = np.array(fitting, kind)
    held = [int(value) for value in array]  # what a narrow float made of it
    wrong = [index for index, value in enumerate(held) if not -2 <= value <= 7]
    assert find_index_of_invalid_integer(array, -2, 7) == (wrong[0] if wrong else -1)


@pytest.mark.parametrize(
    "values",
    [
        *(np.array([1, wrong], object) for wrong in (True, 2.0, 2**64, None, "2")),
        *(np.array([1, wrong]) for wrong in (1.5, np.nan)),
        np.array([1, np.inf], np.float32),
        np.array([1, 2**64 - 1], np.uint64),
    ],
)
def test_what_is_no_number_or_does_not_fit_is_found(values: np.ndarray) -> None:
    assert find_index_of_invalid_integer(values, 0, 2**31 - 1) == 1
    for kind in ("?", "U3", "M8[s]", "c8"):  # which hold no whole numbers
        assert [find_index_of_invalid_integer(np.zeros(size, kind), 0, 7) for size in (2, 0)] == [0, -1]
