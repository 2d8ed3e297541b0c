from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.artefacts.training import MetricsLine
from gaudi_bert.reporting.charts import curve_chart, fill_charts, slots_chart, strategies_chart
from tests.builders.properties import examples


def parsed(picture: str) -> ElementTree.Element:
    """A picture, which must be well-formed; a page knows the prefix of links without being told."""
    return ElementTree.fromstring(picture.replace("<svg ", '<svg xmlns:xlink="links" ', 1))


def words_in(picture: str) -> list[str]:
    """All text of a picture."""
    return [element.text.replace("\u00a0", " ") for element in parsed(picture).iter() if element.text]


def bars_in(picture: str, role: str) -> list[tuple[float, float, float, float]]:
    """Left, right, upper and lower edge of the bars that have a hint and the colour of `role`."""
    bars = [element.find("path") for element in parsed(picture).iter() if element.find("title") is not None]
    edges = []
    for bar in bars:
        assert bar is not None
        if f"var(--{role})" in bar.attrib["style"]:
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", bar.attrib["d"])]
            edges.append((min(numbers[::2]), max(numbers[::2]), min(numbers[1::2]), max(numbers[1::2])))
    return edges


@examples(15)
@given(st.integers(1, 530), st.integers(0, 2**31), st.booleans())
def test_every_row_is_in_one_bar(slots: int, seed: int, packed: bool) -> None:
    generator = np.random.default_rng(seed)
    before = generator.integers(0, 5, slots)
    before[-1] += 1
    after = generator.integers(0, 3, slots) * (generator.random(slots) < 0.1)
    pictures = fill_charts(before, after if packed else None)
    assert len(pictures) == 1 + packed
    for picture, role, counts in zip(pictures, ("before", "real"), (before, after), strict=False):
        hints = [word for word in words_in(picture) if word.endswith("% of rows")]
        shares = [float(hint.split(": ")[1].split(" %")[0]) for hint in hints]
        assert sum(shares) == pytest.approx(100 if counts.sum() else 0, abs=0.5)
        assert len(bars_in(picture, role)) == len(hints) <= 49
        assert all(0 <= left <= right <= 460 and 0 <= top <= low <= 176 for left, right, top, low in bars_in(picture, role))


def test_a_bar_that_towers_over_the_others_is_cut_and_says_so() -> None:
    counts = np.array([1] * 15 + [985])
    cut = fill_charts(counts, None)[0]
    assert "var(--sheet)" in cut
    assert "98.5 % of rows: 16 tokens" in words_in(cut)
    assert "var(--sheet)" not in fill_charts(np.array([5] * 16), None)[0]
    assert "var(--sheet)" not in fill_charts(np.array([0] * 15 + [3]), None)[0]


def test_slots_are_to_scale() -> None:
    picture = slots_chart(40, 20, 200, 10, 20)
    tokens = [right - left for left, right, _, _ in bars_in(picture, "real")]
    padding = [right - left for left, right, _, _ in bars_in(picture, "padding")]
    assert tokens[0] == tokens[1] == padding[0] == 216
    assert padding[1] == 0
    assert "before: 40 rows, 50.00 % real tokens" in words_in(picture)
    assert "after: 20 rows, 100.00 % real tokens" in words_in(picture)
    assert "proven bound" not in slots_chart(40, 20, 200, 10, None)


def test_the_most_used_strategies_come_first() -> None:
    picture = strategies_chart({(1, 2): 5, (10,): 90, (3, 3, 3): 5, (4, 6): 1}, 10, most=3)
    words = words_in(picture)
    assert [word for word in words if word in ("90", "5")] == ["90", "5", "5"]
    assert "3 of 4 strategies: 99.0 % of 101 packs" in words
    assert "7 slots of padding" in words
    assert "0 of 0 strategies" in words_in(strategies_chart({}, 10))[-1]


def line(kind: str, sequences: int, loss: float = 1.0, accuracy: float = 0.0) -> MetricsLine:
    return MetricsLine(
        update=1,
        kind=kind,  # type: ignore[arg-type]
        loss=loss,
        sequences=sequences,
        masked_lm_loss=loss,
        masked_lm_accuracy=accuracy,
        next_sentence_loss=0.0,
        next_sentence_accuracy=0.0,
    )


@pytest.mark.parametrize("count", [0, 1, 5])
def test_curves_of_few_and_of_no_reports(count: int) -> None:
    metrics = [line(kind, 10 * number, accuracy=0.1 * number) for number in range(count) for kind in ("train", "evaluation")]
    picture = curve_chart(metrics, "masked_lm_accuracy", "Accuracy", 0.05)
    assert "unigram baseline, 5.0 %" in words_in(picture)
    assert ("held out" in words_in(picture)) == (count > 0)
    assert "nan" not in picture


def test_a_loss_that_hardly_moved_is_shown_from_zero() -> None:
    flat = curve_chart([line("train", 10, loss=0.70), line("train", 20, loss=0.69)], "masked_lm_loss", "Loss")
    assert "0" in words_in(flat)
    moved = curve_chart([line("train", 10, loss=9.0), line("train", 20, loss=6.0)], "masked_lm_loss", "Loss")
    assert {"6", "7", "8", "9"} <= set(words_in(moved))
