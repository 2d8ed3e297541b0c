"""The published loop: its numbers, and the inputs on which the published listing fails."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.heuristics.best_fit import best_fit_into
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from gaudi_bert.packing.nnls.iterative import iterative_nnls, pack_by_nnls, residual_weights
from gaudi_bert.packing.work import Work
from tests.builders.hard_histograms import lognormal
from tests.builders.histograms import ADVERSARIAL, expected, published

EXPECTED = expected()["habana_iterative_nnls"]["structured-solver"]
CASES = [
    (name, int(depth))
    for name, depths in EXPECTED.items()
    for depth in depths
    if not name.startswith(("wikipedia-1", "wikipedia-2"))
]


@pytest.mark.parametrize(("name", "depth"), CASES)
def test_published_number_of_packs(name: str, depth: int) -> None:
    counts = published(name).counts
    mixture = iterative_nnls(counts, depth, "complement")
    check_mixture(mixture, Histogram(len(counts), counts), depth)
    assert abs(packs_of(mixture) - EXPECTED[name][str(depth)]["packs"]) <= 50


@pytest.mark.parametrize(("name", "depth"), [("wikipedia-512", 4), ("squad-384", 3)])
def test_best_fit_leftovers_need_fewer_packs(name: str, depth: int) -> None:
    counts = published(name).counts
    mixture = iterative_nnls(counts, depth)
    check_mixture(mixture, Histogram(len(counts), counts), depth)
    assert packs_of(mixture) < packs_of(iterative_nnls(counts, depth, "complement"))


@pytest.mark.parametrize("leftovers", ["best-fit", "complement"])
@pytest.mark.parametrize("depth", [1, 2, 3, 13])
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial(case: str, depth: int, leftovers: str) -> None:
    counts = np.array(ADVERSARIAL[case], dtype=np.int64)
    mixture = iterative_nnls(counts, depth, leftovers)  # type: ignore[arg-type]
    check_mixture(mixture, Histogram(len(counts), counts), depth)


def test_twice_is_the_same() -> None:
    counts = published("squad-384").counts
    assert list(iterative_nnls(counts, 3).items()) == list(iterative_nnls(counts, 3).items())


def test_unknown_leftovers() -> None:
    with pytest.raises(InputError, match="leftovers"):
        iterative_nnls(np.ones(5, dtype=np.int64), 2, "none")  # type: ignore[arg-type]


def test_weights() -> None:
    weights = residual_weights(512)
    assert weights[7] == pytest.approx((8 / 1024) ** 0.5)
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
    assert work.left == 1e9


def test_the_least_squares_of_long_packs_cost_no_more_at_any_depth_than_a_little_above_the_mean() -> None:
    counts = lognormal(1283, 300_000)
    mean = counts.sum() / Histogram(1283, counts).token_bound
    assert 6 < mean < 7
    shallow, deep = Work(25e9), Work(25e9)
    iterative_nnls(counts, 8, work=shallow)
    mixture = iterative_nnls(counts, 1283, work=deep)
    check_mixture(mixture, Histogram(1283, counts), 1283)
    assert 0 < 25e9 - deep.left <= 25e9 - shallow.left
