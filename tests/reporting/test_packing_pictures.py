"""Pictures of packing, and the one in the README."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting import packing_pictures as pictures
from tests.builders.agree import agree
from tests.builders.effort import sampled
from tests.builders.properties import examples

COUNTS = [3, 0, 5, 8, 0, 40, 2, 60]
MIXTURE = {(3, 4): 5, (1, 6): 3, (8,): 60, (6,): 37, (4,): 3}
ROWS = [
    {"algorithm": name, "depth": depth, "efficiency": 0.5 + 0.1 * position}
    for name in ("lpfhp", "optimal")
    for position, depth in enumerate((1, 2, 3, "max"))
]
UNPADDING = [{"accelerators": 2**n, "unpadding": 2.1 - 0.1 * n, "ideal_unpadding": 2, "packing": 1.99} for n in range(3)]
FIGURES = {
    "histogram": lambda: pictures.draw_histogram(COUNTS, packs=108, lower_bound=105, prices=[0, 1, 2, 3, 4, 5, 7, 8]),
    "mixture": lambda: pictures.draw_strategy_counts(MIXTURE, 8),
    "depth": lambda: pictures.draw_efficiency_over_depth(ROWS),
    "scaling": lambda: pictures.draw_unpadding(UNPADDING),
    "fills": lambda: pictures.draw_row_fill(np.array([5, 5, 6]), np.array([0, 0, 9])),
    "slots": lambda: pictures.draw_slot_usage(40, 20, 200, 10, 20),
    "curves": lambda: pictures.draw_learning_curve(
        [(10, 0.1), (20, 0.3)], [(20, 0.2)], is_accuracy=True, baseline=("unigram baseline", 0.05)
    ),
}


@pytest.mark.parametrize("name", sampled(FIGURES, 3))
def test_the_same_data_give_the_same_file(name: str, tmp_path: Path) -> None:
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"{name}{ending}"
        pictures.save_picture(FIGURES[name](), path)
        once = path.read_bytes()
        pictures.save_picture(FIGURES[name](), path)
        assert path.read_bytes() == once
        assert once.startswith(start)
        assert len(once) > 2000


@examples(15)
@given(st.integers(1, 530), st.integers(0, 2**31), st.booleans())
def test_every_row_is_in_one_bar(slots: int, seed: int, packed: bool) -> None:
    generator = np.random.default_rng(seed)
    before = generator.integers(0, 5, slots)
    before[-1] += 1
    after = generator.integers(0, 3, slots) * (generator.random(slots) < 0.1)
    panels = pictures.draw_row_fill(before, after if packed else None).axes
    assert len(panels) == 1 + packed
    for axes, counts in zip(panels, (before, after), strict=False):
        heights = [bar.get_height() for bar in axes.patches]
        agree(sum(heights), 100 if counts.sum() else 0)
        assert len(heights) <= 49
        assert all(0 <= bar.get_x() <= bar.get_x() + bar.get_width() <= slots for bar in axes.patches)


def test_pictures_of_a_page_have_no_background_and_an_ink_for_light_and_dark_pages() -> None:
    with pictures.use_page_style():
        figure = FIGURES["curves"]()
        svg = pictures.add_dark_mode_style(pictures.encode_picture(figure, "svg")).decode()
    assert figure.get_facecolor()[3] == figure.axes[0].get_facecolor()[3] == 0
    assert figure.axes[0].xaxis.label.get_color() == pictures.INK
    assert FIGURES["curves"]().get_facecolor()[3] == 1
    ElementTree.fromstring(svg)
    # The rules for dark pages name the colours as matplotlib writes them.
    for what in ("fill", "stroke"):
        assert f'[style*="{what}: {pictures.INK}"]' in svg
        assert svg.count(f"{what}: {pictures.INK}") > 5


def test_the_picture_of_slots_names_the_rows_and_the_share_of_real_tokens() -> None:
    (axes,) = pictures.draw_slot_usage(rows_before=40, rows_after=20, tokens=150, slots=10, lower_bound=19).axes
    words = [text.get_text().replace("\u00a0", " ") for text in axes.texts]
    assert words == ["before: 40 rows, 37.50 % tokens", "after: 20 rows, 75.00 % tokens"]
    assert [bar.get_width() for bar in axes.patches] == [150, 250, 150, 50]


def test_empty_data_are_drawn_too_and_other_endings_are_refused(tmp_path: Path) -> None:
    for figure in (pictures.draw_histogram([0, 0, 0], 0, 0, [0, 0, 0]), pictures.draw_strategy_counts({}, 8)):
        assert pictures.encode_picture(figure, "png").startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"can only be saved as \.png or \.svg"):
        pictures.save_picture(FIGURES["mixture"](), tmp_path / "x.pdf")


@pytest.mark.parametrize(
    ("share", "decimals", "written"),
    [
        *((0.9949, 1, "99.5 %"), (0.99997, 2, "99.997 %"), (0.999951, 2, "99.995 %"), (200 / 6_294_495, 2, "0.003 %")),
        *((1, 2, "100.00 %"), (0, 1, "0.0 %"), (1e-30, 1, "0.000000000 %"), (1.5, 1, "150.0 %")),
    ],
)
def test_nothing_is_rounded_to_all_or_nothing(share: float, decimals: int, written: str) -> None:
    assert pictures.format_percent(share, decimals).replace("\u00a0", " ") == written


# --- the picture of the README


def words_of(picture: str) -> list[str]:
    texts = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return [element.text for element in texts if element.text]


def test_the_committed_picture_is_what_is_drawn_of_a_true_packing(repository: Path) -> None:
    names = runpy.run_path(str(repository / "docs" / "draw_how_it_works.py"))
    drawn = words_of(names["draw_how_it_works"]())
    assert words_of((repository / "docs" / "how-it-works.svg").read_text(encoding="utf-8")) == drawn
    assert {"Packing: 11 sequences in 5 rows", "Before: 11 rows", "99% of slots are tokens"} <= set(drawn)
    assert all(sum(pack) <= names["SLOTS"] for pack in names["PACKS"])
    assert sorted(names["ARRIVAL"]) == list(range(sum(map(len, names["PACKS"]))))
