from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import add_packs, check_mixture, coverage, packs_of, sorted_mixture, trim_to_exact
from tests.builders.properties import examples

HISTOGRAM = Histogram(8, [0, 3, 1, 0, 2, 0, 0, 1], [0, 1, 1, 0, 2, 0, 0, 3])
PACKING = {(2, 5): 2, (2, 3): 1, (8,): 1}


def test_a_packing_passes() -> None:
    check_mixture(PACKING, HISTOGRAM, depth=2)
    check_mixture(PACKING, HISTOGRAM, depth=2, masked_slots=3)
    check_mixture({}, Histogram(8, [0] * 8), depth=1)


@pytest.mark.parametrize(
    ("change", "depth", "masked_slots", "message"),
    [
        ({(2, 5): 1}, 2, None, "length 2 has 2 slots for 3 sequences"),
        ({(2, 5): 3}, 2, None, "length 2 has 4 slots for 3 sequences"),
        ({(): 1}, 2, None, "is empty or not sorted"),
        ({(5, 2): 1}, 2, None, "is empty or not sorted"),
        ({(2, 3): 0}, 2, None, "is used 0 times"),
        ({}, 1, None, "holds 2 sequences, more than the depth 1"),
        ({(3, 8): 1}, 2, None, "holds 11 tokens, more than 8"),
        ({(0, 8): 1}, 2, None, "outside 1 .. 8"),
        ({}, 2, 2, "may hold 3 masked positions, more than the 2 slots"),
    ],
)
def test_what_is_no_packing_is_found(change: dict, depth: int, masked_slots: int | None, message: str) -> None:
    with pytest.raises(FailedError, match=message):
        check_mixture({**PACKING, **change}, HISTOGRAM, depth, masked_slots)


def test_adding_sorts_and_ignores_none() -> None:
    mixture: dict = {}
    add_packs(mixture, (3, 1, 2), 2)
    add_packs(mixture, (1, 2, 3), 1)
    add_packs(mixture, (9,), 0)
    assert mixture == {(1, 2, 3): 3}
    assert packs_of(mixture) == 3


def test_trimming_drops_whole_packs_before_slots() -> None:
    # Two sequences of 1 and one of 7 too many: one pack (1, 7) goes as a whole, one slot of 1 is given up.
    trimmed = trim_to_exact({(1, 7): 3, (8,): 1}, np.array([1, 0, 0, 0, 0, 0, 2, 1]))
    assert trimmed == {(1, 7): 1, (7,): 1, (8,): 1}


def test_trimming_takes_several_slots_of_one_pack() -> None:
    assert trim_to_exact({(1, 1, 1, 5): 2}, np.array([1, 0, 0, 0, 2, 0, 0, 0])) == {(5,): 1, (1, 5): 1}


def test_trimming_leaves_no_empty_pack() -> None:
    assert trim_to_exact({(1,): 4, (2,): 1}, np.array([0, 1])) == {(2,): 1}
    assert trim_to_exact({}, np.array([0, 0])) == {}


def test_trimming_refuses_a_shortage() -> None:
    with pytest.raises(InputError, match="length 2 has 1 slots too few"):
        trim_to_exact({(1, 1): 1}, np.array([2, 1]))


@given(data=st.data())
@examples(150)
def test_trimming_is_exact_and_never_adds_packs(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 9))
    strategies = st.lists(st.integers(1, capacity), min_size=1, max_size=5).map(lambda lengths: tuple(sorted(lengths)))
    mixture = data.draw(st.dictionaries(strategies, st.integers(1, 5), max_size=6))
    slots = coverage(mixture, capacity)
    counts = np.array([data.draw(st.integers(0, int(slot))) for slot in slots], dtype=np.int64)
    for whole_packs in (True, False):
        trimmed = trim_to_exact(mixture, counts, whole_packs=whole_packs)
        assert coverage(trimmed, capacity).tolist() == counts.tolist()
        assert packs_of(trimmed) <= packs_of(mixture)
        assert all(strategy and count > 0 for strategy, count in trimmed.items())
        assert list(trimmed) == list(sorted_mixture(trimmed))
        by_strategy = max(map(len, mixture), default=0)
        assert max(map(len, trimmed), default=0) <= by_strategy
