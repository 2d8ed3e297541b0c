"""Estimates by the paper's equations, and stand-ins for other tools' packers (`benchmarks/peers.py`) against naive ones."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import PEERS, ListedLengths, count_best_fit, count_first_fit, sorted_in_batches
from gaudi_bert.packing.estimate import (
    ACCELERATORS,
    ESTIMATE_ALGORITHMS,
    MEASURED_ON_8,
    Gumbel,
    estimate_packing,
    fit_one_device,
    linear_speed_up,
    scan_lengths,
    unpadding_speed_up,
)
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import Histogram, histogram_of
from gaudi_bert.packing.mixture import packs_of
from tests.builders.agree import agree
from tests.builders.histograms import published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import packs_in_order


def test_every_algorithm_packs_a_small_histogram() -> None:
    histogram = Histogram(7, [4, 0, 3, 5, 0, 1, 2])
    for name in ESTIMATE_ALGORITHMS:
        estimate = estimate_packing(histogram, name, "max", histogram.token_bound)
        assert estimate.packs >= histogram.token_bound or name == "sort"


def test_longer_packs_for_the_same_sequences() -> None:
    # The paper's point in small: 2/3-full rows pack badly at their own length and perfectly at the right longer one.
    histogram = Histogram(27, [0] * 17 + [900] + [0] * 9)
    rows = {row.max_sequence_length: row for row in scan_lengths(histogram, "max")}
    assert list(rows) == [27, 30, 34, 36, 40, 54]
    own, longer = rows[27], rows[36]
    assert (own.packs, longer.packs) == (900, 450)
    agree(own.efficiency, 2 / 3)
    assert longer.efficiency == 1.0
    agree(longer.fewer_slots, 1.5)
    agree(longer.attention_cost, 450 * 36**2 / (900 * 27**2))


def test_the_fit_meets_the_papers_equations() -> None:
    one = fit_one_device()
    agree(one.location, 1.94, 0.005, scale=1.0)
    for share in (0.5, np.exp(-1)):
        value = MEASURED_ON_8.quantile(share)
        below = np.exp(-np.exp(-(value - one.location) / one.scale))
        agree((1 - below) ** 8, 1 - share)


def test_the_papers_speed_ups() -> None:
    one = fit_one_device()
    agree(unpadding_speed_up(one, 32), 1.5, 0.02, scale=1.0)
    agree(unpadding_speed_up(one, 2048), 1.3, 0.03, scale=1.0)
    assert unpadding_speed_up(one, 1) > 2.01  # above the bound of packing, as measured
    values = [unpadding_speed_up(one, number) for number in ACCELERATORS]
    assert values == sorted(values, reverse=True)


def test_integration_agrees_with_drawing() -> None:
    one = Gumbel(1.9, 0.3)
    draws = one.quantile(np.random.default_rng(0).random((20_000, 16)))
    agree(unpadding_speed_up(one, 16), draws.min(axis=1).mean(), 0.005, scale=1.0)


def test_own_data() -> None:
    histogram = published("wikipedia-512")
    values = [linear_speed_up(histogram, number) for number in ACCELERATORS]
    agree(values[0], 2.001, 0.001, scale=1.0)
    assert values == sorted(values, reverse=True)
    lengths = np.repeat(np.arange(1, 513), histogram.counts // 100)
    drawn = np.random.default_rng(0).choice(lengths, (2_000, 64, 32)).sum(axis=2).max(axis=1)
    agree(linear_speed_up(histogram, 64), 512 * 32 / drawn.mean(), 0.01)
    assert linear_speed_up(Histogram(4, [0, 0, 0, 9]), 2048) == 1.0


# --- peers: each is held to a naive one, and TRL's to TRL itself


LENGTHS = st.lists(st.integers(1, 13), max_size=70)
LIMIT = st.one_of(st.none(), st.integers(1, 11))


@pytest.mark.parametrize(("count", "tightest"), [(count_first_fit, False), (count_best_fit, True)])
@given(lengths=LENGTHS, capacity=st.integers(13, 29), depth=st.integers(1, 6), batch=LIMIT, open_packs=LIMIT)
@examples(150)
def test_equals_the_heuristic_pack_by_pack(count, tightest, lengths, capacity, depth, batch, open_packs) -> None:
    found = count(np.array(lengths, np.int32), capacity, depth, batch=batch, open_packs=open_packs)
    assert found == packs_in_order(lengths, capacity, depth, batch, open_packs, tightest=tightest)


@given(histogram=small_histograms(17, 5))
@examples(100)
def test_best_fit_decreasing_has_the_packs_of_lpfhp_without_a_limit_of_depth(histogram) -> None:
    slots = histogram.max_sequence_length
    decreasing = np.repeat(np.arange(slots, 0, -1, dtype=np.int32), histogram.counts[::-1])
    assert count_best_fit(decreasing, slots, slots) == packs_of(pack_longest_first(histogram.counts, slots))


def test_sorted_in_batches_keeps_the_last_batch() -> None:
    assert sorted_in_batches(np.array([1, 3, 2, 5, 4, 6, 7], np.int32), 3).tolist() == [3, 2, 1, 6, 5, 4, 7]
    assert sorted_in_batches(np.array([1, 2], np.int32), 3).tolist() == [2, 1]


def test_the_stand_in_for_trl_has_the_packs_of_trl() -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL IS NOT INSTALLED: pip install trl to hold its stand-in to it")
    lengths = np.random.default_rng(5).integers(3, 97, 2411).astype(np.int32)
    listed = ListedLengths(lengths, lengths, histogram_of(lengths, 101), 101)
    (peer,) = (peer for peer in PEERS if peer.tool == "trl")
    assert peer.callable_for(listed)
    assert peer.installed is not None
    assert peer.installed(listed) == peer.count(listed)
