"""Limits of effort: whatever the histogram, a valid packing and an honest bound, for no more work than allowed."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.certificate import check_certificate
from gaudi_bert.packing.exact.bounds import prove_bound
from gaudi_bert.packing.exact.optimal import pack_optimally
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from gaudi_bert.packing.nnls.iterative import iterative_nnls
from gaudi_bert.packing.work import Work, estimate_limit
from tests.builders.hard_histograms import lognormal, perfect_triplets, scattered

ALLOWED = [0.0, 1e5, 3e6, 1e9]


def test_a_share_is_spent_from_the_whole() -> None:
    whole = Work(100.0)
    part = whole.share(0.25)
    part.spend(30.0)
    assert (part.left, part.exhausted, whole.left, whole.exhausted) == (-5.0, True, 70.0, False)


def test_rows_of_an_estimate_share_a_limit_where_packs_are_long() -> None:
    limits = [estimate_limit(length) for length in (512, 1024, 1025, 2048, 4097, 32_768)]
    assert [limit and limit.left for limit in limits] == [None, None, 180e9, 180e9, 40e9, 40e9]


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


def test_long_packs_by_nnls_go_through_a_grid() -> None:
    counts = lognormal(4999, 20_000)
    mixture = iterative_nnls(counts, 4, work=Work(3e8))
    check_mixture(mixture, Histogram(len(counts), counts), 4)


def test_very_many_sequences_make_no_more_strategies() -> None:
    few, many = (pack_optimally(lognormal(3000, 10**6) * factor, 4, work=Work(1e9)) for factor in (1, 10**5))
    assert len(many.mixture) < 3 * len(few.mixture)
    assert many.gap <= 0.01 * many.certificate.bound


def test_least_squares_length_by_length_refuses_long_packs() -> None:
    with pytest.raises(InputError, match="at most 4096 tokens, not 5000"):
        pack_histogram(Histogram(5000, np.ones(5000, dtype=np.int64)), "nnlshp", 3)
