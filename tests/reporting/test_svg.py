from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.reporting.svg import Axis, Plot, round_ticks, short_number


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0, [0]),
        (1, [0, 0.25, 0.5, 0.75, 1]),
        (128, [0, 50, 100]),
        (3.9, [0, 1, 2, 3]),
        (9.2, [0, 2.5, 5, 7.5]),
        (1e-3, [0, 0.00025, 0.0005, 0.00075, 0.001]),
    ],
)
def test_ticks_are_round(highest: float, ticks: list[float]) -> None:
    assert round_ticks(highest) == pytest.approx(ticks)


@given(st.floats(1e-6, 1e12))
def test_there_are_a_few_ticks_up_to_the_highest_value(highest: float) -> None:
    ticks = round_ticks(highest)
    assert ticks[0] == 0
    assert 2 <= len(ticks) <= 6
    assert highest * 0.5 < ticks[-1] <= highest * (1 + 1e-6)


@pytest.mark.parametrize(
    ("value", "written"), [(0, "0"), (0.25, "0.25"), (999, "999"), (1500, "1.5k"), (2e6, "2M"), (3.21e9, "3.21G")]
)
def test_short_numbers(value: float, written: str) -> None:
    assert short_number(value) == written


def test_coordinates_and_words() -> None:
    plot = Plot(
        Axis(0, 10, "across & up"), Axis(0, 2), "a <label>", width=120, height=90, left=10, right=10, top=10, bottom=30
    )
    assert [plot.across(value) for value in (0, 5, 10)] == [10, 60, 110]
    assert [plot.up(value) for value in (0, 1, 2)] == [60, 35, 10]
    plot.frame()
    plot.legend([("box", "real", "one"), ("dot", "held", "two"), ("line", "train", "three")])
    plot.bar(0, 5, 0, 1, "real", "half <of it>")
    plot.line([(0, 0), (10, 2)], "train")
    plot.dots([(5, 1)], "held")
    picture = ElementTree.fromstring(plot.svg())
    assert picture.attrib["aria-label"] == "a <label>"
    words = [text for element in picture.iter() if (text := element.text)]
    assert "across & up" in words
    assert "half <of it>" in words
