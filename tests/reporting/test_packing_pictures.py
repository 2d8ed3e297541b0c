from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting import packing_pictures as pictures

COUNTS = [3, 0, 5, 8, 0, 40, 2, 60]
MIXTURE = {(3, 4): 5, (1, 6): 3, (8,): 60, (6,): 37, (4,): 3}
ROWS = [
    {"algorithm": name, "depth": depth, "efficiency": 0.5 + 0.1 * place}
    for name in ("lpfhp", "optimal")
    for place, depth in enumerate((1, 2, 3, "max"))
]
FIGURES = {
    "histogram": lambda: pictures.draw_histogram(COUNTS, packs=108, lower_bound=105, prices=[0, 1, 2, 3, 4, 5, 7, 8]),
    "mixture": lambda: pictures.draw_mixture(MIXTURE, 8),
    "depth": lambda: pictures.draw_efficiency_over_depth(ROWS),
    "scaling": lambda: pictures.draw_unpadding([1, 2, 4], [2.1, 1.9, 1.7], [2.0, 1.9, 1.8], 1.99),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_data_give_the_same_file(name: str, tmp_path: Path) -> None:
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"{name}{ending}"
        pictures.save_picture(FIGURES[name](), path)
        once = path.read_bytes()
        pictures.save_picture(FIGURES[name](), path)
        assert path.read_bytes() == once
        assert once.startswith(start)
        assert len(once) > 2000


def test_titles_say_the_numbers() -> None:
    axes = FIGURES["histogram"]().axes[0]
    assert "no packing has fewer than 105 packs; this one has 108" in axes.get_title()
    assert "5 of 5 strategies, 100.0 % of 108 packs" in FIGURES["mixture"]().axes[0].get_title()
    assert [label.get_text() for label in FIGURES["depth"]().axes[0].get_xticklabels()] == ["1", "2", "3", "max"]


def test_empty_data_are_drawn_too() -> None:
    for figure in (pictures.draw_histogram([0, 0, 0]), pictures.draw_mixture({}, 8)):
        assert pictures.picture_bytes(figure, "png").startswith(b"\x89PNG")


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"written as \.png or \.svg"):
        pictures.save_picture(FIGURES["mixture"](), tmp_path / "x.pdf")
