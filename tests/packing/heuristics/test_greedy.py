from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.permutation import permutation
from gaudi_bert.packing.heuristics.greedy import count_greedy_packs, pack_greedily
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from tests.builders.histograms import expected, published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import next_fit


@given(histogram=small_histograms(), depth=st.integers(1, 5), separators=st.integers(0, 2), seed=st.integers(0, 99))
@examples(120)
def test_equals_next_fit(histogram: Histogram, depth: int, separators: int, seed: int) -> None:
    lengths = np.repeat(np.arange(1, histogram.max_sequence_length + 1), histogram.counts)
    shuffled = lengths[permutation(len(lengths), seed, "greedy")].tolist()
    packs = next_fit(shuffled, histogram.max_sequence_length, depth, separators)
    mixture = pack_greedily(histogram.counts, depth, seed=seed, separators=separators)
    check_mixture(mixture, histogram, depth)
    assert mixture == {tuple(sorted(pack)): sum(sorted(one) == sorted(pack) for one in packs) for pack in packs}
    assert count_greedy_packs(histogram.counts, depth, seed=seed, separators=separators) == len(packs)


def test_separators_cost_what_the_paper_says() -> None:
    histogram = published("squad-384")
    packs = [count_greedy_packs(histogram.counts, 384, seed=1, separators=number) for number in (0, 1, 2)]
    assert packs[0] < packs[1] < packs[2]
    assert packs_of(pack_greedily(histogram.counts, 384, seed=1)) == packs[0]


def test_a_tenth_of_wikipedia_has_the_published_efficiency() -> None:
    histogram = published("wikipedia-512")
    counts = histogram.counts // 10
    tokens = int(counts @ np.arange(1, 513))
    row = expected()["greedy"]["wikipedia-512"]
    for separators, efficiency in enumerate((row["eff_mean"], row["one_separator"], row["two_separators"])):
        packs = count_greedy_packs(counts, 512, seed=3, separators=separators)
        assert 100 * tokens / (512 * packs) == pytest.approx(efficiency, abs=3 * row["tolerance_eff"])


def test_too_many_sequences_are_refused() -> None:
    with pytest.raises(InputError, match="takes at most 200,000,000 of them"):
        count_greedy_packs(np.array([10**12]), 1, seed=0)
