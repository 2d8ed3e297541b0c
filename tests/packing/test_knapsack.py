"""Knapsacks: max-plus products, what is behind them, and the pricers against all packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.knapsack import (
    BoundedKnapsackPricer,
    EnumeratedPricer,
    TablePricer,
    backtrack_best_lengths,
    compute_max_pack_price,
    compute_max_sequences_per_pack,
    fill_table_with_max_plus_powers,
    list_factor_rows_for_power,
    list_strategies,
)
from gaudi_bert.packing.strategies import OperationBudget
from tests.builders.agree import agree
from tests.builders.properties import examples
from tests.oracles import packing as naive


@pytest.mark.parametrize("kind", [TablePricer, EnumeratedPricer, BoundedKnapsackPricer])
@given(st.dictionaries(st.integers(1, 17), st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 18), st.randoms())
@examples(60)
def test_a_pricer_finds_the_best_of_all_packs(kind: Any, available: dict[int, int], depth: int, random) -> None:
    """Of all packs that contain a length or, if copies are bounded, that have it as their longest."""
    bounded = kind is BoundedKnapsackPricer
    depth += kind is TablePricer  # which is not used for packs of single sequences
    most = available if bounded else dict.fromkeys(available, 17)
    lengths = np.array(sorted(most))
    counts = np.array([most[length] for length in lengths.tolist()])
    every = [
        pack
        for pack in naive.strategies(17, 17, full=False)
        if all(pack.count(length) <= most.get(length, 0) for length in pack)
    ]
    assert compute_max_sequences_per_pack(lengths, counts, 17) == max(map(len, every))
    price_of = {length: (position + random.random()) / 5 for position, length in enumerate(lengths.tolist())}

    def best_of(packs: list[tuple[int, ...]]) -> np.ndarray:
        fitting = ([pack for pack in packs if length in (pack[-1:] if bounded else pack)] for length in lengths.tolist())
        return np.array([max(sum(map(price_of.__getitem__, pack)) for pack in some) for some in fitting])

    allowed, prices = [pack for pack in every if len(pack) <= depth], np.array(list(price_of.values()))
    limits = {TablePricer: (depth,), EnumeratedPricer: (list_strategies(lengths, 17, depth),)}.get(kind, (depth, counts))
    pricer = kind(lengths, 17, *limits, OperationBudget())
    agree(pricer.compute_best_pack_prices(prices), best_of(allowed), 1e-12, scale=1.0)
    chosen = pricer.find_improving_strategies(np.arange(len(lengths)), prices, -1.0)
    assert set(chosen) <= set(allowed)
    agree(best_of(chosen), best_of(allowed), 1e-12, scale=1.0)
    middle = best_of(allowed).mean() - 1e-9
    improving = pricer.find_improving_strategies(np.arange(len(lengths)), prices, middle)
    assert set(improving) == {pack for pack in chosen if sum(map(price_of.__getitem__, pack)) > middle}


def test_too_many_strategies_are_not_listed() -> None:
    assert list_strategies(np.array([1, 2, 3]), 10**6, 10**6) is None


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
