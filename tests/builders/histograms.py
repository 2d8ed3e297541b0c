"""Histograms: the six published ones with the integers that packing them must give, small random ones, and hard ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import gaudi_bert
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.histogram import Histogram

DATA = Path(__file__).resolve().parent.parent / "data"
HISTOGRAMS = Path(gaudi_bert.__file__).resolve().parent / "histograms"
NAMES = ("wikipedia-128", "wikipedia-384", "wikipedia-512", "wikipedia-1024", "wikipedia-2048", "squad-384")

# The packs of an optimal packing at each depth, proven by `optimal`. The last number is also that of every larger depth.
FEWEST_PACKS = {
    "squad-384": {2: 45_335, 3: 40_195},
    "wikipedia-128": {2: 30_080_937, 3: 30_061_040},
    "wikipedia-384": {2: 12_243_151, 3: 10_684_344},
    "wikipedia-512": {2: 10_099_081, 3: 8_143_829, 4: 8_135_727},
    "wikipedia-1024": {2: 35_886_963, 3: 26_348_556, 4: 21_697_115},
    "wikipedia-2048": {2: 13_092_039, 3: 9_236_660, 4: 7_319_086, 5: 6_294_495},
}
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


class BinPacking(NamedTuple):
    """An instance of the literature, and the fewest packs that it takes."""

    name: str
    counts: IntArray
    bins: int


def bin_packing(kind: str) -> list[BinPacking]:
    """The instances of a class of `bin_packing.json`."""
    instances = []
    for instance in json.loads((DATA / "bin_packing.json").read_text())["classes"][kind]:
        counts = np.zeros(instance["capacity"], dtype=np.int64)
        sizes, copies = np.array(instance["items"]).T
        counts[sizes - 1] = copies
        instances.append(BinPacking(instance["name"], counts, instance["bins"]))
    return instances


def depth_number(depth: str, histogram: Histogram) -> int:
    return histogram.max_sequence_length if depth == "max" else int(depth)


def small_histograms(largest_length: int = 14, largest_count: int = 6) -> st.SearchStrategy[Histogram]:
    """Histograms of up to `largest_length` lengths, many of them absent."""
    count = st.one_of(st.just(0), st.integers(0, largest_count))
    lists = st.integers(1, largest_length).flatmap(lambda length: st.lists(count, min_size=length, max_size=length))
    return lists.map(lambda counts: Histogram(len(counts), np.asarray(counts, dtype=np.int64)))


# --- made to be hard to pack: long, with few or with thousands of lengths, with perfect fills, with very large counts


def perfect_triplets(max_length: int, sequences: int, seed: int = 0) -> IntArray:
    """`sequences` (a multiple of 3) different lengths that fill a third as many packs without a gap: int64 [L].

    The perfect packing is nearly the only one, in the manner of the AI instances of Delorme, Iori and Martello (2016).
    """
    generator = np.random.default_rng(seed)
    counts = np.zeros(max_length, dtype=np.int64)
    while counts.sum() < sequences:
        one, two = (int(length) for length in generator.integers(max_length // 5, max_length // 2, 2))
        lengths = {one, two, max_length - one - two}
        if len(lengths) == 3 and not any(counts[length - 1] for length in lengths):
            counts[np.array(sorted(lengths)) - 1] = 1
    return counts


def scattered(max_length: int, lengths: int, most: int, seed: int = 0) -> IntArray:
    """So many different lengths of at most half a pack, each up to `most` times: int64 [L]."""
    generator = np.random.default_rng(seed)
    counts = np.zeros(max_length, dtype=np.int64)
    counts[generator.choice(max_length // 2, lengths, replace=False)] = generator.integers(1, most, lengths, endpoint=True)
    return counts


def lognormal(max_length: int, sequences: int, seed: int = 0) -> IntArray:
    """Typical lengths of documents: median a twelfth of a pack, clipped to a whole one: int64 [L]."""
    median = np.log(max_length / 12)
    return _drawn(max_length, sequences, lambda generator, size: generator.lognormal(median, 1.1, size), seed)


def uniform(max_length: int, sequences: int, seed: int = 0) -> IntArray:
    """Every length alike: int64 [L]."""
    return _drawn(max_length, sequences, lambda generator, size: generator.uniform(1, max_length, size), seed)


def bimodal(max_length: int, sequences: int, seed: int = 0) -> IntArray:
    """Short questions and long documents: int64 [L]."""

    def draw(generator: np.random.Generator, size: int) -> np.ndarray:
        short = generator.normal(max_length / 20, max_length / 60, size)
        return np.where(generator.random(size) < 0.6, short, generator.normal(0.55 * max_length, max_length / 8, size))

    return _drawn(max_length, sequences, draw, seed)


MOST_DRAWN = 1_000_000
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def _drawn(max_length: int, sequences: int, draw, seed: int) -> IntArray:
    """A histogram of `sequences` draws; of more than a million, that many times a smaller one."""
    size = min(sequences, MOST_DRAWN)
    lengths = np.clip(draw(np.random.default_rng(seed), size), 1, max_length).astype(np.int64)
    counts = np.bincount(lengths, minlength=max_length + 1)[1:].astype(np.int64)
    return counts * (sequences // size)
