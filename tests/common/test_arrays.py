"""Seeded permutations, integers, dealing, CRC-32C, features: each against a naive twin or fixed for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.oracles.wire as naive
from gaudi_bert.common import crc32c as engine
from gaudi_bert.common import dealing
from gaudi_bert.common.arrays import first_not_whole, permutation, permutation_of_kind, random_words
from gaudi_bert.common.dealing import deal_sequences
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import Feature, PackedFeature, UnpackedFeature
from tests.builders.properties import examples
from tests.oracles.packed_record import pack_sequences
from tests.oracles.packing import deal
from tests.oracles.wire import FLOAT_KEYS, UNPACKED_KEYS


@given(count=st.integers(0, 997), seed=st.integers(-(2**70), 2**70), index=st.integers(0, 2**40))
@examples(100)
def test_it_is_a_permutation(count: int, seed: int, index: int) -> None:
    assert sorted(permutation(count, seed, "test", index)) == list(range(count))


def test_it_never_changes_and_purpose_seed_and_indices_all_matter() -> None:
    assert permutation(11, 12345, "packs", 0).tolist() == [8, 2, 5, 9, 6, 0, 7, 10, 4, 1, 3]
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a", 0, 1), (1, "a", 1, 0)]
    assert len({tuple(random_words(4, *key).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize("count", [0, 1, 524_287, 524_288, 1_300_001])
def test_a_large_permutation_is_sorted_range_by_range_and_the_same(count: int) -> None:
    plain = np.argsort(random_words(count, 5, "large", 2), kind="stable")
    for kind in (np.int32, np.int64):
        sorted_words = permutation_of_kind(kind, count, 5, "large", 2)
        assert sorted_words.dtype == kind
        assert np.array_equal(sorted_words, plain)


def test_every_place_is_equally_likely() -> None:
    counts = np.zeros((5, 5))
    for seed in range(2000):
        counts[np.arange(5), permutation(5, seed, "uniform")] += 1
    assert np.abs(counts / 2000 - 0.2).max() < 0.045


NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([7, -7, 2**31, 2**32 + 7, 2**40, 2**63 - 1, -(2**63)]))


@given(values=st.lists(NUMBERS, max_size=9), kind=st.sampled_from(["i8", "i4", "u4", "u8", "f4", "f8", "O"]))
@examples(100)
def test_the_first_number_that_would_wrap_is_found(values: list[int], kind: str) -> None:
    fitting = [value for value in values if kind[0] in "fO" or np.iinfo(kind).min <= value <= np.iinfo(kind).max]
    array = np.array(fitting, kind)
    held = [int(value) for value in array]  # what a narrow float made of it
    wrong = [index for index, value in enumerate(held) if not -2 <= value <= 7]
    assert first_not_whole(array, -2, 7) == (wrong[0] if wrong else -1)


@pytest.mark.parametrize(
    "values",
    [
        *(np.array([1, wrong], object) for wrong in (True, 2.0, 2**64, None, "2")),
        *(np.array([1, wrong]) for wrong in (1.5, np.nan)),
        np.array([1, np.inf], np.float32),
        np.array([1, 2**64 - 1], np.uint64),
    ],
)
def test_what_is_no_number_or_does_not_fit_is_found(values: np.ndarray) -> None:
    assert first_not_whole(values, 0, 2**31 - 1) == 1


@pytest.mark.parametrize("kind", ["?", "U3", "M8[s]", "c8"])
def test_other_types_hold_no_whole_numbers(kind: str) -> None:
    assert first_not_whole(np.zeros(2, kind), 0, 7) == 0
    assert first_not_whole(np.zeros(0, kind), 0, 7) == -1


# --- dealing sequences to packs


PLANS = st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), st.integers(1, 5)), max_size=7)


@given(plan=PLANS, seed=st.integers(0, 3), group=st.integers(0, 2), dtype=st.sampled_from(["uint16", "int32"]))
@examples(100)
def test_equals_dealing_one_at_a_time(plan, seed: int, group: int, dtype: str) -> None:
    lengths = [length for strategy, count in plan for _ in range(count) for length in strategy]
    lengths = [lengths[place] for place in np.random.default_rng(seed).permutation(len(lengths))]
    dealt = deal_sequences(np.array(lengths, dtype), plan, seed, group, np.int64)
    packs = [dealt.members[start:end].tolist() for start, end in zip(dealt.starts[:-1], dealt.starts[1:], strict=True)]
    assert packs == deal(lengths, plan, seed, group)


def test_numpy_and_compiled_code_deal_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [((3, 1), 4), ((2, 2, 1), 3), ((4,), 5), ((1,), 2)]
    lengths = np.random.default_rng(1).permutation([n for strategy, count in plan for _ in range(count) for n in strategy])
    ways = []
    for compiled_from in (0, 1_000_000):
        monkeypatch.setattr(dealing, "_COMPILED_FROM", compiled_from)
        ways.append(deal_sequences(lengths, plan, 7, 2, np.int64))
    assert np.array_equal(ways[0].members, ways[1].members)
    assert ways[0].members.dtype == ways[1].members.dtype == np.int64


def test_lengths_beyond_16_bits() -> None:
    lengths = np.array([100_000, 7, 100_000], np.int32)
    dealt = deal_sequences(lengths, [((7, 100_000), 1), ((100_000,), 1)], 1, 0)
    assert sorted(dealt.members.tolist()) == [0, 1, 2]
    assert dealt.starts.tolist() in ([0, 1, 3], [0, 2, 3])


@pytest.mark.parametrize("lengths", [[3, 4], [3, 3, 3], [3], [3, 2]])
def test_a_plan_of_other_lengths_is_refused(lengths: list[int]) -> None:
    with pytest.raises(InputError, match=r"the plan has slots for \d sequences of length \d, the records hold \d"):
        deal_sequences(np.array(lengths, np.int32), [((3, 3), 1)], 1, 0)


# --- CRC-32C: the published check value, a byte-at-a-time twin, both kernels, and joining


WAYS = [engine.BY_TABLES, *([engine.BY_INSTRUCTIONS] if engine.HAS_INSTRUCTIONS else [])]
SIZES = [*range(60), 95, 96, 97, 1000, 12_287, 12_288, 12_289, 25_000]


def test_the_published_check_value() -> None:
    assert engine.crc32c(b"123456789") == 0xE3069283
    assert engine.crc32c(b"") == 0
    assert engine.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


@pytest.mark.parametrize("size", SIZES)
def test_kernels_against_the_twin(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 3).astype(np.uint8)[3:]  # not aligned
    expected = naive.crc32c(data.tobytes())
    assert engine.crc32c(data) == expected
    for way in WAYS:
        assert way.run(data.ctypes.data, size, 0) == expected
    for cut in {0, size // 3, size // 2, size}:
        first, second = engine.crc32c(data[:cut]), engine.crc32c(data[cut:])
        assert engine.crc32c(data[cut:], first) == expected
        for way in WAYS:
            assert way.append(first, size - cut, second) == expected


def test_a_word_and_the_masked_form() -> None:
    for value in (0, 1, 255, 2**31, 2**40 + 12345, 2**62):
        data = value.to_bytes(8, "little")
        assert {way.of_word(value) for way in WAYS} == {naive.crc32c(data)}
        masked = engine.masked(engine.crc32c(data))
        assert masked.to_bytes(4, "little") == naive.masked_crc(data)
        assert engine.mask_crc.py_func(engine.crc32c(data)) == masked


# --- features are in the order of their names, which is the order in which records are written


AXES = {"tokens": 13, "masked": 5, "sequences": 2}


@pytest.mark.parametrize("kind", [UnpackedFeature, PackedFeature])
def test_numbers_are_places_in_the_order_of_names(kind: type[Feature]) -> None:
    keys = [feature.key for feature in kind]
    assert keys == sorted(keys)
    assert [int(feature) for feature in kind] == list(range(len(keys)))
    assert [feature.key for feature in kind if feature.kind == "float32"] == [key for key in keys if key in FLOAT_KEYS]


def test_names_and_sizes_are_those_of_the_contract() -> None:
    assert {feature.key for feature in UnpackedFeature} == set(UNPACKED_KEYS)
    empty = pack_sequences([], max_sequence_length=13, masked_slots=5, depth=2)
    assert {feature.key: AXES[feature.axis] for feature in PackedFeature} == {
        key: len(values) for key, values in empty.items()
    }
