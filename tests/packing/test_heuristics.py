"""SPFHP, LPFHP, FFD, GREEDY, SORT: every published integer, naive twins, and the properties of a packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.arrays import permutation
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.heuristics import (
    count_greedy_packs,
    count_tokens_of_sorted_batches,
    pack_first_fit,
    pack_greedily,
    pack_longest_first,
    pack_shortest_first,
)
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.optimal import pack_optimally
from gaudi_bert.packing.strategies import check_packing, count_packs
from tests.builders.agree import agree
from tests.builders.histograms import NAMES, depth_number, expected, published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import first_fit_decreasing, next_fit, sorted_batches

HEURISTICS = {"spfhp": pack_shortest_first, "lpfhp": pack_longest_first}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", HEURISTICS)
def test_every_published_integer(algorithm: str, name: str) -> None:
    histogram = published(name)
    for depth, row in expected()[algorithm][name].items():
        number = depth_number(depth, histogram)
        strategy_counts = HEURISTICS[algorithm](histogram.counts, number)
        check_packing(strategy_counts, histogram, number)
        packs = count_packs(strategy_counts)
        padding = packs * histogram.max_sequence_length - histogram.tokens
        figures = (packs, len(strategy_counts), max(map(len, strategy_counts)), padding)
        assert figures == (row["packs"], row["n_strategies"], row["depth_used"], row["padding"]), depth


@given(histogram=small_histograms(17, 5), depth=st.integers(1, 6))
@examples(200)
def test_equals_the_algorithm_on_single_sequences(histogram: Histogram, depth: int) -> None:
    assert pack_first_fit(histogram.counts, depth) == dict(first_fit_decreasing(histogram.counts, depth))


@given(histogram=small_histograms(), depth=st.integers(1, 5), separators=st.integers(0, 2), seed=st.integers(0, 99))
@examples(120)
def test_equals_next_fit(histogram: Histogram, depth: int, separators: int, seed: int) -> None:
    lengths = np.repeat(np.arange(1, histogram.max_sequence_length + 1), histogram.counts)
    shuffled = lengths[permutation(len(lengths), seed, "greedy")].tolist()
    packs = next_fit(shuffled, histogram.max_sequence_length, depth, separators)
    assert count_greedy_packs(histogram.counts, depth, seed=seed, separators=separators) == len(packs)
    if not separators:
        strategy_counts = pack_greedily(histogram.counts, depth, seed=seed)
        check_packing(strategy_counts, histogram, depth)
        assert strategy_counts == {tuple(sorted(pack)): sum(sorted(one) == sorted(pack) for one in packs) for pack in packs}


def test_a_tenth_of_wikipedia_has_the_published_efficiency() -> None:
    histogram = published("wikipedia-512")
    counts = histogram.counts // 10
    tokens = int(counts @ np.arange(1, 513))
    row = expected()["greedy"]["wikipedia-512"]
    for separators, efficiency in enumerate((row["eff_mean"], row["one_separator"], row["two_separators"])):
        packs = count_greedy_packs(counts, 512, seed=3, separators=separators)
        agree(100 * tokens / (512 * packs), efficiency, 3 * row["tolerance_eff"], scale=1.0)


def test_too_many_sequences_are_refused() -> None:
    with pytest.raises(InputError, match=r"200,000,000 .*1,000,000,000,000"):
        count_greedy_packs(np.array([10**12]), 1, seed=0)


@given(histogram=small_histograms(), batch=st.integers(1, 9))
@examples(120)
def test_equals_sorting_and_cutting(histogram: Histogram, batch: int) -> None:
    assert count_tokens_of_sorted_batches(histogram.counts, batch) == sorted_batches(histogram.counts, batch)


def test_more_depth_can_mean_more_packs_for_a_heuristic_and_never_for_optimal() -> None:
    counts = np.array([1, 2, 3, 1, 2, 2, 3, 0, 2, 2, 1, 1, 0, 1, 0, 2, 0])
    assert [count_packs(pack_shortest_first(counts, depth)) for depth in (3, 4)] == [11, 12]
    optimal = [count_packs(pack_optimally(counts, depth).strategy_counts) for depth in range(1, 8)]
    assert optimal == sorted(optimal, reverse=True)
