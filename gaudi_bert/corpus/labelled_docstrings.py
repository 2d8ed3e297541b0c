"""Labelled rows that need no download: docstrings of Python's standard library, and the package that each is from.

The packages with the most docstrings are the labels. A paragraph is kept once (`documentation`), and so is a text: no
row that is held out stands among the others as well. Which rows are held out is a function of their names alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gaudi_bert.corpus.documentation import named_documents

__all__ = ["LABELS", "LabelledText", "labelled_docstrings"]

LABELS = 12
# Of as many rows, one is held out.
HELD_OUT_OF = 5


@dataclass(frozen=True)
class LabelledText:
    """A row: what is documented, its text, the package, and whether the row is held out."""

    name: str
    text: str
    label: str
    held_out: bool


def labelled_docstrings(texts: Mapping[str, str], labels: int = LABELS) -> list[LabelledText]:
    """The rows of the `labels` packages with the most of them, in the order of the names.

    Args:
        texts: docstrings by qualified name, as `python_texts` has them.
        labels: how many packages.
    """
    by_text: dict[str, str] = {}
    for name, sentences in named_documents(texts).items():
        by_text.setdefault(" ".join(sentences), name)
    counts = Counter(map(_package, by_text.values()))
    chosen = set(sorted(counts, key=lambda label: (-counts[label], label))[:labels])
    return [
        LabelledText(name, text, _package(name), _is_held_out(name))
        for text, name in sorted(by_text.items(), key=lambda item: item[1])
        if _package(name) in chosen
    ]


def _package(name: str) -> str:
    """`xml` of `xml.dom.minidom.Node`, `pydecimal` of `_pydecimal.Decimal`."""
    return name.split(".")[0].lstrip("_")


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_OF == 0
