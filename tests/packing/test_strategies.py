"""Mixtures: a packing that is proven, trimmed or filled; and how a limit of work is shared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import FailedError
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.strategies import (
    OperationBudget,
    check_packing,
    count_packs,
    count_slots,
    create_budget_for_estimates,
    drop_surplus_slots,
    fill_planned_packs_with_sequences,
    sort_strategies,
)
from tests.builders.properties import examples

HISTOGRAM = Histogram(8, [0, 3, 1, 0, 2, 0, 0, 1], [0, 1, 1, 0, 2, 0, 0, 3])
PACKING = {(2, 5): 2, (2, 3): 1, (8,): 1}


@pytest.mark.parametrize(
    ("change", "depth", "masked_slots", "message"),
    [
        ({(2, 5): 1}, 2, None, "length 2 .*2 slots .*3 sequences"),
        ({(): 1}, 2, None, "is empty or not sorted"),
        ({(5, 2): 1}, 2, None, "is empty or not sorted"),
        ({(2, 3): 0}, 2, None, "is used 0 times"),
        ({}, 1, None, "2 sequences.*depth 1"),
        ({(3, 8): 1}, 2, None, "11 tokens.* 8"),
        ({(0, 8): 1}, 2, None, "outside 1 to 8"),
        ({}, 2, 2, "3 masked .*2 masked slots"),
    ],
)
def test_what_is_no_packing_is_found(change: dict, depth: int, masked_slots: int | None, message: str) -> None:
    with pytest.raises(FailedError, match=message):
        check_packing({**PACKING, **change}, HISTOGRAM, depth, masked_slots)


@pytest.mark.parametrize(
    ("strategy_counts", "counts", "trimmed"),
    [
        # Two sequences of 1 and one of 7 too many: one pack (1, 7) goes completely, one slot of 1 is given up.
        ({(1, 7): 3, (8,): 1}, [1, 0, 0, 0, 0, 0, 2, 1], {(1, 7): 1, (7,): 1, (8,): 1}),
        ({(1, 1, 1, 5): 2}, [1, 0, 0, 0, 2, 0, 0, 0], {(5,): 1, (1, 5): 1}),  # several slots of one pack
    ],
)
def test_trimming(strategy_counts: dict, counts: list[int], trimmed: dict) -> None:
    assert drop_surplus_slots(strategy_counts, np.array(counts)) == trimmed


@given(data=st.data())
@examples(150)
def test_trimming_is_exact_and_never_adds_packs(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 9))
    strategies = st.lists(st.integers(1, capacity), min_size=1, max_size=5).map(lambda lengths: tuple(sorted(lengths)))
    strategy_counts = data.draw(st.dictionaries(strategies, st.integers(1, 5), max_size=6))
    slots = count_slots(strategy_counts, capacity)
    counts = np.array([data.draw(st.integers(0, int(slot))) for slot in slots], dtype=np.int64)
    for whole_packs in (True, False):
        trimmed = drop_surplus_slots(strategy_counts, counts, drop_whole_packs=whole_packs)
        assert count_slots(trimmed, capacity).tolist() == counts.tolist()
        assert count_packs(trimmed) <= count_packs(strategy_counts)
        assert all(strategy and count > 0 for strategy, count in trimmed.items())
        assert list(trimmed) == list(sort_strategies(trimmed))
        assert max(map(len, trimmed), default=0) <= max(map(len, strategy_counts), default=0)


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
@examples(50)
def test_settled_slots_cover_exactly(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, 30, 17)
    strategy_counts = pack_longest_first(slots, depth)
    counts = np.zeros(17, dtype=np.int64)
    for length in np.repeat(np.arange(1, 18), slots).tolist():
        shorter = int(rng.integers(0, length + 1))
        if shorter:
            counts[shorter - 1] += 1
    settled = fill_planned_packs_with_sequences(strategy_counts, counts)
    check_packing(settled, Histogram(17, counts), depth)
    assert count_packs(settled) <= count_packs(strategy_counts)


def test_a_share_is_spent_from_the_whole() -> None:
    whole = OperationBudget(100.0)
    part = whole.take_fraction(0.25)
    part.spend(30.0)
    assert (part.remaining, part.is_exhausted, whole.remaining, whole.is_exhausted) == (-5.0, True, 70.0, False)


def test_rows_of_an_estimate_share_a_limit_where_packs_are_long() -> None:
    limits = [create_budget_for_estimates(length) for length in (512, 1024, 1025, 2048, 4097, 32_768)]
    assert [limit and limit.remaining for limit in limits] == [None, None, 180e9, 180e9, 40e9, 40e9]
