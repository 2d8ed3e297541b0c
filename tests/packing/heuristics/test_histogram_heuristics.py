"""SPFHP and LPFHP: every published integer, and the properties of a packing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.heuristics.shortest_pack_first import pack_shortest_first
from gaudi_bert.packing.heuristics.unpacked import pack_none
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import Mixture, check_mixture, packs_of
from tests.builders.histograms import ADVERSARIAL, NAMES, depth_number, expected, published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import fewest_packs

HEURISTICS = {"spfhp": pack_shortest_first, "lpfhp": pack_longest_first}
Heuristic = Callable[[np.ndarray, int], Mixture]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", HEURISTICS)
def test_every_published_integer(algorithm: str, name: str) -> None:
    histogram = published(name)
    for depth, row in expected()[algorithm][name].items():
        number = depth_number(depth, histogram)
        mixture = HEURISTICS[algorithm](histogram.counts, number)
        check_mixture(mixture, histogram, number)
        packs = packs_of(mixture)
        padding = packs * histogram.max_sequence_length - histogram.tokens
        found = (packs, len(mixture), max(map(len, mixture)), padding)
        assert found == (row["packs"], row["n_strategies"], row["depth_used"], row["padding"]), depth


@pytest.mark.parametrize("pack", HEURISTICS.values(), ids=HEURISTICS)
@pytest.mark.parametrize("case", ADVERSARIAL)
@pytest.mark.parametrize("depth", [1, 2, 3, 1000])
def test_adversarial(case: str, depth: int, pack: Heuristic) -> None:
    counts = ADVERSARIAL[case]
    histogram = Histogram(len(counts), counts)
    check_mixture(pack(histogram.counts, depth), histogram, depth)


@given(histogram=small_histograms(), depth=st.integers(1, 6))
@examples(150)
def test_packing_and_bound(histogram: Histogram, depth: int) -> None:
    for pack in HEURISTICS.values():
        mixture = pack(histogram.counts, depth)
        check_mixture(mixture, histogram, depth)
        assert packs_of(mixture) >= max(histogram.token_bound, -(-histogram.sequences // depth))


@given(histogram=small_histograms(9, 2), depth=st.integers(1, 4))
@examples(60)
def test_not_better_than_trying_everything(histogram: Histogram, depth: int) -> None:
    best = fewest_packs(tuple(histogram.counts.tolist()), depth)
    for pack in HEURISTICS.values():
        assert packs_of(pack(histogram.counts, depth)) >= best


def test_longest_pack_first_splits_counts() -> None:
    counts = np.zeros(512, dtype=np.int64)
    counts[255] = 7
    assert pack_longest_first(counts, 3) == {(256, 256): 3, (256,): 1}


def test_shortest_pack_first_opens_before_it_splits() -> None:
    counts = np.zeros(512, dtype=np.int64)
    counts[255] = 7
    assert pack_shortest_first(counts, 3) == {(256,): 7}


def test_ten_times_the_counts_give_ten_times_the_packs_of_spfhp() -> None:
    counts = published("squad-384").counts
    once, ten = pack_shortest_first(counts, 3), pack_shortest_first(10 * counts, 3)
    assert {strategy: 10 * count for strategy, count in once.items()} == ten


def test_no_packing_is_one_pack_a_sequence() -> None:
    assert pack_none(np.array([2, 0, 3])) == {(1,): 2, (3,): 3}
