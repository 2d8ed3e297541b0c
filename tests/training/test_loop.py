"""The learning rate of each update: warm-up, the joint, decay. Runs that stop and go on are in `jobs/test_records.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.training.loop import learning_rate_at
from tests.builders.agree import agree
from tests.oracles import training as naive


def schedule(peak: float, warmup: int, updates: int, power: float, decay_from: str) -> TrainingSettings:
    return TrainingSettings(
        learning_rate=peak, warmup_updates=warmup, updates=updates, decay_power=power, decay_from=decay_from
    )


@pytest.mark.parametrize(
    ("peak", "warmup", "updates", "decay_from", "rates"),
    [
        (8.0, 4, 7, "warmup", [2, 4, 6, 8, 6, 4, 2, 0]),
        (1.0, 0, 3, "warmup", [0.75, 0.5, 0.25]),  # below the peak from the start, and never zero
        (8.0, 4, 8, "start", [2, 4, 6, 8, 4, 3, 2, 1, 0]),  # falls where the warm-up ends
    ],
)
def test_literal_rates_with_linear_decay(peak, warmup, updates, decay_from, rates) -> None:
    settings = schedule(peak, warmup, updates, 1.0, decay_from)
    agree([learning_rate_at(update, settings) for update in range(1, len(rates) + 1)], rates)


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
    ours = learning_rate_at(update, schedule(0.01, warmup, updates, power, decay_from))
    agree(ours, naive.learning_rate(update, 0.01, warmup, updates, power, decay_from), 1e-12)
    assert 0 < ours <= 0.01
