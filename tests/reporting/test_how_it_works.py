from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from gaudi_bert.reporting.how_it_works import ARRIVAL, PACKS, SLOTS, draw_how_it_works


def test_the_committed_picture_is_what_is_drawn(repository: Path) -> None:
    picture = repository / "docs" / "how-it-works.svg"
    assert picture.read_text(encoding="utf-8") == draw_how_it_works(), "run python benchmarks/draw_how_it_works.py"
    assert picture.stat().st_size < 150_000


def test_it_is_a_true_picture_of_a_packing() -> None:
    assert all(sum(pack) <= SLOTS for pack in PACKS)
    assert sorted(ARRIVAL) == list(range(sum(map(len, PACKS))))
    words = [element.text for element in ElementTree.fromstring(draw_how_it_works()).iter() if element.text]
    assert "11 rows, 45% of the slots are real tokens" in words
    assert "5 rows, 99% of the slots are real tokens" in words
