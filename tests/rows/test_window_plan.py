"""Plans of windows: every sequence once, in a row that holds it; cheaper than unpacked, or unpacked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.rows.packs import IncompleteBatch
from gaudi_bert.rows.types import Sequences
from gaudi_bert.rows.window_plan import LEAST_GAIN, PackRunner, RowLengthPacks, WindowPlan, estimate_row_cost, plan_window
from tests.builders.properties import examples

# --- plans of windows: every sequence once, in a row that holds it; cheaper than unpacked, or unpacked


def check(plan: WindowPlan, lengths: np.ndarray) -> None:
    members = np.concatenate([part.packs.members for part in plan.parts])
    assert sorted(members.tolist()) == list(range(len(lengths)))
    for part in plan.parts:
        sizes = np.diff(part.packs.starts)
        assert sizes.min() >= 1
        assert sizes.max() <= part.depth
        tokens = np.add.reduceat(lengths[part.packs.members], part.packs.starts[:-1])
        assert tokens.max() <= part.length
    assert plan.tokens == lengths.sum()
    assert plan.slots == sum(len(part.packs) * part.length for part in plan.parts)


def cost(plan: WindowPlan) -> float:
    return sum(len(part.packs) * estimate_row_cost(part.length, 384) for part in plan.parts)


@examples(60)
@given(
    st.lists(st.one_of(st.integers(3, 40), st.integers(3, 512)), min_size=1, max_size=200), st.sampled_from([None, 512, 517])
)
def test_every_sequence_is_read_once(lengths: list[int], fixed_row_length: int | None) -> None:
    array = np.array(lengths, np.int64)
    plan = plan_window(array, hidden_size=384, fixed_row_length=fixed_row_length)
    check(plan, array)
    alone = plan_window(array, hidden_size=384, packed=False, fixed_row_length=fixed_row_length)
    check(alone, array)
    assert (len(alone.parts), alone.gain, alone.parts[0].depth) == (1, 1.0, 1)
    assert cost(plan) <= cost(alone) * (1 + 1e-12)
    assert plan.gain == 1.0 or cost(plan) * LEAST_GAIN <= cost(alone) * (1 + 1e-12)
    if fixed_row_length is not None:
        assert {part.length for part in plan.parts} == {fixed_row_length}
    for packed in (True, False):  # a model of as many positions as the longest sequence has
        tight = plan_window(array, hidden_size=384, packed=packed, max_row_length=max(lengths))
        check(tight, array)
        assert max(part.length for part in tight.parts) <= max(lengths)


def test_short_rows_are_packed_with_next_to_no_padding() -> None:
    lengths = np.random.default_rng(1).integers(5, 40, 4001)
    plan = plan_window(lengths, hidden_size=384)
    assert 1 - plan.tokens / plan.slots < 0.02
    assert plan.gain > 1.5


def test_a_few_long_rows_do_not_lengthen_all() -> None:
    lengths = np.concatenate([np.full(3000, 17), np.full(7, 490)])
    plan = plan_window(lengths, hidden_size=384)
    check(plan, lengths)
    assert {part.length for part in plan.parts} == {64, 496} or {part.length for part in plan.parts} == {128, 496}


def test_long_rows_stay_alone_in_a_few_lengths() -> None:
    lengths = np.random.default_rng(1).integers(384, 513, 512)
    plan = plan_window(lengths, hidden_size=384)
    check(plan, lengths)
    assert (plan.gain, [(part.length, part.depth) for part in plan.parts]) == (1.0, [(n, 1) for n in (416, 448, 480, 512)])
    assert plan_window(lengths, hidden_size=384, packed=False).slots == 512 * 512


def test_rows_are_no_longer_than_needed() -> None:
    assert plan_window(np.array([290, 301]), hidden_size=384).parts[0].length == 304


@pytest.mark.parametrize(
    ("incomplete", "packs_of_batches"), [("smaller", [2, 2, 1]), ("single", [2, 2, 1]), ("filled", [2, 2, 2])]
)
def test_a_runner_computes_every_pack_once(incomplete: IncompleteBatch, packs_of_batches: list[int]) -> None:
    """Five packs of 8 slots, each of two sequences of 1 and 3 tokens; the model says what it was fed for each token."""
    lengths = np.tile([1, 3], 5)
    ids, segments = np.arange(1, 21, dtype=np.int32), np.arange(20, dtype=np.int8) % 3 % 2
    sequences = Sequences(np.arange(10), np.concatenate([[0], np.cumsum(lengths)]), ids, segments)
    packs = SampledPacks(np.arange(10)[::-1].copy(), np.arange(0, 11, 2))
    plan = WindowPlan((RowLengthPacks(8, 2, packs),), tokens=20, slots=40, gain=1.0)
    batches, slots = list[int](), list[int]()

    def compute(features: dict[str, np.ndarray]) -> np.ndarray:
        assert len(batches) < 3
        batches.append(len(features["input_ids"]))
        return np.stack([features[name] for name in ("input_ids", "positions", "segment_ids")], axis=-1).astype(np.float32)

    found = PackRunner(compute, True, 3, batch_tokens=16, incomplete=incomplete).run(sequences, plan, slots.append)
    assert found.T.tolist() == [ids.tolist(), [0, 0, 1, 2] * 5, segments.tolist()]
    assert (batches, slots) == (packs_of_batches, [16, 16, 8])
