"""From fractions to packs: the exhaustive search."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.strategies import OperationBudget, check_packing, count_packs
from gaudi_bert.packing.whole_packs import _search_exhaustively
from tests.builders.properties import examples
from tests.oracles import packing as naive


@given(st.lists(st.integers(0, 2), min_size=2, max_size=10), st.integers(1, 5))
@examples(80)
def test_search_finds_the_fewest_and_no_fewer(counts: list[int], depth: int) -> None:
    max_length = len(counts)
    fewest = naive.fewest_packs(tuple(counts), depth)
    lengths = np.arange(1, max_length + 1)
    prices = lengths / max_length
    strategy_counts = _search_exhaustively(
        lengths, np.array(counts), prices, max_length, depth, fewest, 1_000_000, OperationBudget()
    )[0]
    assert strategy_counts is not None
    assert count_packs(strategy_counts) <= fewest
    if any(counts):
        check_packing(strategy_counts, Histogram(max_length, np.array(counts)), depth)
        fewer = _search_exhaustively(
            lengths, np.array(counts), prices, max_length, depth, fewest - 1, 1_000_000, OperationBudget()
        )
        assert fewer == (None, True)


def test_search_gives_up() -> None:
    counts = np.ones(40, dtype=np.int64)
    lengths = np.arange(1, 41)
    assert _search_exhaustively(lengths, counts, lengths / 40, 40, 3, 21, 3, OperationBudget()) == (None, False)
