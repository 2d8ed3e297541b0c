"""Where sentences end, and how the lines of a file are read."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.corpus.sentences import detect_line_layout, split_lines_into_sentences, split_sentences
from tests.builders.properties import examples


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("No stop here", ["No stop here"]),
        ("Dr. Smith met Mrs. Jones. They left.", ["Dr. Smith met Mrs. Jones.", "They left."]),
        ("J. R. R. Tolkien wrote it. We read it.", ["J. R. R. Tolkien wrote it.", "We read it."]),
        ("Pi is 3.14 or so. See example.org today.", ["Pi is 3.14 or so.", "See example.org today."]),
        ("See Fig. 3 and No. 5. He said no. Then he went.", ["See Fig. 3 and No. 5.", "He said no.", "Then he went."]),
        ("The U.S. Army came. It was late.", ["The U.S. Army came.", "It was late."]),
        ("Fruit, e.g. Apples, is sweet. vs. Nuts.", ["Fruit, e.g. Apples, is sweet. vs. Nuts."]),
        ('"Really?" she said. "Yes." He smiled.', ['"Really?" she said.', '"Yes."', "He smiled."]),
        ("Wait... what? (Yes.) Then [no].", ["Wait... what?", "(Yes.)", "Then [no]."]),
        ("你好。世界！Good. Bye", ["你好。", "世界！", "Good.", "Bye"]),
    ],
)
def test_rules(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@examples(200)
@given(st.text(alphabet="aB. !?\"'()。…3\n", max_size=60))
def test_no_character_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    assert "".join("".join(sentences).split()) == "".join(text.split())


SENTENCES = ["The first one (i.e.", "“broken”) goes on.", "Second. Stop.", "Third.", "Fourth!", "Fifth?"]


PARAGRAPHS = ["One is here. Two is here. Three is here.", "Four is here. Five is here."]


WRAPPED = [
    "It was the best of times, it was the worst of times, it",
    "was the age of wisdom, it was the age of foolishness. We",
    "had everything before us, we had nothing before us, and",
    "that was all.",
]


UNPUNCTUATED = ["he went home", "she read a very long and winding book about whales", "they slept"]


@pytest.mark.parametrize(
    ("lines", "layout", "sentences"),
    [
        (SENTENCES, "sentences", SENTENCES),
        (UNPUNCTUATED, "sentences", UNPUNCTUATED),
        ([], "sentences", []),
        (PARAGRAPHS, "paragraphs", [f"{n} is here." for n in ("One", "Two", "Three", "Four", "Five")]),
        (
            WRAPPED,
            "wrapped",
            [
                "It was the best of times, it was the worst of times, it was the age of wisdom, "
                "it was the age of foolishness.",
                "We had everything before us, we had nothing before us, and that was all.",
            ],
        ),
    ],
)
def test_layouts(lines: list[str], layout: Literal["sentences", "paragraphs", "wrapped"], sentences: list[str]) -> None:
    assert detect_line_layout([lines, lines] if lines else []) == layout
    assert split_lines_into_sentences(lines, layout) == sentences
