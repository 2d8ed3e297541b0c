"""The documentation that every CPython carries (`pydoc_data.topics`), as a small corpus that needs no download.

Each topic is a document. A heading, a paragraph (its wrapped lines joined, then split into sentences), a list item and each
line of an example are sentences. Rulers below headings and borders of tables are left out. Some topics repeat parts of
others ("specialnames" holds "attribute-access"): a paragraph is kept once, in the shortest topic that has it, so that no
held-out document is also part of a training document.
"""

from __future__ import annotations

import json
import re

from gaudi_bert.corpus.sentences import split_sentences

__all__ = ["python_documents", "topics_text"]

_RULER = re.compile(r"\s*([*=~^+|\-])[*=~^+|\-\s]*")
_MARKER = re.compile(r"(?:[*\-•]|\d+\.|\[\d+\])\s+")
# Shorter paragraphs ("For example:", "Note:") stand in many topics by nature.
_SHORTEST_REPEATED_PARAGRAPH = 40


def topics_text() -> str:
    """All topics as one string with a fixed order: what the examples are a function of."""
    return json.dumps(_topics(), sort_keys=True, ensure_ascii=True)


def _topics() -> dict[str, str]:
    from pydoc_data import topics

    return dict(topics.topics)


def python_documents() -> list[list[str]]:
    """The documents in the order of the topics' names, each a list of sentences; none is empty."""
    topics = _topics()
    seen: set[str] = set()
    kept: dict[str, list[str]] = {}
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        sentences = _sentences_of_topic(topics[name], seen)
        if sentences:
            kept[name] = sentences
    return [kept[name] for name in sorted(kept)]


def _sentences_of_topic(text: str, seen: set[str]) -> list[str]:
    sentences: list[str] = []
    after_colon = False
    outer_indent = 0
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if line.strip() and not _RULER.fullmatch(line)]
        if not lines:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        is_example = (after_colon and indent > outer_indent) or lines[0].lstrip().startswith(">>>")
        content = " ".join(" ".join(lines).split())
        if not is_example:
            after_colon, outer_indent = content.endswith(":"), indent
        if content in seen:
            continue
        if len(content) >= _SHORTEST_REPEATED_PARAGRAPH:
            seen.add(content)
        sentences.extend(_sentences_of_paragraph(lines, content, is_example))
    return sentences


def _sentences_of_paragraph(lines: list[str], content: str, is_example: bool) -> list[str]:
    if is_example:
        return [" ".join(line.split()) for line in lines]
    if all("|" in line for line in lines):
        return [" ".join(line.replace("|", " ").split()) for line in lines if line.replace("|", " ").strip()]
    return split_sentences(_MARKER.sub("", content, count=1) if _MARKER.match(content) else content)
