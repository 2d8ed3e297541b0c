"""The realized speed-up: what pairs of passes give, and when they give nothing."""

from __future__ import annotations

import pytest

from gaudi_bert.training.train import Speedup
from tests.builders.agree import agree


def test_the_speedup_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    # The machine slowed down in the middle: each pair saw one speed.
    speedup = Speedup(2.0, (1.0, 1.0, 5.0, 5.0, 5.0), (0.9, 0.9, 4.5, 4.5, 4.5))
    agree(speedup.realized, 1.8)
    assert speedup.line().startswith("realized speed-up 1.800 at 2.000 sequences per pack (90.0% of it)")


@pytest.mark.parametrize("slowdown", [1.0, 1.04])
def test_a_little_above_the_limit_is_noise(slowdown: float) -> None:
    agree(Speedup(2.03, (1.0,) * 5, (slowdown,) * 5).realized, 2.03 * slowdown)


@pytest.mark.parametrize("slowdown", [1.06, 1.7])
def test_more_than_is_possible_is_not_reported_as_a_speedup(slowdown: float) -> None:
    speedup = Speedup(2.03, (1.0,) * 5, (slowdown,) * 5)
    assert speedup.realized is None
    assert speedup.line() == (
        f"realized speed-up not measurable now: the machine was busy ({2.03 * slowdown:.2f} measured, 2.03 is the limit)"
    )
