"""Rows of several lengths: the best of all choices, every sequence in the shortest row it fits, and costs that add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.row_lengths import LEAST_GAIN, MOST_LENGTHS, Cost, choose_row_lengths, estimate_row_cost
from tests.builders.agree import agree
from tests.builders.histograms import bimodal, lognormal, uniform
from tests.builders.properties import examples
from tests.oracles.packing import fewest_packs

ENCODER = partial(estimate_row_cost, hidden_size=256)
"""A small ModernBERT."""


def total(lengths: tuple[int, ...], counts: np.ndarray, cost: Cost, packs_of: Callable[[tuple[int, ...]], int]) -> float:
    """The cost of rows of these lengths, each sequence in the shortest that it fits."""
    padded = [*counts.tolist(), *[0] * lengths[-1]]
    return sum(packs_of((0,) * start + tuple(padded[start:end])) * cost(end) for start, end in pairwise((0, *lengths)))


def least_total(counts: np.ndarray, cost: Cost, packs_of: Callable[[tuple[int, ...]], int], multiple: int) -> float:
    """The least cost of any choice of lengths, by trying each."""
    longest = -(-(int(np.flatnonzero(counts)[-1]) + 1) // multiple) * multiple
    shorter = range(multiple, longest, multiple)
    choices = [(*some, longest) for number in range(MOST_LENGTHS) for some in combinations(shorter, number)]
    return min(total(choice, counts, cost, packs_of) for choice in choices)


@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=8),
    multiple=st.integers(1, 5),
    depth=st.integers(1, 4),
    parts=st.tuples(st.integers(1, 9), st.integers(0, 5)),
)
@examples(60)
def test_against_every_choice(lengths: list[int], multiple: int, depth: int, parts: tuple) -> None:
    counts, (linear, quadratic) = np.bincount(lengths)[1:], parts

    def cost(length: int) -> float:
        return length * (linear + quadratic * length)

    chosen = choose_row_lengths(counts, cost, length_multiple=multiple, depth=depth)
    packs_of = partial(fewest_packs, depth=depth)
    best = least_total(counts, cost, packs_of, multiple)
    one_length = total((-(-len(counts) // multiple) * multiple,), counts, cost, packs_of)
    agree(chosen.one_length_cost, one_length)
    agree(chosen.cost, best if best < (1.0 - LEAST_GAIN) * one_length else one_length)


@pytest.mark.parametrize("depth", ["max", 3])
@pytest.mark.parametrize("make", [lognormal, uniform, bimodal])
def test_many_packs_are_chosen_by_bounds_within_a_hundredth_of_the_best_plans(make, depth: int | str) -> None:
    counts = make(509, 20_000, 3)

    @cache
    def packs_of(part: tuple[int, ...]) -> int:
        return pack_histogram(Histogram(len(part), part), "optimal", depth).packs if any(part) else 0

    best = least_total(counts, ENCODER, packs_of, 64)
    chosen = choose_row_lengths(counts, ENCODER, length_multiple=64, depth=depth)
    cost, one_length = (total(lengths, counts, ENCODER, packs_of) for lengths in (chosen.lengths, (512,)))
    gains = best < (1.0 - LEAST_GAIN) * one_length
    assert gains == (make != uniform)
    assert cost <= (1.01 * best if gains else one_length)
    agree([chosen.cost, chosen.one_length_cost], [cost, one_length], 0.02)


def test_the_cost_of_padded_batches_is_that_of_drawn_ones() -> None:
    counts = bimodal(257, 3000)
    lengths = np.random.default_rng(0).permutation(np.repeat(np.arange(1, 258), counts))
    longest = np.random.default_rng(1).choice(lengths, (20_000, 8)).max(axis=1)
    drawn = len(lengths) * np.mean([ENCODER(length) for length in longest.tolist()])
    agree(choose_row_lengths(counts, ENCODER, batch_sequences=8).padded_cost, drawn, 0.01)
    agree(choose_row_lengths(counts, float, batch_sequences=1).padded_cost, float(counts @ np.arange(1, 258)))


def test_given_lengths_are_taken_as_they_are() -> None:
    counts = np.bincount([3, 90, 90, 99])[1:]
    chosen = choose_row_lengths(counts, ENCODER, row_lengths=(4, 60, 128))
    assert chosen.lengths == (4, 128)
    assert [packing.packs for packing in chosen.packings] == [1, 3]
    agree(chosen.cost, ENCODER(4) + 3 * ENCODER(128))
    with pytest.raises(InputError, match=r"99 .*98"):
        choose_row_lengths(counts, ENCODER, row_lengths=(4, 98))


def test_a_position_limit_and_lengths_that_fit_none() -> None:
    counts = np.bincount([3, 90, 90, 99])[1:]
    assert choose_row_lengths(counts, float, max_row_length=99).lengths[-1] == 99
    with pytest.raises(InputError, match=r"99 .*98"):
        choose_row_lengths(counts, float, max_row_length=98)
    with pytest.raises(InputError, match="no sequence"):
        choose_row_lengths(counts * 0, float)
