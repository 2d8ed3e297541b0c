"""The solver of least squares against SciPy, and its factor as columns come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.nnls_solver import _append_column, _remove_column, _solve_factor, solve_nnls
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 30])
def test_factor_follows_columns_in_and_out(size: int) -> None:
    rng = np.random.default_rng(size)
    columns = rng.normal(size=(40, size))
    target = rng.normal(size=40)
    factor, projected = np.zeros((40, 40)), np.zeros(40)
    for number in range(size):
        products = np.zeros(40)
        products[:number] = columns[:, :number].T @ columns[:, number]
        squared = float(columns[:, number] @ columns[:, number])
        assert _append_column(factor, number, products, squared, projected, float(columns[:, number] @ target))
    there = list(range(size))
    while there:
        solution = np.zeros(40)
        _solve_factor(factor, len(there), projected, solution)
        expected = np.linalg.lstsq(columns[:, there], target, rcond=None)[0]
        agree(solution[: len(there)], expected, 1e-9, scale=1.0)
        gone = int(rng.integers(len(there)))
        _remove_column(factor, len(there), gone, projected, np.zeros(40))
        del there[gone]


def test_a_dependent_column_is_refused() -> None:
    factor, projected = np.zeros((4, 4)), np.zeros(4)
    assert _append_column(factor, 0, np.zeros(4), 2.0, projected, 1.0)
    assert not _append_column(factor, 1, np.array([4.0, 0, 0, 0]), 8.0, projected, 2.0)
