"""How evenly packs of a sorted input are mixed: the shares of topics in windows of packs, compared with a uniform shuffle.

    python benchmarks/reading_topics.py [--topics 22 40 200] [--groups 33 2000] [--windows 400] [--epochs 3]

Shards are integers only: groups of 32 shards of 7,656 packs, each group of one topic, sorted; 33 groups are Wikipedia. For
windows at random positions, the figure is the root mean square of the error of the topics' shares over that of as many
independent draws (1: a uniform shuffle). Order 2, which this project had before, is written down here as its description had
it: each of 32 streams has a shard of each group, in a random sequence. py1e is written from the description of MosaicML's
streaming for one node: shards are permuted, and each sample is moved by up to half a block of 4,000,000 samples.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from measuring import show, show_processor

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.reading.global_order import GlobalOrder

SHARDS_OF_A_GROUP, PACKS, STREAMS, BLOCK = 32, 7656, 32, 4_000_000
WINDOWS = (256, 2048, 16384, 65536)
TopicsOf = Callable[[int, int], IntArray]
"""The topics of so many packs, from a number on."""


def second_order(topics: IntArray, random: np.random.Generator) -> TopicsOf:
    """Order 2: each stream has a shard of each group, in a random sequence."""
    streams = np.stack([random.permutation(topics) for _ in range(STREAMS)])

    def read(first: int, packs: int) -> IntArray:
        rounds, stream = np.divmod(np.arange(first, first + packs), STREAMS)
        return streams[stream, rounds // PACKS]

    return read


def our_order(topics: IntArray, epoch: int, streams: int = STREAMS) -> TopicsOf:
    """Our order as it is read; with 512 streams, as many shards are open as a block of py1e has."""
    regions = np.repeat(np.arange(len(topics)), SHARDS_OF_A_GROUP)
    order = GlobalOrder(np.full(len(regions), PACKS), 1, streams=streams, regions=regions)
    return lambda first, packs: topics[regions[order.locate(epoch, np.arange(first, first + packs)).shards]]


def py1e(topics: IntArray, random: np.random.Generator) -> IntArray:
    """The topics of 6,000,000 packs in the middle of an epoch, or of a shorter epoch."""
    shards = random.permutation(len(topics) * SHARDS_OF_A_GROUP)[: 4 * BLOCK // PACKS]
    moved = np.arange(len(shards) * PACKS) + random.uniform(-1, 1, len(shards) * PACKS) * (BLOCK - PACKS) / 2
    of_packs = np.repeat(topics[shards // SHARDS_OF_A_GROUP].astype(np.int16), PACKS)
    middle = (moved > BLOCK) & (moved < 2.5 * BLOCK) if len(moved) > 3 * BLOCK else np.ones(len(moved), bool)
    return of_packs[middle][np.argsort(moved[middle])]


def spread(read: TopicsOf, packs: int, shares: np.ndarray, windows: int, random: np.random.Generator) -> list[float]:
    """The error of the shares for each size of a window, in those of independent draws."""
    figures = []
    for size in WINDOWS:
        errors = []
        for first in random.integers(0, packs - size, windows).tolist():
            errors.append(((np.bincount(read(first, size), minlength=len(shares)) / size - shares) ** 2).sum())
        figures.append(float(np.sqrt(np.mean(errors) / ((shares * (1 - shares)).sum() / size))))
    return figures


def main() -> None:
    """Print each way of reading, over some epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, nargs="*", default=[22, 40, 200])
    parser.add_argument("--groups", type=int, nargs="*", default=[33, 2000])
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    show_processor()
    for groups, count in itertools.product(options.groups, options.topics):
        if count > groups:
            continue
        topics = np.arange(groups) * count // groups
        found: dict[str, list[list[float]]] = {}
        for epoch in range(options.epochs):
            for name, figures in spreads(topics, epoch, options.windows).items():
                found.setdefault(name, []).append(figures)
        for name, figures in found.items():
            for size, values in zip(WINDOWS, zip(*figures, strict=True), strict=True):
                show(f"{groups:,} groups, {count} topics, windows of {size:,}: {name}", values, "times")


def spreads(topics: IntArray, epoch: int, windows: int) -> dict[str, list[float]]:
    """The figures of each way of reading, for each size of a window."""
    random = np.random.default_rng(len(topics) + epoch)
    shares, packs = np.bincount(topics) / len(topics), len(topics) * SHARDS_OF_A_GROUP * PACKS
    shuffled = py1e(topics, random)
    ways: dict[str, tuple[TopicsOf, int]] = {
        "uniform shuffle": (lambda _, size: random.choice(topics, size), packs),
        "order 2": (second_order(topics, random), packs),
        "order 4": (our_order(topics, epoch), packs),
        "order 4, 512 streams": (our_order(topics, epoch, streams=512), packs),
        "py1e, one node": (lambda first, size: shuffled[first : first + size], len(shuffled)),
    }
    return {name: spread(read, most, shares, windows, random) for name, (read, most) in ways.items()}


if __name__ == "__main__":
    main()
