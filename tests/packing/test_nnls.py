"""Non-negative least squares: the published residuals and packs, and the solver against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from gaudi_bert.packing.heuristics import add_by_best_fit
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.nnls import (
    _add_packs_for_uncovered_sequences,
    _compute_extended_nnls_objective,
    _pack_iteratively,
    _solve_extended_nnls,
    compute_single_nnls_residual_weights,
    pack_by_extended_nnls,
    pack_by_nnls,
    pack_by_single_nnls,
)
from gaudi_bert.packing.nnls_solver import solve_nnls
from gaudi_bert.packing.strategies import OperationBudget, check_packing, count_packs
from tests.builders.agree import agree
from tests.builders.histograms import expected, lognormal, published
from tests.oracles.packing import strategies, strategy_matrix


@pytest.mark.parametrize("name", ["wikipedia-512", "squad-384"])
def test_published_packs_and_residual(name: str) -> None:
    histogram, rows = published(name), expected()["nnlshp"][name]
    solution = solve_nnls(histogram.counts, compute_single_nnls_residual_weights(histogram.max_sequence_length), 3)
    agree(solution.objective, rows["rnorm_weighted"], 1e-8)
    if "rnorm_unweighted" in rows:
        unweighted = solve_nnls(histogram.counts, np.ones(histogram.max_sequence_length), 3)
        agree(unweighted.objective, rows["rnorm_unweighted"], 1e-8)
    strategy_counts = pack_by_single_nnls(histogram.counts, 3)
    check_packing(strategy_counts, histogram, 3)
    published_packs = rows["scipy-1.17.1"]["weighted"]["packs"]
    assert abs(count_packs(strategy_counts) - published_packs) <= rows["tolerance_packs"]


def test_leftovers_get_their_complement() -> None:
    counts = np.array([0, 0, 2, 0, 1, 0, 0, 1])
    # (3, 5) covers one sequence of 3; the other one is padded up by a slot of 5 that no sequence fills.
    assert _add_packs_for_uncovered_sequences({(3, 5): 1}, counts, 3) == {(3,): 1, (3, 5): 1, (8,): 1}
    assert _add_packs_for_uncovered_sequences({}, counts, 1) == {(3,): 2, (5,): 1, (8,): 1}


@pytest.mark.parametrize("seed", range(6))
def test_solves_the_stated_problem(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(7, 20))
    counts = random.integers(0, 1000, size)
    usage = _solve_extended_nnls(counts, 3)
    assert all(count >= 0 for count in usage.values())
    residual = counts - strategy_matrix(list(usage), size) @ np.array(list(usage.values()))
    # The stacked problem of equation 24 as printed, with -I in the lower right block, by SciPy.
    matrix = strategy_matrix(strategies(size, 3), size)
    stacked = np.block([[matrix, np.zeros((size, size))], [matrix, -np.eye(size)]])
    weights = np.concatenate((np.arange(1, size + 1), np.full(size, 1e6)))
    _, norm = nnls(weights[:, None] * stacked, weights * np.tile(counts, 2), maxiter=10_000)
    agree(_compute_extended_nnls_objective(residual), norm**2, 1e-3, scale=max(norm**2, 1))


def test_better_than_one_shot_where_padding_cannot_be_avoided() -> None:
    histogram = published("squad-384")
    strategy_counts = pack_by_extended_nnls(histogram.counts, 3)
    check_packing(strategy_counts, histogram, 3)
    assert count_packs(strategy_counts) < count_packs(pack_by_single_nnls(histogram.counts, 3)) - 300


# The published loop: its numbers, and the inputs on which the published listing fails.

EXPECTED = expected()["habana_iterative_nnls"]["structured-solver"]
CASES = [
    (name, int(depth))
    for name, depths in EXPECTED.items()
    if not name.startswith(("wikipedia-1", "wikipedia-2"))
    for depth in depths
]


@pytest.mark.parametrize(("name", "depth"), CASES)
def test_published_number_of_packs(name: str, depth: int) -> None:
    counts = published(name).counts
    strategy_counts = _pack_iteratively(counts, depth, "complement")
    check_packing(strategy_counts, Histogram(len(counts), counts), depth)
    assert abs(count_packs(strategy_counts) - EXPECTED[name][str(depth)]["packs"]) <= 50


def test_best_fit_uses_room_first() -> None:
    counts = np.array([1, 0, 2, 0, 0, 0, 0, 0, 0, 0], dtype=np.int64)
    strategy_counts = add_by_best_fit({(7,): 1, (2, 4): 1}, counts, 3)
    assert strategy_counts == {(2, 3, 4): 1, (3, 7): 1, (1,): 1}


def test_long_packs_as_few_as_the_tokens_need_take_no_least_squares() -> None:
    counts = lognormal(1283, 300_000)
    budget = OperationBudget(1e9)
    solved = pack_by_nnls(counts, 1283, budget=budget)
    assert solved.algorithm_used == "lpfhp"
    least = Histogram(1283, counts).min_packs_by_tokens
    assert count_packs(solved.strategy_counts) <= least * 1.0001
    assert budget.remaining == 1e9


def test_the_least_squares_of_long_packs_cost_no_more_at_any_depth_than_a_little_above_the_mean() -> None:
    counts = lognormal(1283, 300_000)
    mean = counts.sum() / Histogram(1283, counts).min_packs_by_tokens
    assert 6 < mean < 7
    shallow, deep = OperationBudget(25e9), OperationBudget(25e9)
    _pack_iteratively(counts, 8, budget=shallow)
    strategy_counts = _pack_iteratively(counts, 1283, budget=deep)
    check_packing(strategy_counts, Histogram(1283, counts), 1283)
    assert 0 < 25e9 - deep.remaining <= 25e9 - shallow.remaining
