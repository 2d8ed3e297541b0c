from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from gaudi_bert.packing.nnls.complements import complete_by_complements
from gaudi_bert.packing.nnls.nnlshp import pack_nnlshp, residual_weights
from gaudi_bert.packing.nnls.solver import solve_nnls
from tests.builders.histograms import ADVERSARIAL, expected, published, small_histograms
from tests.builders.properties import examples


@pytest.mark.parametrize("name", ["wikipedia-512", "squad-384"])
def test_published_packs_and_residual(name: str) -> None:
    histogram, rows = published(name), expected()["nnlshp"][name]
    solution = solve_nnls(histogram.counts, residual_weights(histogram.max_sequence_length), 3)
    assert solution.objective == pytest.approx(rows["rnorm_weighted"], rel=1e-8)
    mixture = pack_nnlshp(histogram.counts, 3)
    check_mixture(mixture, histogram, 3)
    published_packs = rows["scipy-1.17.1"]["weighted"]["packs"]
    assert abs(packs_of(mixture) - published_packs) <= rows["tolerance_packs"]


def test_without_weights() -> None:
    histogram, rows = published("wikipedia-512"), expected()["nnlshp"]["wikipedia-512"]
    solution = solve_nnls(histogram.counts, np.ones(512), 3)
    assert solution.objective == pytest.approx(rows["rnorm_unweighted"], rel=1e-8)
    packs = packs_of(pack_nnlshp(histogram.counts, 3, np.ones(512)))
    assert abs(packs - rows["scipy-1.11.4"]["unweighted"]["packs"]) <= rows["tolerance_packs"]


@given(histogram=small_histograms(), depth=st.integers(1, 5))
@examples(60)
def test_always_a_packing(histogram: Histogram, depth: int) -> None:
    check_mixture(pack_nnlshp(histogram.counts, depth), histogram, depth)


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial(case: str) -> None:
    histogram = Histogram(len(ADVERSARIAL[case]), ADVERSARIAL[case])
    for depth in (1, 2, 3, 1000):
        check_mixture(pack_nnlshp(histogram.counts, depth), histogram, depth)


def test_leftovers_get_their_complement() -> None:
    counts = np.array([0, 0, 2, 0, 1, 0, 0, 1])
    # (3, 5) covers one sequence of 3; the other one is padded up by a slot of 5 that no sequence fills.
    assert complete_by_complements({(3, 5): 1}, counts, 3) == {(3,): 1, (3, 5): 1, (8,): 1}
    assert complete_by_complements({}, counts, 1) == {(3,): 2, (5,): 1, (8,): 1}
