"""The packer as a library."""

from __future__ import annotations

import doctest
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert import Packs, pack_histogram, pack_lengths
from gaudi_bert.common.errors import ArgumentError
from gaudi_bert.common.sampling import sample_packs
from gaudi_bert.packing import pack_lengths as module
from gaudi_bert.packing.histogram import count_lengths
from tests.builders.agree import agree
from tests.builders.properties import examples

ALGORITHMS = ("optimal", "nnls", "nnlshp", "ennlshp", "spfhp", "lpfhp", "greedy", "ffd", "none")


def as_lists(packs) -> list[list[int]]:
    return [pack.tolist() for pack in packs]


@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=60),
    depth=st.one_of(st.just("max"), st.integers(1, 5)),
    algorithm=st.sampled_from(ALGORITHMS),
    seed=st.integers(0, 2**70),
)
@examples(90)
def test_every_sequence_is_there_once_and_every_figure_is_true(lengths, depth, algorithm: str, seed: int) -> None:
    packs = pack_lengths(lengths, 17, depth=depth, algorithm=algorithm, seed=seed)
    listed = as_lists(packs)
    assert sorted(index for pack in listed for index in pack) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in pack) for pack in listed) <= 17
    assert 1 <= min(map(len, listed)) <= max(map(len, listed)) <= (17 if depth == "max" else depth)
    assert len(packs) == len(listed)
    assert packs.gap == len(listed) - packs.lower_bound >= 0
    agree(packs.efficiency, sum(lengths) / (17 * len(listed)))
    agree(packs.packing_factor, len(lengths) / len(listed))
    assert [packs[place].tolist() for place in range(len(packs))] == listed
    assert [packs[place - len(packs)].tolist() for place in range(len(packs))] == listed
    assert packs.indices.dtype == packs.offsets.dtype == np.int64


@given(
    packs=st.integers(0, 30),
    size=st.integers(1, 9),
    start=st.integers(-11, 11),
    stop=st.integers(-11, 11),
    step=st.sampled_from([1, 2, -1, -3]),
)
@examples(60)
def test_some_packs_are_those_that_a_list_has(packs: int, size: int, start: int, stop: int, step: int) -> None:
    whole = pack_lengths([8, 2] * packs, 10)
    assert as_lists(whole[start:stop:step]) == as_lists(whole)[start:stop:step]
    assert as_lists(whole[start:]) == as_lists(whole)[start:]
    for rank in range(size):
        assert as_lists(whole.shard(rank, size)) == as_lists(whole)[rank::size]


def test_packs_and_their_parts_are_of_one_kind_are_counted_from_both_ends_and_can_be_sent() -> None:
    packs = pack_lengths([8, 2, 5, 5], 10)
    assert all(isinstance(some, Packs) for some in (packs, packs[1:], packs.shard(0, 2)))
    assert repr(packs[1:]) == "Packs(2 sequences in 1 packs)"
    assert packs[-1].tolist() == as_lists(packs)[1]
    for beyond in (2, -3):
        with pytest.raises(IndexError, match=rf"packs\[{beyond}\]"):
            packs[beyond]
    with pytest.raises(TypeError, match=r"packs\[1\.5\]"):
        packs[1.5]  # type: ignore[call-overload]
    again = pickle.loads(pickle.dumps(packs))
    assert (as_lists(again), repr(again)) == (as_lists(packs), repr(packs))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_sequences_are_no_packs(algorithm: str) -> None:
    for nothing in ([], np.zeros(0), np.zeros(0, np.int32)):
        packs = pack_lengths(nothing, 512, algorithm=algorithm)
        assert (len(packs), list(packs), packs.lower_bound, packs.gap, packs.efficiency) == (0, [], 0, 0, 1.0)
        assert len(packs.shard(1, 3)) == len(packs[2:]) == 0
        assert "<td>0 of 512 slots</td>" in packs._repr_html_()


def test_arrays_cannot_be_changed_and_the_input_is_not() -> None:
    lengths = np.array([2, 1, 2])
    packs = pack_lengths(lengths, 3)
    with pytest.raises(ValueError, match="read-only"):
        packs.indices[0] = 1
    with pytest.raises(AttributeError):
        packs.tokens = 1  # type: ignore[misc]
    assert lengths.flags.writeable
    assert lengths.tolist() == [2, 1, 2]


