"""Few lengths in very long packs: planned exactly at any length, from a list of strategies; and the bound by thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing import certificate
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.certificate import Certificate, check_certificate, simple_certificate, threshold_certificate
from gaudi_bert.packing.exact import bounds, linear_program
from gaudi_bert.packing.exact.linear_program import TablePricer
from gaudi_bert.packing.exact.listed import ListedPricer, list_strategies
from gaudi_bert.packing.exact.optimal import pack_optimally
from gaudi_bert.packing.histogram import MOST_SLOTS, Histogram
from gaudi_bert.packing.mixture import packs_of
from gaudi_bert.packing.result import Work
from tests.builders.agree import agree
from tests.builders.effort import LONG
from tests.builders.histograms import small_histograms
from tests.builders.properties import examples
from tests.oracles import packing as naive

LENGTH = 1 << 17
SHARES = (  # of a pack, with their counts
    {0.5: 1000, 0.5 + 1 / LENGTH: 1000},
    {1 / LENGTH: 300_000, 1.0: 100},
    {0.3: 7001, 0.36: 5003},
    {0.07: 900, 0.31: 7001, 0.45: 5003},
    {0.006: 9007, 0.13: 900, 0.27: 7001, 0.55: 5003},
)
FEWEST = ((1500, 1500, 1500), (100_100, 42_958, 103), (4252, 4252, 4252), (4836, 4836, 4836), (7304, 5669, 5669))
"""Packs at each of `DEPTHS`, each proven to be the fewest."""
DEPTHS = (3, 7, "max")


def counts_of(shares: dict[float, int], max_length: int) -> np.ndarray:
    counts = np.zeros(max_length, dtype=np.int64)
    for share, count in shares.items():
        counts[int(share * max_length) - 1] = count
    return counts


@pytest.mark.parametrize(("shares", "fewest"), zip(SHARES, FEWEST, strict=True))
def test_few_lengths_are_exact_and_more_depth_is_never_worse(
    shares: dict[float, int], fewest: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "LONGEST_EXACT", LENGTH - 1)  # an exact check of the token bound takes a minute
    counts = counts_of(shares, LENGTH)
    packings = [pack_histogram(Histogram(LENGTH, counts), "optimal", depth) for depth in DEPTHS]
    assert tuple(packing.packs for packing in packings) == fewest
    for packing in packings:
        assert check_certificate(packing.certificate, counts) == packing.lower_bound == packing.packs


@pytest.mark.skipif(not LONG, reason="takes a gigabyte; `make test-long` runs it")
@pytest.mark.repeated
@pytest.mark.parametrize("depth", DEPTHS)
def test_two_lengths_in_the_longest_packs(depth: int | str) -> None:
    counts = counts_of({0.5: 1000, 0.5 + 1 / MOST_SLOTS: 1000}, MOST_SLOTS)
    packing = pack_histogram(Histogram(MOST_SLOTS, counts), "optimal", depth)
    assert check_certificate(packing.certificate, counts) == packing.lower_bound == packing.packs == 1500


@given(small_histograms(9, 2), st.integers(1, 9))
@examples(60)
def test_plans_from_a_list_against_trying_everything(histogram: Histogram, depth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (linear_program, "LONGEST_TABLE"),
            (bounds, "LONGEST_TABLE"),
            (linear_program, "LONGEST_EXACT"),
        ):
            patch.setattr(module, name, 3)
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


# --- bounds


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
