from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.heuristics.first_fit import pack_first_fit
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from tests.builders.histograms import ADVERSARIAL, published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import first_fit_decreasing


@given(histogram=small_histograms(17, 5), depth=st.integers(1, 6))
@examples(200)
def test_equals_the_algorithm_on_single_sequences(histogram: Histogram, depth: int) -> None:
    assert pack_first_fit(histogram.counts, depth) == dict(first_fit_decreasing(histogram.counts, depth))


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial(case: str) -> None:
    counts = ADVERSARIAL[case]
    for depth in (1, 2, 1000):
        check_mixture(pack_first_fit(np.array(counts), depth), Histogram(len(counts), counts), depth)


def test_a_published_histogram() -> None:
    histogram = published("wikipedia-2048")
    mixture = pack_first_fit(histogram.counts, 8)
    check_mixture(mixture, histogram, 8)
    assert packs_of(mixture) == 7_014_160
