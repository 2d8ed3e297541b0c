"""Optimal packings: gap 0 on the published histograms, brute force on tiny ones, and inputs made to break it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.packing import certificate
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.certificate import Certificate, check_certificate, simple_certificate, threshold_certificate
from gaudi_bert.packing.exact import bounds, linear_program
from gaudi_bert.packing.exact.bounds import prove_bound
from gaudi_bert.packing.exact.optimal import NEAR_WORK, pack_optimally, solve_optimally
from gaudi_bert.packing.exact.pricers import TablePricer
from gaudi_bert.packing.exact.whole_packs import search_packs
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import MOST_SLOTS, Histogram
from gaudi_bert.packing.mixture import Work, check_mixture, estimate_limit, packs_of
from gaudi_bert.packing.nnls import iterative_nnls, pack_by_nnls
from gaudi_bert.packing.pricing import ListedPricer, list_strategies
from tests.builders.agree import agree
from tests.builders.effort import sampled
from tests.builders.histograms import lognormal, perfect_triplets, published, scattered, small_histograms
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


@pytest.mark.parametrize("depth", [2, 3, 4, 16, 512])
@pytest.mark.parametrize("name", ["squad-384", "wikipedia-512"])
def test_quick_bound(name: str, depth: int) -> None:
    counts = published(name).counts
    certificate = prove_bound(counts, depth)
    assert check_certificate(certificate, counts) == certificate.bound
    for mixture in (pack_longest_first(counts, depth), iterative_nnls(counts, depth)):
        assert certificate.bound <= packs_of(mixture)
    assert certificate.bound == PROVEN[name][min(depth, max(PROVEN[name]))]


def test_a_false_certificate_is_refused() -> None:
    counts = np.array([0, 3, 0, 2], dtype=np.int64)
    prices = np.arange(1, 5)
    assert check_certificate(Certificate(prices, 2, 4), counts) == 4
    with pytest.raises(FailedError, match="prove 4 packs"):
        check_certificate(Certificate(prices, 2, 5), counts)


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


def test_the_solver_is_silent_from_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    highspy = pytest.importorskip("highspy")
    original, printing = highspy.Highs.enableCallbacks, []

    def enable_callbacks(solver: Any) -> None:
        printing.append(solver.getOptionValue("output_flag")[1])
        original(solver)

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", enable_callbacks)
    linear_program.LinearProgram.unlimited(np.array([0, 5, 3, 7, 0, 2, 0, 1]))
    assert printing == [False]


def test_a_share_is_spent_from_the_whole() -> None:
    whole = Work(100.0)
    part = whole.share(0.25)
    part.spend(30.0)
    assert (part.remaining, part.exhausted, whole.remaining, whole.exhausted) == (-5.0, True, 70.0, False)


def test_rows_of_an_estimate_share_a_limit_where_packs_are_long() -> None:
    limits = [estimate_limit(length) for length in (512, 1024, 1025, 2048, 4097, 32_768)]
    assert [limit and limit.remaining for limit in limits] == [None, None, 180e9, 180e9, 40e9, 40e9]


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


@pytest.mark.parametrize("operations", ALLOWED)
def test_a_bound_is_a_bound_however_little_was_done(operations: float) -> None:
    counts = scattered(301, 90, 40)
    certificate = prove_bound(counts, 4, Work(operations))
    assert certificate.bound <= check_certificate(certificate, counts) <= packs_of(pack_longest_first(counts, 4))


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


# --- from fractions to packs: the exhaustive search


@given(st.lists(st.integers(0, 2), min_size=2, max_size=10), st.integers(1, 5))
@examples(80)
def test_search_finds_the_fewest_and_no_fewer(counts: list[int], depth: int) -> None:
    max_length = len(counts)
    fewest = naive.fewest_packs(tuple(counts), depth)
    lengths = np.arange(1, max_length + 1)
    prices = lengths / max_length
    mixture = search_packs(lengths, np.array(counts), prices, max_length, depth, fewest, 1_000_000, Work()).packs
    assert mixture is not None
    assert packs_of(mixture) <= fewest
    if any(counts):
        check_mixture(mixture, Histogram(max_length, np.array(counts)), depth)
        fewer = search_packs(lengths, np.array(counts), prices, max_length, depth, fewest - 1, 1_000_000, Work())
        assert fewer == (None, True)


def test_search_gives_up() -> None:
    counts = np.ones(40, dtype=np.int64)
    lengths = np.arange(1, 41)
    assert search_packs(lengths, counts, lengths / 40, 40, 3, 21, 3, Work()) == (None, False)


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


@given(small_histograms(9, 2), st.integers(1, 9))
@examples(60)
def test_plans_from_a_list_against_trying_everything(histogram: Histogram, depth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_program, "LONGEST_TABLE", 3)
        patch.setattr(linear_program, "LONGEST_EXACT", 3)
        patch.setattr(bounds, "LONGEST_TABLE", 3)
        optimum = pack_optimally(histogram.counts, depth)
    fewest = naive.fewest_packs(tuple(histogram.counts.tolist()), depth)
    assert packs_of(optimum.mixture) == fewest
    assert check_certificate(optimum.certificate, histogram.counts) == optimum.certificate.bound <= fewest


@given(st.sets(st.integers(1, 31), min_size=1, max_size=5), st.integers(2, 33), st.integers(0, 2**32 - 1))
@examples(60)
def test_a_list_prices_as_the_tables_do(lengths: set[int], depth: int, seed: int) -> None:
    rows = np.array(sorted(lengths))
    prices = np.sort(np.random.default_rng(seed).random(len(rows)))
    copies = list_strategies(rows, 31, depth)
    assert copies is not None
    listed, table = ListedPricer(rows, 31, copies, Work()), TablePricer(rows, 31, depth, Work())
    agree(listed.price(prices), table.price(prices), 1e-12, scale=1.0)
    every = np.arange(len(rows))
    for pricer in (listed, table):
        best = pricer.strategies(every, prices, 0.0)
        assert all(sum(strategy) <= 31 and len(strategy) <= depth for strategy in best)
        assert {length for strategy in best for length in strategy} == lengths


def test_a_list_that_is_too_long_is_not_made() -> None:
    assert list_strategies(np.array([1, 2, 3]), 10**6, 10**6) is None
    assert list_strategies(np.array([10, 31]), 100, 4, most_entries=8) is not None
    assert list_strategies(np.array([10, 31]), 100, 4, most_entries=7) is None


# --- bounds by thresholds


@given(small_histograms(9, 2), st.integers(1, 9))
@examples(80)
def test_thresholds_prove_what_their_prices_do(histogram: Histogram, depth: int) -> None:
    proof = threshold_certificate(histogram.counts, min(depth, histogram.max_sequence_length))
    assert proof.bound <= naive.fewest_packs(tuple(histogram.counts.tolist()), depth)
    assert check_certificate(proof, histogram.counts) == proof.bound
    with pytest.MonkeyPatch.context() as patch:  # as those of packs too long for an exact proof
        patch.setattr(certificate, "LONGEST_EXACT", 0)
        assert check_certificate(proof, histogram.counts) == proof.bound


@given(st.lists(st.integers(0, 50), min_size=1, max_size=17), st.integers(1, 18), st.sampled_from([0, 2**22]))
@examples(80)
def test_limits_of_worth_hold(prices: list[int], depth: int, listed: int) -> None:
    best = naive.best_worth(prices, depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "LONGEST_EXACT", 0)
        patch.setattr(certificate, "MOST_LISTED", listed)
        ones = np.ones(len(prices), dtype=np.int64)
        bound = check_certificate(Certificate(np.array(prices), depth, 0), ones)
    exact = -(-sum(prices) // best) if best else 0
    assert bound == exact if listed else bound <= exact


@pytest.mark.parametrize("depth", [3, 8])
def test_many_sequences_of_a_full_pack(depth: int) -> None:
    """Zipf's law, cut at the length of a pack: the linear program on a coarse grid proves a fifth less."""
    lengths = np.minimum(np.random.default_rng(0).zipf(1.5, 200_000), 4096)
    counts = np.bincount(lengths, minlength=4097)[1:]
    packing = pack_histogram(Histogram(4096, counts), "optimal", depth)
    assert packing.gap <= 0.001 * packing.lower_bound
    assert simple_certificate(counts, depth).bound < 0.99 * packing.lower_bound
