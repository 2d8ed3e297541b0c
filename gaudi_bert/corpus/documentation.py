"""Documents from the plain-text documentation of programs: topics of a manual, docstrings.

A heading, a paragraph (its wrapped lines joined, then split into sentences), a list item and each line of an example are
sentences. Rulers below headings and borders of tables are left out. Some texts repeat parts of others (the topic
"specialnames" holds "attribute-access"; subclasses repeat the docstrings of their base): a paragraph is kept once, in the
shortest text that has it, so that no held-out document is also part of a training document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gaudi_bert.corpus.sentences import split_sentences

__all__ = ["documentation_documents", "named_documents"]

_RULER = re.compile(r"\s*([*=~^+|\-])[*=~^+|\-\s]*")
_MARKER = re.compile(r"(?:[*\-•]|\d+\.|\[\d+\])\s+")
# Shorter paragraphs ("For example:", "Note:") stand in many texts by nature.
_SHORTEST_REPEATED_PARAGRAPH = 40


def documentation_documents(texts: Mapping[str, str]) -> list[list[str]]:
    """One document (a list of sentences) per text, in the order of the names; a text left without a sentence gives none."""
    return list(named_documents(texts).values())


def named_documents(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """The same, by the names of the texts."""
    seen: set[str] = set()
    kept: dict[str, list[str]] = {}
    for name in sorted(texts, key=lambda name: (len(texts[name]), name)):
        sentences = _sentences_of_text(texts[name], seen)
        if sentences:
            kept[name] = sentences
    return {name: kept[name] for name in sorted(kept)}


def _sentences_of_text(text: str, seen: set[str]) -> list[str]:
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
