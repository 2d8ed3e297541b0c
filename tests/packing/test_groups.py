from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.groups import form_groups, group_histogram, too_large_files
from tests.builders.properties import examples


class File(NamedTuple):
    name: str
    bytes: int
    sequences: int


def file(number: int, sequences: int, size: int = 1) -> File:
    return File(f"part-{number:05d}.tfrecord", size, sequences)


def test_a_small_data_set_is_one_group() -> None:
    files = [file(number, 10) for number in range(5)]
    assert form_groups(list(reversed(files)), 500, 500, seed=1) == [files]


def test_groups_are_even_and_depend_on_the_seed() -> None:
    files = [file(number, 50) for number in range(21)]
    groups = form_groups(files, 500, 10**9, seed=1)
    assert [len(group) for group in groups] == [7, 7, 7]
    assert groups == form_groups(files[::-1], 500, 10**9, seed=1)
    assert groups != form_groups(files, 500, 10**9, seed=2)
    assert groups[0] != files[:7]


def test_a_larger_file_is_a_group_of_its_own() -> None:
    files = [file(0, 10), file(1, 900), file(2, 10), file(3, 1, size=99)]
    groups = form_groups(files, 100, 50, seed=3)
    assert [files[1]] in groups
    assert [files[3]] in groups
    assert too_large_files(files, 100, 50) == [files[1], files[3]]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=30),
    limits=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    seed=st.integers(0, 5),
)
@examples(200)
def test_every_file_once_and_limits_kept(sizes: list[tuple[int, int]], limits: tuple[int, int], seed: int) -> None:
    files = [file(number, sequences, size) for number, (sequences, size) in enumerate(sizes)]
    groups = form_groups(files, *limits, seed)
    assert sorted((one for group in groups for one in group), key=lambda one: one.name) == files
    for group in groups:
        assert group
        within = sum(one.sequences for one in group) <= limits[0] and sum(one.bytes for one in group) <= limits[1]
        assert within or len(group) == 1 or all(one.sequences == 0 for one in group[1:])


def test_histogram_of_a_group() -> None:
    rows = (((2, 1, 5), (4, 1, 2), (4, 3, 1)), ((4, 2, 1),))
    histogram = group_histogram([np.array(counts) for counts in rows], 5)
    assert histogram.counts.tolist() == [0, 5, 0, 4, 0]
    assert histogram.max_masked is not None
    assert histogram.max_masked.tolist() == [0, 1, 0, 3, 0]
    assert group_histogram([], 2).counts.dtype == np.int64
