"""Every algorithm by name, and the one function that turns a histogram into a checked packing with its proven bound.

A new algorithm is a file with a function `(counts, depth) -> Mixture` and a line in `ALGORITHMS`; its name in
`config/values.py` lets pipelines ask for it. A file is imported when its algorithm is asked for, so packing on the fly by
LPFHP needs no SciPy.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any, Literal

from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.masked_budget import choose_masked_slots, fit_to_budget, needed_masked_slots
from gaudi_bert.packing.mixture import sorted_mixture
from gaudi_bert.packing.result import Packing, Solved
from gaudi_bert.packing.work import Work

__all__ = ["ALGORITHMS", "Algorithm", "Leftovers", "depth_of", "pack_histogram", "solve"]

Leftovers = Literal["best-fit", "complement"]


@dataclass(frozen=True)
class Algorithm:
    """Where an algorithm is, and what it needs.

    Attributes:
        module: below `gaudi_bert.packing`.
        function: takes the counts, int64 [L], the depth, and what `needs` names; returns a mixture or a `Solved`.
        needs: of `leftovers` (what `nnls` does with the last sequences), `seed` and `work` (a limit of effort).
    """

    module: str
    function: str
    needs: tuple[str, ...] = ()


ALGORITHMS = {
    "nnls": Algorithm("nnls.iterative", "pack_by_nnls", needs=("leftovers", "work")),
    "optimal": Algorithm("exact.optimal", "solve_optimally", needs=("work",)),
    "nnlshp": Algorithm("nnls.nnlshp", "pack_nnlshp"),
    "ennlshp": Algorithm("nnls.ennlshp", "pack_ennlshp"),
    "spfhp": Algorithm("heuristics.shortest_pack_first", "pack_shortest_first"),
    "lpfhp": Algorithm("heuristics.longest_pack_first", "pack_longest_first"),
    "greedy": Algorithm("heuristics.greedy", "pack_greedily", needs=("seed",)),
    "ffd": Algorithm("heuristics.first_fit", "pack_first_fit"),
    "none": Algorithm("heuristics.unpacked", "pack_none"),
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


def solve(
    counts: IntArray,
    algorithm: str,
    depth: int,
    *,
    leftovers: Leftovers = "best-fit",
    seed: int = 0,
    work: Work | None = None,
) -> Solved:
    """Run one algorithm; arguments as `pack_histogram`, and the limit of effort, None for the algorithm's own.

    Raises:
        InputError: the algorithm is unknown.
    """
    if algorithm not in ALGORITHMS:
        near = difflib.get_close_matches(algorithm, ALGORITHMS, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(ALGORITHMS)}"
        raise InputError(f"algorithm `{algorithm}` is unknown; {hint}")
    known = ALGORITHMS[algorithm]
    offered: dict[str, Any] = {"leftovers": leftovers, "seed": seed, "work": work}
    function = getattr(importlib.import_module(f"gaudi_bert.packing.{known.module}"), known.function)
    found = function(counts, depth, **{name: offered[name] for name in known.needs})
    return found if isinstance(found, Solved) else Solved(found, algorithm)


def pack_histogram(
    histogram: Histogram,
    algorithm: str = "nnls",
    depth: int | str = 3,
    *,
    leftovers: Leftovers = "best-fit",
    max_predictions: int | None = None,
    masked_slots: int | None = None,
    seed: int = 0,
    quick_bound: bool = False,
) -> Packing:
    """Pack a histogram, check the packing, and prove how good it is.

    Args:
        histogram: the sequences; an empty one gives an empty packing.
        algorithm: a key of `ALGORITHMS`.
        depth: most sequences per pack, or "max".
        leftovers: `nnls` only: what the loop leaves over is packed by best fit, or padded as published ("complement").
        max_predictions: most masked positions of one sequence (P), for the default budget.
        masked_slots: the budget of masked positions per pack (Q); None for `max_predictions + depth`, or more if needed.
        seed: of `greedy`, the only algorithm that draws.
        quick_bound: where the algorithm proves no bound itself, be content with what tokens and sequences prove.

    Raises:
        InputError: unknown algorithm or depth, or a budget that one sequence alone breaks.
    """
    from gaudi_bert.packing.certificate import simple_certificate
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
    certificate = solved.certificate or (simple_certificate if quick_bound else prove_bound)(histogram.counts, most)
    return Packing(
        histogram, most, algorithm, solved.algorithm_used, mixture, certificate.bound, certificate, masked_slots, needed
    )
