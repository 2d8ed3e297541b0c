"""The stand-ins for other tools' packers (`benchmarks/compare.py`) are held to naive ones, and TRL's to TRL itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import histogram_of
from gaudi_bert.packing.mixture import packs_of
from tests.builders.histograms import small_histograms
from tests.builders.properties import examples
from tests.oracles.packing import packs_in_order

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from peers import PEERS, ListedLengths, count_best_fit, count_first_fit, sorted_in_batches

LENGTHS = st.lists(st.integers(1, 13), max_size=70)
LIMIT = st.one_of(st.none(), st.integers(1, 11))


@pytest.mark.parametrize(("count", "tightest"), [(count_first_fit, False), (count_best_fit, True)])
@given(lengths=LENGTHS, capacity=st.integers(13, 29), depth=st.integers(1, 6), batch=LIMIT, open_packs=LIMIT)
@examples(150)
def test_equals_the_heuristic_pack_by_pack(count, tightest, lengths, capacity, depth, batch, open_packs) -> None:
    found = count(np.array(lengths, np.int32), capacity, depth, batch=batch, open_packs=open_packs)
    assert found == packs_in_order(lengths, capacity, depth, batch, open_packs, tightest=tightest)


@given(histogram=small_histograms(17, 5))
@examples(100)
def test_best_fit_decreasing_has_the_packs_of_lpfhp_without_a_limit_of_depth(histogram) -> None:
    slots = histogram.max_sequence_length
    decreasing = np.repeat(np.arange(slots, 0, -1, dtype=np.int32), histogram.counts[::-1])
    assert count_best_fit(decreasing, slots, slots) == packs_of(pack_longest_first(histogram.counts, slots))


def test_scenarios_spelt_out() -> None:
    lengths = np.array([6, 7, 3, 4], np.int32)
    assert count_first_fit(lengths, 10, 10) == 3  # 6+3, 7, 4
    assert count_best_fit(lengths, 10, 10) == 2  # 6+4, 7+3
    assert count_best_fit(lengths, 10, 10, open_packs=1) == 3  # 6 | 7+3 | 4
    assert count_best_fit(lengths, 10, 10, batch=3) == 3  # 6, 7+3 | 4
    assert count_best_fit(lengths, 10, 1) == 4


def test_sorted_in_batches_keeps_the_last_batch() -> None:
    assert sorted_in_batches(np.array([1, 3, 2, 5, 4, 6, 7], np.int32), 3).tolist() == [3, 2, 1, 6, 5, 4, 7]
    assert sorted_in_batches(np.array([1, 2], np.int32), 3).tolist() == [2, 1]


def test_the_stand_in_for_trl_has_the_packs_of_trl() -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL IS NOT INSTALLED: pip install trl to hold its stand-in to it")
    lengths = np.random.default_rng(5).integers(3, 97, 2411).astype(np.int32)
    listed = ListedLengths(lengths, lengths, histogram_of(lengths, 101), 101)
    (peer,) = (peer for peer in PEERS if peer.tool == "trl")
    assert peer.callable_for(listed)
    assert peer.installed is not None
    assert peer.installed(listed) == peer.count(listed)
