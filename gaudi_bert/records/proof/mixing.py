"""How even the shards are, and whether any batch is a fair sample of the data.

Fair mixing: the number of sequences in a batch of b packs varies as if the packs were drawn independently,
whose standard deviation is that of one pack times the square root of b. A folder with one strategy a file (as
the predecessor wrote) varies many times more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gaudi_bert.common.arrays import Int32Array

__all__ = ["Mixing", "dropped_packs", "is_balanced"]

FAIR_RATIO = 1.2
_FEWEST_BATCHES = 20
_MOST_WORKERS = 32


@dataclass
class Mixing:
    """Sums over packs, and over batches of `batch_packs` packs that follow each other in a shard."""

    batch_packs: int
    packs: int = 0
    pack_sum: int = 0
    pack_squares: int = 0
    batches: int = 0
    batch_sum: int = 0
    batch_squares: int = 0

    @classmethod
    def for_shards(cls, packs: Sequence[int]) -> Mixing:
        """With the largest batch, a power of two up to 256, of which the median shard holds at least four."""
        median = sorted(packs)[len(packs) // 2] if packs else 0
        return cls(2 ** min(8, max(0, int(math.log2(max(1, median // 4))))))

    def add(self, pack_sizes: Int32Array) -> None:
        """Add a shard: int32 [packs], the number of sequences of each pack in order."""
        sizes = pack_sizes.astype(np.int64)
        batches = sizes[: sizes.size // self.batch_packs * self.batch_packs].reshape(-1, self.batch_packs).sum(axis=1)
        self.packs += sizes.size
        self.pack_sum += int(sizes.sum())
        self.pack_squares += int((sizes**2).sum())
        self.batches += batches.size
        self.batch_sum += int(batches.sum())
        self.batch_squares += int((batches**2).sum())

    @property
    def ratio(self) -> float | None:
        """Standard deviation of sequences per batch over that of independent draws; None where it cannot be
        told."""
        if self.batches < _FEWEST_BATCHES or self.batch_packs < 2:
            return None
        pack_variance = self.pack_squares / self.packs - (self.pack_sum / self.packs) ** 2
        batch_variance = self.batch_squares / self.batches - (self.batch_sum / self.batches) ** 2
        if pack_variance <= 0:
            return 0.0
        return math.sqrt(max(batch_variance, 0.0) / (self.batch_packs * pack_variance))

    @property
    def is_fair(self) -> bool:
        """Whether the ratio is at most 1.2, or within four standard errors of 1 where there are few batches."""
        ratio = self.ratio
        return ratio is None or ratio <= max(FAIR_RATIO, 1 + 4 / math.sqrt(2 * self.batches))


def is_balanced(names: Sequence[str], packs: Sequence[int]) -> bool:
    """Whether the shards of each group (the first number in their names) hold equal packs, to within one."""
    groups: dict[str, list[int]] = {}
    for name, count in zip(names, packs, strict=True):
        match = re.match(r"packed-(\d+)-", name)
        groups.setdefault(match[1] if match else "", []).append(count)
    return all(max(counts) - min(counts) <= 1 for counts in groups.values())


def dropped_packs(packs: int) -> dict[int, int]:
    """Packs of an epoch that do not go round, by number of workers W = 1 .. 32, when rank r takes pack i with i mod W = r.

    Our trainer counts on into the next epoch and drops none of them; a reader that ends with the epoch drops them.
    """
    return {workers: packs % workers for workers in range(1, _MOST_WORKERS + 1)}
