"""Files of JSON lines: rows to learn from and to answer, and what a run says of itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses_of(out: Path) -> list[float]:
    """Of the updates of a run, as far as it told them."""
    return [line["loss"] for line in lines_of(out / "metrics.jsonl") if line["kind"] == "train"]
