from __future__ import annotations

import ast
import gc
import json

import pytest

from gaudi_bert.common.built_in_texts import BUILT_IN_TEXTS
from gaudi_bert.corpus.documentation import documentation_documents
from gaudi_bert.corpus.python_texts import docstrings_of_source, python_texts

SOURCE = b'''"""Of the module."""
class Outer:
    """Of the class.

        Indented further than
    the rest.
    """

    attribute = 1
    """Of an attribute: no docstring."""

    async def method(self):
        "Of the method."

    def bare(self):
        """ """

if attribute:
    def one(): "First."
else:
    def one(): "Second."
try:
    import thing
except ImportError:
    class Instead: "For want of it."
for _ in ():
    def looped():
        def inner(): "Inside."
'''


def test_docstrings_are_those_of_modules_classes_and_functions_wherever_they_stand() -> None:
    assert list(docstrings_of_source(SOURCE, "module")) == [
        ("module", "Of the module."),
        ("module.Outer", "Of the class.\n\n    Indented further than\nthe rest."),
        ("module.Outer.method", "Of the method."),
        ("module.one", "First."),
        ("module.one", "Second."),
        ("module.Instead", "For want of it."),
        ("module.looped.inner", "Inside."),
    ]


def test_every_built_in_text_is_there_and_about_as_long_as_stated() -> None:
    for name, size in BUILT_IN_TEXTS.items():
        texts = python_texts(name)
        assert sum(map(len, texts.values())) == pytest.approx(size, rel=0.2)
        assert json.loads(json.dumps(texts)) == texts
    assert gc.isenabled()


def test_the_topics_are_few_long_documents_without_repetition() -> None:
    assert python_texts("python-docs").keys() >= {"assert", "class"}
    documents = documentation_documents(python_texts("python-docs"))
    assert len(documents) > 60
    assert sum(map(len, documents)) > 3000
    long_sentences = [sentence for document in documents for sentence in document if len(sentence) > 150]
    assert len(set(long_sentences)) > 0.99 * len(long_sentences), "paragraphs are not repeated"
    assert not any(set(sentence) <= set("=*-~^+|# ") for document in documents for sentence in document)


def test_the_docstrings_are_many_short_documents_without_repetition() -> None:
    texts = python_texts("python-docstrings")
    assert texts["json.dumps"].split() == (json.dumps.__doc__ or "").split()
    assert texts["ast.get_docstring"].split() == (ast.get_docstring.__doc__ or "").split()
    assert not {"idlelib", "lib2to3", "test", "this"} & {name.split(".")[0] for name in texts}
    documents = documentation_documents(texts)
    assert len(documents) > 5000
    characters = sorted(sum(map(len, document)) for document in documents)
    assert characters[len(characters) // 2] < 150, "most are far shorter than a row of 128 tokens"
    paragraphs = [" ".join(document) for document in documents if sum(map(len, document)) > 100]
    assert len(set(paragraphs)) == len(paragraphs)