def test_the_seed_decides_and_the_kind_of_array_does_not() -> None:
    lengths = np.random.default_rng(3).integers(1, 65, 997)
    first = pack_lengths(lengths, 64, seed=7)
    for same in (lengths.tolist(), lengths.astype(np.uint8), lengths[::-1][::-1]):
        assert as_lists(pack_lengths(same, 64, seed=7)) == as_lists(first)
    assert as_lists(pack_lengths(lengths, 64, seed=8)) != as_lists(first)


def test_packs_are_those_that_write_deals() -> None:
    lengths = np.random.default_rng(4).integers(1, 33, 499).astype(np.int32)
    packs = pack_lengths(lengths, 32, depth=3, seed=5)
    plan = pack_histogram(count_lengths(lengths, 32).counts, depth=3)
    written = sample_packs(lengths, list(zip(plan.strategies, plan.counts.tolist(), strict=True)), 5, 0)
    assert written.members.tolist() == packs.indices.tolist()
    assert written.starts.tolist() == packs.offsets.tolist()


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=19).filter(any), depth=st.integers(1, 5))
@examples(60)
def test_a_histogram_has_the_figures_of_its_lengths(counts: list[int], depth: int) -> None:
    lengths = np.repeat(np.arange(1, len(counts) + 1), counts)
    packed = pack_histogram(counts, depth=depth)
    packs = pack_lengths(lengths, len(counts), depth=depth)
    for figure in ("lower_bound", "gap", "efficiency", "packing_factor", "tokens", "algorithm", "max_sequence_length"):
        assert getattr(packed, figure) == getattr(packs, figure)
    assert packed.packs == len(packs)
    assert packed.sequences == len(lengths)
    assert all(list(strategy) == sorted(strategy) for strategy in packed.strategies)
    pairs = zip(packed.strategies, packed.counts.tolist(), strict=True)
    assert sorted(length for strategy, count in pairs for length in strategy * count) == lengths.tolist()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: pack_histogram([1, 2], depth=0), "depth = 0"),
        (lambda: pack_lengths([1, 2], 3, effort="none"), "but is 'none'"),
        (lambda: pack_histogram([0, 0]), r"`counts` contains no sequences"),
        (lambda: pack_histogram([0, 0, 1], 2), r"max_sequence_length .*\b2\b"),
        (lambda: pack_lengths([1], 1).shard(2, 2), "rank = 2"),
        (lambda: pack_lengths([1], 1).shard(0, 0), "size = 0"),
        (lambda: pack_histogram([1, 2], algorithm="nnsl"), "did you mean `nnls`"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        call()
    assert isinstance(caught.value, ArgumentError)


ODD = [  # what else is bad of lengths and counts is in test_histogram
    None, True, -1, 3.5, float("nan"), np.float64(8), "", "optimall", "x" * 2**20, "\ud800", b"345", {3, "x"}, [10**400],
    [[1], [2, 3]], object(), Ellipsis, slice(3), np.array(3.0), np.zeros((2, 2), int), np.array([b"3"]), np.array([3 + 0j]),
    np.array([3], "m8[s]"), np.zeros(2, [("a", int)]), np.ma.array([3, 4], mask=True), (each for each in [3, "x"]),
]  # fmt: skip
CALLS = {
    "lengths": lambda odd: pack_lengths(odd, 8),
    "max_sequence_length": lambda odd: pack_lengths([3, 4], odd),
    "counts": lambda odd: pack_histogram(odd),
    "depth": lambda odd: pack_lengths([3, 4], 8, depth=odd),
    "algorithm": lambda odd: pack_histogram([1, 2], algorithm=odd),
    "seed": lambda odd: pack_lengths([3, 4], 8, seed=odd),
}


@pytest.mark.parametrize("argument", CALLS)
def test_whatever_is_given_instead_is_refused_in_a_short_line(argument: str) -> None:
    for odd in ODD:
        with pytest.raises(ArgumentError) as caught:
            CALLS[argument](odd)
        assert len(str(caught.value)) <= 1000


def test_examples_in_docstrings_print_what_they_show() -> None:
    results = doctest.testmod(module)
    assert (results.failed, results.attempted) == (0, 9)
