"""The texts that every CPython carries."""

from __future__ import annotations

import ast
import gc
import json
from collections import Counter

from gaudi_bert.common.features import BUILT_IN_TEXTS
from gaudi_bert.corpus.documents import convert_texts_to_documents
from gaudi_bert.corpus.python_texts import (
    HELD_OUT_OF,
    LABELS,
    _find_docstrings,
    load_python_texts,
    make_labelled_docstring_rows,
)
from tests.builders.agree import agree

SOURCE = b'''"""Of the module."""
class Outer:
    """Of the class.

        Indented further than
    the rest.
    """

    async def method(self):
        "Of the method."

    def bare(self):
        """ """

if attribute:
    def one(): "First."
else:
    def one():
        def inner(): "Inside."
try:
    import thing
except ImportError:
    class Instead: "For want of it."
'''


def test_docstrings_are_those_of_modules_classes_and_functions_wherever_they_stand() -> None:
    assert list(_find_docstrings(ast.parse(SOURCE), "module")) == [
        ("module", "Of the module."),
        ("module.Outer", "Of the class.\n\n    Indented further than\nthe rest."),
        ("module.Outer.method", "Of the method."),
        ("module.one", "First."),
        ("module.one.inner", "Inside."),
        ("module.Instead", "For want of it."),
    ]


def test_every_built_in_text_is_there_about_as_long_as_stated_and_without_repetition() -> None:
    for name, size in BUILT_IN_TEXTS.items():
        texts = load_python_texts(name)
        agree(sum(map(len, texts.values())), size, 0.2)
        documents = convert_texts_to_documents(texts).values()
        assert len(documents) > (60 if name == "python-docs" else 5000)
        long_sentences = [sentence for document in documents for sentence in document if len(sentence) > 150]
        assert len(set(long_sentences)) > 0.98 * len(long_sentences), "paragraphs are not repeated"
    assert texts["json.dumps"].split() == (json.dumps.__doc__ or "").split()
    assert not {"idlelib", "lib2to3", "test", "this"} & {name.split(".")[0] for name in texts}
    assert gc.isenabled()


def test_the_standard_library_gives_enough_of_each_label() -> None:
    rows = make_labelled_docstring_rows(convert_texts_to_documents(load_python_texts("python-docstrings")))
    held_out = [row for row, is_held_out in rows if is_held_out]
    assert len({row["label"] for row, _ in rows}) == len({row["label"] for row in held_out}) == LABELS
    assert len(rows) > 1500
    assert 0.8 < len(held_out) * HELD_OUT_OF / len(rows) < 1.2
    assert not {row["text"] for row in held_out} & {row["text"] for row, is_held_out in rows if not is_held_out}
    most = max(Counter(row["label"] for row in held_out).values())
    assert most < 0.25 * len(held_out), "one answer for everything must not look like learning"
