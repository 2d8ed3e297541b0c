"""Prices of packs: max-plus products, what is behind them, and lists of all strategies."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.max_plus import (
    backtrack_best_lengths,
    compute_max_pack_price,
    fill_table_with_max_plus_powers,
    list_factor_rows_for_power,
)
from gaudi_bert.packing.pricers import EnumeratedPricer, TablePricer, list_strategies
from gaudi_bert.packing.strategies import OperationBudget
from tests.builders.agree import agree
from tests.builders.properties import examples
from tests.oracles import packing as naive


@given(st.sets(st.integers(1, 31), min_size=1, max_size=5), st.integers(2, 33), st.integers(0, 2**32 - 1))
@examples(60)
def test_a_list_prices_as_the_tables_do(lengths: set[int], depth: int, seed: int) -> None:
    rows = np.array(sorted(lengths))
    prices = np.sort(np.random.default_rng(seed).random(len(rows)))
    copies = list_strategies(rows, 31, depth)
    assert copies is not None
    assert list_strategies(np.array([1, 2, 3]), 10**6, 10**6) is None
    listed, table = EnumeratedPricer(rows, 31, copies, OperationBudget()), TablePricer(rows, 31, depth, OperationBudget())
    agree(listed.compute_best_pack_prices(prices), table.compute_best_pack_prices(prices), 1e-12, scale=1.0)
    every = np.arange(len(rows))
    for pricer in (listed, table):
        best = pricer.find_improving_strategies(every, prices, 0.0)
        assert all(sum(strategy) <= 31 and len(strategy) <= depth for strategy in best)
        assert {length for strategy in best for length in strategy} == lengths


@given(st.integers(1, 19), st.integers(0, 25), st.integers(0, 2**32 - 1))
@examples(60)
def test_completions_and_their_items(max_total: int, max_items: int, seed: int) -> None:
    prices = np.concatenate(([0.0], np.random.default_rng(seed).integers(-5, 20, max_total).astype(float)))
    factor_rows = list_factor_rows_for_power(max_items, max_total)
    table = np.zeros((len(factor_rows) + 1, max_total + 1))
    table[0] = prices
    completion = fill_table_with_max_plus_powers(factor_rows, table, np.arange(1, max_total + 1))
    best = dict.fromkeys(range(1, max_total + 1), -1e300) | {0: 0.0}
    if max_items:
        for total in range(1, max_total + 1):
            packs = naive.strategies(total, min(max_items, total), full=True)
            best[total] = max(sum(prices[length] for length in pack) for pack in packs)
    for total in range(max_total + 1):
        assert completion[total] == best[total]
        if best[total] > -1e299:
            items = np.zeros(max_total + 2, dtype=np.int64)
            found = backtrack_best_lengths(
                factor_rows, table, total, items, 0, np.zeros(2 * (max_total + len(factor_rows) + 5), dtype=np.int64)
            )
            assert found <= max_items
            assert items[:found].sum() == total
            assert prices[items[:found]].sum() == best[total]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=17), st.integers(1, 20))
@examples(60)
def test_best_worth_of_integers(steps: list[int], depth: int) -> None:
    prices = np.cumsum(steps)
    assert compute_max_pack_price(prices, depth) == naive.compute_max_pack_price(prices.tolist(), depth)
