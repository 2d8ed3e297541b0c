"""Non-negative least squares: the published residuals and packs, and the solver against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.heuristics import best_fit_into
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import Work, check_mixture, packs_of
from gaudi_bert.packing.nnls import (
    ExtendedProblem,
    complete_by_complements,
    iterative_nnls,
    loop_weights,
    pack_by_nnls,
    pack_ennlshp,
    pack_nnlshp,
    paper_weights,
    solve_ennls,
)
from gaudi_bert.packing.nnls_solver import append_column, remove_column, solve_factor, solve_nnls
from gaudi_bert.packing.pricing import best_worth, completion_values, power_chain, unwind
from tests.builders.agree import agree
from tests.builders.histograms import expected, lognormal, published
from tests.builders.properties import examples
from tests.oracles import packing as naive
from tests.oracles.packing import strategies, strategy_matrix


@pytest.mark.parametrize("name", ["wikipedia-512", "squad-384"])
def test_published_packs_and_residual(name: str) -> None:
    histogram, rows = published(name), expected()["nnlshp"][name]
    solution = solve_nnls(histogram.counts, paper_weights(histogram.max_sequence_length), 3)
    agree(solution.objective, rows["rnorm_weighted"], 1e-8)
    mixture = pack_nnlshp(histogram.counts, 3)
    check_mixture(mixture, histogram, 3)
    published_packs = rows["scipy-1.17.1"]["weighted"]["packs"]
    assert abs(packs_of(mixture) - published_packs) <= rows["tolerance_packs"]


def test_without_weights() -> None:
    histogram, rows = published("wikipedia-512"), expected()["nnlshp"]["wikipedia-512"]
    solution = solve_nnls(histogram.counts, np.ones(512), 3)
    agree(solution.objective, rows["rnorm_unweighted"], 1e-8)
    packs = packs_of(pack_nnlshp(histogram.counts, 3, np.ones(512)))
    assert abs(packs - rows["scipy-1.11.4"]["unweighted"]["packs"]) <= rows["tolerance_packs"]


def test_leftovers_get_their_complement() -> None:
    counts = np.array([0, 0, 2, 0, 1, 0, 0, 1])
    # (3, 5) covers one sequence of 3; the other one is padded up by a slot of 5 that no sequence fills.
    assert complete_by_complements({(3, 5): 1}, counts, 3) == {(3,): 1, (3, 5): 1, (8,): 1}
    assert complete_by_complements({}, counts, 1) == {(3,): 2, (5,): 1, (8,): 1}


def objective_of_equation_24(counts: np.ndarray, depth: int) -> float:
    """The stacked problem as printed, with -I in the lower right block, by SciPy."""
    size = len(counts)
    matrix = strategy_matrix(strategies(size, depth), size)
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
    agree(counts - matrix @ np.array(list(usage.values())), residual, 1e-6, scale=1.0)
    objective = objective_of_equation_24(counts, 3)
    agree(problem.objective(residual), objective, 1e-3, scale=max(objective, 1))


def test_better_than_one_shot_where_padding_cannot_be_avoided() -> None:
    histogram = published("squad-384")
    mixture = pack_ennlshp(histogram.counts, 3)
    check_mixture(mixture, histogram, 3)
    assert packs_of(mixture) < packs_of(pack_nnlshp(histogram.counts, 3)) - 300


# The published loop: its numbers, and the inputs on which the published listing fails.

EXPECTED = expected()["habana_iterative_nnls"]["structured-solver"]
QUICK = [name for name in EXPECTED if not name.startswith(("wikipedia-1", "wikipedia-2"))]
CASES = [(name, int(depth)) for name in QUICK for depth in EXPECTED[name]]


@pytest.mark.parametrize(("name", "depth"), CASES)
def test_published_number_of_packs(name: str, depth: int) -> None:
    counts = published(name).counts
    mixture = iterative_nnls(counts, depth, "complement")
    check_mixture(mixture, Histogram(len(counts), counts), depth)
    assert abs(packs_of(mixture) - EXPECTED[name][str(depth)]["packs"]) <= 50


def test_weights_and_leftovers() -> None:
    with pytest.raises(InputError, match="leftovers"):
        iterative_nnls(np.ones(5, dtype=np.int64), 2, "none")  # type: ignore[arg-type]
    weights = loop_weights(512)
    agree(weights[7], (8 / 1024) ** 0.5)
    assert weights[8] == 1.0


def test_best_fit_uses_room_first() -> None:
    counts = np.array([1, 0, 2, 0, 0, 0, 0, 0, 0, 0], dtype=np.int64)
    mixture = best_fit_into({(7,): 1, (2, 4): 1}, counts, 3)
    assert mixture == {(2, 3, 4): 1, (3, 7): 1, (1,): 1}


def test_long_packs_as_few_as_the_tokens_need_take_no_least_squares() -> None:
    counts = lognormal(1283, 300_000)
    work = Work(1e9)
    solved = pack_by_nnls(counts, 1283, work=work)
    assert solved.algorithm_used == "lpfhp"
    least = Histogram(1283, counts).token_bound
    assert packs_of(solved.mixture) <= least * 1.0001
    assert work.remaining == 1e9


def test_the_least_squares_of_long_packs_cost_no_more_at_any_depth_than_a_little_above_the_mean() -> None:
    counts = lognormal(1283, 300_000)
    mean = counts.sum() / Histogram(1283, counts).token_bound
    assert 6 < mean < 7
    shallow, deep = Work(25e9), Work(25e9)
    iterative_nnls(counts, 8, work=shallow)
    mixture = iterative_nnls(counts, 1283, work=deep)
    check_mixture(mixture, Histogram(1283, counts), 1283)
    assert 0 < 25e9 - deep.remaining <= 25e9 - shallow.remaining


# --- the active-set solver against SciPy on listed columns, and its kernels against naive ones


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


def test_any_number_of_additions_gives_the_same_objective() -> None:
    counts = published("squad-384").counts
    weights = np.ones(len(counts))
    found = [solve_nnls(counts, weights, 4, additions=additions).objective for additions in (1, 3, 8)]
    agree(found, [found[0]] * 3, 1e-10)


@given(st.integers(1, 19), st.integers(0, 25), st.integers(0, 2**32 - 1))
@examples(60)
def test_completions_and_their_items(max_total: int, max_items: int, seed: int) -> None:
    prices = np.concatenate(([0.0], np.random.default_rng(seed).integers(-5, 20, max_total).astype(float)))
    chain = power_chain(max_items, max_total)
    table = np.zeros((len(chain) + 1, max_total + 1))
    table[0] = prices
    completion = completion_values(chain, table, np.arange(1, max_total + 1))
    best = dict.fromkeys(range(1, max_total + 1), -1e300) | {0: 0.0}
    if max_items:
        for total in range(1, max_total + 1):
            packs = naive.strategies(total, min(max_items, total), full=True)
            best[total] = max(sum(prices[length] for length in pack) for pack in packs)
    for total in range(max_total + 1):
        assert completion[total] == best[total]
        if best[total] > -1e299:
            items = np.zeros(max_total + 2, dtype=np.int64)
            found = unwind(chain, table, total, items, 0, np.zeros(2 * (max_total + len(chain) + 5), dtype=np.int64))
            assert found <= max_items
            assert items[:found].sum() == total
            assert prices[items[:found]].sum() == best[total]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=17), st.integers(1, 20))
@examples(60)
def test_best_worth_of_integers(steps: list[int], depth: int) -> None:
    prices = np.cumsum(steps)
    assert best_worth(prices, depth) == naive.best_worth(prices.tolist(), depth)


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
        assert append_column(factor, number, products, squared, projected, float(columns[:, number] @ target))
    there = list(range(size))
    while there:
        solution = np.zeros(40)
        solve_factor(factor, len(there), projected, solution)
        expected = np.linalg.lstsq(columns[:, there], target, rcond=None)[0]
        agree(solution[: len(there)], expected, 1e-9, scale=1.0)
        gone = int(rng.integers(len(there)))
        remove_column(factor, len(there), gone, projected, np.zeros(40))
        del there[gone]


def test_a_dependent_column_is_refused() -> None:
    factor, projected = np.zeros((4, 4)), np.zeros(4)
    assert append_column(factor, 0, np.zeros(4), 2.0, projected, 1.0)
    assert not append_column(factor, 1, np.array([4.0, 0, 0, 0]), 8.0, projected, 2.0)
