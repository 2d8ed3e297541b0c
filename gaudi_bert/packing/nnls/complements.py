"""What the published NNLS methods do with sequences that their rounded solution leaves over: pad each one up."""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.packing.mixture import Mixture, add_packs, coverage, trim_to_exact

__all__ = ["complete_by_complements"]


def complete_by_complements(mixture: Mixture, counts: IntArray, depth: int) -> Mixture:
    """Give each sequence without a slot a pack (length, L - length), and give up the slots that no sequence fills.

    The complement of such a pack stands for padding, unless a sequence of that length lacks a slot as well. A sequence of
    full length, for which the published listing looks up a strategy with a length of 0, is a pack of its own.

    Args:
        mixture: strategies with too many slots for some lengths and too few for others.
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences per pack.
    """
    result = dict(mixture)
    lacking = np.maximum(counts - coverage(mixture, len(counts)), 0)
    for length in (np.flatnonzero(lacking) + 1).tolist():
        alone = depth == 1 or length == len(counts)
        add_packs(result, (length,) if alone else (length, len(counts) - length), int(lacking[length - 1]))
    return trim_to_exact(result, counts, whole_packs=False)
