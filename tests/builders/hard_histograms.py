"""Histograms made to be hard to pack: long, with few or with thousands of lengths, with perfect fills, with huge counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import IntArray


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


CORE = {44: 2, 33: 3, 12: 6}
CORE_LENGTH = 132
"""Known from the literature: 259 tokens, with fractions 1.962 packs of 132, but no two packs hold these 11 sequences."""


def rounded_up_is_not_enough(max_length: int, sequences: int, seed: int = 0) -> IntArray:
    """`perfect_triplets` and a core of 11 sequences that takes a pack more than its linear program rounded up: int64 [L].

    In the manner of the ANI instances of Delorme, Iori and Martello (2016): bound and optimum may differ by one.
    """
    counts = perfect_triplets(max_length, sequences - sum(CORE.values()), seed)
    for length, number in CORE.items():
        counts[length * max_length // CORE_LENGTH - 1] += number
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


HARD = {
    "402 perfect fills at 5,000": (perfect_triplets, 5000, 402),
    "400 lengths at 20,000": (scattered, 20_000, 400, 1000),
    "2,000 lengths at 20,000": (scattered, 20_000, 2000, 10**6),
    "lognormal at 32,768": (lognormal, 32_768, 10**12),
    "uniform at 32,768": (uniform, 32_768, 10**12),
    "bimodal at 32,768": (bimodal, 32_768, 10**6),
    "one of each at 32,768": (scattered, 32_768, 16_384, 1),
}
"""By name the function that makes each, and its arguments."""


def hard_histogram(name: str) -> IntArray:
    """The counts of one of `HARD`."""
    function, *arguments = HARD[name]
    return function(*arguments)
