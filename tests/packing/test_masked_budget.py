from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.masked_budget import (
    budget_costs,
    choose_masked_slots,
    fit_to_budget,
    least_masked_slots,
    needed_masked_slots,
    smaller_budgets,
)
from gaudi_bert.packing.mixture import check_mixture, packs_of
from tests.builders.histograms import small_histograms
from tests.builders.properties import examples

# Lengths 1 .. 8; a sequence of 4 has up to 3 masked positions, one of 2 up to 1, one of 8 up to 3.
HISTOGRAM = Histogram(8, [0, 4, 0, 4, 0, 0, 0, 1], [0, 1, 0, 3, 0, 0, 0, 3])
PACKING = {(4, 4): 2, (2, 2, 2, 2): 1, (8,): 1}


def test_what_is_needed_and_what_is_least() -> None:
    assert needed_masked_slots(PACKING, HISTOGRAM) == 6
    assert least_masked_slots(HISTOGRAM) == 3
    unknown = Histogram(8, HISTOGRAM.counts)
    assert needed_masked_slots(PACKING, unknown) is None
    assert fit_to_budget(PACKING, unknown, 4, 1) == PACKING


def test_default_budget() -> None:
    assert choose_masked_slots(20, 3, 21) == 23
    assert choose_masked_slots(20, 3, 30) == 30
    assert choose_masked_slots(20, 3, None) == 23
    assert choose_masked_slots(None, 3, None) is None


def test_strategies_over_the_budget_are_packed_again() -> None:
    # With 5 slots two sequences of 4 no longer go together: each of the four stands alone.
    assert fit_to_budget(PACKING, HISTOGRAM, 4, 5) == {(4,): 4, (2, 2, 2, 2): 1, (8,): 1}
    assert fit_to_budget(PACKING, HISTOGRAM, 4, 6) == PACKING


def test_a_budget_below_one_sequence_is_refused_with_the_number() -> None:
    with pytest.raises(InputError, match=r"masked_slots is 2, but one sequence alone has up to 3 .* give at least 3"):
        fit_to_budget(PACKING, HISTOGRAM, 4, 2)


def test_costs_of_smaller_budgets() -> None:
    assert budget_costs([(PACKING, HISTOGRAM)], 4, smaller_budgets(3, 6)) == {5: 6, 4: 6, 3: 7}
    assert smaller_budgets(3, 3) == []
    assert smaller_budgets(20, 120) == [119, 86, 53, 20]


@given(histogram=small_histograms(), depth=st.integers(1, 5), data=st.data())
@examples(150)
def test_every_budget_is_kept(histogram: Histogram, depth: int, data: st.DataObject) -> None:
    masked = np.array([data.draw(st.integers(0, length)) for length in range(1, histogram.max_sequence_length + 1)])
    histogram = Histogram(histogram.max_sequence_length, histogram.counts, masked)
    mixture = pack_longest_first(histogram.counts, depth)
    least, needed = least_masked_slots(histogram), needed_masked_slots(mixture, histogram)
    assert least is not None
    assert needed is not None
    budget = data.draw(st.integers(least, max(least, needed)))
    fitted = fit_to_budget(mixture, histogram, depth, budget)
    check_mixture(fitted, histogram, depth, budget)
    if budget >= needed:
        assert packs_of(fitted) == packs_of(mixture)
