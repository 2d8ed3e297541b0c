"""Small files of labelled rows, of words that `bert_folder` knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.builders.bert_folder import WORDS

NOUNS = ("cat", "dog", "hill", "river", "mat")


def sentence(random: np.random.Generator, longest: int = 12) -> list[str]:
    return [str(word) for word in random.choice(WORDS[:16], random.integers(2, longest))]


def make_row(task: str, random: np.random.Generator) -> dict[str, Any]:
    words = sentence(random)
    nouns = sorted(set(words) & set(NOUNS))
    if task == "classification":
        return {
            "text": " ".join(words),
            "text_pair": "the cat",
            "label": "animal" if "cat" in words or "dog" in words else "none",
        }
    if task == "multi-label":
        return {"text": " ".join(words), "label": nouns}
    if task == "regression":
        return {"text": " ".join(words), "label": len(words) / 10}
    if task == "token-classification":
        return {"tokens": words, "tags": ["B-noun" if word in NOUNS else "O" for word in words]}
    if task == "question-answering":
        context = " ".join([*words, "cat", *sentence(random)])
        start = context.index("cat")
        return {"question": "the cat ?", "context": context, "answers": [{"text": "cat", "answer_start": start}]}
    return {"text": " ".join(words)}


def write_rows(path: Path, task: str, count: int, seed: int) -> Path:
    """A file of JSON lines."""
    random = np.random.default_rng(seed)
    rows = [make_row(task, random) for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
