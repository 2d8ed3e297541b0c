"""Certificates: what prices and thresholds prove, checked in integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import FailedError
from gaudi_bert.packing import certificate
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.certificate import (
    Certificate,
    prove_bound_by_length_threshold,
    prove_bound_by_totals,
    verify_certified_lower_bound,
)
from gaudi_bert.packing.histogram import Histogram
from tests.builders.histograms import small_histograms
from tests.builders.properties import examples
from tests.oracles import packing as naive


def test_a_false_certificate_is_refused() -> None:
    counts = np.array([0, 3, 0, 2], dtype=np.int64)
    prices = np.arange(1, 5)
    assert verify_certified_lower_bound(Certificate(prices, 2, 4), counts) == 4
    with pytest.raises(FailedError, match=r"\b4\b.*\b5\b"):
        verify_certified_lower_bound(Certificate(prices, 2, 5), counts)


@given(small_histograms(9, 2), st.integers(1, 9))
@examples(80)
def test_thresholds_prove_what_their_prices_do(histogram: Histogram, depth: int) -> None:
    proof = prove_bound_by_length_threshold(histogram.counts, min(depth, histogram.max_sequence_length))
    assert proof.bound <= naive.fewest_packs(tuple(histogram.counts.tolist()), depth)
    assert verify_certified_lower_bound(proof, histogram.counts) == proof.bound
    with pytest.MonkeyPatch.context() as patch:  # as those of packs too long for an exact proof
        patch.setattr(certificate, "MAX_EXACT_LENGTH", 0)
        assert verify_certified_lower_bound(proof, histogram.counts) == proof.bound


@given(st.lists(st.integers(0, 50), min_size=1, max_size=17), st.integers(1, 18), st.sampled_from([0, 2**22]))
@examples(80)
def test_limits_of_worth_hold(prices: list[int], depth: int, listed: int) -> None:
    best = naive.compute_max_pack_price(prices, depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "MAX_EXACT_LENGTH", 0)
        patch.setattr(certificate, "MAX_LISTED", listed)
        ones = np.ones(len(prices), dtype=np.int64)
        bound = verify_certified_lower_bound(Certificate(np.array(prices), depth, 0), ones)
    exact = -(-sum(prices) // best) if best else 0
    loose = -(-sum(prices) // (depth * max(prices))) if best else 0  # as if each pack were full of the most valuable
    assert bound == exact if listed else loose <= bound <= exact


@pytest.mark.parametrize("depth", [3, 8])
def test_many_sequences_of_a_full_pack(depth: int) -> None:
    """Zipf's law, cut at the length of a pack: the linear program on a coarse grid proves a fifth less."""
    lengths = np.minimum(np.random.default_rng(0).zipf(1.5, 200_000), 4096)
    counts = np.bincount(lengths, minlength=4097)[1:]
    packing = pack_histogram(Histogram(4096, counts), "optimal", depth)
    assert packing.gap <= 0.001 * packing.lower_bound
    assert prove_bound_by_totals(counts, depth).bound < 0.99 * packing.lower_bound
