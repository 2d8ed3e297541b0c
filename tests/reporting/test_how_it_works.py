from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="module")
def drawing(repository: Path) -> ModuleType:
    """The benchmark that draws the README's picture."""
    path = repository / "benchmarks" / "draw_how_it_works.py"
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def words_of(picture: str) -> list[str]:
    return [
        element.text for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text") if element.text
    ]


def test_the_committed_picture_is_what_is_drawn(drawing: ModuleType, repository: Path) -> None:
    picture = repository / "docs" / "how-it-works.svg"
    drawn = words_of(drawing.draw_how_it_works())
    assert words_of(picture.read_text(encoding="utf-8")) == drawn, "run python benchmarks/draw_how_it_works.py"
    assert picture.stat().st_size < 250_000
    assert "11 rows, 45% of the slots are real tokens" in drawn
    assert "5 rows, 99% of the slots are real tokens" in drawn


def test_it_is_a_true_picture_of_a_packing(drawing: ModuleType) -> None:
    assert all(sum(pack) <= drawing.SLOTS for pack in drawing.PACKS)
    assert sorted(drawing.ARRIVAL) == list(range(sum(map(len, drawing.PACKS))))
