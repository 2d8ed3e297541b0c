"""Sequences dealt to the packs of a plan, against one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common import sampling
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.sampling import sample_packs
from tests.builders.properties import examples
from tests.oracles.packing import deal

PLANS = st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), st.integers(1, 5)), max_size=7)


@given(plan=PLANS, seed=st.integers(0, 3), group=st.integers(0, 2), dtype=st.sampled_from(["uint16", "int32"]))
@examples(100)
def test_equals_dealing_one_at_a_time(plan, seed: int, group: int, dtype: str) -> None:
    lengths = [length for strategy, count in plan for _ in range(count) for length in strategy]
    lengths = [lengths[place] for place in np.random.default_rng(seed).permutation(len(lengths))]
    dealt = sample_packs(np.array(lengths, dtype), plan, seed, group, np.int64)
    packs = [dealt.members[start:end].tolist() for start, end in zip(dealt.starts[:-1], dealt.starts[1:], strict=True)]
    assert packs == deal(lengths, plan, seed, group)


def test_numpy_and_compiled_code_deal_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [((3, 1), 4), ((2, 2, 1), 3), ((4,), 5), ((1,), 2)]
    lengths = np.random.default_rng(1).permutation([n for strategy, count in plan for _ in range(count) for n in strategy])
    ways = []
    for compiled_from in (0, 1_000_000):
        monkeypatch.setattr(sampling, "_MIN_COMPILED_SEQUENCES", compiled_from)
        ways.append(sample_packs(lengths, plan, 7, 2, np.int64))
    assert np.array_equal(ways[0].members, ways[1].members)
    assert ways[0].members.dtype == ways[1].members.dtype == np.int64


def test_lengths_beyond_16_bits() -> None:
    dealt = sample_packs(np.array([100_000, 7, 100_000], np.int32), [((7, 100_000), 1), ((100_000,), 1)], 1, 0)
    assert sorted(dealt.members.tolist()) == [0, 1, 2]
    assert dealt.starts.tolist() in ([0, 1, 3], [0, 2, 3])


@pytest.mark.parametrize("lengths", [[3, 4], [3, 3, 3], [3], [3, 2]])
def test_a_plan_of_other_lengths_is_refused(lengths: list[int]) -> None:
    with pytest.raises(InputError, match=r"the plan has slots for \d sequences of length \d, .* \d"):
        sample_packs(np.array(lengths, np.int32), [((3, 3), 1)], 1, 0)
