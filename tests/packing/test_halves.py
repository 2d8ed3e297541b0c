"""Packs matched anew: the same sequences, never more packs, none too long or too deep; and two that alone fit nobody."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing.flat_packs import flatten_packs, mixture_of_packs
from gaudi_bert.packing.halves import rematch_halves
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.mixture import check_mixture, packs_of
from gaudi_bert.packing.work import Work
from tests.builders.properties import examples


@given(st.integers(0, 2**32 - 1), st.sampled_from([31, 64, 97]), st.integers(1, 9))
@examples(100)
def test_packs_are_packs_and_never_more(seed: int, max_length: int, depth: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 9, max_length) * generator.integers(0, 2, max_length)
    before = pack_longest_first(counts, depth)
    after = rematch_halves(before, max_length, depth, 0, Work(1e6))
    check_mixture(after, Histogram(max_length, counts), depth)
    assert packs_of(after) <= packs_of(before)


def test_sequences_of_over_and_under_half_a_pack_find_their_partners() -> None:
    assert rematch_halves({(47, 51): 1, (49,): 1, (53,): 1}, 100, 2, 0, Work(1e9)) == {(47, 53): 1, (49, 51): 1}
    assert rematch_halves({(31,): 3, (69,): 3, (40, 60): 2}, 100, 2, 0, Work(1e9)) == {(31, 69): 3, (40, 60): 2}


def test_it_stops_at_enough_packs_and_without_work() -> None:
    wasteful = {(31,): 4, (69,): 4}
    assert packs_of(rematch_halves(wasteful, 100, 2, 8, Work(1e9))) == 8
    assert packs_of(rematch_halves(wasteful, 100, 2, 4, Work(0))) == 8
    assert rematch_halves(wasteful, 100, 2, 4, Work(1e9)) == {(31, 69): 4}
    assert rematch_halves({}, 100, 2, 0, Work(1e9)) == {}


def test_packs_as_arrays_and_back() -> None:
    mixture = {(3, 5): 2, (7,): 1}
    lengths, starts = flatten_packs(mixture)
    assert (lengths.tolist(), starts.tolist()) == ([3, 5, 3, 5, 7], [0, 2, 4, 5])
    assert mixture_of_packs(lengths, starts) == mixture
    assert mixture_of_packs(np.array([0, 3, 0, 0]), np.array([0, 2, 4])) == {(3,): 1}
