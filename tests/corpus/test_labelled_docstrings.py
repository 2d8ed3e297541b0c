"""Labelled rows from docstrings: the packages with the most of them, each text once, some of them held out for ever."""

from __future__ import annotations

from collections import Counter

from gaudi_bert.corpus.labelled_docstrings import HELD_OUT_OF, LABELS, labelled_docstrings
from gaudi_bert.corpus.python_texts import python_texts

TEXTS = {
    **{f"email.part{number}": f"Return the header number {number} of a message." for number in range(7)},
    **{f"_pydecimal.f{number}": f"Round to {number} digits." for number in range(5)},
    "xml.dom": "Nodes of a tree.",
    "xml.sax": "Events of a parser.",
    "zlib": "Compress.",
    # The same words in two packages are one row, of the first by name.
    "abc.f": "Round to 3 digits.",
}


def test_the_packages_with_the_most_texts_are_the_labels() -> None:
    rows = labelled_docstrings(TEXTS, labels=3)
    assert Counter(row.label for row in rows) == {"email": 7, "pydecimal": 5, "xml": 2}
    assert [row.name for row in rows] == sorted(row.name for row in rows)
    assert len({row.text for row in rows}) == len(rows)


def test_whether_a_row_is_held_out_depends_on_its_name_alone() -> None:
    held_out = {row.name for row in labelled_docstrings(TEXTS, labels=3) if row.held_out}
    fewer = {name: text for name, text in TEXTS.items() if "part" not in name}
    assert {row.name for row in labelled_docstrings(fewer, labels=3) if row.held_out} <= held_out | {"zlib", "abc.f"}


def test_the_standard_library_gives_enough_of_each_label() -> None:
    rows = labelled_docstrings(python_texts("python-docstrings"))
    held_out = [row for row in rows if row.held_out]
    assert len({row.label for row in rows}) == len({row.label for row in held_out}) == LABELS
    assert len(rows) > 1500
    assert 0.8 < len(held_out) * HELD_OUT_OF / len(rows) < 1.2
    assert not {row.text for row in held_out} & {row.text for row in rows if not row.held_out}
    most = max(Counter(row.label for row in held_out).values())
    assert most < 0.25 * len(held_out), "one answer for everything must not look like learning"
