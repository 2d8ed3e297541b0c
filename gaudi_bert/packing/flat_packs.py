"""A mixture as arrays: the lengths of all packs one after the other, and where each pack begins; and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs

__all__ = ["flatten_packs", "mixture_of_packs"]


def flatten_packs(mixture: Mapping[Strategy, int]) -> tuple[IntArray, IntArray]:
    """The length of each sequence, pack by pack, and where each pack begins: int64 [sequences], int64 [packs + 1]."""
    sizes = np.fromiter(map(len, mixture), dtype=np.int64, count=len(mixture))
    flat = np.fromiter(chain.from_iterable(mixture), dtype=np.int64, count=int(sizes.sum()))
    packs = np.repeat(np.arange(len(mixture)), np.fromiter(mixture.values(), dtype=np.int64, count=len(mixture)))
    starts = np.concatenate(([0], np.cumsum(sizes[packs])))
    from_strategy = (np.cumsum(sizes) - sizes)[packs] - starts[:-1]
    return flat[np.arange(starts[-1]) + np.repeat(from_strategy, sizes[packs])], starts


def mixture_of_packs(lengths: IntArray, starts: IntArray) -> Mixture:
    """The mixture of packs that lie so; lengths of 0 are left out, and so are packs of nothing else."""
    sizes = np.diff(starts)
    mixture: Mixture = {}
    for size in np.unique(sizes).tolist():
        first = starts[:-1][sizes == size]
        members = np.sort(lengths[first[:, None] + np.arange(size)], axis=1)
        members = members[np.lexsort(members.T)]  # equal packs lie side by side: numpy's own unique takes ten times as long
        new = np.flatnonzero(np.concatenate(([True], (members[1:] != members[:-1]).any(axis=1))))
        repeats = np.diff(new, append=len(members))
        for strategy, repeat in zip(members[new].tolist(), repeats.tolist(), strict=True):
            add_packs(mixture, tuple(strategy[strategy.count(0) :]), repeat)
    mixture.pop((), None)
    return mixture
