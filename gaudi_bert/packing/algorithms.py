"""Every algorithm by name, and the one function that turns a histogram into a checked packing with its proven bound.

`nnls`, the default, is the better of the iterative loop with its leftovers packed by best fit and LPFHP: least squares wants
exact fills, and where there is too little to fill with (wikipedia-128) LPFHP is nearer to the optimum. What was used is said
in `algorithm_used`. Solvers are imported when they are asked for, so packing on the fly by LPFHP needs no SciPy.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.heuristics.longest_pack_first import pack_longest_first
from gaudi_bert.packing.heuristics.shortest_pack_first import pack_shortest_first
from gaudi_bert.packing.heuristics.unpacked import pack_none
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.masked_budget import choose_masked_slots, fit_to_budget, needed_masked_slots
from gaudi_bert.packing.mixture import Mixture, packs_of, sorted_mixture
from gaudi_bert.packing.result import Packing

if TYPE_CHECKING:
    from gaudi_bert.packing.certificate import Certificate

__all__ = ["ALGORITHMS", "Leftovers", "Solved", "depth_of", "pack_histogram", "solve"]

Leftovers = Literal["best-fit", "complement"]


@dataclass(frozen=True)
class Solved:
    """What an algorithm returns: the mixture, the name of what made it, and the proof of its bound if it made one."""

    mixture: Mixture
    algorithm_used: str
    certificate: Certificate | None = None


def _none(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    return Solved(pack_none(counts), "none")


def _spfhp(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    return Solved(pack_shortest_first(counts, depth), "spfhp")


def _lpfhp(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    return Solved(pack_longest_first(counts, depth), "lpfhp")


def _nnls(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    from gaudi_bert.packing.nnls.iterative import iterative_nnls

    if leftovers == "complement":
        return Solved(iterative_nnls(counts, depth, leftovers="complement"), "iterative-nnls-complement")
    heuristic = pack_longest_first(counts, depth)
    loop = iterative_nnls(counts, depth, leftovers="best-fit", enough=packs_of(heuristic))
    if packs_of(loop) <= packs_of(heuristic):
        return Solved(loop, "iterative-nnls")
    return Solved(heuristic, "lpfhp")


def _optimal(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    from gaudi_bert.packing.exact.optimal import pack_optimally

    result = pack_optimally(counts, depth)
    return Solved(result.mixture, "optimal", result.certificate)


def _nnlshp(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    from gaudi_bert.packing.nnls.nnlshp import pack_nnlshp

    return Solved(pack_nnlshp(counts, depth), "nnlshp")


def _ennlshp(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    from gaudi_bert.packing.nnls.ennlshp import pack_ennlshp

    return Solved(pack_ennlshp(counts, depth), "ennlshp")


def _greedy(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    from gaudi_bert.packing.heuristics.greedy import pack_greedily

    return Solved(pack_greedily(counts, depth, seed=seed), "greedy")


def _ffd(counts: np.ndarray, depth: int, leftovers: Leftovers, seed: int) -> Solved:
    from gaudi_bert.packing.heuristics.first_fit import pack_first_fit

    return Solved(pack_first_fit(counts, depth), "ffd")


ALGORITHMS: dict[str, Callable[[np.ndarray, int, Leftovers, int], Solved]] = {
    "nnls": _nnls,
    "optimal": _optimal,
    "nnlshp": _nnlshp,
    "ennlshp": _ennlshp,
    "spfhp": _spfhp,
    "lpfhp": _lpfhp,
    "greedy": _greedy,
    "ffd": _ffd,
    "none": _none,
}


def depth_of(depth: int | str, max_sequence_length: int) -> int:
    """The depth as a number; "max" is the maximum sequence length, which limits nothing.

    Raises:
        InputError: neither a whole number from 1 nor "max".
    """
    if depth == "max":
        return max_sequence_length
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise InputError(f"depth is {depth!r}; it must be a whole number from 1, or `max`")
    return min(depth, max_sequence_length)


def solve(counts: np.ndarray, algorithm: str, depth: int, *, leftovers: Leftovers = "best-fit", seed: int = 0) -> Solved:
    """Run one algorithm; arguments as `pack_histogram`.

    Raises:
        InputError: the algorithm is unknown.
    """
    if algorithm not in ALGORITHMS:
        near = difflib.get_close_matches(algorithm, ALGORITHMS, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(ALGORITHMS)}"
        raise InputError(f"algorithm `{algorithm}` is unknown; {hint}")
    return ALGORITHMS[algorithm](counts, depth, leftovers, seed)


def pack_histogram(
    histogram: Histogram,
    algorithm: str = "nnls",
    depth: int | str = 3,
    *,
    leftovers: Leftovers = "best-fit",
    max_predictions: int | None = None,
    masked_slots: int | None = None,
    seed: int = 0,
) -> Packing:
    """Pack a histogram, check the packing, and prove how good it is.

    Args:
        histogram: the sequences; an empty one gives an empty packing.
        algorithm: a key of `ALGORITHMS`.
        depth: most sequences a pack, or "max".
        leftovers: `nnls` only: what the loop leaves over is packed by best fit, or padded as published ("complement").
        max_predictions: most masked positions of one sequence (P), for the default budget.
        masked_slots: the budget of masked positions a pack (Q); None for `max_predictions + depth`, or more if needed.
        seed: of `greedy`, the only algorithm that draws.

    Raises:
        InputError: unknown algorithm or depth, or a budget that one sequence alone breaks.
    """
    from gaudi_bert.packing.exact.bounds import prove_bound

    most = depth_of(depth, histogram.max_sequence_length)
    solved = solve(histogram.counts, algorithm, most, leftovers=leftovers, seed=seed)
    mixture = solved.mixture
    if masked_slots is not None:
        mixture = fit_to_budget(mixture, histogram, most, masked_slots)
    mixture = sorted_mixture(mixture)
    needed = needed_masked_slots(mixture, histogram)
    deepest = max(map(len, mixture), default=1) if depth == "max" else most
    if masked_slots is None:
        masked_slots = choose_masked_slots(max_predictions, deepest, needed)
    certificate = solved.certificate or prove_bound(histogram.counts, most)
    return Packing(
        histogram, most, algorithm, solved.algorithm_used, mixture, certificate.bound, certificate, masked_slots, needed
    )
