"""Sequences dealt into slots of a coarse plan: none lost, none too many, no pack too long or too deep, and full packs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.coarse_grid import split_counts
from gaudi_bert.packing.exact.optimal import pack_optimally
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture
from gaudi_bert.packing.slot_swaps import deal_into_slots
from gaudi_bert.packing.work import Work
from tests.builders.hard_histograms import bimodal, lognormal, uniform
from tests.builders.properties import examples


@given(st.integers(0, 2**32 - 1), st.sampled_from([31, 64, 97]), st.integers(1, 7), st.sampled_from([0.0, 1e12]))
@examples(60)
def test_packs_are_packs_and_no_sequence_is_lost(seed: int, max_length: int, depth: int, operations: float) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 9, max_length) * generator.integers(0, 2, max_length)
    counts[int(generator.integers(0, max_length))] += 1
    bins = int(generator.integers(5, 20))
    coarse = pack_longest_first(split_counts(counts, bins), depth)
    mixture, left = deal_into_slots(coarse, counts, bins, depth, Work(operations))
    check_mixture(mixture, Histogram(max_length, counts - left), depth)
    assert left.min() >= 0


def test_excess_goes_by_swaps() -> None:
    counts = np.zeros(100, dtype=np.int64)
    counts[[48, 49, 50]] = 3, 2, 3  # 49 49 49 50 50 51 51 51: four full packs
    mixture, left = deal_into_slots({(5, 5): 4}, counts, 10, 2, Work(1e9))
    assert not left.any()
    assert mixture == {(49, 51): 3, (50, 50): 1}


def test_what_cannot_be_swapped_gets_a_new_pack() -> None:
    counts = np.zeros(100, dtype=np.int64)
    counts[50] = 4
    mixture, left = deal_into_slots({(5, 5): 2}, counts, 10, 2, Work(1e9))
    assert (mixture, left.sum()) == ({(51,): 4}, 0)


@pytest.mark.parametrize(("bins", "max_length"), [(10, 97), (16, 64), (31, 331)])
def test_splitting_keeps_number_and_tokens(bins: int, max_length: int) -> None:
    counts = np.random.default_rng(bins).integers(0, 1000, max_length)
    counts[: -(-max_length // bins)] = 0  # shorter than a bin
    split = split_counts(counts, bins)
    assert split.sum() == counts.sum()
    tokens = counts @ np.arange(1, max_length + 1)
    assert abs(split @ np.arange(1, bins + 1) * max_length / bins - tokens) <= max_length / bins


@pytest.mark.parametrize(
    ("counts", "depth"), [(lognormal(8192, 3000), 8), (uniform(8192, 3000, 3), 4), (bimodal(8191, 3000, 6), 8191)]
)
def test_thousands_of_lengths_end_within_a_pack(counts: np.ndarray, depth: int) -> None:
    optimum = pack_optimally(counts, depth)
    check_mixture(optimum.mixture, Histogram(len(counts), counts), depth)
    assert optimum.gap <= 1
