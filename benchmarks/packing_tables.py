"""What the packing benchmarks share: the published histograms by name, and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.reporting.estimate import shipped_histograms


def load(name: str) -> Histogram:
    """One of the published histograms."""
    value = json.loads(shipped_histograms()[name].read_text(encoding="utf-8"))
    return Histogram(value["max_sequence_length"], value["counts"])


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A Markdown table, row by row as they come."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header), flush=True)
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
