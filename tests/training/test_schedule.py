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


@given(
    warmup=st.integers(0, 50),
    rest=st.integers(1, 100),
    update=st.integers(1, 150),
    power=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_equals_the_naive_schedule(warmup: int, rest: int, update: int, power: float) -> None:
    updates = warmup + rest
    update = min(update, updates)
    ours = learning_rate_at(update, peak=0.01, warmup_updates=warmup, updates=updates, decay_power=power)
    assert ours == pytest.approx(naive.learning_rate(update, 0.01, warmup, updates, power), rel=1e-12)
    assert 0 < ours <= 0.01
