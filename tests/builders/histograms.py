"""The six published histograms and the integers that packing them must give."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import gaudi_bert
from gaudi_bert.packing.histogram import Histogram

DATA = Path(__file__).resolve().parent.parent / "data"
HISTOGRAMS = Path(gaudi_bert.__file__).resolve().parent / "histograms"
NAMES = ("wikipedia-128", "wikipedia-384", "wikipedia-512", "wikipedia-1024", "wikipedia-2048", "squad-384")

ADVERSARIAL = {
    "one length": [0, 0, 0, 0, 0, 0, 41, 0, 0, 0, 0, 0, 0],
    "all full": [0] * 12 + [17],
    "all of length 1": [1000] + [0] * 12,
    "one sequence": [0, 0, 0, 1] + [0] * 9,
    "empty": [0] * 13,
    "one of each": [1] * 13,
    "above half only": [0] * 7 + [5, 3, 8, 1, 9, 2],
    "a million millions": [10**12, 0, 3, 10**11, 0, 0, 10**12, 1, 0, 0, 0, 0, 7],
    "capacity 1": [5],
}


@cache
def published(name: str) -> Histogram:
    value = json.loads((HISTOGRAMS / f"{name}.json").read_text())
    return Histogram(value["max_sequence_length"], value["counts"])


@cache
def expected() -> dict[str, Any]:
    return json.loads((DATA / "expected_packing.json").read_text())


def depth_number(depth: str, histogram: Histogram) -> int:
    return histogram.max_sequence_length if depth == "max" else int(depth)


def small_histograms(largest_length: int = 14, largest_count: int = 6) -> st.SearchStrategy[Histogram]:
    """Histograms of up to `largest_length` lengths, many of them absent."""
    count = st.one_of(st.just(0), st.integers(0, largest_count))
    lists = st.integers(1, largest_length).flatmap(lambda length: st.lists(count, min_size=length, max_size=length))
    return lists.map(lambda counts: Histogram(len(counts), np.asarray(counts, dtype=np.int64)))
