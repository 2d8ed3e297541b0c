from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.unpadding import (
    ACCELERATORS,
    MEASURED_ON_8,
    Gumbel,
    fit_one_device,
    linear_speed_up,
    speed_up,
)
from tests.builders.histograms import published


def test_the_fit_meets_the_papers_equations() -> None:
    one = fit_one_device()
    assert one.location == pytest.approx(1.94, abs=0.005)
    for share in (0.5, np.exp(-1)):
        value = MEASURED_ON_8.quantile(share)
        assert (1 - one.cumulative(value)) ** 8 == pytest.approx(1 - share)


def test_the_papers_speed_ups() -> None:
    one = fit_one_device()
    assert speed_up(one, 32) == pytest.approx(1.5, abs=0.02)
    assert speed_up(one, 2048) == pytest.approx(1.3, abs=0.03)
    assert speed_up(one, 1) > 2.01  # above the bound of packing, as measured
    values = [speed_up(one, number) for number in ACCELERATORS]
    assert values == sorted(values, reverse=True)


def test_integration_agrees_with_drawing() -> None:
    one = Gumbel(1.9, 0.3)
    draws = one.quantile(np.random.default_rng(0).random((20_000, 16)))
    assert speed_up(one, 16) == pytest.approx(draws.min(axis=1).mean(), abs=0.005)


def test_own_data() -> None:
    histogram = published("wikipedia-512")
    values = [linear_speed_up(histogram, number) for number in ACCELERATORS]
    assert values[0] == pytest.approx(2.001, abs=0.001)
    assert values == sorted(values, reverse=True)
    lengths = np.repeat(np.arange(1, 513), histogram.counts // 100)
    drawn = np.random.default_rng(0).choice(lengths, (2_000, 64, 32)).sum(axis=2).max(axis=1)
    assert linear_speed_up(histogram, 64) == pytest.approx(512 * 32 / drawn.mean(), rel=0.01)
    assert linear_speed_up(Histogram(4, [0, 0, 0, 9]), 2048) == 1.0


def test_one_device_needs_more_than_one() -> None:
    with pytest.raises(InputError, match="devices is 1"):
        fit_one_device(devices=1)
