"""No packing: one sequence per pack, as the published BERT pretraining data have it. The baseline of every comparison."""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.mixture import Mixture

__all__ = ["pack_none"]


def pack_none(counts: IntArray, depth: int = 1) -> Mixture:
    """One pack per sequence, whatever the depth.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: taken as all algorithms take it; no pack is deeper than 1.
    """
    return {(length,): int(counts[length - 1]) for length in (np.flatnonzero(counts) + 1).tolist()}
