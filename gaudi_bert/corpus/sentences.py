"""Split text into sentences by a few rules, and detect how the sentences of a file are divided into lines.

A sentence ends after `.`, `!`, `?` or `…` and the closing quotes and brackets that follow, if white space comes next and the
sentence after it does not begin with a lower-case letter. A full stop does not end a sentence in these cases:

- It follows an abbreviation that needs a following word (`Dr.`, `e.g.`: `_ABBREVIATIONS`) or a following number (`No. 5`,
  `p. 17`: `_NUMBERED_ABBREVIATIONS`).
- It follows a single capital letter, which is an initial (`J. Smith`), or letters with dots (`U.S. Army`).
- It is inside a number (`3.14`) or a name (`example.org`), because no white space follows it.

A Chinese or Japanese full stop (`。`, `！`, `？`) always ends a sentence.

The *layout* of a file says how its lines are read. It is detected from the first lines:

- `sentences`: Each line is one sentence, and is not changed.
- `paragraphs`: Each line is one paragraph, and is split by the rules above.
- `wrapped`: The lines are broken at a fixed width. The lines of a document are joined and then split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

LineLayout = Literal["sentences", "paragraphs", "wrapped"]

_UNFINISHED = """
    Adm Brig Capt Cmdr Col Dr Drs Fr Gen Gov Hon Lt Maj Messrs Mgr Mr Mrs Ms Mt Pres Prof Rep Rev Sen Sgt St Ste
    al approx ca cf e.g eg i.e ie esp viz vs
"""
_NUMBERED = """
    art c ch col fig figs no nos nr op p para pl pp sec v vol vols
    jan feb mar apr jun jul aug sep sept oct nov dec
"""
# A full stop after one of these abbreviations never ends a sentence. The abbreviations are case-sensitive.
_ABBREVIATIONS = frozenset(_UNFINISHED.split())
# A full stop after one of these abbreviations, such as "fig.", does not end a sentence if a number follows. These
# abbreviations are not case-sensitive.
_NUMBERED_ABBREVIATIONS = frozenset(_NUMBERED.split())

_CLOSING = "\"'”’»)\\]"
_BOUNDARY = re.compile(rf"[.!?…]+[{_CLOSING}]*\s+|[。！？]+[{_CLOSING}」』]*\s*")
_OPENING = "\"'“‘«([¿¡*_"
_LAST_WORD = re.compile(r"[^\s\"'“‘«(\[]+$")
_INITIAL_OR_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[A-ZÀ-ÖØ-Þ]")
_FINISHED_LINE = re.compile(rf"[.!?…。！？:;][{_CLOSING}」』]*$")

# If the lines of a text contain, on average, at most this many sentence boundaries before their ends, every line counts as
# one sentence. Otherwise, every line counts as a paragraph.
_MOST_INNER_BOUNDARIES = 0.3
_LEAST_LOWER_CASE_STARTS = 0.2
_LEAST_FILL_OF_WRAPPED_LINES = 0.8
_WIDEST_WRAPPED_LINE = 200


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, and return them without surrounding white space. Empty sentences are left out."""
    sentences: list[str] = []
    start = 0
    for boundary in _BOUNDARY.finditer(text):
        if boundary.end() < len(text) and _is_sentence_continued(text, start, boundary):
            continue
        sentence = text[start : boundary.end()].strip()
        if sentence:
            sentences.append(sentence)
        start = boundary.end()
    rest = text[start:].strip()
    if rest:
        sentences.append(rest)
    return sentences


def _is_sentence_continued(text: str, sentence_start: int, boundary: re.Match[str]) -> bool:
    """Return whether the sentence continues after the given punctuation, for example because the punctuation belongs to an
    abbreviation.

    Args:
        text: The text.
        sentence_start: Where the sentence begins.
        boundary: The match of the punctuation and the white space after it.
    """
    if boundary[0][0] in "。！？":
        return False
    following = text[boundary.end() : boundary.end() + 4].lstrip(_OPENING)
    if following[:1].islower():
        return True
    if boundary[0].rstrip() != ".":
        return False
    word_match = _LAST_WORD.search(text, max(sentence_start, boundary.start() - 40), boundary.start())
    if word_match is None:
        return False
    word = word_match[0]
    if word in _ABBREVIATIONS or (word.lower() in _NUMBERED_ABBREVIATIONS and following[:1].isdigit()):
        return True
    return _INITIAL_OR_DOTTED.fullmatch(word) is not None and word != "I"


def detect_line_layout(documents: Sequence[Sequence[str]]) -> LineLayout:
    """Detect whether each line of a file is a sentence or a paragraph, or whether lines are wrapped at a fixed width.

    Args:
        documents: A sample of its documents, each a list of stripped, non-empty lines.
    """
    lines = [line for document in documents for line in document]
    if not lines:
        return "sentences"
    finished = sum(_FINISHED_LINE.search(line) is not None for line in lines)
    if 2 * finished < len(lines) and _has_wrapped_lines(documents):
        return "wrapped"
    inner_boundaries = sum(len(split_sentences(line)) - 1 for line in lines)
    return "sentences" if inner_boundaries <= _MOST_INNER_BOUNDARIES * len(lines) else "paragraphs"


def _has_wrapped_lines(documents: Sequence[Sequence[str]]) -> bool:
    """Return whether lines seem to be wrapped at a fixed width.

    All lines except the last line of a document must have nearly the same width, and lines must often begin in lower case.
    """
    widths = sorted(len(line) for document in documents for line in document[:-1])
    starts = [line[:1] for document in documents for line in document[1:]]
    if not widths:
        return False
    widest, middle = widths[min(len(widths) - 1, len(widths) * 95 // 100)], widths[(len(widths) - 1) // 2]
    lower_case = sum(start.islower() for start in starts)
    return (
        widest <= _WIDEST_WRAPPED_LINE
        and middle >= _LEAST_FILL_OF_WRAPPED_LINES * widest
        and lower_case >= _LEAST_LOWER_CASE_STARTS * len(starts)
    )


def split_lines_into_sentences(lines: Sequence[str], layout: LineLayout) -> list[str]:
    """Split the lines of a document into sentences. The layout of the file states whether a line is a sentence or a
    paragraph, or whether lines are wrapped.

    Args:
        lines: The non-empty lines of the document.
        layout: The layout of the file, from `detect_line_layout`.
    """
    if layout == "sentences":
        return list(lines)
    if layout == "wrapped":
        return split_sentences(" ".join(lines))
    return [sentence for line in lines for sentence in split_sentences(line)]
