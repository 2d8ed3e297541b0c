"""NNLSHP, non-negative least squares histogram-packing (paper 3.1.2 and F.4), one shot.

Find usages x >= 0 of the strategies that fill a pack exactly, such that || w (A x - b) || is least, where b are the counts
and w is 0.09 for lengths of 8 or less, whose deficit is cheap padding, and 1 elsewhere. Round x to the nearest integers. A
negative residual b - A x is padding; a sequence of positive residual becomes a pack of its own, padded up.

The paper solves this with 22,102 columns at depth 3 and length 512, and runs out of memory beyond; `solve_nnls` does not
list the columns, so any depth works. Least squares is not the number of packs: this is 0.14 % above the optimum there.
"""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.packing.mixture import Mixture, add_packs
from gaudi_bert.packing.nnls.complements import complete_by_complements
from gaudi_bert.packing.nnls.solver import solve_nnls

__all__ = ["pack_nnlshp", "residual_weights"]

SHORT_LENGTH = 8
SHORT_WEIGHT = 0.09


def residual_weights(
    max_sequence_length: int, short_length: int = SHORT_LENGTH, short_weight: float = SHORT_WEIGHT
) -> FloatArray:
    """float64 [L]: `short_weight` for lengths up to `short_length`, 1 for the rest (paper F.4.5 and F.5)."""
    weights = np.ones(max_sequence_length)
    weights[:short_length] = short_weight
    return weights


def pack_nnlshp(counts: IntArray, depth: int, weights: FloatArray | None = None) -> Mixture:
    """Pack by NNLSHP.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences per pack, from 1.
        weights: float64 [L], positive residual weights; None for those of the paper.
    """
    weights = residual_weights(len(counts)) if weights is None else weights
    solution = solve_nnls(counts, weights, depth)
    mixture: Mixture = {}
    for strategy, usage in zip(solution.strategies, np.rint(solution.usage).astype(np.int64).tolist(), strict=True):
        add_packs(mixture, strategy, usage)
    return complete_by_complements(mixture, counts, depth)
