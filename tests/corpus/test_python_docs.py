from __future__ import annotations

import json

import pytest

from gaudi_bert.corpus import python_docs
from gaudi_bert.corpus.python_docs import python_documents, topics_text

SHORT = """The "short" topic
*****************

This paragraph, which is wrapped, stands in both of the topics. It has
two sentences.
"""
LONG = """A longer topic
**************

This paragraph, which is wrapped, stands in both of the topics. It has
two sentences.

For example:

   >>> print("a. B")
   a. B

* An item of a list. It has two sentences.

+------+-----+
| left | one |
+------+-----+
| more | two |
+------+-----+

   An indented paragraph that follows no colon is text. Is it not?
"""


def test_what_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_docs, "_topics", lambda: {"z": SHORT, "a": LONG, "rulers": "****\n\n====\n"})
    long, short = python_documents()
    assert short == [
        'The "short" topic',
        "This paragraph, which is wrapped, stands in both of the topics.",
        "It has two sentences.",
    ]
    assert long == [
        "A longer topic",
        "For example:",
        '>>> print("a. B")',
        "a. B",
        "An item of a list.",
        "It has two sentences.",
        "left one",
        "more two",
        "An indented paragraph that follows no colon is text.",
        "Is it not?",
    ]


def test_the_documentation_of_this_python() -> None:
    documents = python_documents()
    assert len(documents) > 60
    assert sum(map(len, documents)) > 3000
    long_sentences = [sentence for document in documents for sentence in document if len(sentence) > 150]
    assert len(set(long_sentences)) > 0.99 * len(long_sentences), "paragraphs are not repeated"
    assert not any(set(sentence) <= set("=*-~^+|# ") for document in documents for sentence in document)
    assert json.loads(topics_text()).keys() >= {"assert", "class"}
