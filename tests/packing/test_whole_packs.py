"""From fractions to whole packs: the exhaustive search, and slots that shorter sequences use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.exact.whole_packs import search_packs
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, coverage, fill_slots, packs_of
from gaudi_bert.packing.result import Work
from tests.builders.properties import examples
from tests.oracles import packing as naive


@given(st.lists(st.integers(0, 2), min_size=2, max_size=10), st.integers(1, 5))
@examples(80)
def test_search_finds_the_fewest_and_no_fewer(counts: list[int], depth: int) -> None:
    max_length = len(counts)
    fewest = naive.fewest_packs(tuple(counts), depth)
    lengths = np.arange(1, max_length + 1)
    prices = lengths / max_length
    mixture = search_packs(lengths, np.array(counts), prices, max_length, depth, fewest, 1_000_000, Work())
    assert mixture is not None
    assert packs_of(mixture) <= fewest
    if any(counts):
        check_mixture(mixture, Histogram(max_length, np.array(counts)), depth)
        assert search_packs(lengths, np.array(counts), prices, max_length, depth, fewest - 1, 1_000_000, Work()) is None


def test_search_gives_up() -> None:
    counts = np.ones(40, dtype=np.int64)
    lengths = np.arange(1, 41)
    assert search_packs(lengths, counts, lengths / 40, 40, 3, 21, 3, Work()) is None


def test_a_longer_slot_holds_a_shorter_sequence() -> None:
    counts = np.array([1, 2, 0, 1, 0, 0], dtype=np.int64)
    mixture = fill_slots({(1, 4): 2, (2,): 1}, counts)
    assert coverage(mixture, 6).tolist() == counts.tolist()


def test_too_few_slots() -> None:
    with pytest.raises(InputError, match="too few"):
        fill_slots({(1, 2): 1}, np.array([0, 0, 1], dtype=np.int64))


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
@examples(50)
def test_settled_slots_cover_exactly(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, 30, 17)
    mixture = pack_longest_first(slots, depth)
    counts = np.zeros(17, dtype=np.int64)
    for length in np.repeat(np.arange(1, 18), slots).tolist():
        shorter = int(rng.integers(0, length + 1))
        if shorter:
            counts[shorter - 1] += 1
    settled = fill_slots(mixture, counts)
    check_mixture(settled, Histogram(17, counts), depth)
    assert packs_of(settled) <= packs_of(mixture)
