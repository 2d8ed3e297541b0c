"""Lengths and counts: what is accepted, named or refused; histograms merged, rescaled and divided into groups."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import ArgumentError, InputError
from gaudi_bert.packing.histogram import (
    Histogram,
    build_group_histogram,
    count_lengths,
    divide_files_into_groups,
    resize_histogram,
    validate_lengths,
)
from tests.builders.properties import examples


@pytest.mark.parametrize(
    ("length", "counts", "message"),
    [
        (3, [1, 2], "counts has 2 entries"),
        (3, [1, -2, 0], "counts .*-2 .*length 2"),
        (3, [True, 2, 0], "counts .*True .*length 1"),
        (2, np.ma.array([1, 2], mask=[True, False]), r"counts\[0\] is masked"),
        (3, [1, 2**63, 0], "for length 2; counts must be non-negative integers"),
        (2, [2**61, 2**61], "tokens"),
        (2, np.ones((2, 1), int), r"\(2, 1\)"),
        (0, [], "max_sequence_length = 0"),
    ],
)
def test_bad_values_are_named(length: object, counts: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Histogram(length, counts)  # type: ignore[arg-type]


def test_other_capacity_keeps_the_sequences() -> None:
    histogram = Histogram(4, [1, 2, 3, 0], [0, 1, 1, 0])
    assert resize_histogram(histogram, 6).counts.tolist() == [1, 2, 3, 0, 0, 0]
    assert resize_histogram(histogram, 3).tokens == histogram.tokens
    with pytest.raises(InputError, match=r"max_sequence_length .*\b2\b.*\b3 tokens"):
        resize_histogram(histogram, 2)
    assert resize_histogram(Histogram(4, [0] * 4), 2).sequences == 0


NUMBERS = [3, 1, 8, 8]


@pytest.mark.parametrize(
    "lengths",
    [
        NUMBERS,
        tuple(NUMBERS),
        iter(NUMBERS),
        [np.int8(3), 1, np.uint64(8), 8],
        *(np.array(NUMBERS, dtype) for dtype in ("int8", "uint16", "int64", "uint64", object)),
        np.array([NUMBERS, NUMBERS]).T[:, 0],
        np.array(NUMBERS, ">i4"),
    ],
)
def test_whatever_holds_whole_numbers(lengths) -> None:
    checked = validate_lengths(lengths, 8)
    assert checked.tolist() == NUMBERS
    assert checked.dtype == np.uint16
    assert count_lengths(checked, 8).counts.tolist() == [1, 0, 1, 0, 0, 0, 0, 2]


def test_long_rows_have_room_for_their_lengths() -> None:
    assert validate_lengths([70_000, 65_536], 70_000).tolist() == [70_000, 65_536]
    assert validate_lengths([65_535], 65_535).tolist() == [65_535]


@pytest.mark.parametrize(
    ("lengths", "index_and_value"),
    [
        pytest.param([3, 0, 8], "lengths[1] is 0;", id="zero"),
        pytest.param(np.array([3, 8, -2], np.int8), "lengths[2] is -2;", id="negative in an array"),
        pytest.param([3, 9], "lengths[1] is 9;", id="too long"),
        pytest.param([3, 2**70], "lengths[1] is 1180591620717411303424;", id="too large for any type"),
        pytest.param(np.array([3, 2**64 - 1], np.uint64), "lengths[1] is 18446744073709551615;", id="wraps"),
        pytest.param(np.array([3.0, np.nan]), "lengths[1] is nan, of type float64;", id="NaN"),
        pytest.param([3, 2.0], "lengths[1] is 2.0;", id="float in a list"),
        pytest.param(np.array([True, False]), "lengths[0] is True, of type bool;", id="truth values"),
        pytest.param(np.array([3, None]), "lengths[1] is None;", id="null in an array"),
    ],
)
def test_bad_lengths_are_named(lengths: object, index_and_value: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(index_and_value)):
        validate_lengths(lengths, 8)


# --- groups of files


def file(number: int, sequences: int, size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(name=f"part-{number:05d}.tfrecord", bytes=size, sequences=sequences)


def test_groups_are_even_and_depend_on_the_seed() -> None:
    files = [file(number, 50) for number in range(21)]
    groups = divide_files_into_groups(files, 500, 10**9, seed=1)
    assert [len(group) for group in groups] == [7, 7, 7]
    assert groups == divide_files_into_groups(files[::-1], 500, 10**9, seed=1)
    assert groups != divide_files_into_groups(files, 500, 10**9, seed=2)
    assert groups[0] != files[:7]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=30),
    limits=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    seed=st.integers(0, 5),
)
@examples(200)
def test_every_file_once_and_limits_kept(sizes: list[tuple[int, int]], limits: tuple[int, int], seed: int) -> None:
    files = [file(number, sequences, size) for number, (sequences, size) in enumerate(sizes)]
    groups = divide_files_into_groups(files, *limits, seed)
    assert sorted((one for group in groups for one in group), key=lambda one: one.name) == files
    for group in groups:
        assert group
        within = sum(one.sequences for one in group) <= limits[0] and sum(one.bytes for one in group) <= limits[1]
        assert within or len(group) == 1 or all(one.sequences == 0 for one in group[1:])


def test_histogram_of_a_group() -> None:
    rows = (((2, 1, 5), (4, 1, 2), (4, 3, 1)), ((4, 2, 1),))
    histogram = build_group_histogram([np.array(counts) for counts in rows], 5)
    assert histogram.counts.tolist() == [0, 5, 0, 4, 0]
    assert histogram.max_masked is not None
    assert histogram.max_masked.tolist() == [0, 1, 0, 3, 0]
    assert build_group_histogram([], 2).counts.dtype == np.int64
