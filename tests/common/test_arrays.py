"""Seeded permutations: permutations at all, fixed for ever, and independent by purpose and index."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.arrays import permutation, random_words
from tests.builders.properties import examples


@given(count=st.integers(0, 997), seed=st.integers(-(2**70), 2**70), index=st.integers(0, 2**40))
@examples(100)
def test_it_is_a_permutation(count: int, seed: int, index: int) -> None:
    assert sorted(permutation(count, seed, "test", index)) == list(range(count))


def test_it_never_changes() -> None:
    assert permutation(11, 12345, "packs", 0).tolist() == [8, 2, 5, 9, 6, 0, 7, 10, 4, 1, 3]


def test_purpose_seed_and_indices_all_matter() -> None:
    words = {
        tuple(random_words(4, *arguments).tolist())
        for arguments in [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a", 0, 1), (1, "a", 1, 0)]
    }
    assert len(words) == 7


def test_every_place_is_equally_likely() -> None:
    counts = np.zeros((5, 5))
    for seed in range(2000):
        counts[np.arange(5), permutation(5, seed, "uniform")] += 1
    assert np.abs(counts / 2000 - 0.2).max() < 0.045
