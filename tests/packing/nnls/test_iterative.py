"""The published loop: its numbers, and the inputs on which the published listing fails."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.heuristics.best_fit import best_fit_into
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from gaudi_bert.packing.nnls.iterative import iterative_nnls, residual_weights
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
