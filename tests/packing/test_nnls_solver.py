"""The solver of least squares against SciPy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.nnls_solver import solve_nnls
from tests.builders.agree import agree
from tests.builders.properties import examples
from tests.oracles import packing as naive


@given(st.integers(1, 23), st.integers(1, 6), st.integers(0, 2**32 - 1))
@examples(60)
def test_objective_and_residual_are_scipys(max_length: int, depth: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 1000, max_length)
    weights = rng.uniform(0.1, 1.0, max_length)
    solution = solve_nnls(counts, weights, depth)
    objective, residual = naive.weighted_nnls(counts.astype(float), weights, min(depth, max_length))
    agree(solution.objective, objective, 1e-10, scale=max(objective, 10000))
    agree(solution.residual, residual, 1e-5, scale=1.0)
    assert (solution.usage > 0).all()
    assert all(sum(pack) == max_length and len(pack) <= depth for pack in solution.strategies)
