"""Files of rows, and what is read of them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.reading import read_rows
from gaudi_bert.rows.types import Row

QUESTIONS: list[dict[str, Any]] = [
    {"id": "a", "question": "What flows?", "answers": [{"text": "Elbe", "answer_start": 4}]},
    {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
]
PARAGRAPH: dict[str, Any] = {"context": "The Elbe flows north.", "qas": QUESTIONS}
SQUAD = {"version": "v2.0", "data": [{"title": "Rivers", "paragraphs": [PARAGRAPH]}]}


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows_of(path: Path, task: Any = None, labelled: bool = True, **settings: Any) -> list[Row]:
    return list(read_rows(path, task, TaskSettings(**settings), labelled=labelled))
