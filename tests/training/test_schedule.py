"""The learning rate: warm-up, the joint, decay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.training.schedule import learning_rate_at
from tests.oracles import training as naive


def test_literal_rates_with_linear_decay() -> None:
    rates = [learning_rate_at(t, peak=8.0, warmup_updates=4, updates=7, decay_power=1.0) for t in range(1, 9)]
    assert rates == pytest.approx([2, 4, 6, 8, 6, 4, 2, 0])


def test_no_warmup_starts_below_the_peak_and_never_reaches_zero() -> None:
    rates = [learning_rate_at(t, peak=1.0, warmup_updates=0, updates=3, decay_power=1.0) for t in (1, 2, 3)]
    assert rates == pytest.approx([0.75, 0.5, 0.25])


def test_decay_from_the_start_falls_where_the_warmup_ends() -> None:
    rates = [
        learning_rate_at(t, peak=8.0, warmup_updates=4, updates=8, decay_power=1.0, decay_from="start") for t in range(1, 10)
    ]
    assert rates == pytest.approx([2, 4, 6, 8, 4, 3, 2, 1, 0])


@given(
    warmup=st.integers(0, 50),
    rest=st.integers(1, 100),
    update=st.integers(1, 150),
    power=st.sampled_from([0.5, 1.0, 2.0]),
    decay_from=st.sampled_from(["warmup", "start"]),
)
def test_equals_the_naive_schedule(warmup: int, rest: int, update: int, power: float, decay_from: str) -> None:
    updates = warmup + rest
    update = min(update, updates)
    ours = learning_rate_at(
        update, peak=0.01, warmup_updates=warmup, updates=updates, decay_power=power, decay_from=decay_from
    )
    assert ours == pytest.approx(naive.learning_rate(update, 0.01, warmup, updates, power, decay_from), rel=1e-12)
    assert 0 < ours <= 0.01
