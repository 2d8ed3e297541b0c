from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from gaudi_bert.packing.nnls.ennlshp import ExtendedProblem, pack_ennlshp, solve_ennls
from gaudi_bert.packing.nnls.nnlshp import pack_nnlshp
from tests.builders.histograms import ADVERSARIAL, published, small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import all_strategies, strategy_matrix


def objective_of_equation_24(counts: np.ndarray, depth: int) -> float:
    """The stacked problem as printed, with -I in the lower right block, by SciPy."""
    size = len(counts)
    matrix = strategy_matrix(all_strategies(size, depth), size)
    stacked = np.block([[matrix, np.zeros((size, size))], [matrix, -np.eye(size)]])
    weights = np.concatenate((np.arange(1, size + 1), np.full(size, 1e6)))
    _, norm = nnls(weights[:, None] * stacked, weights * np.tile(counts, 2), maxiter=10_000)
    return norm**2


@pytest.mark.parametrize("seed", range(6))
def test_solves_the_stated_problem(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(7, 20))
    counts = random.integers(0, 1000, size)
    problem = ExtendedProblem(counts)
    usage, residual = solve_ennls(counts, 3)
    assert all(count >= 0 for count in usage.values())
    matrix = strategy_matrix(list(usage), size)
    np.testing.assert_allclose(counts - matrix @ np.array(list(usage.values())), residual, atol=1e-6)
    assert problem.objective(residual) == pytest.approx(objective_of_equation_24(counts, 3), rel=1e-3, abs=1e-3)


def test_better_than_one_shot_where_padding_cannot_be_avoided() -> None:
    histogram = published("squad-384")
    mixture = pack_ennlshp(histogram.counts, 3)
    check_mixture(mixture, histogram, 3)
    assert packs_of(mixture) < packs_of(pack_nnlshp(histogram.counts, 3)) - 300


@given(histogram=small_histograms(), depth=st.integers(1, 5))
@examples(40)
def test_always_a_packing(histogram: Histogram, depth: int) -> None:
    check_mixture(pack_ennlshp(histogram.counts, depth), histogram, depth)


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial(case: str) -> None:
    histogram = Histogram(len(ADVERSARIAL[case]), ADVERSARIAL[case])
    for depth in (1, 2, 1000):
        check_mixture(pack_ennlshp(histogram.counts, depth), histogram, depth)
