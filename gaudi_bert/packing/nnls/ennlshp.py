"""ENNLSHP, extended NNLS with padding token weighting (paper S): weigh the padding, and all but forbid what is not packed.

The paper adds a variable r >= 0 for the deficit A x - b and solves one larger NNLS (equations 23 and 24):

    min  || w (A x - b) ||^2 + || v (A x - b - r) ||^2,   x >= 0, r >= 0,   w_i = i, v = 10^6.

Its listing fills the lower right block with ones; this is the -I of equation 24. For a given x the best r is
max(A x - b, 0), so the problem is one in x alone in which a row has the squared weight w^2 where it is over-subscribed and
w^2 + v^2 where it is not packed. Convex and piecewise quadratic, it is solved by Newton steps: fix the rows' weights by the
present signs, solve that ordinary weighted NNLS without listing columns, and go there as far as the objective falls. The
weight v is raised from 1 to 10^6 in powers of ten: started at 10^6, the steps stall.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_bert.common.arrays import FloatArray, IntArray
from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs
from gaudi_bert.packing.nnls.complements import complete_by_complements
from gaudi_bert.packing.nnls.solver import solve_nnls

__all__ = ["ExtendedProblem", "pack_ennlshp", "solve_ennls"]

SHORTAGE_WEIGHT = 1e6
EASY_WEIGHTS = (1e0, 1e1, 1e2, 1e3, 1e4, 1e5)
STEPS_AT_A_WEIGHT = 10
LINE_SEARCH_HALVINGS = 60
SMALL_GAIN = 1e-6


class ExtendedProblem:
    """The objective of equation 23 with the best r put in, as a function of the residual b - A x.

    Args:
        counts: int64 [L], sequences of length 1 .. L (b).
        shortage_weight: v, how dear a sequence that is not packed is beside a token of padding.
    """

    def __init__(self, counts: IntArray, shortage_weight: float = SHORTAGE_WEIGHT) -> None:
        self.counts = np.asarray(counts, dtype=np.float64)
        self.padding_weights = np.arange(1, len(counts) + 1, dtype=np.float64)
        self.shortage_weight = shortage_weight

    def row_weights(self, residual: FloatArray) -> FloatArray:
        """float64 [L], the weight of each row where the residual has these signs."""
        weights: FloatArray = np.sqrt(self.padding_weights**2 + np.where(residual > 0, self.shortage_weight**2, 0.0))
        return weights

    def objective(self, residual: FloatArray) -> float:
        """The value of equation 23."""
        return float(np.sum((self.row_weights(residual) * residual) ** 2))

    def slope(self, residual: FloatArray, change: FloatArray) -> float:
        """Half the derivative of the objective where the residual moves by `change`."""
        return float(np.sum(self.row_weights(residual) ** 2 * residual * change))

    def best_step(self, residual: FloatArray, change: FloatArray) -> float:
        """The share of `change`, 0 .. 1, after which the objective is least; its slope grows along the way."""
        if self.slope(residual + change, change) <= 0:
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(LINE_SEARCH_HALVINGS):
            middle = (low + high) / 2
            if self.slope(residual + middle * change, change) <= 0:
                low = middle
            else:
                high = middle
        return low


def solve_ennls(counts: IntArray, depth: int) -> tuple[dict[Strategy, float], FloatArray]:
    """Minimise equation 23 over all strategies of at most `depth` sequences.

    Returns:
        Usages (x) of the strategies, and the residual b - A x, float64 [L].
    """
    usage: dict[Strategy, float] = {}
    residual = np.asarray(counts, dtype=np.float64)
    for shortage_weight in (*EASY_WEIGHTS, SHORTAGE_WEIGHT):
        problem = ExtendedProblem(counts, shortage_weight)
        usage, residual = _newton_steps(problem, usage, residual, depth)
    return usage, residual


def _newton_steps(
    problem: ExtendedProblem, usage: dict[Strategy, float], residual: FloatArray, depth: int
) -> tuple[dict[Strategy, float], FloatArray]:
    """Go down from `usage` until the signs are those that were assumed, or a step gains nothing; never up."""
    for _ in range(STEPS_AT_A_WEIGHT):
        value = problem.objective(residual)
        target = solve_nnls(problem.counts, problem.row_weights(residual), depth)
        change = target.residual - residual
        step = problem.best_step(residual, change)
        usage = _between(usage, dict(zip(target.strategies, target.usage.tolist(), strict=True)), step)
        residual = residual + step * change
        reached = problem.objective(residual)
        if min(reached - target.objective**2, value - reached) <= SMALL_GAIN * reached:
            break
    return usage, residual


def pack_ennlshp(counts: IntArray, depth: int) -> Mixture:
    """Pack by ENNLSHP; usages are rounded to the nearest integer, and what is then not packed is padded up.

    Args:
        counts: int64 [L], sequences of length 1 .. L.
        depth: most sequences per pack, from 1.
    """
    usage, _ = solve_ennls(counts, depth)
    mixture: Mixture = {}
    for strategy, count in usage.items():
        add_packs(mixture, strategy, round(count))
    return complete_by_complements(mixture, counts, depth)


def _between(start: Mapping[Strategy, float], end: Mapping[Strategy, float], share: float) -> dict[Strategy, float]:
    """(1 - share) * start + share * end."""
    mixed = {strategy: (1 - share) * count for strategy, count in start.items() if share < 1.0}
    for strategy, count in end.items():
        mixed[strategy] = mixed.get(strategy, 0.0) + share * count
    return mixed
