from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from gaudi_bert.reporting.drawing import colour, hint, new_axes, new_figure, short_number, svg_text


@pytest.mark.parametrize(
    ("value", "written"), [(0, "0"), (0.25, "0.25"), (999, "999"), (1500, "1.5k"), (2e6, "2M"), (3.21e9, "3.21G")]
)
def test_short_numbers(value: float, written: str) -> None:
    assert short_number(value) == written


def picture(label: str = "a <label>", style: str = "") -> str:
    figure = new_figure(120, 90)
    axes = new_axes(figure, 10, 10, 10, 30)
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 2)
    axes.bar(2.5, 1, 5, color=colour("real"))[0].set_gid(hint("half <of it>"))
    axes.plot([0, 5, 10], [0, 1, 2], color=colour("held"), marker="o")
    axes.text(5, 1, "across & up", color=colour("ink"), fontsize=11, fontweight="bold")
    axes.grid(color=colour("rule"))
    return svg_text(figure, label, style)


def test_colours_are_roles_and_words_stay_words() -> None:
    content = picture(style="text{font-family:serif}")
    root = ElementTree.fromstring(content)
    assert root.attrib["viewBox"] == "0 0 120 90"
    assert root.attrib["aria-label"] == "a <label>"
    words = {element.text: element for element in root.iter() if element.text and element.text.strip()}
    assert {"across & up", "half <of it>", "text{font-family:serif}"} <= words.keys()
    across = words["across & up"].attrib
    assert (across["font-size"], across["font-weight"]) == ("11", "700")
    assert {"real", "held", "ink", "soft", "rule"} == set(re.findall(r"var\(--(\w+)\)", content))
    assert "#0102" not in content
    bar = next(element for element in root.iter() if element.find("{*}title") is not None)
    assert bar[1].attrib["d"].strip() == "M 10 60 L 60 60 L 60 35 L 10 35 z"


def test_a_picture_for_a_page_brings_nothing_that_could_touch_the_page() -> None:
    content = picture()
    assert content == picture()
    assert not re.search(r"http|url\(|<style|<metadata|clip|font-family|DejaVu", content)
    identifiers = re.findall(r'\bid="([^"]*)"', content)
    assert set(identifiers) == set(re.findall(r'href="#([^"]*)"', content))
    assert identifiers
    assert not set(identifiers) & set(re.findall(r'\bid="([^"]*)"', picture("another label")))
