"""Prices with no more of a length than there are sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.pricers import BoundedKnapsackPricer, compute_max_sequences_per_pack
from gaudi_bert.packing.strategies import OperationBudget
from tests.builders.agree import agree
from tests.builders.properties import examples
from tests.oracles import packing as naive


@given(st.dictionaries(st.integers(1, 17), st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 18), st.randoms())
@examples(60)
def test_bounded_prices_are_those_of_all_packs(available: dict[int, int], depth: int, random) -> None:
    lengths = np.array(sorted(available))
    counts = np.array([available[length] for length in lengths.tolist()])
    prices = np.sort([random.random() for _ in lengths])
    pricer = BoundedKnapsackPricer(lengths, 17, depth, counts, OperationBudget())
    worth = pricer.compute_best_pack_prices(prices)
    price_of = dict(zip(lengths.tolist(), prices.tolist(), strict=True))
    packs = [
        pack
        for pack in naive.strategies(17, depth, full=False)
        if all(pack.count(length) <= available.get(length, 0) for length in pack)
    ]
    best = [max(sum(map(price_of.get, pack)) for pack in packs if pack[-1] == length) for length in lengths.tolist()]
    agree(worth, np.array(best), 1e-12, scale=1.0)
    assert compute_max_sequences_per_pack(lengths, counts, 17) == max(
        len(pack) for pack in naive.strategies(17, 17, full=False) if all(pack.count(i) <= available.get(i, 0) for i in pack)
    )
    chosen = pricer.find_improving_strategies(np.arange(len(lengths)), prices, -1.0)
    agree(np.array([sum(map(price_of.get, pack)) for pack in chosen]), np.array(best), 1e-12, scale=1.0)
    assert all(pack in packs for pack in chosen)
