"""Optimal packings: gap 0 on the published histograms, brute force on tiny ones, and inputs made to break it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing import certificate
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.certificate import check_certificate
from gaudi_bert.packing.exact.bounds import prove_bound
from gaudi_bert.packing.exact.optimal import NEAR_WORK, pack_optimally, solve_optimally
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import MOST_SLOTS, Histogram
from gaudi_bert.packing.mixture import Work, check_mixture, packs_of
from gaudi_bert.packing.nnls import iterative_nnls, pack_by_nnls
from tests.builders.effort import sampled
from tests.builders.histograms import lognormal, perfect_triplets, published, scattered
from tests.builders.properties import examples
from tests.oracles import packing as naive

PROVEN = {
    "squad-384": {2: 45_335, 3: 40_195},
    "wikipedia-128": {2: 30_080_937, 3: 30_061_040},
    "wikipedia-384": {2: 12_243_151, 3: 10_684_344},
    "wikipedia-512": {2: 10_099_081, 3: 8_143_829, 4: 8_135_727},
    "wikipedia-1024": {2: 35_886_963, 3: 26_348_556, 4: 21_697_115},
    "wikipedia-2048": {2: 13_092_039, 3: 9_236_660, 4: 7_319_086, 5: 6_294_495},
}
DEPTHS = (2, 3, 4, 5, 8, 16, 2048)
# Many lengths at middling depths take longest.
LONGEST = [*(("wikipedia-1024", depth) for depth in (5, 8, 16)), *(("wikipedia-2048", depth) for depth in (5, 8, 16))]
QUICK = [(name, depth) for name in PROVEN for depth in DEPTHS if (name, depth) not in LONGEST]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in LONGEST]


def checked(counts: np.ndarray, depth: int) -> Any:
    optimum = pack_optimally(counts, depth)
    check_mixture(optimum.mixture, Histogram(len(counts), counts), depth)
    assert check_certificate(optimum.certificate, counts) == optimum.certificate.bound <= packs_of(optimum.mixture)
    return optimum


@pytest.mark.parametrize(("name", "depth"), [*QUICK, *SLOW])
def test_gap_0(name: str, depth: int) -> None:
    optimum = checked(published(name).counts, depth)
    packs = PROVEN[name][min(depth, max(PROVEN[name]))]
    assert (packs_of(optimum.mixture), optimum.certificate.bound, optimum.gap) == (packs, packs, 0)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 9))
@examples(80)
def test_tiny_against_brute_force(counts: list[int], depth: int) -> None:
    fewest = naive.fewest_packs(tuple(counts), min(depth, len(counts)))
    optimum = checked(np.array(counts, dtype=np.int64), depth)
    assert packs_of(optimum.mixture) == fewest
    assert prove_bound(np.array(counts, dtype=np.int64), depth).bound <= fewest


@given(st.integers(0, 2**32 - 1), st.sampled_from([31, 64, 97]))
@examples(20)
def test_packs_never_rise_with_depth(seed: int, max_length: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 300, max_length)
    packs = [packs_of(checked(counts, depth).mixture) for depth in (1, 2, 3, 4, 7, max_length)]
    assert packs == sorted(packs, reverse=True)


@pytest.mark.slow
def test_what_the_search_leaves_far_from_the_bound_is_packed_by_nnls_too() -> None:
    """201 sequences that fill 67 packs without a slot left, of which the search finds no more than the 68th and 69th."""
    counts = perfect_triplets(2500, 201)
    solved = solve_optimally(counts, 3)
    check_mixture(solved.mixture, Histogram(len(counts), counts), 3)
    assert packs_of(solved.mixture) <= packs_of(pack_by_nnls(counts, 3).mixture)
    assert solved.certificate is not None
    assert solved.certificate.bound == 67


# --- limits of effort: whatever the histogram, a valid packing and an honest bound, for no more work than allowed

ALLOWED = [0.0, 1e5, 3e6, 1e9]


@pytest.mark.parametrize("operations", ALLOWED)
@pytest.mark.parametrize("depth", [3, 600])
def test_optimal_stops_with_a_packing_and_its_bound(operations: float, depth: int) -> None:
    counts = perfect_triplets(600, 60)
    optimum = pack_optimally(counts, depth, work=Work(operations))
    check_mixture(optimum.mixture, Histogram(len(counts), counts), depth)
    assert 20 == check_certificate(optimum.certificate, counts) <= packs_of(optimum.mixture)
    assert packs_of(optimum.mixture) <= packs_of(pack_longest_first(counts, depth))


@pytest.mark.parametrize("operations", ALLOWED)
def test_nnls_stops_with_a_packing(operations: float) -> None:
    counts = scattered(301, 90, 40)
    for leftovers in ("best-fit", "complement"):
        mixture = iterative_nnls(counts, 4, leftovers, work=Work(operations))
        check_mixture(mixture, Histogram(len(counts), counts), 4)


def effort_of(counts: np.ndarray, depth: int, effort: Any = "bounded") -> tuple[Any, float]:
    """The plan, and the operations that were counted."""
    work = Work()
    solved = solve_optimally(counts, depth, work, effort)
    check_mixture(solved.mixture, Histogram(len(counts), counts), depth)
    assert solved.certificate is not None
    assert check_certificate(solved.certificate, counts) == solved.certificate.bound
    return solved, work.spent


CLOSE = {
    "thousands of lengths": np.bincount(
        np.clip(np.exp(np.random.default_rng(5).normal(6, 1.1, 3_000_000)).astype(int), 1, 8192), minlength=8193
    )[1:],
    "a pack of 119": np.bincount(np.clip(np.exp(np.random.default_rng(5).normal(6.75, 0.5, 1000)).astype(int), 1, 8192)),
}


@pytest.mark.parametrize("name", CLOSE)
def test_where_little_can_be_gained_little_is_done_and_always_the_same(name: str) -> None:
    """Both took minutes of work that saved no pack, or one."""
    counts = CLOSE[name]
    first, spent = effort_of(counts, len(counts))
    assert spent < 2 * NEAR_WORK
    assert packs_of(first.mixture) - first.certificate.bound <= max(0, 1e-5 * first.certificate.bound)
    again, spent_again = effort_of(counts, len(counts))
    assert (again.mixture, spent_again) == (first.mixture, spent)


def test_effort_without_a_limit_goes_on() -> None:
    counts = scattered(301, 90, 40)
    bounded, spent = effort_of(counts, 4)
    unlimited, more = effort_of(counts, 4, "unlimited")
    assert packs_of(unlimited.mixture) <= packs_of(bounded.mixture)
    assert more >= spent


def test_very_many_sequences_make_no_more_strategies() -> None:
    few, many = (pack_optimally(lognormal(3000, 10**6) * factor, 4, work=Work(1e9)) for factor in (1, 10**5))
    assert len(many.mixture) < 3 * len(few.mixture)
    assert many.gap <= 0.01 * many.certificate.bound


def test_least_squares_length_by_length_refuses_long_packs() -> None:
    with pytest.raises(InputError, match="at most 4096 tokens, not 5000"):
        pack_histogram(Histogram(5000, np.ones(5000, dtype=np.int64)), "nnlshp", 3)


# --- few lengths in very long packs: planned exactly at any length, from a list of strategies; the bound by thresholds


LENGTH = 1 << 17
SHARES = (  # of a pack, with their counts
    {0.5: 1000, 0.5 + 1 / LENGTH: 1000},
    {1 / LENGTH: 300_000, 1.0: 100},
    {0.3: 7001, 0.36: 5003},
    {0.07: 900, 0.31: 7001, 0.45: 5003},
    {0.006: 9007, 0.13: 900, 0.27: 7001, 0.55: 5003},
)
FEWEST = ((1500, 1500, 1500), (100_100, 42_958, 103), (4252, 4252, 4252), (4836, 4836, 4836), (7304, 5669, 5669))
"""Packs at each of `FEW_DEPTHS`, each proven to be the fewest."""
FEW_DEPTHS = (3, 7, "max")


def counts_of(shares: dict[float, int], max_length: int) -> np.ndarray:
    counts = np.zeros(max_length, dtype=np.int64)
    for share, count in shares.items():
        counts[int(share * max_length) - 1] = count
    return counts


@pytest.mark.parametrize(("shares", "fewest"), sampled(zip(SHARES, FEWEST, strict=True), 2))
def test_few_lengths_are_exact_and_more_depth_is_never_worse(
    shares: dict[float, int], fewest: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "LONGEST_EXACT", LENGTH - 1)  # an exact check of the token bound takes a minute
    counts = counts_of(shares, LENGTH)
    packings = [pack_histogram(Histogram(LENGTH, counts), "optimal", depth) for depth in FEW_DEPTHS]
    assert tuple(packing.packs for packing in packings) == fewest
    for packing in packings:
        assert check_certificate(packing.certificate, counts) == packing.lower_bound == packing.packs


@pytest.mark.slow  # each takes a gigabyte
@pytest.mark.parametrize("depth", FEW_DEPTHS)
def test_two_lengths_in_the_longest_packs(depth: int | str) -> None:
    counts = counts_of({0.5: 1000, 0.5 + 1 / MOST_SLOTS: 1000}, MOST_SLOTS)
    packing = pack_histogram(Histogram(MOST_SLOTS, counts), "optimal", depth)
    assert check_certificate(packing.certificate, counts) == packing.lower_bound == packing.packs == 1500
