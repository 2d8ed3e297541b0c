from __future__ import annotations

from gaudi_bert.corpus.documentation import documentation_documents

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


def test_what_becomes_a_sentence() -> None:
    long, short = documentation_documents({"z": SHORT, "a": LONG, "rulers": "****\n\n====\n"})
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
