"""A mixture as arrays: the lengths of all packs one after the other, and where each pack begins; and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs

__all__ = ["flatten_packs", "mixture_of_packs"]


def flatten_packs(mixture: Mapping[Strategy, int]) -> tuple[IntArray, IntArray]:
    """The length of each sequence, pack by pack, and where each pack begins: int64 [sequences], int64 [packs + 1]."""
    sizes = np.concatenate([np.full(count, len(strategy)) for strategy, count in mixture.items()])
    lengths = [np.tile(np.array(strategy, dtype=np.int64), count) for strategy, count in mixture.items()]
    return np.concatenate(lengths), np.concatenate(([0], np.cumsum(sizes)))


def mixture_of_packs(lengths: IntArray, starts: IntArray) -> Mixture:
    """The mixture of packs that lie so; lengths of 0 are left out, and so are packs of nothing else."""
    sizes = np.diff(starts)
    mixture: Mixture = {}
    for size in np.unique(sizes).tolist():
        first = starts[:-1][sizes == size]
        members = np.sort(lengths[first[:, None] + np.arange(size)], axis=1)
        strategies, repeats = np.unique(members, axis=0, return_counts=True)
        for strategy, repeat in zip(strategies.tolist(), repeats.tolist(), strict=True):
            add_packs(mixture, tuple(length for length in strategy if length), repeat)
    mixture.pop((), None)
    return mixture
