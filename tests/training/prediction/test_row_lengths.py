"""The lengths of rows that hold one sequence each, beside all others that could be chosen."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.training.prediction.row_lengths import GRID, MOST_LENGTHS, best_row_lengths
from gaudi_bert.training.prediction.shapes import row_cost
from tests.builders.properties import examples


def cost(length: int) -> float:
    return row_cost(length, 128)


def cost_of(lengths: list[int], rows: list[int]) -> float:
    return sum(cost(min(row for row in rows if row >= length)) for length in lengths)


@examples(60)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 269)), min_size=1, max_size=60), st.integers(0, 20))
def test_no_others_cost_less(lengths: list[int], beyond: int) -> None:
    longest = max(lengths) + beyond
    rows, total = best_row_lengths(np.bincount(lengths)[1:], longest, cost)
    assert rows == sorted(set(rows))
    assert max(lengths) <= rows[-1] <= longest
    assert len(rows) <= MOST_LENGTHS
    assert total == pytest.approx(cost_of(lengths, rows), rel=1e-12)
    grid = range(GRID, longest, GRID)
    others = [[*some, longest] for count in range(MOST_LENGTHS) for some in combinations(grid, count)]
    assert total <= min(cost_of(lengths, other) for other in others) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ([7], 16, [16]),
        ([31, 32, 33], 48, [32, 48]),
        ([100, 100, 290], 304, [128, 304]),
        ([20, 60, 90, 120, 150, 180], 192, [64, 128, 160, 192]),
        ([512] * 3, 512, [512]),
    ],
)
def test_by_hand(lengths: list[int], longest: int, expected: list[int]) -> None:
    assert best_row_lengths(np.bincount(lengths)[1:], longest, cost)[0] == expected
