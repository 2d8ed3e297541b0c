"""No packing: one sequence a pack, as the published BERT pretraining data have it. The baseline of every comparison."""

from __future__ import annotations

import numpy as np

from gaudi_bert.packing.mixture import Mixture

__all__ = ["pack_none"]


def pack_none(counts: np.ndarray) -> Mixture:
    """One pack for each sequence.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
    """
    return {(length,): int(counts[length - 1]) for length in (np.flatnonzero(counts) + 1).tolist()}
