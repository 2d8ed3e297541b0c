"""Long packs: sequences dealt, matched and thinned; none is lost, no pack is too long or too deep, and packs get full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.packing import bounds, certificate, linear_program, nnls, optimal
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.certificate import verify_certified_lower_bound
from gaudi_bert.packing.heuristics import pack_longest_first
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.long_packs import (
    assign_sequences_to_slots,
    cut_and_recombine_packs,
    pack_by_subsample,
    split_counts_into_bins,
)
from gaudi_bert.packing.strategies import OperationBudget, check_packing, count_packs
from tests.builders.properties import examples
from tests.oracles.packing import fewest_packs


def few_counts(generator: np.random.Generator, max_length: int) -> np.ndarray:
    return generator.integers(0, 9, max_length) * generator.integers(0, 2, max_length)


@given(st.integers(0, 2**32 - 1), st.sampled_from([31, 64, 97]), st.integers(1, 9))
@examples(100)
def test_packs_are_packs_and_never_more(seed: int, max_length: int, depth: int) -> None:
    counts = few_counts(np.random.default_rng(seed), max_length)
    before = pack_longest_first(counts, depth)
    after = cut_and_recombine_packs(before, max_length, depth, 0, OperationBudget(1e6))
    check_packing(after, Histogram(max_length, counts), depth)
    assert count_packs(after) <= count_packs(before)


@pytest.mark.parametrize(
    ("before", "target", "operations", "after"),
    [
        # Sequences of over and under half a pack find their partners.
        ({(47, 51): 1, (49,): 1, (53,): 1}, 0, 1e9, {(47, 53): 1, (49, 51): 1}),
        ({(31,): 3, (69,): 3, (40, 60): 2}, 0, 1e9, {(31, 69): 3, (40, 60): 2}),
        ({(31,): 4, (69,): 4}, 4, 1e9, {(31, 69): 4}),
        ({(31,): 4, (69,): 4}, 8, 1e9, {(31,): 4, (69,): 4}),  # these packs are few enough
        ({(31,): 4, (69,): 4}, 4, 0, {(31,): 4, (69,): 4}),  # no operations are left
        ({}, 0, 1e9, {}),
    ],
)
def test_halves_of_packs_find_partners_until_there_are_few_packs(
    before: dict, target: int, operations: float, after: dict
) -> None:
    assert cut_and_recombine_packs(before, 100, 2, target, OperationBudget(operations)) == after


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from([31, 64, 97]), st.integers(1, 7), st.sampled_from([0.0, 1e12]))
@examples(60)
def test_packs_are_packs_and_no_sequence_is_lost(seed: int, max_length: int, depth: int, operations: float) -> None:
    generator = np.random.default_rng(seed)
    counts = few_counts(generator, max_length)
    counts[int(generator.integers(0, max_length))] += 1
    bins = int(generator.integers(5, 20))
    coarse = pack_longest_first(split_counts_into_bins(counts, bins), depth)
    strategy_counts, left = assign_sequences_to_slots(coarse, counts, bins, depth, OperationBudget(operations))
    check_packing(strategy_counts, Histogram(max_length, counts - left), depth)
    assert left.min() >= 0


@pytest.mark.parametrize(
    ("coarse", "lengths", "packs"),
    [
        (4, {49: 3, 50: 2, 51: 3}, {(49, 51): 3, (50, 50): 1}),  # excess goes by swaps: four full packs
        (2, {51: 4}, {(51,): 4}),  # what cannot be swapped gets a new pack
    ],
)
def test_excess_is_swapped_or_gets_a_new_pack(coarse: int, lengths: dict[int, int], packs: dict) -> None:
    counts = np.zeros(100, dtype=np.int64)
    counts[np.array(list(lengths)) - 1] = list(lengths.values())
    strategy_counts, left = assign_sequences_to_slots({(5, 5): coarse}, counts, 10, 2, OperationBudget(1e9))
    assert (strategy_counts, left.any()) == (packs, False)


@given(st.integers(0, 2**32 - 1), st.sampled_from([31, 64, 97]), st.integers(1, 7), st.integers(20, 400))
@examples(60)
def test_a_part_is_planned_for_all(seed: int, max_length: int, depth: int, planned: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 90, max_length)
    parts: list[np.ndarray] = []

    def pack(part: np.ndarray) -> dict:
        parts.append(part)
        return pack_longest_first(part, depth)

    strategy_counts = pack_by_subsample(counts, depth, pack, planned)
    check_packing(strategy_counts, Histogram(max_length, counts), depth)
    every = -(-counts.sum() // planned)
    assert parts[0].sum() == counts.sum() // every <= planned
    assert count_packs(strategy_counts) <= every * count_packs(pack_longest_first(parts[0], depth)) + every


@pytest.mark.parametrize("algorithm", ["nnls", "optimal"])
@pytest.mark.parametrize("depth", [3, "max"])
def test_of_very_many_lengths_a_part_is_planned(algorithm: str, depth: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nnls, optimal):
        monkeypatch.setattr(module, "MOST_LENGTHS", 200)
    for counts in (np.ones(5003, dtype=np.int64), np.full(5003, 3)):
        packing = pack_histogram(Histogram(5003, counts), algorithm, depth)
        assert verify_certified_lower_bound(packing.certificate, counts) == packing.lower_bound
        assert packing.gap <= 0.02 * packing.lower_bound


# --- bounds of packs too long for an exact proof


def bound_packs_of_more_than(tokens: int, patch: pytest.MonkeyPatch) -> None:
    """Bound such packs as those of a million tokens are."""
    for module in (certificate, bounds, linear_program):
        patch.setattr(module, "MAX_EXACT_LENGTH", tokens)


@given(st.lists(st.integers(1, 23), min_size=1, max_size=9), st.integers(1, 23), st.integers(23, 23 * 23))
@examples(60)
def test_a_bound_by_steps_is_never_above_the_fewest_packs(lengths: list[int], depth: int, work: int) -> None:
    counts = np.bincount(lengths, minlength=24)[1:]
    prices = np.maximum.accumulate(np.random.default_rng(work).integers(0, 50, 23))
    with pytest.MonkeyPatch.context() as patch:
        bound_packs_of_more_than(20, patch)
        patch.setattr(bounds, "STEP_WORK", work)
        proof = bounds.prove_bound_by_prices(counts, prices, depth)
        assert proof.bound <= fewest_packs(tuple(counts.tolist()), depth)
        assert verify_certified_lower_bound(proof, counts) == proof.bound


@pytest.mark.parametrize("algorithm", ["nnls", "optimal"])
@pytest.mark.parametrize("depth", [5, "max"])
def test_long_packs_come_with_a_bound_that_their_prices_prove(
    algorithm: str, depth: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_packs_of_more_than(5000, monkeypatch)
    counts = np.bincount(np.random.default_rng(5).integers(1, 5004, 300), minlength=5004)[1:]
    packing = pack_histogram(Histogram(5003, counts), algorithm, depth)
    assert verify_certified_lower_bound(packing.certificate, counts) == packing.lower_bound
    assert packing.gap <= 4


def test_prices_are_never_too_large_to_be_checked() -> None:
    """At any depth: a plan for 8,192 slots with thousands of lengths was refused by `write`."""
    counts = np.bincount(np.random.default_rng(1).integers(1, 8192, 9000), minlength=8192)[1:]
    packing = pack_histogram(Histogram(8191, counts), "lpfhp", "max")
    assert verify_certified_lower_bound(packing.certificate, counts) == packing.lower_bound


def test_packs_of_a_million_tokens_are_bounded_and_packed_at_once() -> None:
    counts = np.zeros(1 << 20, np.int64)
    counts[[700_000, 900_000]] = 5
    for depth, bound in ((1 << 20, 8), (1, 10)):
        simple = certificate.prove_bound_by_totals(counts, depth)
        assert verify_certified_lower_bound(simple, counts) == simple.bound == bound
    packing = pack_histogram(Histogram(1 << 20, [0] * (2**20 - 1) + [1]), "nnls", "max")
    assert (packing.packs, packing.lower_bound) == (1, 1)
