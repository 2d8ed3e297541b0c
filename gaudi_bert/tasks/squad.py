"""SQuAD's measure of answers (Rajpurkar et al., 2016, section 6.1; 2018 for questions without an answer).

Texts are compared in lower case, without punctuation, articles and extra space. Exact match: the same text as one of the
right answers. F1: of the words in common, the best over the right answers. A question without an answer is right if and only
if the empty text is given. Both are means over questions, from 0 to 100.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = ["squad_scores"]

ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_scores(given: Sequence[str], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """exact_match and f1.

    Args:
        given: one answer a question.
        right: the right answers of each question; none where it has none.
    """
    pairs = [
        ([_normal(text) for text in texts] or [""], _normal(answer)) for answer, texts in zip(given, right, strict=True)
    ]
    count = max(1, len(pairs))
    return {
        "exact_match": 100.0 * sum(answer in texts for texts, answer in pairs) / count,
        "f1": 100.0 * sum(max(_f1(answer, text) for text in texts) for texts, answer in pairs) / count,
    }


def _normal(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _f1(answer: str, text: str) -> float:
    given, wanted = answer.split(), text.split()
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2.0 * common / (len(given) + len(wanted))
